"""Which ids carry loss, and where padding stands."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.records import HintedTurn, PreferencePair
from composer_replication.trainer.collator import TokenRows, check_pairs, collate_hinted_turns, collate_pairs

PAD = 0
TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=6).map(tuple)
HINTED = st.lists(st.builds(HintedTurn, TOKENS, TOKENS, TOKENS), min_size=1, max_size=5)


def refused(work: Any) -> tuple[str, str]:
    with pytest.raises(InputError) as error:
        work()
    return error.value.code, error.value.where


def rows_as_lists(rows: TokenRows) -> list[tuple[list[int], list[int]]]:
    """Ids up to the last one under the loss, and the ids under it."""
    lengths = [int(mask.nonzero().max()) + 1 for mask in rows.loss_mask_NS]
    return [
        (ids[:length].tolist(), ids[mask.bool()].tolist())
        for ids, mask, length in zip(rows.ids_NS, rows.loss_mask_NS, lengths, strict=True)
    ]


def test_padding_by_hand() -> None:
    rows = collate_pairs(
        [PreferencePair((1, 2, 3), (4,), (5, 6)), PreferencePair((7,), (8, 9), (8,))], pad_id=PAD
    )
    assert rows.ids_NS.tolist() == [
        [1, 2, 3, 4, 0],
        [7, 8, 9, 0, 0],
        [1, 2, 3, 5, 6],
        [7, 8, 0, 0, 0],
    ]
    assert rows.loss_mask_NS.tolist() == [
        [0, 0, 0, 1, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1],
        [0, 1, 0, 0, 0],
    ]


@given(HINTED)
def test_hinted_turns_keep_every_id_and_pad_on_the_right_side(turns: list[HintedTurn]) -> None:
    rows = collate_hinted_turns(turns, pad_id=PAD)
    for side, prompts in (
        (rows.student, [turn.prompt_ids for turn in turns]),
        (rows.teacher, [turn.hinted_prompt_ids for turn in turns]),
    ):
        assert rows_as_lists(side) == [
            ([*prompt, *turn.completion_ids], list(turn.completion_ids))
            for prompt, turn in zip(prompts, turns, strict=True)
        ]
        for ids, (known, _) in zip(side.ids_NS.tolist(), rows_as_lists(side), strict=True):
            assert ids[len(known) :] == [PAD] * (len(ids) - len(known))
    assert (
        rows.sampled_logp_M.shape
        == rows.weight_M.shape
        == rows.student.ids_NS[rows.student.loss_mask_NS.bool()].shape
    )
    assert bool(rows.sampled_logp_M.isnan().all())


def test_log_probabilities_are_unknown_where_none_are_given() -> None:
    rows = collate_hinted_turns(
        [HintedTurn((1,), (1, 2), (3, 4)), HintedTurn((1,), (2,), (3,), sampled_logp=(-0.5,), weight=0.25)],
        pad_id=PAD,
    )
    assert rows.sampled_logp_M.isnan().tolist() == [True, True, False]
    assert rows.sampled_logp_M[2] == -0.5
    assert rows.weight_M.tolist() == [1.0, 1.0, 0.25]


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
