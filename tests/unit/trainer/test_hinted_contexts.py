"""The teacher reads what the policy read, and the hint: nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.records import Completion, HintedTurn, Rollout, StopReason, Turn
from composer_replication.trainer.collator import matched_turns as matched_and_left_out

PROMPT, ANSWER, LOGPS = (5, 6, 7), (40, 41), (-1.0, -20.1)
MODEL = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=100)))
few_ids = st.lists(st.integers(0, 2), max_size=6).map(tuple)


def rollout(logps: tuple[float, ...] = LOGPS) -> Rollout:
    turn = Turn(PROMPT, Completion(ANSWER, "an answer", StopReason.FINISHED, logps), "a prompt")
    return Rollout("a task", 0, (turn,), 0.0, None, StopReason.FINISHED, 0.0)


def hinted(prompt: tuple[int, ...] = (5, 90, 6, 7), logps: tuple[float, ...] = ()) -> HintedTurn:
    return HintedTurn(PROMPT, prompt, ANSWER, logps)


def matched_turns(turns: list[list[HintedTurn]], rollouts: list[Rollout]) -> list[list[HintedTurn]]:
    matched, num_too_long = matched_and_left_out(turns, rollouts, MODEL)
    assert num_too_long == 0
    return matched


def refusal(action: Callable[[], object]) -> InputError:
    with pytest.raises(InputError) as caught:
        action()
    assert caught.value.code == "CR0751"
    return caught.value


@pytest.mark.parametrize("prompt", [(90, 5, 6, 7), (5, 6, 5, 6, 7), (5, 6, 7, 90, 91), PROMPT])
def test_a_context_with_one_run_of_ids_put_in_is_taken(prompt: tuple[int, ...]) -> None:
    assert matched_turns([[hinted(prompt)]], [rollout()]) == [[hinted(prompt, LOGPS)]]


@pytest.mark.parametrize("prompt", [(99, 98), (5, 6), (90, 5, 6, 8), (90, 5, 91, 6, 7), (5, 9, 7), (7, 6, 5)])
def test_another_context_is_refused(prompt: tuple[int, ...]) -> None:
    error = refusal(lambda: matched_turns([[hinted(prompt)]], [rollout()]))
    assert "one run of ids" in str(error)


@given(few_ids, few_ids, st.integers(0, 6))
def test_wherever_ids_are_put_in_the_context_is_taken(
    prompt: tuple[int, ...], hint: tuple[int, ...], place: int
) -> None:
    made = Turn(prompt, Completion(ANSWER, "an answer", StopReason.FINISHED, ()), "a prompt")
    turn = HintedTurn(prompt, (*prompt[:place], *hint, *prompt[place:]), ANSWER)
    assert matched_turns([[turn]], [replace(rollout(), turns=(made,))]) == [[turn]]


def test_the_rows_log_probabilities_win_where_they_are_known() -> None:
    other = [[hinted(logps=(-50.0, -60.0))]]
    assert matched_turns(other, [rollout()]) == [[hinted(logps=LOGPS)]]
    assert matched_turns(other, [rollout(())]) == other


@pytest.mark.parametrize(
    ("turn", "code"),
    [
        (replace(hinted(), weight=-1.0), "CR0722"),
        (replace(hinted(), weight=float("nan")), "CR0722"),
        (hinted(logps=(-1.0,)), "CR0751"),
    ],
)
def test_turns_that_cannot_be_weighed_are_refused(turn: HintedTurn, code: str) -> None:
    with pytest.raises(InputError) as caught:
        matched_turns([[turn]], [rollout(())])
    assert (caught.value.code, caught.value.where) == (code, "row 0")
