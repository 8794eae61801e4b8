"""The tokenizers of transformers fit the Protocol: hints and ledger over them are as in the other tests, and beside TRL's suffix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import FAMILIES, TRL, Family, TemplateTokenizer, tokenizer_of, tool_messages

from composer_replication.errors import InputError
from composer_replication.records import Completion, StopReason, ToolCall, ToolResult
from composer_replication.rollouts.hints.hint_prompts import hint_chat_prompt, insertion
from composer_replication.rollouts.tokens.token_ledger import Chat, Tokenizer, TokenLedger
from composer_replication.tasks.intake.cache import cache_folder

pytestmark = pytest.mark.long  # importing transformers and TRL takes longer than the test
HINT = "Hint: The available tools are: bash, read_file."
FIRST = [{"role": "user", "content": "Fix it."}]
CHATML = ("qwen2_5_training", "qwen3_training", "qwen3_instruct_2507", "qwen3_5_think_training", "qwen3_5_nothink_training",
          "nemotron_3_nano_training", "lfm2_v2_training")  # fmt: skip
BY_TRL = {**dict.fromkeys(CHATML, "<|im_end|>"), "llama3_1": "<|eot_id|>", "gptoss_training": "<|call|>"}
"""Templates that TRL trains tools with, and what ends a call in them."""
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))


def theirs(ours: TemplateTokenizer, template: str | None = None, eos: str | None = None) -> Any:
    from transformers import PreTrainedTokenizerFast

    known = {"bos_token": ours.family.bos or None, "eos_token": eos or ours.family.eos}
    return PreTrainedTokenizerFast(tokenizer_object=ours.raw, chat_template=template or ours.text, **known)


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    return tokenizer.apply_chat_template(messages, tools=None, tokenize=False, add_generation_prompt=True)


# ---- hints


@by_family
def test_same_prompts_as_the_tokenizer_of_the_other_tests(family: Family) -> None:
    ours = tokenizer_of(family)
    tokenizer: Tokenizer = theirs(ours)
    conversations = [FIRST]
    if family.tool_place:
        conversations.append([*FIRST, *tool_messages(family, "I look.", "x = 1")])
    for messages in conversations:
        text = rendered(tokenizer, messages)
        if family.name != "gptoss":  # has today's date in it
            assert text == rendered(ours, messages)
        ids = ids_of(tokenizer, text)
        assert ids == ids_of(ours, text)
        hinted = hint_chat_prompt(tokenizer, ids, Chat(messages), HINT)
        assert insertion(ids, hinted) is not None
        place = family.place if messages[-1]["role"] == "user" else family.tool_place
        if place == "own-message":
            whole = rendered(tokenizer, [*messages, {"role": "user", "content": HINT}])
            assert hinted == ids_of(tokenizer, whole)


def test_the_tokenizer_of_the_quick_start_where_it_is_on_this_machine() -> None:
    from transformers import AutoTokenizer

    folders = [path.parent for path in (cache_folder() / "models").glob("*/tokenizer.json")]
    if not folders:
        pytest.skip("the quick start's model is not in the cache")
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folders[0])
    said, asked = {"role": "assistant", "content": "I do."}, {"role": "user", "content": "cat: no file\n"}
    messages = [*FIRST, said, asked]
    ids = ids_of(tokenizer, rendered(tokenizer, messages))
    whole = rendered(tokenizer, [*messages, {"role": "user", "content": HINT}])
    assert hint_chat_prompt(tokenizer, ids, Chat(messages), HINT) == ids_of(tokenizer, whole)


# ---- the ledger


def played(tokenizer: Tokenizer, family: Family) -> tuple[int, ...]:
    has_tools = bool(family.tool_place) and family.name != "gptoss"
    ledger = TokenLedger(tokenizer, Chat(FIRST), has_tool_messages=has_tools)
    calls, results = [ToolCall("read", "{}")] * 2, [ToolResult("a\n"), ToolResult("b")]
    for n in range(3):
        ledger.add_completion(Completion(ids_of(tokenizer, f"I look {n}"), "", StopReason.LENGTH))
        ledger.add_results(calls, results)
    return ledger.prompt_ids()


@by_family
def test_same_ids_as_with_the_tokenizer_of_the_other_tests(family: Family) -> None:
    ours = tokenizer_of(family)
    ids, expected = played(theirs(ours), family), played(ours, family)
    if family.name != "gptoss":  # has today's date in it
        assert ids == expected
    assert ids[-20:] == expected[-20:]


@pytest.mark.parametrize("name", sorted(BY_TRL))
def test_the_suffix_is_that_of_trl(name: str) -> None:
    from trl import GRPOTrainer

    text, end = (TRL / f"{name}.jinja").read_text(), BY_TRL[name]
    family = Family(name.removesuffix("_training"), "", end, "own-message", tool_place="own-message")
    tokenizer = theirs(tokenizer_of(family), text, end)
    results = [{"role": "tool", "name": "read", "tool_call_id": "call00000", "content": "x = 1\n"}]
    known = {"processing_class": tokenizer, "_tokenizer": tokenizer, "chat_template": text}
    trainer = SimpleNamespace(**known, chat_template_kwargs={}, _is_vlm=False)
    ledger = TokenLedger(tokenizer, Chat(FIRST))
    ledger.add_completion(Completion(ids_of(tokenizer, f"I look{end}"), "", StopReason.FINISHED))
    before = ledger.num_tokens
    ledger.add_messages(results)
    assert list(ledger.prompt_ids()[before:]) == GRPOTrainer._get_tool_suffix_ids(trainer, results)


def test_a_tokenizer_without_a_template_is_one_sentence() -> None:
    tokenizer = theirs(tokenizer_of(FAMILIES[0]))
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="CR0810") as error:
        TokenLedger(tokenizer, Chat(FIRST))
    assert "\n" not in str(error.value)
