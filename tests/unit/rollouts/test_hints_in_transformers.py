"""The tokenizers of transformers fit the Protocol, and render the templates as the other tests do."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import FAMILIES, Family, tokenizer_of, tool_messages

from composer_replication.interfaces import Tokenizer
from composer_replication.rollouts.hints.hint_prompts import hint_chat_prompt, insertion
from composer_replication.rollouts.tokens.token_ledger import Chat
from composer_replication.tasks.intake.cache import cache_folder

pytestmark = pytest.mark.long  # importing transformers takes longer than the test
HINT = "Hint: The available tools are: bash, read_file."


def theirs(family: Family) -> Any:
    from transformers import PreTrainedTokenizerFast

    ours = tokenizer_of(family)
    known = {"bos_token": family.bos or None, "eos_token": family.eos or None}
    return PreTrainedTokenizerFast(tokenizer_object=ours.raw, chat_template=ours.text, **known)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_same_prompts_as_the_tokenizer_of_the_other_tests(family: Family) -> None:
    tokenizer: Tokenizer = theirs(family)
    ours = tokenizer_of(family)
    conversations = [[{"role": "user", "content": "Fix last()."}]]
    if family.tool_place:
        conversations.append([*conversations[0], *tool_messages(family, "I look.", "x = 1")])
    for messages in conversations:
        text = tokenizer.apply_chat_template(messages, tools=None, tokenize=False, add_generation_prompt=True)
        if family.name != "gptoss":  # has today's date in it
            assert text == ours.apply_chat_template(
                messages, tools=None, tokenize=False, add_generation_prompt=True
            )
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        mine = hint_chat_prompt(tokenizer, ids, Chat(messages), HINT)
        plain = tuple(ours.encode(text, add_special_tokens=False))
        assert ids == plain
        place = family.place if messages[-1]["role"] == "user" else family.tool_place
        hinted = [*messages[:-1], messages[-1], {"role": "user", "content": HINT}]
        assert insertion(ids, mine) is not None
        if place == "own-message":
            whole = tokenizer.apply_chat_template(
                hinted, tools=None, tokenize=False, add_generation_prompt=True
            )
            assert mine == tuple(tokenizer.encode(whole, add_special_tokens=False))


def test_the_tokenizer_of_the_quick_start_where_it_is_on_this_machine() -> None:
    from transformers import AutoTokenizer

    folders = [path.parent for path in (cache_folder() / "models").glob("*/tokenizer.json")]
    if not folders:
        pytest.skip("the quick start's model is not in the cache")
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folders[0])
    messages = [
        {"role": "user", "content": "Fix last()."},
        {"role": "assistant", "content": "I do."},
        {"role": "user", "content": "cat: no file\n"},
    ]
    ids = _ids(tokenizer, messages)
    prompt = hint_chat_prompt(tokenizer, ids, Chat(messages), HINT)
    assert prompt == _ids(tokenizer, [*messages, {"role": "user", "content": HINT}])


def _ids(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> tuple[int, ...]:
    text = tokenizer.apply_chat_template(messages, tools=None, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))
