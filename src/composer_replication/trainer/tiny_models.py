"""Random models that are made on the spot: for tests, and for the recipes that show the machinery and no skill."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

TINY = "tiny-random"
TINY_TOOLS = "tiny-tools"
_CHATML = """\
{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Call one by <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or loop.previtem.role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tiny_model(seed: int) -> tuple[Any, Any]:
    """A random two-layer Llama over bytes, for tests and the tiny recipe (0.1 M parameters)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<eos>", *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types for it
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    return _llama(tokenizer, seed=seed, num_positions=4096), tokenizer


def make_tiny_tools_model(seed: int) -> tuple[Any, Any]:
    """A random two-layer Llama with a chat template that knows tools (ChatML with Hermes' calls, 0.2 M parameters).

    Its tokenizer is trained on the tools' own schemas, so that a prompt with all of them is short. It has not learned to call
    any of them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<pad>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(_tool_texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types for it
        tokenizer_object=raw, pad_token="<pad>", eos_token="<|im_end|>", padding_side="left"
    )
    tokenizer.chat_template = _CHATML
    return _llama(tokenizer, seed=seed, num_positions=32_768), tokenizer


def _tool_texts() -> Iterable[str]:
    from composer_replication.rollouts.environment.feature_deletion_env import HOW_TO_WORK
    from composer_replication.rollouts.tools.tool_schemas import function_schema
    from composer_replication.rollouts.tools.toolbox import TOOLS

    return [_CHATML, HOW_TO_WORK, *(json.dumps(function_schema(tool)) for tool in TOOLS)]


def _llama(tokenizer: Any, *, seed: int, num_positions: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=num_positions,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
