"""The layers that write hints: what each says, in which order, how long, and what none may say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from chat_templates import FAMILIES, tokenizer_of
from hint_rollouts import cases, observe
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from composer_replication.channel_tables import HintWritingSection
from composer_replication.errors import UsageError
from composer_replication.records import Score
from composer_replication.rollouts.hints.hint_context import FailedTest, Fault, HintContext, ObservedRollout
from composer_replication.rollouts.hints.hinted_turns import find_faults
from composer_replication.rollouts.hints.layers import (
    clamp,
    clean_text,
    open_layers,
    template_hint,
    write_hint,
)


def context_of(name: str, **changes: Any) -> HintContext:
    observed = replace(observe(next(case for case in cases() if case["name"] == name)), **changes)
    return HintContext(observed, find_faults(observed)[0])


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
    text = template_hint(context_of(name))
    assert text is not None
    assert says in text


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
    context = context_of(name)
    assert template_hint(context) is None
    hint = write_hint(context, open_layers(HintWritingSection()))
    assert hint is not None and hint.source == "environment" and says in hint.text


def test_a_failing_test_is_told_with_its_assertion() -> None:
    tests = (
        FailedTest("t.py::test_a", "last(['a', 'b'])\n  == 'b'"),
        FailedTest("t.py::test_b[1-2]"),
        FailedTest("t.py::test_c"),
    )
    text = template_hint(context_of("failing tests belong to the last change", failed_tests=tests))
    assert text == ("test_a fails: it checks `last(['a', 'b']) == 'b'`.\ntest_b[1-2] fails. And 1 more.")


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        ("the run ended with exit code 3", True),
        ("outcomes were forged: a test that must fail has not failed", False),
        ("t.py::test_secret[1] is missing", False),
        ("test_secret did not end", False),
    ],
)
def test_an_error_that_names_a_paid_test_or_a_forgery_is_not_told(error: str, is_told: bool) -> None:
    case = next(case for case in cases() if case["name"] == "failing tests belong to the last change")
    observed = observe(case)
    score = Score({}, error, paid=("t.py::test_secret[1]",))
    observed = replace(observed, rollout=replace(observed.rollout, score=score))
    context = HintContext(observed, Fault(0, "test-failure", ""))
    assert observed.run_error == context.error_text == (error if is_told else "")
    told = [fault.evidence for fault in find_faults(observed) if fault.kind == "test-failure"]
    assert told == ([error] if is_told else [])


def test_without_a_template_the_next_layer_speaks() -> None:
    context = context_of("a tool's own refusal in other words")
    hint = write_hint(context, open_layers(HintWritingSection()))
    assert hint is not None
    assert (hint.source, hint.kind, hint.turn_idx) == ("environment", "tool-error", 0)
    assert hint.text == "Hint: The environment answered: the tree has no changes"


def lesson(context: HintContext) -> str | None:
    return f"lesson on {context.fault.kind}" if context.fault.kind == "missing-file" else None


def broken_lesson(context: HintContext) -> str | None:
    raise RuntimeError("no lesson today\nsecond line")


def odd_lesson(context: HintContext) -> Any:
    return 3


def no_lesson() -> None:
    return None


def test_layers_of_the_user_come_where_they_are_named() -> None:
    options = HintWritingSection(layers=[f"{__name__}:lesson", "template"])
    first = write_hint(context_of("the tool's own words for a missing file"), open_layers(options))
    assert first is not None
    assert (first.text, first.source) == ("Hint: lesson on missing-file", f"{__name__}:lesson")
    second = write_hint(context_of("an empty answer"), open_layers(options))
    assert second is not None
    assert second.source == "template"


@pytest.mark.parametrize("name", ["no_lesson", "nothing", "MESSAGE"])
def test_a_layer_that_cannot_be_used(name: str) -> None:
    with pytest.raises(UsageError, match="CR0210") as caught:
        open_layers(HintWritingSection(layers=[f"{__name__}:{name}"]))
    assert name in caught.value.message
    with pytest.raises(UsageError, match="CR0210"):
        open_layers(HintWritingSection(layers=["no.such.module:f"]))


MESSAGE = "not callable"


@pytest.mark.parametrize(("name", "says"), [("broken_lesson", "no lesson today"), ("odd_lesson", "gave 3")])
def test_a_layer_that_breaks_is_named(name: str, says: str) -> None:
    options = HintWritingSection(layers=[f"{__name__}:{name}"])
    with pytest.raises(UsageError, match="CR0210") as caught:
        write_hint(context_of("the tool's own words for a missing file"), open_layers(options))
    assert name in caught.value.message
    assert says in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("layers", [[], ["templates"], ["template", "template"]])
def test_layers_that_cannot_be(layers: list[str]) -> None:
    with pytest.raises(ValidationError, match="each once"):
        HintWritingSection(layers=layers)


# ---- what no hint may say ------------------------------------------------------------------------


def solution(context: HintContext) -> str | None:
    return "return min(bounded, high)"


def test_a_hint_that_shows_what_is_hidden_is_thrown_away_and_the_next_layer_asked() -> None:
    context, own = context_of("failing tests belong to the last change"), f"{__name__}:solution"
    options = HintWritingSection(layers=[own, "template"])

    def leaking(text: str) -> bool:
        return "return min(bounded" in text

    guarded = replace(context, observed=replace(context.observed, is_leak=leaking))
    shown = write_hint(context, open_layers(options))
    hidden = write_hint(guarded, open_layers(options))
    assert shown is not None
    assert hidden is not None
    assert (shown.source, hidden.source) == (own, "template")
    nothing = replace(context, observed=replace(context.observed, is_leak=lambda _: True))
    assert write_hint(nothing, open_layers(options)) is None


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


def test_clamping_cuts_at_a_word() -> None:
    assert clamp("one two three four", 15) == "one two..."
    assert clamp("one", 15) == "one"
    assert clamp("a" * 20, 10) == "a" * 7 + "..."


# ---- the judge -----------------------------------------------------------------------------------


def test_no_field_of_a_context_holds_golden_code() -> None:
    """What a layer can reach is listed here, so that a new field is a decision."""
    assert set(ObservedRollout.__slots__) == {
        "rollout", "turns", "tools", "path", "answered_text", "answer", "indent", "function_start", "failed_tests", "is_leak",
    }  # fmt: skip
    assert set(HintContext.__slots__) == {"observed", "fault"}
    assert set(Fault.__slots__) == {"turn_idx", "kind", "evidence", "subject", "call_idx"}
