"""Scores on disk first: whatever a crash tears off, the verdicts are those of a run that never stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.records import HeldoutReading
from composer_replication.safety import EvaluationJournal, EvidenceGuard, EvidenceStatus
from composer_replication.safety.evaluation_journal import _linked

NUM_EVALUATIONS = 3
Whole = tuple[bytes, list[EvidenceStatus]]


def scores_of(step: int, attempt: int) -> list[tuple[float, float]]:
    """What the policy scores in an evaluation; another time, something else."""
    seed = 7919 * step + attempt
    return [((seed >> place) % 1000 / 999, (seed >> place) % 7 / 6) for place in range(3)]


def reading(step: int, pairs: Any = ((1.0, 1.0),), canaries: Any = (), neutral: int = 0) -> HeldoutReading:
    score = sum(hidden for _, hidden in pairs) / len(pairs) if pairs else 0.5
    return HeldoutReading(step, score, tuple(pairs), tuple(canaries), "split", 0.1, neutral)


def carry_on(path: Path, attempt: int = 0) -> list[EvidenceStatus]:
    """A run that begins or resumes with a new guard: what the journal has is judged, all else is measured."""
    journal, guard = EvaluationJournal(path, run="a"), EvidenceGuard(3, tolerated_gap=0.1, alpha=0.2)
    statuses = []
    for step in range(1, NUM_EVALUATIONS + 1):
        scores = journal.settled(reading(step, scores_of(step, attempt), [float(step == NUM_EVALUATIONS)], 1))
        statuses.append(guard.update(step, scores.pairs, scores.canary_passes, neutral=1))
    return statuses


@pytest.fixture(scope="module", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """``run_folder`` syncs, and its tests say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """File and verdicts of the run that was never stopped."""
    path = tmp_path_factory.mktemp("whole") / "journal.jsonl"
    statuses = carry_on(path)
    return path.read_bytes(), statuses


def test_cut_around_each_line_and_resumed_every_verdict_and_every_byte_is_the_same(
    whole: Whole, tmp_path: Path
) -> None:
    data, verdicts = whole
    assert [status.fire for status in verdicts] == [False, False, True]
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    assert len(ends) == 1 + NUM_EVALUATIONS
    path = tmp_path / "journal.jsonl"
    for cut in [0, 1, *(end + by for end in ends for by in (-20, -1, 0, 1) if end + by < len(data))]:
        path.write_bytes(data[:cut])
        assert carry_on(path) == verdicts, cut
        assert path.read_bytes().rstrip() == data.rstrip(), cut  # whole without its line break is whole


def test_what_was_seen_cannot_be_thrown_again(whole: Whole, tmp_path: Path) -> None:
    data, verdicts = whole
    path = tmp_path / "journal.jsonl"
    path.write_bytes(data)
    assert carry_on(path, attempt=1) == verdicts
    assert carry_on(tmp_path / "other.jsonl", attempt=1) != verdicts


def test_a_line_that_the_disk_refused_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal = EvaluationJournal(path)
    journal.settled(reading(1))
    good = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.settled(reading(2, [(0.0, 0.0)]))
    assert len(journal.evaluations) == 1
    path.write_bytes(good + b'{"half')
    journal.settled(reading(2, [(0.5, 0.5)]))
    assert [scores.pairs for scores in EvaluationJournal(path).evaluations] == [((1.0, 1.0),), ((0.5, 0.5),)]


