"""The hook with a guard that judges whole readings, on bare instances as the contract names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.errors import CollapseStopError
from composer_replication.records import HeldoutReading
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.safety import CombinedGuard, EvidenceGuard, HeldOutGuard
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer

HONEST = ((1.0, 1.0), (0.0, 0.0)) * 16
HACKED = ((1.0, 0.0),) * 32


def bare_trainer(evaluate: Callable[[], Any], **fields: Any) -> Any:
    trainer = ComposerReplicationTrainer.__new__(ComposerReplicationTrainer)
    trainer.rows = []
    settings: dict[str, Any] = {
        "heldout_guard": CombinedGuard(HeldOutGuard(), EvidenceGuard(10, tolerated_gap=0.1)),
        "heldout_eval_fn": evaluate,
        "strict_killswitch": True,
        "alpha_sdpo": 0.0,
        "beta_replay": 0.0,
        "state": SimpleNamespace(global_step=0),
        "args": SimpleNamespace(logging_steps=10),
        "control": SimpleNamespace(should_training_stop=False),
        "_metrics": {"train": {"reward": [0.5]}},
        "log": lambda row: trainer.rows.append(dict(row)),
    }
    for name, value in {**settings, **fields}.items():
        setattr(trainer, name, value)
    return trainer


def reading(idx: int, pairs: Any = HONEST) -> HeldoutReading:
    return HeldoutReading(idx, 0.5, tuple(pairs), (0.0,) * 4, "split-a", 0.1, 1)


def scripted(*answers: Any) -> Callable[[], Any]:
    left = list(answers)

    def evaluate() -> Any:
        answer = left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return evaluate


def fold(trainer: Any, times: int = 1) -> None:
    for _ in range(times):
        trainer._maybe_update_killswitch()
        trainer.state.global_step += 10


def test_pairs_canaries_and_failures_reach_the_evidence() -> None:
    trainer = bare_trainer(scripted(reading(1), None, reading(2)))
    fold(trainer, 3)
    alone = EvidenceGuard(10, tolerated_gap=0.1)
    statuses = [alone.update(step, HONEST, [0.0] * 4, neutral=1) for step in (1, 2)]
    assert trainer.heldout_guard.last_status.evidence == statuses[-1]
    assert trainer.heldout_guard.last_status.round_idx == 20  # the global step is a label only
    assert [row["killswitch/evidence_gap"] for row in trainer.rows] == [s.gap_log_evidence for s in statuses]


def test_evidence_halts_the_run_and_the_error_carries_the_combined_status() -> None:
    trainer = bare_trainer(scripted(reading(1, HACKED)))
    with pytest.raises(CollapseStopError, match="visible scores exceed") as caught:
        fold(trainer)
    assert caught.value.status is trainer.heldout_guard.last_status
    assert trainer.rows[-1]["killswitch/fire"] == 1.0
    assert trainer.guard_hook.last_verdict["reason"].startswith("visible scores exceed")
    assert trainer.halted_at == 0


def test_a_plain_guard_gets_exactly_the_keywords_that_it_always_got() -> None:
    class Plain(HeldOutGuard):
        def update(self, *labels: Any, **keywords: Any) -> Any:
            seen.append((labels, keywords))
            return super().update(*labels, **keywords)

    seen: list[Any] = []
    trainer = bare_trainer(scripted(reading(1), 0.25), heldout_guard=Plain())
    fold(trainer, 2)
    assert seen == [
        ((0,), {"in_loop_reward": 0.5, "heldout_score": 0.5, "kl_to_init": None}),
        ((10,), {"in_loop_reward": 0.5, "heldout_score": 0.25, "kl_to_init": None}),
    ]
    assert not [name for row in trainer.rows for name in row if "evidence" in name]


def test_figures_of_the_evidence_are_in_the_run_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    trainer = bare_trainer(scripted(reading(1), reading(2)))
    trainer.step_lines.folder = folder
    fold(trainer, 2)
    status = trainer.heldout_guard.last_status
    row = read_jsonl(folder.verdicts)[-1]
    assert row["evidence_canary"] == status.evidence.canary_log_evidence
    assert (row["round_idx"], row["num_updates"], row["fire"]) == (10, 2, False)


# ---- an evaluation that gives up by itself


@pytest.mark.parametrize("strict", [True, False])
def test_an_evaluation_that_gives_up_halts_with_its_verdict_on_disk(strict: bool, tmp_path) -> None:
    def broken() -> float:
        raise ValueError("no grader")

    folder = RunFolder(tmp_path / "run")
    trainer = bare_trainer(PatientEvaluation(broken), heldout_guard=HeldOutGuard(), strict_killswitch=strict)
    trainer.step_lines.folder = folder
    for step in (0, 10):
        trainer.state.global_step = step
        trainer._maybe_update_killswitch()
    assert trainer.rows == []  # missed twice: nothing was folded, the run went on
    trainer.state.global_step = 20
    if strict:
        with pytest.raises(CollapseStopError, match="3 held-out evaluations in a row were missed"):
            trainer._maybe_update_killswitch()
    else:
        trainer._maybe_update_killswitch()
        assert trainer.control.should_training_stop is True
    assert trainer.halted_at == 20
    assert trainer.rows == [{"killswitch/fire": 1.0, "killswitch/proxy_real_gap": 0.0}]
    (verdict,) = read_jsonl(folder.verdicts)
    assert verdict["fire"] is True
    assert "no grader" in verdict["reason"]
    assert trainer.heldout_guard.last_status is None
