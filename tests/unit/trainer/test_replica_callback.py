"""What a trainer does when the other replicas' run ends, on the real trainer with a loop that ends when told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_replication.replicas.run_records import RunEnd
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.guard import ReplicaCallback


class EndingLoop:
    """Ends after step 2, as ``end`` says."""

    def __init__(self, end: RunEnd) -> None:
        self.end, self.calls = end, []

    def begin(self, identity: Any, *, max_steps: int, step: int, tokens: int) -> None:
        self.calls.append(("begin", max_steps, step))

    def after_step(self, step: int, tokens: int) -> RunEnd | None:
        self.calls.append(("step", step))
        self.tokens = tokens
        return self.end if step == 2 else None

    def finish(self) -> RunEnd:
        self.calls.append(("finish",))
        return self.end

    def halt(self, reason: str) -> RunEnd:
        self.calls.append(("halt", reason))
        return self.end

    def close(self) -> None:
        self.calls.append(("close",))


def test_a_halt_of_another_replica_is_written_as_ones_own(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=5, run_folder=RunFolder(tmp_path / "run"))
    loop = EndingLoop(RunEnd("halted", 1, 3, "the gap is too wide"))
    trainer.add_callback(ReplicaCallback(trainer.guard_hook, trainer.interrupt, loop, {}))
    trainer.train()
    assert trainer.state.global_step == trainer.halted_at == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()]
    assert [(row["fire"], row["reason"], row["from_replica"]) for row in rows] == [
        (True, "the gap is too wide", 3)
    ]
    assert ("finish",) not in loop.calls
    assert loop.tokens > 0


def test_a_finished_run_stops_without_a_verdict(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=5, run_folder=RunFolder(tmp_path / "run"))
    loop = EndingLoop(RunEnd("finished", 1, 3))
    trainer.add_callback(ReplicaCallback(trainer.guard_hook, trainer.interrupt, loop, {}))
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.halted_at is None
    assert loop.calls == [("begin", 5, 0), ("step", 1), ("step", 2), ("finish",)]
    assert not (tmp_path / "run" / "verdicts.jsonl").exists()
