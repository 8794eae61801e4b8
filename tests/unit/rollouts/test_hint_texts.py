"""The texts of hints: what each says, in which order, how long, and what none may say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import FAMILIES, tokenizer_of
from hint_rollouts import cases, observe
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.records import Score
from composer_replication.rollouts.hints.hinted_turns import (
    Fault,
    ObservedRollout,
    clamp,
    clean_text,
    find_faults,
    write_hint,
)


def known_fault(name: str, **changes: Any) -> Fault:
    return find_faults(replace(observe(next(case for case in cases() if case["name"] == name)), **changes))[0]


def never(text: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("the same listing twice in a row", "list_files again tells nothing new"),
        ("an empty answer", "Call one of the tools: bash"),
        ("an answer cut off in the middle of the work", "The whole answer has to fit into"),
        ("failing tests belong to the last change", "test_last fails."),
    ],
)
def test_templates_say_what_is_known(name: str, says: str) -> None:
    fault = known_fault(name)
    assert says in fault.texts[0] and not fault.texts[0].startswith("The environment answered")
    hint = write_hint(fault, never)
    assert hint is not None and says in hint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("an argument that is not there", "unexpected argument count"),
        ("a command that is not installed", "rg: command not found"),
        ("a replacement that does not stand there", "old_str not found"),
        ("a command that never ends", "stopped after 30 s"),
        ("tests that ran too long belong to the last change", "the tests ran longer than"),
    ],
)
def test_where_the_environment_says_what_failed_its_own_words_are_the_hint(name: str, says: str) -> None:
    fault = known_fault(name)
    hint = write_hint(fault, never)
    assert hint is not None and fault.texts == (hint.removeprefix("Hint: "),) and says in hint
    assert hint.startswith("Hint: The environment answered: ")


def test_a_failing_test_is_told_with_its_assertion() -> None:
    tests = {"t.py::test_a": "last(['a', 'b'])\n  == 'b'", "t.py::test_b[1-2]": "", "t.py::test_c": ""}
    [text] = known_fault("failing tests belong to the last change", failed_tests=tests).texts
    assert text == ("test_a fails: it checks `last(['a', 'b']) == 'b'`.\ntest_b[1-2] fails. And 1 more.")


@pytest.mark.parametrize(
    ("error", "is_forged", "is_told"),
    [
        ("the run ended with exit code 3", False, True),
        ("outcomes were forged: a test that must fail has not failed", True, False),
        ("t.py::test_secret[1] is missing", False, False),
        ("test_secret did not end", False, False),
    ],
)
def test_an_error_that_names_a_paid_test_or_a_forgery_is_not_told(
    error: str, is_forged: bool, is_told: bool
) -> None:
    case = next(case for case in cases() if case["name"] == "failing tests belong to the last change")
    observed = observe(case)
    score = Score({}, error, paid=("t.py::test_secret[1]",), is_forged=is_forged)
    observed = replace(observed, episode=replace(observed.episode, score=score))
    assert observed.run_error == (error if is_told else "")
    told = [fault.texts for fault in find_faults(observed) if fault.kind == "test-failure"]
    assert told == ([(f"The environment answered: {error}",)] if is_told else [])


def test_without_a_template_the_environment_speaks() -> None:
    hint = write_hint(known_fault("a tool's own refusal in other words"), never)
    assert hint == "Hint: The environment answered: the tree has no changes"


# ---- what no hint may say ------------------------------------------------------------------------


def test_a_hint_that_shows_what_is_hidden_is_thrown_away_and_the_next_text_is_tried() -> None:
    found = known_fault("a tool's own refusal in other words")

    def told(is_leak: Callable[[str], bool], text: str = "return min(bounded, high)") -> str | None:
        return write_hint(replace(found, texts=(text, *found.texts)), is_leak)

    environments_words = "Hint: The environment answered: the tree has no changes"
    assert told(never) == "Hint: return min(bounded, high)"
    assert told(lambda text: "min(bounded" in text) == environments_words
    assert told(lambda _: True) is None
    # what cleaning makes of it is looked at as well, and what clamping leaves out
    long = f"<|im_end|>{'a ' * 300}secret"
    assert told(lambda text: text.startswith("< |im_end|>"), long) == environments_words
    assert told(lambda text: text.endswith("secret"), long) == environments_words


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_no_control_token_survives_cleaning(family: Any) -> None:
    for token in [*tokenizer_of(family).control, "<think>", "</tool_call>", "[/INST]", "<<SYS>>"]:
        assert token not in clean_text(f"before {token} after")
    assert clean_text("a < b and b > c, x[0], <div>, <|, |>") == "a < b and b > c, x[0], <div>, <|, |>"


@given(st.text(max_size=120), st.integers(1, 60))
def test_clamped_texts_are_short_and_begin_alike(text: str, most: int) -> None:
    short = clamp(text, most)
    assert len(short) <= most
    assert text.strip().startswith(short.removesuffix("...").rstrip()) or most < 4


# ---- what a hint can be made of ------------------------------------------------------------------


def test_no_field_of_what_is_observed_holds_golden_code() -> None:
    """What a text can reach is listed here, so that a new field is a decision."""
    assert set(ObservedRollout.__slots__) == {
        "episode", "answered_text", "indent", "failed_tests", "is_leak",
    }  # fmt: skip
    assert set(Fault.__slots__) == {"turn_idx", "kind", "texts"}
