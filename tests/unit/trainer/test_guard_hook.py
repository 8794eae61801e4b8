"""The hook on bare instances, as far as it differs from the callback (``test_guard_fold``), and the sum of the losses."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from guarded_steps import Only, bare_trainer
from trl import GRPOTrainer

from composer_replication.errors import CollapseStopError
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer


def test_without_a_guard_nothing_is_read_called_or_logged() -> None:
    trainer: Any = ComposerReplicationTrainer.__new__(ComposerReplicationTrainer)
    trainer.heldout_guard = None
    trainer.heldout_eval_fn = lambda: pytest.fail("the evaluation was called")
    assert trainer._maybe_update_killswitch() is None


def test_a_guard_without_an_evaluation_is_named() -> None:
    with pytest.raises(ValueError, match="heldout_guard is set but heldout_eval_fn is not"):
        bare_trainer(heldout_eval_fn=None)._maybe_update_killswitch()


def test_one_fold_logs_exactly_the_contracts_keys_and_instances_share_no_state() -> None:
    trainer, other = bare_trainer(), bare_trainer(_metrics={"train": {}})
    trainer._maybe_update_killswitch()
    other._maybe_update_killswitch()
    assert trainer.rows == [
        {
            "killswitch/fire": 0.0,
            "killswitch/in_loop_ema": 0.5,
            "killswitch/heldout_ema": 0.25,
            "killswitch/proxy_real_gap": 0.0,
        }
    ]
    assert trainer.heldout_guard.last_status.round_idx == 0
    assert other.rows == []


@pytest.mark.parametrize(
    "metrics", [{}, {"train": {}}, {"train": {"reward": [math.inf, None]}}, {"eval": {"reward": [0.5]}}]
)
def test_without_a_reward_nothing_is_evaluated_or_folded(metrics: dict[str, Any]) -> None:
    trainer = bare_trainer(_metrics=metrics)
    trainer._maybe_update_killswitch()
    assert (trainer.asked, trainer.rows, trainer.heldout_guard.last_status) == ([], [], None)


def test_the_newest_finite_reward_and_kl_are_folded() -> None:
    trainer = bare_trainer(_metrics={"train": {"reward": [0.1, 0.5, math.nan], "kl": [0.9, 0.25]}})
    trainer._maybe_update_killswitch()
    assert trainer.rows[0]["killswitch/in_loop_ema"] == 0.5
    assert trainer.rows[0]["killswitch/kl_ema"] == 0.25


def test_strict_raises_without_the_flag_that_stops_training() -> None:
    guard = HeldOutGuard(min_steps=1, ema_alpha=0.0, kl_hard_stop=0.1)
    trainer = bare_trainer(heldout_guard=guard, _metrics={"train": {"reward": [0.5], "kl": [0.2]}})
    with pytest.raises(CollapseStopError):
        trainer._maybe_update_killswitch()
    assert trainer.control.should_training_stop is False


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


def test_the_gate_is_shut_during_evaluation_and_open_after_one_that_failed(
    flat_loss: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *rest: Any) -> None:
        self._compute_loss(object(), {})
        raise RuntimeError("no data")

    trainer = bare_trainer()
    monkeypatch.setattr(GRPOTrainer, "prediction_step", lambda self, *rest: self._compute_loss(*rest[:2]))
    monkeypatch.setattr(GRPOTrainer, "evaluate", fail)
    assert trainer.prediction_step(object(), {}, True) == 2.0
    with pytest.raises(RuntimeError, match="no data"):
        trainer.evaluate()
    assert trainer.asked == []
    trainer._compute_loss(object(), {})
    assert trainer.asked == [0]


def test_the_total_is_the_weighted_sum_and_a_weight_of_zero_costs_nothing(flat_loss: None) -> None:
    class WithChannels(ComposerReplicationTrainer):
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
