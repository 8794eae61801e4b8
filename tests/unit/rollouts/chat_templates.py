"""Tokenizers with real chat templates, small and offline: a byte-level BPE that is trained on the spot.

Templates are rendered as transformers does (a sandboxed Jinja environment, blocks trimmed), and control tokens are
real ones. Two ways of cutting text into words are there, since they decide which seams are clean: GPT-2's, and
that of Llama 3 and Qwen, which joins punctuation and line ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

FIXTURES = Path(__file__).parent / "fixtures" / "chat_templates"
TRL = Path((find_spec("trl") or json).origin or "").parent / "chat_templates"  # type: ignore[union-attr]
_CONTROL = re.compile(r"<\|\w+\|>|<｜[^｜\s]+｜>|<start_of_turn>|<end_of_turn>|\[gMASK\]|<sop>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
READ = {"name": "read", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": READ}]


@dataclass(frozen=True)
class Family:
    """A template, its tokens, and what it takes.

    ``place`` is where a hint goes after a user's message, ``tool_place`` after a tool's; empty: no tools.
    """

    name: str
    bos: str
    eos: str
    place: str
    words: str = "llama3"
    has_system: bool = True
    tool_place: str = ""
    tool_arguments: str = "object"
    control: bool = True


FAMILIES = (
    Family("smollm2", "", "<|im_end|>", "own-message", "gpt2"),
    Family("qwen2_5", "", "<|im_end|>", "own-message", tool_place="own-message"),
    Family("qwen3", "", "<|im_end|>", "own-message", tool_place="own-message"),
    Family("llama3", "<|begin_of_text|>", "<|eot_id|>", "own-message"),
    Family("llama3_1", "<|begin_of_text|>", "<|eot_id|>", "own-message", tool_place="own-message"),
    Family("gemma", "<bos>", "<eos>", "merged", "gpt2", has_system=False),
    Family("gemma3", "<bos>", "<eos>", "merged", "gpt2"),
    Family("mistral", "<s>", "</s>", "merged", "gpt2", has_system=False),
    Family("zephyr", "<s>", "</s>", "own-message", "gpt2", control=False),
    Family("phi3", "<s>", "<|endoftext|>", "own-message", "gpt2"),
    Family("deepseekv3", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "own-message", tool_place="merged", tool_arguments="text"),
    Family("cohere", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "merged"),
    Family("glm4moe", "", "<|user|>", "own-message", tool_place="own-message"),
    Family("gptoss", "", "<|return|>", "own-message", tool_place="own-message"),
    Family("kimi_k2", "", "<|im_end|>", "own-message", tool_place="own-message"),
)  # fmt: skip


class TemplateTokenizer:
    """Has what ``token_ledger.Tokenizer`` asks for."""

    def __init__(self, family: Family) -> None:
        own, trl = FIXTURES / f"{family.name}.jinja", TRL / f"{family.name}.jinja"
        # the last line end of the file is no part of a template that is written by hand
        text = own.read_text().removesuffix("\n") if own.is_file() else trl.read_text()
        self.family = family
        self.control = {family.bos, family.eos, *(_CONTROL.findall(text) if family.control else ())} - {""}
        self.raw = Tokenizer.from_str(_trained(family.words))
        self.raw.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in sorted(self.control)]
        )
        self.text = self.chat_template = text
        self.template = _environment().from_string(text)

    def __len__(self) -> int:
        return int(self.raw.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.raw.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not clean_up_tokenization_spaces
        return str(self.raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: Any,
    ) -> str:
        assert not tokenize
        return self.template.render(
            messages=conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.family.bos,
            eos_token=self.family.eos,
            **options,
        )

    def split_token(self, token_id: int) -> list[int]:
        """The same text as single bytes: ids that a policy may sample and a tokenizer never gives."""
        vocabulary = self.raw.get_vocab()
        return [vocabulary[symbol] for symbol in self.raw.id_to_token(token_id) or ""]


@cache
def tokenizer_of(family: Family) -> TemplateTokenizer:
    return TemplateTokenizer(family)


@cache
def _trained(words: str) -> str:
    raw = Tokenizer(models.BPE())
    cut: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words == "gpt2")]
    if words == "llama3":
        cut.insert(0, pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(cut)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(
        [Path(__file__).read_text(), "x)\n\n" * 50, "a.\n\n  b\n\n\n" * 50, "    \n" * 50], trainer
    )
    return raw.to_str()


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda _: "2026-01-01"
    return environment


def tool_messages(family: Family, said: str, result: str) -> list[dict[str, Any]]:
    """An assistant's call of a tool and the result."""
    arguments: Any = {"path": "a.py"} if family.tool_arguments == "object" else '{"path": "a.py"}'
    call = {"type": "function", "id": "read:0", "function": {"name": "read", "arguments": arguments}}
    return [
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "content": result, "name": "read", "tool_call_id": "read:0"},
    ]
