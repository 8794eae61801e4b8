from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest

from composer_replication.errors import (
    CollapseStopError,
    ComposerError,
    InputError,
    MissingError,
    SandboxFailure,
    SplitOverlapError,
    UsageError,
)


def test_the_sentence_holds_code_place_and_next_step() -> None:
    error = UsageError("CR0299", "this is wrong.", where="run.toml:3", fix="type that")
    assert str(error) == "CR0299: this is wrong. [run.toml:3] Next: type that"
    assert str(UsageError("CR0299", "this is wrong.")) == "CR0299: this is wrong."


def test_a_broken_sandbox_is_missing_and_not_bad_input() -> None:
    assert issubclass(SandboxFailure, MissingError)
    assert not issubclass(SandboxFailure, InputError)


def test_overlap_names_five_pairs_and_counts_the_rest() -> None:
    pairs = [("id", f"train{n}", f"held{n}") for n in range(7)]
    error = SplitOverlapError(pairs)
    assert error.pairs == pairs
    assert isinstance(error, ValueError)
    assert "7 pair(s), 7 by id: id: train0 and held0; " in error.message
    assert "train4 and held4" in error.message
    assert "train5" not in error.message
    assert "and 2 more" in error.message
    assert "more" not in SplitOverlapError(pairs[:5]).message


def test_a_pair_of_two_kinds_is_one_pair() -> None:
    error = SplitOverlapError(
        [("near-duplicate", "a", "b"), ("near-duplicate", "a", "c"), ("origin", "a", "b")]
    )
    assert error.message == (
        "train and held-out tasks overlap in 2 pair(s), 2 by near-duplicate, 1 by origin: "
        "near-duplicate and origin: a and b; near-duplicate: a and c."
    )


def test_a_halt_carries_the_very_status() -> None:
    status = SimpleNamespace(reason="the truth fell")
    error = CollapseStopError(status)
    assert error.status is status
    assert "the truth fell" in str(error)
    assert error.exit_code == 5
    assert isinstance(error, RuntimeError)
    assert "the guard fired" in str(CollapseStopError(None))


@pytest.mark.parametrize(
    "error",
    [
        UsageError("CR0201", "m.", where="w", fix="f"),
        SplitOverlapError([("id", "a", "b")]),
        CollapseStopError({"reason": "r"}),
    ],
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling_as_they_are(error: ComposerError, protocol: int) -> None:
    """Worker processes send them home."""
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert again.__dict__ == error.__dict__
