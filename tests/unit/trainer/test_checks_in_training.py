"""Each check on a real trainer: it speaks where something is wrong, and an honest run leaves it silent."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import HintEveryTurn, shifted_rollouts
from transformers import TrainerCallback

from composer_replication.errors import InputError
from composer_replication.records import PreferencePair
from composer_replication.report import read_run
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.trainer import checks
from composer_replication.trainer.model_modes import parameter_sha256

MakeTrainer = Callable[..., Any]
ENDS_EARLY = {"prefix_sharing": True, "is_finished": lambda text: len(text) >= 3, "max_completion_length": 12}
HUGE = 3e38


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits, reached in fewer steps."""
    for name, number in {"WINDOW": 3, "TREND_STEPS": 2, "NUM_ZERO_STEPS": 3}.items():
        monkeypatch.setattr(checks, name, number)


def uneven(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(number % 4) for number in range(len(completions))]


def spoken(trainer: Any) -> list[str]:
    """What was said, and that the run folder says the same."""
    stored = read_jsonl(trainer.run_folder.checks)
    assert [row["code"] for row in stored] == [finding.row()["code"] for finding in trainer.checks.findings]
    return [finding.name for finding in trainer.checks.findings]


@pytest.fixture
def make(make_trainer: MakeTrainer, tmp_path: Path) -> MakeTrainer:
    def build(**settings: Any) -> Any:
        settings.setdefault("run_folder", RunFolder(tmp_path / "run"))
        settings.setdefault("reward", uneven)
        return make_trainer(**settings)

    return build


@pytest.mark.usefixtures("soon")
def test_an_honest_run_is_silent(make: MakeTrainer) -> None:
    """Sampled with our own engine, two updates a generation, rows that end: every check has its numbers."""
    trainer = make(max_steps=10, num_iterations=2, learning_rate=1e-4, **ENDS_EARLY)
    trainer.train()
    assert spoken(trainer) == []
    lines = read_jsonl(trainer.run_folder.metrics)
    assert max(line["checks/token_drift"] for line in lines) < 1e-5
    assert min(line["checks/effective_sample_size"] for line in lines) > 0.99


def test_token_drift_names_the_token(make: MakeTrainer) -> None:
    trainer = make(max_steps=2, rollout_func=shifted_rollouts(0.3, 2))
    trainer.train()
    assert spoken(trainer) == ["token_drift"]
    (finding,) = trainer.checks.findings
    assert finding.figures["mean"] == pytest.approx(0.15, abs=1e-3)
    assert "they part first at token 2 of row" in finding.sentence
    assert any(f"id {90 + n} " in finding.sentence for n in range(4))
    (row,) = read_run(trainer.run_folder.root).findings  # as the report shows it
    assert dict(row) == finding.row()


@pytest.mark.usefixtures("soon")
def test_a_weighted_channel_that_gets_nothing(make: MakeTrainer) -> None:
    """Two channels that are told apart by their values alone: one is exactly 0, the other is not."""
    trainer = make(
        max_steps=4,
        alpha_sdpo=0.5,
        hint_source=HintEveryTurn(until=-math.inf),
        beta_replay=0.5,
        replay_pairs=[PreferencePair((5, 6), (7, 8), (9,))],
        **ENDS_EARLY,
    )
    trainer.train()
    assert spoken(trainer) == ["zero_channel"]
    assert trainer.checks.findings[0].sentence == "the channel sdpo was exactly 0 in the last 3 steps."


@pytest.mark.usefixtures("soon")
def test_answers_that_never_end(make: MakeTrainer) -> None:
    trainer = make(max_steps=4, learning_rate=1e-5, max_completion_length=4)
    trainer.model.generation_config.suppress_tokens = None
    trainer.eos_token_ids = [300]  # a token that the model does not have
    trainer.train()
    assert spoken(trainer) == ["truncated_groups"]
    assert trainer.checks.findings[0].step == 3


# ---- loss and gradient that are not finite --------------------------------------------------------------


def overflowing(steps: set[int]) -> Callable[..., list[float]]:
    """Rewards so large that the loss of these steps (from 0) overflows."""

    def reward(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        huge = HUGE if trainer_state.global_step in steps else 1.0
        return [huge * (number % 4 == 0) for number in range(len(completions))]

    return reward


class Hashes(TrainerCallback):
    """The weights' hash and the optimizer's step count after every step."""

    def __init__(self) -> None:
        self.hashes: list[str] = []
        self.counts: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hashes.append(parameter_sha256(kwargs["model"]))
        states = kwargs["optimizer"].state.values()
        self.counts.append(max((float(one["step"]) for one in states), default=0.0))


def test_a_step_that_is_not_finite_is_saved_and_skipped(make: MakeTrainer) -> None:
    hashes = Hashes()
    trainer = make(
        max_steps=5,
        reward=overflowing({1, 3}),
        loss_type="dr_grpo",
        scale_rewards="none",
        callbacks=[hashes],
        weight_decay=0.1,
        max_completion_length=6,
    )
    trainer.train()
    first, second, third, fourth, fifth = hashes.hashes
    assert second == first  # neither gradient nor weight decay nor momentum
    assert third != second
    assert fourth == third
    assert fifth != fourth
    assert hashes.counts == [1, 1, 2, 2, 3]
    assert all(math.isfinite(float(weight.detach().sum())) for weight in trainer.model.parameters())
    assert [name for name in spoken(trainer) if name == "non_finite"] == ["non_finite"] * 2
    bad = [finding for finding in trainer.checks.findings if finding.name == "non_finite"]
    assert [finding.step for finding in bad] == [2, 4]
    assert [finding.row()["level"] for finding in bad] == ["error", "error"]
    folder = trainer.run_folder.bad_batches
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-000002-process-0.pt",
        "step-000004-process-0.pt",
    ]
    batch = torch.load(folder / "step-000002-process-0.pt", weights_only=True)
    assert batch["advantages"].abs().max() > 1e38
    assert batch["completion_ids"].shape[0] == 4


