"""States that earlier versions wrote are read, and go on as they did then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_replication.records import HeldoutReading
from composer_replication.safety import (
    CombinedGuard,
    EvaluationJournal,
    EvidenceGuard,
    HeldOutGuard,
    HeldoutSplit,
)

FOLDER = Path(__file__).parents[2] / "golden"
SAVED: dict[str, Any] = json.loads((FOLDER / "saved_states.json").read_text())


def test_the_smoothed_guard_goes_on() -> None:
    guard = HeldOutGuard()
    guard.load_state_dict(SAVED["heldout"]["state"])
    assert guard.state_dict() == SAVED["heldout"]["state"]
    said = [guard.update(9 + n, in_loop_reward=0.5 + 0.2 * n, heldout_score=0.2) for n in range(3)]
    assert [repr(status) for status in said] == SAVED["heldout"]["then"]


def test_the_evidence_goes_on_to_the_last_bit() -> None:
    guard = EvidenceGuard(20, tolerated_gap=0.1)
    guard.load_state_dict(SAVED["evidence"]["state"])
    assert guard.state_dict() == SAVED["evidence"]["state"]
    said = [guard.update(5 + n, [(1.0, 0.2), (0.9, 0.1)] * 6, [0.0]) for n in range(3)]
    assert [repr(status) for status in said] == SAVED["evidence"]["then"]
    assert guard.state_dict()["memory"]["chain"] == SAVED["evidence"]["end"]


def test_both_behind_one_hook_go_on() -> None:
    saved = SAVED["combined"]
    guard = CombinedGuard(HeldOutGuard(), EvidenceGuard(20, tolerated_gap=0.1))
    guard.load_state_dict(saved["state"])
    assert guard.state_dict() == saved["state"]
    assert guard.last_status is not None
    assert (guard.last_status.fire, guard.last_status.reason) == (saved["fire"], saved["reason"])
    reading = HeldoutReading(4, 0.5, ((0.5, 0.5),), (), "split", 0.1, 0)
    assert guard.update_from_reading(50, reading, in_loop_reward=0.9).reason == saved["then_reason"]


def test_the_split_has_its_fingerprint() -> None:
    state = SAVED["split"]["state"]
    assert HeldoutSplit.from_state_dict(state).state_dict() == state


def test_the_journal_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_text(SAVED["journal"]["text"])
    journal = EvaluationJournal(path, run="split/7")
    first, second = journal.evaluations
    assert (first.pairs, first.canary_passes, first.neutral) == (((1.0, 0.5), (0.25, 0.0)), (0.0,), 1)
    assert second.pairs == ((0.1, 0.3),)
    journal.settled(HeldoutReading(3, 1.0, ((1.0, 1.0),), (), "split", 0.1))
    assert len(EvaluationJournal(path, run="split/7").evaluations) == 3