@pytest.mark.parametrize(
    ("step", "pairs", "message"),
    [
        (0, [(1.0, 1.0)], "step must be 2"),
        (3, [(1.0, 1.0)], "step must be 2"),
        (2, [], "nothing was drawn"),
        (2, [(2.0, 0.0)], "visible"),
        (2, [(0.0, float("nan"))], "hidden"),
    ],
)
def test_what_cannot_come_next_is_refused_and_not_written(
    tmp_path: Path, step: int, pairs: Any, message: str
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = EvaluationJournal(path)
    written = journal.settled(reading(1, [(1.0, 0.5)], [0.0], 1))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        journal.settled(reading(step, pairs))
    assert path.read_bytes() == before
    assert written == reading(1, [(1.0, 0.5)], [0.0], 1)
    assert EvaluationJournal(path).settled(reading(1, [(0.0, 0.0)])) == written


# ---- damage ---------------------------------------------------------------------------------------


def test_any_flipped_bit_before_the_last_line_break_is_noticed(whole: Whole, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(whole[0])
    true = EvaluationJournal(path, run="a").evaluations
    for place in range(0, len(whole[0]) - 1, 3):
        data = bytearray(whole[0])
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            read = EvaluationJournal(path, run="a").evaluations
        except InputError:
            continue
        assert read == true[: len(read)]  # a broken line break looks torn, and other white space says nothing


def test_a_line_taken_out_put_in_twice_moved_or_foreign_is_refused(whole: Whole, tmp_path: Path) -> None:
    lines = whole[0].splitlines(keepends=True)
    path = tmp_path / "journal.jsonl"
    for damaged in (
        [lines[0], lines[2]],
        [*lines, lines[3]],
        [lines[0], lines[2], lines[1]],
        lines[1:],
        [*lines, b"[]\n"],
        [*lines, b"\xff\n"],
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(InputError, match="CR0884") as caught:
            EvaluationJournal(path, run="a")
        assert caught.value.where.startswith(f"{path}:")
    path.write_bytes(b"".join([*lines[:2], b"{\n", *lines[2:]]))
    with pytest.raises(InputError, match="not JSON"):
        EvaluationJournal(path, run="a")


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "other", "step": 1},
        {"kind": "evaluation", "step": 2, "pairs": [[1.0, 1.0]], "canaries": [], "neutral": 0},
        {"kind": "evaluation", "step": 1, "pairs": [[1.0]], "canaries": [], "neutral": 0},
        {"kind": "evaluation"},
    ],
)
def test_a_line_that_makes_no_sense_is_refused_even_with_a_fitting_hash(tmp_path: Path, row: Any) -> None:
    header = _linked({"kind": "journal", "version": 1, "run": ""}, "")
    path = tmp_path / "journal.jsonl"
    rows = [header, _linked(row, header["chain"])]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(InputError, match="CR0884"):
        EvaluationJournal(path)


def test_another_version_and_another_runs_journal_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for row in ({"kind": "journal", "version": 2, "run": ""}, {"kind": "diary", "version": 1, "run": ""}):
        path.write_text(json.dumps(_linked(row, "")) + "\n")
        with pytest.raises(InputError, match="it is of kind"):
            EvaluationJournal(path)
    path.unlink()
    EvaluationJournal(path, run="split-a").settled(reading(1))
    with pytest.raises(InputError, match=r"split-a.*split-b") as caught:
        EvaluationJournal(path, run="split-b")
    assert caught.value.code == "CR0884"


# ---- readings -------------------------------------------------------------------------------------


def test_a_repeated_evaluation_gives_the_scores_of_the_first_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = [EvaluationJournal(path).settled(reading(step, [(1.0, 1 / step)], [0.0], 1)) for step in (1, 2)]
    assert [each.score for each in first] == [1.0, 0.5]
    resumed = EvaluationJournal(path)  # from before 2
    assert resumed.settled(reading(2, [(1.0, 1.0)])) == first[1]
    assert resumed.settled(reading(3)) == reading(3)
    with pytest.raises(ValueError, match="step must be 4"):
        resumed.settled(reading(5))


@pytest.mark.parametrize("pairs", [((1.0, 0.0), (1.0, 1.0)), ()])
def test_a_score_that_is_not_the_mean_of_its_pairs_is_kept(tmp_path: Path, pairs: Any) -> None:
    share = HeldoutReading(1, 0.75, pairs, (0.0,), "split", 0.1)
    assert EvaluationJournal(tmp_path / "journal.jsonl").settled(share) == share
