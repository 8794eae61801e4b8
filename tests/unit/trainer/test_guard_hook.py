"""The hook on bare instances: made with ``__new__`` and given only what the contract names."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.records import HeldoutReading
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.safety import CombinedGuard, EvidenceGuard, HeldOutGuard
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer


class Only:
    """Has these attributes; reading any other is a failure."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the hook read {name}")


class BareTrainer(ComposerReplicationTrainer):
    """Reading anything of TRL's beyond the contract is a failure: a bare instance does not have it."""


def bare_trainer(**fields: Any) -> Any:
    trainer = BareTrainer.__new__(BareTrainer)
    trainer.calls = []
    trainer.rows = []

    def evaluate() -> float:
        trainer.calls.append(trainer.state.global_step)
        return 0.25

    settings: dict[str, Any] = {
        "heldout_guard": HeldOutGuard(min_steps=3, decline_patience=3, ema_alpha=0.5, kl_hard_stop=0.08),
        "heldout_eval_fn": evaluate,
        "strict_killswitch": True,
        "alpha_sdpo": 0.0,
        "beta_replay": 0.0,
        "state": Only(global_step=0),
        "args": Only(logging_steps=10),
        "control": SimpleNamespace(should_training_stop=False),
        "_metrics": {"train": {"reward": [0.5]}},
        "log": lambda row: trainer.rows.append(dict(row)),
    }
    for name, value in {**settings, **fields}.items():
        setattr(trainer, name, value)
    return trainer


@pytest.fixture
def flat_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: 2.0)


def firing_guard() -> HeldOutGuard:
    return HeldOutGuard(min_steps=1, decline_patience=1, ema_alpha=0.0, max_proxy_real_gap=0.1)


def drive_to_fire(trainer: Any) -> None:
    """The proxy jumps by 0.5 while the truth stands still."""
    trainer._maybe_update_killswitch()
    trainer._metrics["train"]["reward"].append(1.0)
    trainer.state.global_step += 10
    trainer._maybe_update_killswitch()


def test_without_a_guard_nothing_is_read_called_or_logged() -> None:
    trainer = BareTrainer.__new__(BareTrainer)
    trainer.heldout_guard = None

    def evaluate() -> float:
        raise AssertionError("the evaluation was called")

    trainer.heldout_eval_fn = evaluate
    assert trainer._maybe_update_killswitch() is None


def test_a_guard_without_an_evaluation_is_named() -> None:
    with pytest.raises(ValueError, match="heldout_guard is set but heldout_eval_fn is not"):
        bare_trainer(heldout_eval_fn=None)._maybe_update_killswitch()


def test_one_fold_logs_exactly_the_contracts_keys() -> None:
    trainer = bare_trainer()
    trainer._maybe_update_killswitch()
    assert trainer.rows == [
        {
            "killswitch/fire": 0.0,
            "killswitch/in_loop_ema": 0.5,
            "killswitch/heldout_ema": 0.25,
            "killswitch/proxy_real_gap": 0.0,
        }
    ]
    assert trainer.heldout_guard.last_status.round_idx == 0


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"train": {}},
        {"train": {"reward": []}},
        {"train": {"reward": [math.nan]}},
        {"train": {"reward": [math.inf, None]}},
        {"train": {"reward": [torch.tensor([0.5, 0.6])]}},
        {"eval": {"reward": [0.5]}},
    ],
)
def test_without_a_reward_nothing_is_evaluated_or_folded(metrics: dict[str, Any]) -> None:
    trainer = bare_trainer(_metrics=metrics)
    trainer._maybe_update_killswitch()
    assert (trainer.calls, trainer.rows, trainer.heldout_guard.last_status) == ([], [], None)


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32, np.array])
def test_the_newest_finite_reward_and_kl_are_folded(kind: Callable[[float], Any]) -> None:
    metrics = {"reward": [0.1, kind(0.5), math.nan], "kl": [0.9, kind(0.25)]}
    trainer = bare_trainer(_metrics={"train": metrics})
    trainer._maybe_update_killswitch()
    assert trainer.rows[0]["killswitch/in_loop_ema"] == 0.5
    assert trainer.rows[0]["killswitch/kl_ema"] == 0.25


def test_an_evaluation_that_is_not_due_folds_and_logs_nothing() -> None:
    trainer = bare_trainer(heldout_eval_fn=lambda: None)
    trainer._maybe_update_killswitch()
    assert (trainer.rows, trainer.heldout_guard.last_status) == ([], None)


def reading(fingerprint: str) -> HeldoutReading:
    return HeldoutReading(1, 0.75, ((1.0, 0.75),), (), fingerprint, 0.1)


def test_a_reading_gives_its_score() -> None:
    trainer = bare_trainer(heldout_eval_fn=lambda: reading("split-a"), split_fingerprint="split-a")
    trainer._maybe_update_killswitch()
    assert trainer.rows[0]["killswitch/heldout_ema"] == 0.75
    assert trainer.guard_hook.last_verdict["split_fingerprint"] == "split-a"