def test_three_in_a_row_stop_the_run(make: MakeTrainer) -> None:
    trainer = make(
        max_steps=9, reward=overflowing({1, 3, 4, 5, 6}), loss_type="dr_grpo", scale_rewards="none"
    )
    with pytest.raises(InputError) as caught:
        trainer.train()
    assert caught.value.code == "CR0770"
    assert "bad_batches" in caught.value.where
    assert trainer.state.global_step == 6
    assert [line["step"] for line in read_jsonl(trainer.run_folder.metrics)] == [1, 2, 3, 4, 5, 6]


def test_a_gradient_that_is_not_finite_is_skipped_too(make: MakeTrainer) -> None:
    """The loss is fine; backward through one weight overflows in the second step."""
    hashes = Hashes()
    trainer = make(max_steps=3, callbacks=[hashes], **ENDS_EARLY)
    weight = trainer.model.model.norm.weight
    weight.register_hook(lambda gradient: gradient * (math.inf if trainer.state.global_step == 1 else 1.0))
    trainer.train()
    assert hashes.hashes[1] == hashes.hashes[0] != hashes.hashes[2]
    assert spoken(trainer) == ["non_finite"]
    assert "the gradient is not finite" in trainer.checks.findings[0].sentence
    assert (trainer.run_folder.bad_batches / "step-000002-process-0.pt").is_file()


class StubScaler:
    """In the place of a GradScaler that has looked at the gradients."""


def test_a_gradient_that_overflows_under_a_scaler_is_no_bad_step(make: MakeTrainer) -> None:
    trainer = make(max_steps=1)
    trainer.accelerator.scaler = StubScaler()
    trainer.checks.note_grad_norm(torch.tensor(math.inf))
    assert not trainer.run_folder.bad_batches.exists()
    trainer.accelerator.scaler = None
    trainer.checks.note_grad_norm(torch.tensor(math.inf))
    assert trainer.run_folder.bad_batches.exists()


@pytest.mark.parametrize(("scaler", "max_norm", "is_dropped"), [(None, 0, True), (1, 1, True), (1, 0, False)])
def test_a_scaler_that_has_not_looked_yet_keeps_the_gradients(
    make: MakeTrainer, scaler: int | None, max_norm: int, is_dropped: bool
) -> None:
    trainer = make(max_steps=1, max_grad_norm=max_norm)
    trainer.accelerator.scaler = None if scaler is None else StubScaler()
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), math.nan)
    trainer.checks._note_bad("the loss")
    trainer.checks.on_pre_optimizer_step(trainer.args, None, None, optimizer=torch.optim.SGD([weight]))
    assert (weight.grad is None) == is_dropped
    assert trainer.checks.judgement.num_bad_in_a_row == 1


# ---- on and off, resume, report ---------------------------------------------------------------------------


def test_checks_can_be_off(make: MakeTrainer) -> None:
    trainer = make(max_steps=2, checks=False, rollout_func=shifted_rollouts(0.5, 0))
    trainer.train()
    assert trainer.checks is None
    assert not trainer.run_folder.checks.exists()
    assert not any(name.startswith("checks/") for name in read_jsonl(trainer.run_folder.metrics)[0])


def test_findings_of_steps_that_are_trained_again_are_cut_back(make: MakeTrainer, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "max_steps": 6,
        "reward": overflowing({1, 4}),
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = make(**settings)
    whole.train()
    rows = read_jsonl(whole.run_folder.checks)
    assert [row["step"] for row in rows if row["name"] == "non_finite"] == [2, 5]
    checkpoint = Path(whole.args.output_dir) / "checkpoint-3"
    again = make(**settings)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert read_jsonl(again.run_folder.checks) == rows
    assert parameter_sha256(again.model) == parameter_sha256(whole.model)


@pytest.mark.parametrize("shares", [False, True])
def test_weights_that_are_not_finite_while_sampling_stop_the_run_at_its_step(
    make: MakeTrainer, shares: bool
) -> None:
    class Overflow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                with torch.no_grad():
                    kwargs["model"].model.norm.weight.mul_(math.inf)

    trainer = make(max_steps=3, prefix_sharing=shares, callbacks=[Overflow()])
    with pytest.raises(InputError, match=r"not finite while sampling \(step 2\)") as caught:
        trainer.train()
    assert (caught.value.code, caught.value.exit_code, caught.value.where) == ("CR0770", 4, "step 2")
    assert trainer.state.global_step == 1
