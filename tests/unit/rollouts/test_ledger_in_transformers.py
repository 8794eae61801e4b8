"""The ledger with transformers' own tokenizers, and beside the suffix that TRL appends after a tool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import FAMILIES, TRL, Family, TemplateTokenizer, tokenizer_of

from composer_replication.interfaces import Tokenizer
from composer_replication.records import Completion, StopReason, ToolCall, ToolResult
from composer_replication.rollouts.tokens.token_ledger import Chat, TokenLedger

pytestmark = pytest.mark.long  # importing transformers and TRL takes longer than the test
FIRST = [{"role": "user", "content": "Fix it."}]
BY_TRL = {
    "qwen2_5_training": "<|im_end|>",
    "qwen3_training": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_5_think_training": "<|im_end|>",
    "qwen3_5_nothink_training": "<|im_end|>",
    "nemotron_3_nano_training": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gptoss_training": "<|call|>",
    "lfm2_v2_training": "<|im_end|>",
}
"""Templates that TRL trains tools with, and what ends a call in them."""


def theirs(ours: TemplateTokenizer, template: str, eos: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=ours.raw, chat_template=template, bos_token=ours.family.bos or None, eos_token=eos
    )


def played(tokenizer: Tokenizer, family: Family) -> tuple[int, ...]:
    has_tools = bool(family.tool_place) and family.name != "gptoss"
    ledger = TokenLedger(tokenizer, Chat(FIRST), has_tool_messages=has_tools)
    for n in range(3):
        ids = tuple(tokenizer.encode(f"I look {n}", add_special_tokens=False))
        ledger.add_completion(Completion(ids, "", StopReason.LENGTH))
        ledger.add_results(
            [ToolCall("read", "{}"), ToolCall("read", "{}")], [ToolResult("a\n"), ToolResult("b")]
        )
    return ledger.prompt_ids()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_same_ids_as_with_the_tokenizer_of_the_other_tests(family: Family) -> None:
    ours = tokenizer_of(family)
    tokenizer: Tokenizer = theirs(ours, ours.text, family.eos)
    ids, expected = played(tokenizer, family), played(ours, family)
    if family.name != "gptoss":  # has today's date in it
        assert ids == expected
    start = len(ids) - 20
    assert ids[start:] == expected[-20:]


@pytest.mark.parametrize("name", sorted(BY_TRL))
def test_the_suffix_is_that_of_trl(name: str) -> None:
    from trl import GRPOTrainer

    text, end = (TRL / f"{name}.jinja").read_text(), BY_TRL[name]
    family = Family(name.removesuffix("_training"), "", end, "own-message", tool_place="own-message")
    tokenizer = theirs(tokenizer_of(family), text, end)
    results = [{"role": "tool", "name": "read", "tool_call_id": "call00000", "content": "x = 1\n"}]
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        chat_template=text,
        chat_template_kwargs={},
        _is_vlm=False,
        _tokenizer=tokenizer,
    )
    expected = GRPOTrainer._get_tool_suffix_ids(trainer, results)
    ledger = TokenLedger(tokenizer, Chat(FIRST))
    said = tokenizer.encode(f"I look{end}", add_special_tokens=False)
    ledger.add_completion(Completion(tuple(said), "", StopReason.FINISHED))
    before = ledger.num_tokens
    ledger.add_messages(results)
    assert list(ledger.prompt_ids()[before:]) == expected


def test_a_tokenizer_without_a_template_is_one_sentence() -> None:
    from composer_replication.errors import InputError

    tokenizer = theirs(tokenizer_of(FAMILIES[0]), "", "<|im_end|>")
    tokenizer.chat_template = None
    with pytest.raises(InputError) as error:
        TokenLedger(tokenizer, Chat(FIRST))
    assert error.value.code == "CR0810"
    assert "\n" not in str(error.value)