def test_a_reading_of_another_split_is_refused_with_both_fingerprints() -> None:
    trainer = bare_trainer(heldout_eval_fn=lambda: reading("split-b"), split_fingerprint="split-a")
    with pytest.raises(InputError, match=r"CR0884.*split-b.*split-a"):
        trainer._maybe_update_killswitch()
    assert (trainer.rows, trainer.heldout_guard.last_status) == ([], None)


@pytest.mark.parametrize(("own", "measured"), [("", "split-b"), ("split-a", "")])
def test_an_unknown_split_on_either_side_is_not_refused(own: str, measured: str) -> None:
    trainer = bare_trainer(heldout_eval_fn=lambda: reading(measured), split_fingerprint=own)
    trainer._maybe_update_killswitch()
    assert len(trainer.rows) == 1


def test_strict_raises_after_logging() -> None:
    trainer = bare_trainer(heldout_guard=firing_guard())
    with pytest.raises(CollapseStopError) as caught:
        drive_to_fire(trainer)
    assert trainer.rows[-1]["killswitch/fire"] == 1.0
    assert caught.value.status is trainer.heldout_guard.last_status
    assert trainer.control.should_training_stop is False
    assert trainer.halted_at == 10


def test_not_strict_sets_the_stop_flag_and_does_not_raise() -> None:
    trainer = bare_trainer(heldout_guard=firing_guard(), strict_killswitch=False)
    drive_to_fire(trainer)
    assert trainer.rows[-1]["killswitch/fire"] == 1.0
    assert trainer.control.should_training_stop is True


def test_an_evaluation_that_fails_leaves_the_guard_unchanged() -> None:
    def broken() -> float:
        raise OSError("no grader")

    trainer = bare_trainer(heldout_eval_fn=broken)
    with pytest.raises(OSError, match="no grader"):
        trainer._maybe_update_killswitch()
    assert (trainer.rows, trainer.heldout_guard.last_status) == ([], None)


def test_a_cadence_hit_without_a_new_reward_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = bare_trainer()
    trainer._maybe_update_killswitch()
    assert trainer.guard_hook.num_cadence_hits_without_new_reward == 0
    trainer.state.global_step = 10
    with caplog.at_level(logging.WARNING):
        trainer._maybe_update_killswitch()
    assert trainer.guard_hook.num_cadence_hits_without_new_reward == 1
    assert "in-loop reward" in caplog.text
    assert trainer.rows[-1]["killswitch/in_loop_ema"] == 0.5  # the remembered one was folded
    trainer.state.global_step = 20
    trainer._metrics["train"]["reward"].append(0.7)
    trainer._maybe_update_killswitch()
    assert trainer.guard_hook.num_cadence_hits_without_new_reward == 1


def test_the_gate_folds_once_a_global_step_on_the_cadence(flat_loss: None) -> None:
    trainer = bare_trainer()
    for step in range(35):
        trainer.state.global_step = step
        for _ in range(3):  # micro-steps
            assert trainer._compute_loss(object(), {}) == 2.0
    assert trainer.calls == [0, 10, 20, 30]


