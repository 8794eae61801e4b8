"""Scores on disk first: whatever a crash tears off, the verdicts are those of a run that never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.records import HeldoutReading
from composer_replication.safety import (
    EvaluationJournal,
    EvaluationScores,
    EvidenceGuard,
    EvidenceStatus,
    JournalledEvaluation,
    evaluation_seed,
)

SECRET = bytes(range(32))
NUM_TASKS = 2
NUM_EVALUATIONS = 2


def make_guard() -> EvidenceGuard:
    return EvidenceGuard(NUM_EVALUATIONS, tolerated_gap=0.1, alpha=0.2)


def score(step: int, draw_idx: int) -> tuple[float, float]:
    """What the policy scores on a place of the draw of an evaluation: fixed by the seed."""
    seed = evaluation_seed(SECRET, step) >> draw_idx
    return (seed % 1000) / 999, (seed % 7) / 6


def carry_on(path: Path, statuses: list[EvidenceStatus]) -> EvidenceGuard:
    """A run that begins or resumes: what the journal has is not scored again, all else is."""
    journal, guard = EvaluationJournal(path, run="a"), make_guard()
    statuses += journal.replay_into(guard)
    while guard.num_evaluations < NUM_EVALUATIONS:
        step = journal.next_step
        for draw_idx in sorted(set(range(NUM_TASKS + 2)) - journal.open_draws):
            visible, hidden = score(step, draw_idx)
            if draw_idx < NUM_TASKS:
                journal.record_pair(step, draw_idx, visible, hidden)
            elif draw_idx == NUM_TASKS:
                journal.record_canary(step, draw_idx, step == NUM_EVALUATIONS)
            else:
                journal.record_neutral(step, draw_idx)
        scores = journal.close_evaluation(step)
        statuses.append(guard.update(step, scores.pairs, scores.canary_passes, neutral=scores.neutral))
    return guard


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[EvidenceStatus], dict[str, Any]]:
    """File, verdicts and state of the run that was never stopped."""
    path = tmp_path_factory.mktemp("whole") / "journal.jsonl"
    statuses: list[EvidenceStatus] = []
    guard = carry_on(path, statuses)
    return path.read_bytes(), statuses, guard.state_dict()


def test_cut_around_each_line_and_resumed_every_verdict_and_every_byte_is_the_same(
    whole: tuple[bytes, list[EvidenceStatus], dict[str, Any]], tmp_path: Path
) -> None:
    data, verdicts, state = whole
    assert [status.fire for status in verdicts] == [False, True]
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    assert len(ends) == 1 + NUM_EVALUATIONS * (NUM_TASKS + 3)
    path = tmp_path / "journal.jsonl"
    for cut in [0, 1, *(end + by for end in ends for by in (-20, -1, 0, 1) if end + by < len(data))]:
        path.write_bytes(data[:cut])
        statuses: list[EvidenceStatus] = []
        guard = carry_on(path, statuses)
        assert statuses == verdicts, cut
        assert guard.state_dict() == state
        assert path.read_bytes() == data, cut


def test_cut_at_any_byte_the_journal_holds_the_whole_lines_before_it(
    whole: tuple[bytes, list[EvidenceStatus], dict[str, Any]], tmp_path: Path
) -> None:
    def held(cut: int) -> tuple[object, ...]:
        path.write_bytes(data[:cut])
        journal = EvaluationJournal(path, run="a")
        return journal.evaluations, journal.next_step, journal.open_draws

    data, path = whole[0], tmp_path / "journal.jsonl"
    for cut in range(len(data)):
        assert held(cut) == held(data[:cut].rfind(b"\n") + 1)


PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import test_evaluation_journal as script
num, keep = int(sys.argv[2]), script.EvaluationJournal._append
def append(self, row):
    global num
    keep(self, row)
    num -= 1
    if num == 0:
        os.kill(os.getpid(), signal.SIGKILL)
script.EvaluationJournal._append = append
script.carry_on(Path(sys.argv[1]), [])
"""


