"""Which ids carry loss, and where padding stands."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.records import HintedTurn, PreferencePair
from composer_replication.trainer.collator import TokenRows, collate_hinted_turns, collate_pairs

PAD = 0
TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=6).map(tuple)
HINTED = st.lists(st.builds(HintedTurn, TOKENS, TOKENS, TOKENS), min_size=1, max_size=5)


def refused(work: Any) -> tuple[str, str]:
    with pytest.raises(InputError) as error:
        work()
    return error.value.code, error.value.where


def rows_as_lists(rows: TokenRows) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt ids, completion ids and ids under the loss, read through the masks."""
    return [
        (
            rows.prompt_ids_NP[n][rows.prompt_mask_NP[n].bool()].tolist(),
            rows.completion_ids_NT[n][rows.completion_mask_NT[n].bool()].tolist(),
            rows.completion_ids_NT[n][rows.loss_mask_NT[n].bool()].tolist(),
        )
        for n in range(rows.prompt_ids_NP.size(0))
    ]


def test_padding_by_hand() -> None:
    rows = collate_pairs(
        [PreferencePair((1, 2, 3), (4,), (5, 6)), PreferencePair((7,), (8, 9), (8,))], pad_id=PAD
    )
    assert rows.weight_P.tolist() == [1.0, 1.0]
    assert rows.answers.prompt_ids_NP.tolist() == [[1, 2, 3], [0, 0, 7]] * 2
    assert rows.answers.prompt_mask_NP.tolist() == [[1, 1, 1], [0, 0, 1]] * 2
    assert rows.answers.completion_ids_NT.tolist() == [[4, 0], [8, 9], [5, 6], [8, 0]]
    assert rows.answers.loss_mask_NT.tolist() == [[1, 0], [1, 1], [1, 1], [1, 0]]


@given(HINTED)
def test_hinted_turns_keep_every_id_and_pad_on_the_right_side(turns: list[HintedTurn]) -> None:
    rows = collate_hinted_turns(turns, pad_id=PAD)
    assert rows_as_lists(rows.student) == [
        (list(t.prompt_ids), list(t.completion_ids), list(t.completion_ids)) for t in turns
    ]
    assert rows_as_lists(rows.teacher) == [
        (list(t.hinted_prompt_ids), list(t.completion_ids), list(t.completion_ids)) for t in turns
    ]
    for side in (rows.student, rows.teacher):
        assert bool((side.prompt_mask_NP.diff(dim=1) >= 0).all())  # padding, then tokens
        assert bool((side.completion_mask_NT.diff(dim=1) <= 0).all())  # tokens, then padding
        assert bool(side.prompt_mask_NP[:, -1].all())
        assert bool(side.completion_mask_NT[:, 0].all())
        assert not bool((side.prompt_ids_NP * (1 - side.prompt_mask_NP)).any())
        assert not bool((side.completion_ids_NT * (1 - side.completion_mask_NT)).any())
    assert rows.student.completion_ids_NT is rows.teacher.completion_ids_NT
    assert rows.student.loss_mask_NT is rows.teacher.loss_mask_NT
    assert bool(rows.sampled_logp_NT.isnan().all())


def test_log_probabilities_that_are_not_one_an_id_are_refused_or_unknown() -> None:
    short = HintedTurn((1,), (1, 2), (3, 4), sampled_logp=(-1.0,))
    assert refused(lambda: collate_hinted_turns([short], pad_id=PAD)) == ("CR0751", "hinted turn 0")
    rows = collate_hinted_turns(
        [replace(short, sampled_logp=()), HintedTurn((1,), (2,), (3,), sampled_logp=(-0.5,))], pad_id=PAD
    )
    assert rows.sampled_logp_NT.isnan().tolist() == [[True, True], [False, True]]
    assert rows.sampled_logp_NT[1, 0] == -0.5


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
    assert refused(lambda: collate_pairs([GOOD_PAIR, pair], pad_id=PAD)) == (code, "pair 1")


@pytest.mark.parametrize(
    ("hinted", "code"),
    [
        (HintedTurn((), (2,), (3,)), "CR0751"),
        (HintedTurn((1,), (), (3,)), "CR0751"),
        (HintedTurn((1,), (2,), ()), "CR0751"),
        (HintedTurn((1,), (2,), (3,), weight=-1.0), "CR0722"),
    ],
)
def test_turns_that_cannot_be_scored_are_refused(hinted: HintedTurn, code: str) -> None:
    assert refused(lambda: collate_hinted_turns([hinted], pad_id=PAD)) == (code, "hinted turn 0")


def test_the_oracle_of_these_tests_sees_a_wrong_mask() -> None:
    rows = collate_pairs([GOOD_PAIR], pad_id=PAD).answers
    shifted = TokenRows(
        rows.prompt_ids_NP,
        rows.prompt_mask_NP,
        rows.completion_ids_NT,
        rows.completion_mask_NT,
        torch.zeros_like(rows.loss_mask_NT),
    )
    assert rows_as_lists(shifted) != rows_as_lists(rows)
