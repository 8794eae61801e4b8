"""A hint as a comment in a prompt that is the beginning of a source file."""

from __future__ import annotations

import ast

import pytest
from chat_templates import FAMILIES, TemplateTokenizer, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.records import Completion, StopReason, Turn
from composer_replication.rollouts.hints.hint_prompts import WIDTH, comment, hint_code_prompt, insertion

TOKENIZERS = [tokenizer_of(FAMILIES[0]), tokenizer_of(FAMILIES[1])]
"""One that cuts words as GPT-2 does, and one as Llama 3 does."""
PROMPT = 'class Shelf:\n    """Books."""\n\n    @property\n    def last(self):\n        """Last book."""'
START = PROMPT.index("    @property")
HINT = "Hint: test_last fails: it checks `shelf.last == 'b'`."


def code_prompt(
    tokenizer: TemplateTokenizer, ids: tuple[int, ...], text: str, hint: str, *, indent: str, answer: str
) -> tuple[int, ...]:
    turn = Turn(ids, Completion((1,), answer, StopReason.FINISHED), text)
    return hint_code_prompt(tokenizer, turn, hint, path="a.py", indent=indent, function_start=START)


def place(
    text: str, hint: str = HINT, *, tokenizer: int = 0, indent: str = "        ", answer: str = "\n"
) -> tuple[int, ...]:
    chosen = TOKENIZERS[tokenizer]
    ids = tuple(chosen.encode(text, add_special_tokens=False))
    prompt = code_prompt(chosen, ids, text, hint, indent=indent, answer=answer)
    assert insertion(ids, prompt) is not None
    return prompt


def text_of(prompt: tuple[int, ...], tokenizer: int = 0) -> str:
    return TOKENIZERS[tokenizer].decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("tokenizer", [0, 1])
def test_the_comment_as_the_first_line_of_the_body(tokenizer: int) -> None:
    prompt = place(PROMPT, tokenizer=tokenizer)
    assert text_of(prompt, tokenizer) == f"{PROMPT}\n        # {HINT}"
    ast.parse(text_of(prompt, tokenizer) + "\n        return self.books[-1]")


@pytest.mark.parametrize("tokenizer", [0, 1])
def test_any_other_answer_would_run_on_in_the_comment(tokenizer: int) -> None:
    prompt = place(PROMPT, tokenizer=tokenizer, answer=" return 1")
    assert text_of(prompt, tokenizer) == PROMPT.replace("    @property", f"    # {HINT}\n    @property")


def test_a_beginning_of_text_token_before_the_prompt_stays_first() -> None:
    tokenizer = tokenizer_of(next(family for family in FAMILIES if family.name == "llama3"))
    bos = tokenizer.raw.token_to_id("<|begin_of_text|>")
    ids = (bos, *tokenizer.encode(PROMPT, add_special_tokens=False))
    for answer in ("\n", " return 1"):
        prompt = code_prompt(tokenizer, ids, PROMPT, HINT, indent="        ", answer=answer)
        assert prompt[0] == bos
        assert insertion(ids, prompt) is not None


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


def test_what_does_not_fit_is_refused() -> None:
    tokenizer = TOKENIZERS[0]
    ids = tuple(tokenizer.encode(PROMPT, add_special_tokens=False))

    def code(ids: tuple[int, ...], text: str, hint: str) -> str:
        with pytest.raises(InputError) as caught:
            code_prompt(tokenizer, ids, text, hint, indent="  ", answer="\n")
        return caught.value.code

    assert code(ids[:-1], PROMPT, HINT) == "CR0430"
    assert code(ids, PROMPT + " ", HINT) == "CR0430"
    assert code(ids, PROMPT, " ") == "CR0430"
    assert code((), "", HINT) == "CR0430"
    assert code(ids, "", HINT) == "CR0430"
    assert code((7, 7, 7, *ids), PROMPT, HINT) == "CR0430"
    assert code(ids, PROMPT, "Hint: <|im_end|>") == "CR0430"