@pytest.mark.parametrize("num", [1, 5, 8])
def test_killed_between_two_lines_and_resumed(
    num: int, whole: tuple[bytes, list[EvidenceStatus], dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    command = [sys.executable, "-c", PROGRAM, str(path), str(num), str(Path(__file__).parent), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(path.read_bytes().splitlines()) == num + 1
    statuses: list[EvidenceStatus] = []
    carry_on(path, statuses)
    assert statuses == whole[1]


def test_a_guard_from_a_checkpoint_gets_only_what_it_has_not_seen(
    whole: tuple[bytes, list[EvidenceStatus], dict[str, Any]], tmp_path: Path
) -> None:
    data, verdicts, state = whole
    path = tmp_path / "journal.jsonl"
    path.write_bytes(data)
    journal = EvaluationJournal(path, run="a")
    for seen in range(NUM_EVALUATIONS + 1):
        early, late = make_guard(), make_guard()
        for event in journal.evaluations[:seen]:
            early.update(event.step, event.pairs, event.canary_passes, neutral=event.neutral)
        late.load_state_dict(json.loads(json.dumps(early.state_dict())))
        assert journal.replay_into(late) == verdicts[seen:]
        assert late.state_dict() == state


def test_a_guard_that_is_ahead_of_the_journal_is_refused(tmp_path: Path) -> None:
    guard = make_guard()
    guard.update(1, [(1.0, 1.0)])
    with pytest.raises(ValueError, match="seen 1 evaluations and the journal holds 0"):
        EvaluationJournal(tmp_path / "journal.jsonl").replay_into(guard)


def test_missed_evaluations_are_replayed_and_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal, guard = EvaluationJournal(path), make_guard()
    statuses = []

    def miss(reason: str) -> None:
        journal.record_missed(journal.next_step, reason)
        statuses.append(guard.note_missed(reason))

    miss("hung")
    journal.record_pair(1, 0, 1.0, 0.0)
    miss("hung again")  # what was scored before is kept
    journal.record_pair(1, 1, 1.0, 1.0)
    scores = journal.close_evaluation(1)
    assert scores == EvaluationScores(1, ((1.0, 0.0), (1.0, 1.0)))
    statuses.append(guard.update(1, scores.pairs))
    checkpoints = [guard.state_dict()]
    for reason in ("a", "b", "c"):
        miss(reason)
        checkpoints.append(guard.state_dict())
    assert statuses[-1].fire and "c" in statuses[-1].reason
    again = make_guard()
    assert EvaluationJournal(path).replay_into(again) == statuses
    assert again.state_dict() == guard.state_dict()
    for seen, checkpoint in enumerate(checkpoints):
        late = make_guard()
        late.load_state_dict(checkpoint)
        assert EvaluationJournal(path).replay_into(late) == statuses[3 + seen :]


def test_each_line_is_synced_before_the_call_returns_and_so_is_the_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def watch(descriptor: int) -> None:
        sync(descriptor)
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((target.name, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", watch)
    path = tmp_path / "journal.jsonl"
    journal = EvaluationJournal(path)
    journal.record_pair(1, 0, 1.0, 1.0)
    assert [name for name, _ in synced] == ["journal.jsonl", tmp_path.name]
    journal.close_evaluation(1)
    assert synced[-1] == ("journal.jsonl", path.stat().st_size)
    assert len(synced) == 3


def test_a_line_that_the_disk_refused_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal = EvaluationJournal(path)
    journal.record_pair(1, 0, 1.0, 1.0)
    good = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.record_pair(1, 1, 0.0, 0.0)
    assert journal.open_draws == {0}
    path.write_bytes(good + b'{"half')
    journal.record_pair(1, 1, 0.5, 0.5)
    assert EvaluationJournal(path).close_evaluation(1).pairs == ((1.0, 1.0), (0.5, 0.5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda j: j.record_pair(1, 0, 1.0, 1.0), "step must be 2"),
        (lambda j: j.record_pair(3, 0, 1.0, 1.0), "step must be 2"),
        (lambda j: j.record_pair(2, 0, 0.0, 0.0), "place 0 of evaluation 2 is scored already"),
        (lambda j: j.record_neutral(2, 0), "scored already"),
        (lambda j: j.record_canary(2, 0, 1.0), "scored already"),
        (lambda j: j.record_pair(2, -1, 0.0, 0.0), "draw_idx must be >= 0"),
        (lambda j: j.record_pair(2, 1.5, 0.0, 0.0), "draw_idx"),
        (lambda j: j.record_pair(2, 1, 1.5, 0.0), "visible"),
        (lambda j: j.record_pair(2, 1, 0.0, float("nan")), "hidden"),
        (lambda j: j.record_canary(2, 1, -1.0), "canary"),
        (lambda j: j.close_evaluation(1), "step must be 2"),
        (lambda j: j.record_missed(1, "late"), "step must be 2"),
        (lambda j: j.record_evaluation(2, [(1.0, 1.0)]), "single scores already"),
        (lambda j: j.record_evaluation(1, [(1.0, 1.0)]), "step must be 2"),
        (lambda j: j.record_evaluation(2, []), "nothing was drawn"),
        (lambda j: j.record_evaluation(2, [(2.0, 0.0)]), "visible"),
    ],
)
def test_duplicates_and_bad_scores_are_refused_and_not_written(
    tmp_path: Path, call: Any, message: str
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = EvaluationJournal(path)
    journal.record_evaluation(1, [(1.0, 0.5)], [0.0], neutral=1)
    journal.record_pair(2, 0, 1.0, 1.0)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        call(journal)
    assert path.read_bytes() == before
    assert (journal.next_step, journal.open_draws) == (2, {0})


def test_nothing_drawn_cannot_be_closed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was drawn"):
        EvaluationJournal(tmp_path / "journal.jsonl").close_evaluation(1)


def test_scores_of_closed_evaluations_only(tmp_path: Path) -> None:
    journal = EvaluationJournal(tmp_path / "journal.jsonl")
    written = journal.record_evaluation(1, [(1.0, 0.1)], [1.0], neutral=2)
    journal.record_pair(2, 0, 1.0, 1.0)
    assert written == EvaluationScores(1, ((1.0, 0.1),), (1.0,), 2)
    again = EvaluationJournal(tmp_path / "journal.jsonl")
    assert [again.scores_of(step) for step in (0, 1, 2, -1)] == [None, written, None, None]


# ---- seeds ----------------------------------------------------------------------------------------


def test_the_seed_is_an_hmac_of_secret_and_step() -> None:
    """The first eight bytes that ``openssl dgst -sha256 -mac HMAC`` gives for "evaluation/1", less the last bit."""
    assert evaluation_seed(SECRET, 1) == 0x13F23B1662215FB0 >> 1
    seeds = {evaluation_seed(secret, step) for secret in (SECRET, SECRET[::-1]) for step in range(1, 200)}
    assert len(seeds) == 398
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("secret", "step", "message"),
    [(b"short", 1, "secret"), ("x" * 32, 1, "secret"), (SECRET, 0, "step"), (SECRET, 1.0, "step")],
)
def test_a_bad_secret_or_step_is_refused(secret: Any, step: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation_seed(secret, step)


# ---- in front of the trainer ----------------------------------------------------------------------


def reading(idx: int, hidden: float) -> HeldoutReading:
    return HeldoutReading(idx, hidden, ((1.0, hidden),), (0.0,), "split", 0.1, 1)


def test_a_repeated_evaluation_gives_the_scores_of_the_first_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    script: Iterator[Any] = iter([None, reading(1, 0.5), 0.5, reading(2, 0.25)])
    first = JournalledEvaluation(lambda: next(script), EvaluationJournal(path))
    assert [first() for _ in range(4)] == [None, reading(1, 0.5), 0.5, reading(2, 0.25)]
    script = iter([reading(2, 1.0), reading(3, 1.0), reading(5, 1.0)])  # resumed from before 2
    second = JournalledEvaluation(lambda: next(script), EvaluationJournal(path))
    assert [second(), second()] == [reading(2, 0.25), reading(3, 1.0)]
    with pytest.raises(ValueError, match="step must be 4"):
        second()


def test_a_score_that_is_not_the_mean_of_its_pairs_is_kept(tmp_path: Path) -> None:
    share = HeldoutReading(1, 0.75, ((1.0, 0.0), (1.0, 1.0)), (), "split", 0.1)
    assert JournalledEvaluation(lambda: share, EvaluationJournal(tmp_path / "journal.jsonl"))() == share


def test_an_evaluation_of_canaries_alone_keeps_its_score(tmp_path: Path) -> None:
    only = HeldoutReading(1, 0.75, (), (0.0,), "split", 0.1)
    assert JournalledEvaluation(lambda: only, EvaluationJournal(tmp_path / "journal.jsonl"))() == only