def test_the_gate_is_shut_during_evaluation(flat_loss: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = bare_trainer()
    monkeypatch.setattr(
        GRPOTrainer, "prediction_step", lambda self, model, inputs, *rest: self._compute_loss(model, inputs)
    )
    monkeypatch.setattr(GRPOTrainer, "evaluate", lambda self, *rest: self._compute_loss(object(), {}))
    assert trainer.prediction_step(object(), {}, True) == 2.0
    assert trainer.evaluate() == 2.0
    assert trainer.calls == []
    trainer._compute_loss(object(), {})  # and open again afterwards
    assert trainer.calls == [0]


def test_the_gate_opens_again_after_an_evaluation_that_failed(
    flat_loss: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *rest: Any) -> None:
        raise RuntimeError("no data")

    trainer = bare_trainer()
    monkeypatch.setattr(GRPOTrainer, "evaluate", fail)
    with pytest.raises(RuntimeError, match="no data"):
        trainer.evaluate()
    trainer._compute_loss(object(), {})
    assert trainer.calls == [0]


def test_the_total_is_the_weighted_sum_and_a_weight_of_zero_costs_nothing(flat_loss: None) -> None:
    class WithChannels(BareTrainer):
        def _compute_sdpo_loss(self, model: Any, inputs: Any) -> float:
            self.asked.append("sdpo")
            return 10.0

        def _compute_trace_replay_loss(self, model: Any, inputs: Any) -> float:
            self.asked.append("replay")
            return 100.0

    for alpha, beta, total, asked in [
        (0.0, 0.0, 2.0, []),
        (0.5, 0.0, 7.0, ["sdpo"]),
        (0.0, 0.25, 27.0, ["replay"]),
        (0.5, 0.25, 32.0, ["sdpo", "replay"]),
    ]:
        trainer = WithChannels.__new__(WithChannels)
        trainer.asked = []
        trainer.alpha_sdpo, trainer.beta_replay = alpha, beta
        trainer.state, trainer.args, trainer._metrics = Only(global_step=3), Only(logging_steps=10), {}
        assert trainer._compute_loss(object(), {}) == total
        assert trainer.asked == asked


def test_component_losses_are_collected_on_the_cadence_only(flat_loss: None) -> None:
    trainer = bare_trainer(alpha_sdpo=0.5, heldout_guard=None)
    trainer._compute_sdpo_loss = lambda model, inputs: 10.0
    for step in (0, 1):
        trainer.state.global_step = step
        trainer._compute_loss(object(), {})
    assert trainer._metrics["train"]["loss/sdpo"] == [10.0]
    assert trainer._metrics["train"]["loss/grpo"] == [2.0]


def test_what_a_guard_does_not_know_is_not_logged_and_one_that_does_not_fire_stops_nothing() -> None:
    class Silent(HeldOutGuard):
        def update(self, *labels: Any, **keywords: Any) -> Any:
            return SimpleNamespace(fire=False, reason="")

    trainer = bare_trainer(heldout_guard=Silent(), strict_killswitch=False)
    trainer._maybe_update_killswitch()
    assert trainer.rows == [{"killswitch/fire": 0.0}]
    assert trainer.guard_hook.last_verdict["proxy_real_gap"] == 0
    assert (trainer.control.should_training_stop, trainer.halted_at) == (False, None)


def test_bare_instances_share_no_state() -> None:
    first, second = bare_trainer(), bare_trainer(_metrics={"train": {}})
    first._maybe_update_killswitch()
    second._maybe_update_killswitch()
    assert (len(first.rows), second.rows) == (1, [])


# ---- guards that judge whole readings

HONEST = ((1.0, 1.0), (0.0, 0.0)) * 16
HACKED = ((1.0, 0.0),) * 32


def evidence_trainer(evaluate: Callable[[], Any]) -> Any:
    guard = CombinedGuard(HeldOutGuard(), EvidenceGuard(10, tolerated_gap=0.1))
    return bare_trainer(heldout_guard=guard, heldout_eval_fn=evaluate)


def paired(idx: int, pairs: Any = HONEST) -> HeldoutReading:
    return HeldoutReading(idx, 0.5, tuple(pairs), (0.0,) * 4, "split-a", 0.1, 1)


def scripted(*answers: Any) -> Callable[[], Any]:
    return iter(answers).__next__


def folded(trainer: Any, times: int = 1) -> None:
    for _ in range(times):
        trainer._maybe_update_killswitch()
        trainer.state.global_step += 10


def test_pairs_canaries_and_failures_reach_the_evidence() -> None:
    trainer = evidence_trainer(scripted(paired(1), None, paired(2)))
    folded(trainer, 3)
    alone = EvidenceGuard(10, tolerated_gap=0.1)
    statuses = [alone.update(step, HONEST, [0.0] * 4, neutral=1) for step in (1, 2)]
    assert trainer.heldout_guard.last_status.evidence == statuses[-1]
    assert trainer.heldout_guard.last_status.round_idx == 20  # the global step is a label only
    assert [row["killswitch/evidence_gap"] for row in trainer.rows] == [s.gap_log_evidence for s in statuses]


def test_evidence_halts_the_run_and_the_error_carries_the_combined_status() -> None:
    trainer = evidence_trainer(scripted(paired(1, HACKED)))
    with pytest.raises(CollapseStopError, match="visible scores exceed") as caught:
        folded(trainer)
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
    trainer = bare_trainer(heldout_eval_fn=scripted(paired(1), 0.25), heldout_guard=Plain())
    folded(trainer, 2)
    assert seen == [
        ((0,), {"in_loop_reward": 0.5, "heldout_score": 0.5, "kl_to_init": None}),
        ((10,), {"in_loop_reward": 0.5, "heldout_score": 0.25, "kl_to_init": None}),
    ]
    assert not [name for row in trainer.rows for name in row if "evidence" in name]


def test_figures_of_the_evidence_are_in_the_run_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    trainer = evidence_trainer(scripted(paired(1), paired(2)))
    trainer.step_lines.folder = folder
    folded(trainer, 2)
    status = trainer.heldout_guard.last_status
    row = read_jsonl(folder.verdicts)[-1]
    assert row["evidence_canary"] == status.evidence.canary_log_evidence
    assert (row["round_idx"], row["num_updates"], row["fire"]) == (10, 2, False)


# ---- an evaluation that gives up by itself


@pytest.mark.parametrize("strict", [True, False])
def test_an_evaluation_that_gives_up_halts_with_its_verdict_on_disk(strict: bool, tmp_path: Path) -> None:
    def broken() -> float:
        raise ValueError("no grader")

    folder = RunFolder(tmp_path / "run")
    trainer = bare_trainer(heldout_eval_fn=PatientEvaluation(broken), strict_killswitch=strict)
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
