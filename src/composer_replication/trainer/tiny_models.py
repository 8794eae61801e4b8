"""Random models that are made on the spot: for tests, and for the recipes that show the machinery and no skill."""

from __future__ import annotations

import json
from typing import Any

import torch
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TINY, TINY_TOOLS = "tiny-random", "tiny-tools"
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
    symbols = ["<pad>", "<eos>", *sorted(ByteLevel.alphabet())]
    raw = ByteLevelBPETokenizer({symbol: index for index, symbol in enumerate(symbols)}, [])
    return _llama(raw, end="<eos>", seed=seed, num_positions=4096)


def make_tiny_tools_model(seed: int) -> tuple[Any, Any]:
    """A random two-layer Llama with a chat template that knows tools (ChatML with Hermes' calls, 0.2 M parameters).

    Its tokenizer is trained on the tools' own schemas, so that a prompt with all of them is short. It has not learned to call
    any of them.
    """
    from composer_replication.rollouts.environment.feature_deletion_env import HOW_TO_WORK
    from composer_replication.rollouts.tools.tool_context import function_schema
    from composer_replication.rollouts.tools.toolbox import TOOLS

    raw: Any = ByteLevelBPETokenizer()
    texts = [_CHATML, HOW_TO_WORK, *(json.dumps(function_schema(tool)) for tool in TOOLS)]
    special = ["<pad>", "<|im_end|>", "<|im_start|>"]
    raw.train_from_iterator(texts, 1500, min_frequency=0, special_tokens=special, show_progress=False)
    model, tokenizer = _llama(raw, end="<|im_end|>", seed=seed, num_positions=32_768)
    tokenizer.chat_template = _CHATML
    return model, tokenizer


def _llama(raw: Any, *, end: str, seed: int, num_positions: int) -> tuple[Any, Any]:
    words = {"pad_token": "<pad>", "eos_token": end, "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw._tokenizer, **words)  # type: ignore[no-untyped-call]  # noqa: SLF001
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
        return LlamaForCausalLM(config), tokenizer
