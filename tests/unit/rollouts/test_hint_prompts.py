"""A hint in the ids of a prompt: exact over many chat templates, refused wherever there is a doubt."""

from __future__ import annotations

import ast
import contextlib
from typing import Any

import pytest
from chat_templates import FAMILIES, TOOLS, Family, TemplateTokenizer, tokenizer_of, tool_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.rollouts.hints.hint_prompts import (
    ENDINGS,
    SEPARATORS,
    comment,
    hint_chat_prompt,
    hint_code_prompt,
    insertion,
)
from composer_replication.rollouts.tokens.token_ledger import Chat

HINT = "Hint: The available tools are: bash, read_file."
WITH_TOOLS = [family for family in FAMILIES if family.tool_place]
texts = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab Z9.)(\n\t'\"{}[]#-"), st.characters(codec="utf-8", exclude_characters="<>|｜")
    ),
    max_size=30,
)
hints = texts.map(lambda text: f"Hint: {text}")


def ids_of(tokenizer: TemplateTokenizer, messages: list[dict[str, Any]], **known: Any) -> tuple[int, ...]:
    text = tokenizer.apply_chat_template(
        messages, tools=known.get("tools"), tokenize=False, add_generation_prompt=True
    )
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def expected_ids(
    tokenizer: TemplateTokenizer, messages: list[dict[str, Any]], hint: str, place: str, **known: Any
) -> set[tuple[int, ...]]:
    """What the template and the tokenizer themselves make of the conversation with the hint in it."""
    if place == "own-message":
        return {ids_of(tokenizer, [*messages, {"role": "user", "content": hint}], **known)}
    said = messages[-1]["content"]
    merged = [f"{said}{space}{text}" for space in SEPARATORS for text in (hint, hint.rstrip(ENDINGS) or hint)]
    merged += [f"{hint}{space}{said}" for space in SEPARATORS]
    return {
        ids_of(tokenizer, [*messages[:-1], {**messages[-1], "content": text}], **known) for text in merged
    }


SMOLLM2 = FAMILIES[0]
MESSAGES = [{"role": "user", "content": "Fix last()."}]


def code_of(*arguments: Any, **known: Any) -> str:
    """Of the error with which ``hint_chat_prompt`` refuses."""
    with pytest.raises(InputError) as caught:
        hint_chat_prompt(*arguments, **known)
    return caught.value.code


def placed(
    tokenizer: TemplateTokenizer, ids: tuple[int, ...], messages: list[dict[str, Any]], hint: str
) -> tuple[int, ...] | None:
    """The hinted prompt, or None where it is refused for want of a place."""
    with contextlib.suppress(InputError):
        return hint_chat_prompt(tokenizer, ids, Chat(messages), hint)
    assert code_of(tokenizer, ids, Chat(messages), hint) == "CR0430"
    return None


def check(hinted: tuple[int, ...], given_ids: tuple[int, ...]) -> None:
    """Nothing but one run of ids was added; the rest stands as it was."""
    assert insertion(given_ids, hinted) is not None  # what the trainer asks of every hint


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> list[dict[str, Any]]:
    messages = (
        [{"role": "system", "content": draw(texts)}] if family.has_system and draw(st.booleans()) else []
    )
    for _ in range(draw(st.integers(0, 2))):
        messages += [{"role": "user", "content": draw(texts)}, {"role": "assistant", "content": draw(texts)}]
    return [*messages, {"role": "user", "content": draw(texts)}]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_the_hinted_prompt_is_what_the_template_makes_of_the_conversation_with_the_hint(
    family: Family,
) -> None:
    tokenizer = tokenizer_of(family)

    @settings(max_examples=20)
    @given(conversations(family), hints)
    def exact(messages: list[dict[str, Any]], hint: str) -> None:
        ids = ids_of(tokenizer, messages)
        prompt = placed(tokenizer, ids, messages, hint)
        if prompt is None:
            # The hint has to share a message, and no separator keeps its ids: at a space or a mark at its end.
            last = messages[-1]["content"]
            assert family.place == "merged"
            assert not (last[-1:].isalnum() and last.isascii())
            return
        check(prompt, ids)
        assert prompt in expected_ids(tokenizer, messages, hint.strip(), family.place)

    exact()


@pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: str(family.name))
def test_a_hint_after_a_tool_result(family: Family) -> None:
    tokenizer = tokenizer_of(family)

    @settings(max_examples=10)
    @given(st.sampled_from(["cat: b.py: No such file or directory", "x = 1", '{"a": [1]}', "ok."]), texts)
    def exact(result: str, said: str) -> None:
        messages = [{"role": "user", "content": "Fix it."}, *tool_messages(family, said, result)]
        ids = ids_of(tokenizer, messages, tools=TOOLS)
        prompt = hint_chat_prompt(tokenizer, ids, Chat(messages, TOOLS), HINT)
        check(prompt, ids)
        assert prompt in expected_ids(tokenizer, messages, HINT, family.tool_place, tools=TOOLS)

    exact()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_sampled_ids_of_earlier_turns_are_copied_whatever_the_tokenizer_would_make_of_them(
    family: Family,
) -> None:
    tokenizer = tokenizer_of(family)
    messages = [
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": "the tokenizer template conversation"},
        {"role": "user", "content": "Go on, please."},
    ]
    plain = ids_of(tokenizer, messages)
    # the policy said "template" in single bytes, which is another list of ids with the same text
    place = next(
        i
        for i, token in enumerate(plain)
        if tokenizer.raw.id_to_token(token) not in tokenizer.control and len(tokenizer.split_token(token)) > 3
    )
    sampled = (*plain[:place], *tokenizer.split_token(plain[place]), *plain[place + 1 :])
    assert sampled != plain
    canonical = hint_chat_prompt(tokenizer, plain, Chat(messages), HINT)
    prompt = hint_chat_prompt(tokenizer, sampled, Chat(messages), HINT)
    check(prompt, sampled)
    _, start, run = insertion(sampled, prompt) or pytest.fail("no place")
    _, canonical_start, canonical_run = insertion(plain, canonical) or pytest.fail("no place")
    assert run == canonical_run
    assert len(sampled) - start == len(plain) - canonical_start


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_a_prompt_of_another_conversation_is_refused(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    ids = ids_of(tokenizer, MESSAGES)
    for wrong in (
        ids[:-1],
        (*ids, ids[-1]),
        (*ids[:-4], 5, 6, 7, 8),
        ids[-2:],
        (),
        ids_of(tokenizer, [{"role": "user", "content": "Fix first()."}]),
    ):
        assert code_of(tokenizer, wrong, Chat(MESSAGES), HINT) == "CR0430"


def test_a_template_that_rewrites_earlier_turns_gets_the_hint_into_the_tools_message() -> None:
    family = next(family for family in FAMILIES if family.name == "qwen3")
    tokenizer = tokenizer_of(family)
    messages = [
        {"role": "user", "content": "Fix it."},
        *tool_messages(family, "<think>\nlook first\n</think>\n\nNow.", "x = 1"),
    ]
    ids = ids_of(tokenizer, messages, tools=TOOLS)
    # a new message of the user would make the template drop the thought above
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "look first" in text
    prompt = hint_chat_prompt(tokenizer, ids, Chat(messages, TOOLS), HINT)
    check(prompt, ids)
    assert prompt in expected_ids(tokenizer, messages, HINT, "merged", tools=TOOLS)


def test_a_template_that_hides_the_hint_is_refused() -> None:
    class Deaf(TemplateTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, Any]], **known: Any) -> str:
            return super().apply_chat_template(
                [{**m, "content": str(m["content"]).replace("Hint", "Note")} for m in conversation], **known
            )

    tokenizer = Deaf(SMOLLM2)
    assert code_of(tokenizer, ids_of(tokenizer, MESSAGES), Chat(MESSAGES), HINT) == "CR0430"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.control], ids=lambda family: str(family.name))
def test_a_control_token_in_a_hint_is_refused(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    for token in sorted(tokenizer.control):
        hint = f"Hint: end {token} here"
        assert code_of(tokenizer, ids_of(tokenizer, MESSAGES), Chat(MESSAGES), hint) == "CR0430"


# ---- as a comment, in a prompt that is the beginning of a source file -----------------------------------

TOKENIZERS = [tokenizer_of(FAMILIES[0]), tokenizer_of(FAMILIES[1])]
"""One that cuts words as GPT-2 does, and one as Llama 3 does."""
CODE = 'class Shelf:\n    """Books."""\n\n    @property\n    def last(self):\n        """Last book."""'
FAILS = "Hint: test_last fails: it checks `shelf.last == 'b'`."


def place(text: str, *, tokenizer: int = 0, answer: str = "\n") -> tuple[int, ...]:
    chosen = TOKENIZERS[tokenizer]
    ids = tuple(chosen.encode(text, add_special_tokens=False))
    prompt = hint_code_prompt(chosen, ids, answer, FAILS, indent="        ")
    assert insertion(ids, prompt) is not None
    return prompt


def text_of(prompt: tuple[int, ...], tokenizer: int = 0) -> str:
    return TOKENIZERS[tokenizer].decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("tokenizer", [0, 1])
@pytest.mark.parametrize(
    "answer", ["\n        return self.books[-1]", "return self.books[-1]", "\r\n        return 1"]
)
def test_the_comment_as_the_first_line_of_the_body(tokenizer: int, answer: str) -> None:
    prompt = place(CODE, tokenizer=tokenizer, answer=answer)
    added = text_of(prompt, tokenizer).removeprefix(CODE)
    assert added == f"\n        # {FAILS}" + ("" if answer[0] in "\r\n" else "\n        ")
    ast.parse(f"{CODE}{added}{answer}")


@given(st.text(max_size=200), st.sampled_from(["", "    ", "\t"]))
def test_every_line_of_a_comment_is_one(text: str, indent: str) -> None:
    lines = comment(text.replace("\x00", " "), indent).split("\n")
    if lines != [""]:
        assert all(line.startswith(f"{indent}# ") for line in lines)
    ast.parse("\n".join(["if True:", *lines, "    pass"]))


def test_a_control_token_is_refused() -> None:
    with pytest.raises(InputError, match="CR0430"):
        hint_code_prompt(TOKENIZERS[0], (7,), "\n", "Hint: <|im_end|>", indent="  ")
