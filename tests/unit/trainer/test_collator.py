"""Which ids carry loss, where padding stands, and which hinted turns are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.records import Completion, HintedTurn, PreferencePair, Rollout, StopReason, Turn
from composer_replication.trainer.collator import check_pairs, collate_pairs
from composer_replication.trainer.collator import matched_turns as matched_and_left_out

PAD = 0


def refused(work: Any) -> tuple[str, str]:
    with pytest.raises(InputError) as error:
        work()
    return error.value.code, error.value.where


def test_padding_by_hand() -> None:
    rows = collate_pairs(
        [PreferencePair((1, 2, 3), (4,), (5, 6)), PreferencePair((7,), (8, 9), (8,))], pad_id=PAD
    )
    assert rows.ids_NS.tolist() == [[1, 2, 3, 4, 0], [7, 8, 9, 0, 0], [1, 2, 3, 5, 6], [7, 8, 0, 0, 0]]
    assert rows.loss_mask_NS.tolist() == [[0, 0, 0, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]


GOOD_PAIR = PreferencePair((1,), (2,), (3,))


@pytest.mark.parametrize(
    ("pair", "code"),
    [
        (PreferencePair((), (2,), (3,)), "CR0751"),
        (PreferencePair((1,), (), (3,)), "CR0751"),
        (PreferencePair((1,), (2,), ()), "CR0751"),
        (PreferencePair((1,), (2, 3), (2, 3)), "CR0751"),
        (PreferencePair((1,), (2,), (3,), weight=-0.1), "CR0722"),
        (PreferencePair((1,), (2,), (3,), weight=math.nan), "CR0722"),
        (PreferencePair((1,), (2,), (3,), weight=math.inf), "CR0722"),
    ],
)
def test_pairs_that_say_nothing_are_refused(pair: PreferencePair, code: str) -> None:
    assert refused(lambda: check_pairs([GOOD_PAIR, pair])) == (code, "pair 1")


# ---- the teacher reads what the policy read, and the hint: nothing else

PROMPT, ANSWER, LOGPS = (5, 6, 7), (40, 41), (-1.0, -20.1)
MODEL = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=100)))
few_ids = st.lists(st.integers(0, 2), max_size=6).map(tuple)


def rollout(logps: tuple[float, ...] = LOGPS) -> Rollout:
    turn = Turn(PROMPT, Completion(ANSWER, "an answer", StopReason.FINISHED, logps))
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
    made = Turn(prompt, Completion(ANSWER, "an answer", StopReason.FINISHED, ()))
    turn = HintedTurn(prompt, (*prompt[:place], *hint, *prompt[place:]), ANSWER)
    assert matched_turns([[turn]], [replace(rollout(), turns=(made,))]) == [[turn]]


@pytest.mark.parametrize("answer", [None, [], [None], [[None]], ["a hint"], iter([[]])])
def test_a_hint_source_that_answers_otherwise_is_told_what_to_give(answer: Any) -> None:
    error = refusal(lambda: matched_turns(answer, [rollout()]))
    assert "a list of HintedTurn for each of 1 rollout" in error.message


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
        (replace(hinted(), completion_ids=(*ANSWER, 1)), "CR0751"),  # not what was sampled
    ],
)
def test_turns_that_cannot_be_weighed_or_were_not_sampled_are_refused(turn: HintedTurn, code: str) -> None:
    with pytest.raises(InputError) as caught:
        matched_turns([[turn]], [rollout(())])
    assert (caught.value.code, caught.value.where) == (code, "row 0")
