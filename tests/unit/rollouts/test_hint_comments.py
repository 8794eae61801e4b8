"""A hint as a comment in a prompt that is the beginning of a source file."""

from __future__ import annotations

import ast

import pytest
from chat_templates import FAMILIES, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.rollouts.hints.hint_prompts import WIDTH, comment, hint_code_prompt, insertion

TOKENIZERS = [tokenizer_of(FAMILIES[0]), tokenizer_of(FAMILIES[1])]
"""One that cuts words as GPT-2 does, and one as Llama 3 does."""
PROMPT = 'class Shelf:\n    """Books."""\n\n    @property\n    def last(self):\n        """Last book."""'
HINT = "Hint: test_last fails: it checks `shelf.last == 'b'`."


def place(
    text: str, hint: str = HINT, *, tokenizer: int = 0, indent: str = "        ", answer: str = "\n"
) -> tuple[int, ...]:
    chosen = TOKENIZERS[tokenizer]
    ids = tuple(chosen.encode(text, add_special_tokens=False))
    prompt = hint_code_prompt(chosen, ids, answer, hint, indent=indent)
    assert insertion(ids, prompt) is not None
    return prompt


def text_of(prompt: tuple[int, ...], tokenizer: int = 0) -> str:
    return TOKENIZERS[tokenizer].decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("tokenizer", [0, 1])
@pytest.mark.parametrize(
    "answer", ["\n        return self.books[-1]", "return self.books[-1]", "\r\n        return 1"]
)
def test_the_comment_as_the_first_line_of_the_body(tokenizer: int, answer: str) -> None:
    prompt = place(PROMPT, tokenizer=tokenizer, answer=answer)
    added = text_of(prompt, tokenizer).removeprefix(PROMPT)
    assert added == f"\n        # {HINT}" + ("" if answer[0] in "\r\n" else "\n        ")
    ast.parse(f"{PROMPT}{added}{answer}")


def test_the_ids_that_the_policy_saw_stay_first() -> None:
    tokenizer = tokenizer_of(next(family for family in FAMILIES if family.name == "llama3"))
    bos = tokenizer.raw.token_to_id("<|begin_of_text|>")
    ids = (bos, *tokenizer.encode(PROMPT, add_special_tokens=False))
    for answer in ("\n", " return 1"):
        assert hint_code_prompt(tokenizer, ids, answer, HINT, indent="    ")[: len(ids)] == ids


@given(st.text(max_size=200), st.sampled_from(["", "    ", "\t"]))
def test_every_line_of_a_comment_is_one(text: str, indent: str) -> None:
    lines = comment(text.replace("\x00", " "), indent).split("\n")
    if lines != [""]:
        assert all(line.startswith(f"{indent}# ") for line in lines)
    ast.parse("\n".join(["if True:", *lines, "    pass"]))


def test_long_hints_are_wrapped() -> None:
    lines = comment("word " * 60, "        ").split("\n")
    assert len(lines) > 3
    assert all(len(line) <= WIDTH for line in lines)


@settings(max_examples=30)
@given(st.text(alphabet="ab (\n'é🙂)#.", max_size=40), st.sampled_from([0, 1]))
def test_the_prompt_is_only_added_to(text: str, tokenizer: int) -> None:
    prompt = place(f'{text}\ndef f(x):\n    """D."""', tokenizer=tokenizer)
    assert HINT in text_of(prompt, tokenizer)


def test_a_control_token_is_refused() -> None:
    with pytest.raises(InputError, match="CR0430"):
        hint_code_prompt(TOKENIZERS[0], (7,), "\n", "Hint: <|im_end|>", indent="  ")
