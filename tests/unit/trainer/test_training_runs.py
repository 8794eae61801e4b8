"""Whole small runs: the guard's cadence, halts, lines, KL, interruption, channels of a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.run_folder import RunFolder, read_json, read_jsonl
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer import checkpoints, processes
from composer_replication.trainer.checkpoints import STATE_NAME, newest_whole_checkpoint
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.preset_settings import TrainerSettingError

MakeTrainer = Callable[..., Any]


def patient_guard() -> HeldOutGuard:
    return HeldOutGuard(min_steps=1000)


def falling_truth() -> Callable[[], float]:
    """1.0, 0.9, 0.8, …: with a flat reward the gap grows by 0.1 a fold."""
    scores = iter(1.0 - 0.1 * fold for fold in range(10))
    return lambda: next(scores)


def flat_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.5] * len(completions)


def gap_guard() -> HeldOutGuard:
    """Fires at the fourth fold of ``falling_truth`` (gap 0.3)."""
    return HeldOutGuard(min_steps=1, decline_patience=100, ema_alpha=0.0, max_proxy_real_gap=0.25)


def test_the_cadence_with_reused_generations(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """The reward of step 16 is cleared by TRL's row of step 20, just before the fold at 20, and is remembered."""
    folds, given = list[int](), list[float]()

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        given.append(0.125 * (len(given) + 1))
        return [given[-1]] * len(completions)

    trainer = make_trainer(
        max_steps=35,
        num_prompts=8,
        num_iterations=2,
        steps_per_generation=8,
        logging_steps=10,
        reward=reward,
        heldout_guard=HeldOutGuard(min_steps=1000, ema_alpha=0.0),
        heldout_eval_fn=lambda: folds.append(trainer.state.global_step) or 0.5,
        run_folder=RunFolder(tmp_path / "run"),
    )
    trainer.train()
    assert folds == [0, 10, 20, 30]
    lines = read_jsonl(trainer.run_folder.metrics)
    assert [line["step"] for line in lines] == list(range(1, 36))
    judged = {line["step"]: line["killswitch/round_idx"] for line in lines if "killswitch/round_idx" in line}
    assert judged == {1: 0, 11: 10, 21: 20, 31: 30}
    assert [row["round_idx"] for row in read_jsonl(trainer.run_folder.verdicts)] == [0, 10, 20, 30]
    # A generation serves 16 steps, so new rewards come at steps 0, 16 and 32.
    assert trainer.guard_hook.num_cadence_hits_without_new_reward == 2
    assert [line["step"] for line in lines if line["reward_is_new"]] == [1, 17, 33]
    assert all(line["reward"] is not None and line["loss"] is not None for line in lines)
    averages = [row["in_loop_ema"] for row in read_jsonl(trainer.run_folder.verdicts)]
    assert averages == [0.125, 0.125, 0.25, 0.25]
    # TRL's own rows still carry everything it measured: the verdict rows did not empty its lists.
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert len(rewards) == 3


def test_lines_agree_with_trls_rows_and_time_a_checkpoint_in_the_step_after_it(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(max_steps=4, run_folder=RunFolder(tmp_path / "run"), **saving)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    lines = read_jsonl(trainer.run_folder.metrics)
    for line, row in zip(lines, rows, strict=True):
        assert line["step"] == row["step"]
        for name in ("reward", "entropy", "grad_norm", "learning_rate"):
            assert line[name] == row[name]
        assert line["loss"] == pytest.approx(row["loss"], abs=1e-9)
        assert 0 < line["sampling_seconds"] + line["grading_seconds"] < line["generation_seconds"]
        assert line["generation_seconds"] < line["step_seconds"]
    assert [line.get("checkpoint_seconds", 0.0) > 0 for line in lines] == [False, False, True, False]


@pytest.mark.parametrize(("strict", "accumulation"), [(True, 1), (True, 2), (False, 1)])
def test_a_halt_leaves_checkpoint_verdict_and_line(
    make_trainer: MakeTrainer, tmp_path: Path, strict: bool, accumulation: int
) -> None:
    def make(strict: bool) -> Any:
        return make_trainer(
            max_steps=8,
            gradient_accumulation_steps=accumulation,
            save_strategy="steps",
            save_steps=3,
            save_total_limit=1,
            reward=flat_reward,
            heldout_guard=gap_guard(),
            heldout_eval_fn=falling_truth(),
            strict_killswitch=strict,
            run_folder=RunFolder(tmp_path / "run"),
        )

    trainer = make(strict)
    if strict:
        with pytest.raises(CollapseStopError) as caught:
            trainer.train()
        assert caught.value.status is trainer.heldout_guard.last_status
    else:
        trainer.train()
    assert trainer.halted_at == 3
    # Step 4 is broken off by an exception, or before its optimizer step where it has several micro-steps.
    last_step = 3 if strict or accumulation > 1 else 4
    assert trainer.state.global_step == last_step
    checkpoint = newest_whole_checkpoint(Path(trainer.args.output_dir))
    assert checkpoint is not None
    assert checkpoint.name == f"checkpoint-{last_step}"
    state = read_json(checkpoint / STATE_NAME)
    assert state["last_verdict"]["fire"] is True
    assert "Hacking Gap" in state["last_verdict"]["reason"]
    assert HeldOutGuard().should_halt() is False
    restored = HeldOutGuard()
    restored.load_state_dict(state["guard"])
    assert restored.should_halt()
    verdicts = read_jsonl(trainer.run_folder.verdicts)
    assert [(row["round_idx"], row["fire"]) for row in verdicts] == [
        (0, False),
        (1, False),
        (2, False),
        (3, True),
    ]
    lines = read_jsonl(trainer.run_folder.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("halted", False) for line in lines] == [False, False, False, True]
    assert lines[3]["killswitch/round_idx"] == 3
    assert lines[3]["reward"] == 0.5
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    # A halted run is not trained on.
    if strict:
        again = make(True)
        with pytest.raises(CollapseStopError):
            again.train(resume_from_checkpoint=True)
    lenient = make(False)
    assert lenient.train(resume_from_checkpoint=True).global_step == last_step
    assert parameter_sha256(lenient.model) == parameter_sha256(trainer.model)
    assert read_jsonl(trainer.run_folder.metrics) == lines


def test_a_halt_is_raised_even_where_it_cannot_be_saved(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(
        max_steps=8, reward=flat_reward, heldout_guard=gap_guard(), heldout_eval_fn=falling_truth()
    )

    def full_disk(model: Any, trial: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(trainer, "_save_checkpoint", full_disk)
    with pytest.raises(CollapseStopError) as caught:
        trainer.train()
    assert "no space left" in caught.value.__notes__[0]


def test_a_run_that_was_cut_after_its_last_step_takes_no_other(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """Three steps end in the middle of the second epoch (two batches of two prompts an epoch)."""

    def make() -> Any:
        return make_trainer(
            max_steps=3,
            per_device_train_batch_size=8,
            save_strategy="steps",
            save_steps=3,
            run_folder=RunFolder(tmp_path / "run"),
        )

    first = make()
    first.train()
    lines = first.run_folder.metrics.read_text()
    again = make()
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert again.state.global_step == 3
    assert parameter_sha256(again.model) == parameter_sha256(first.model)
    assert again.run_folder.metrics.read_text() == lines
    assert newest_whole_checkpoint(Path(again.args.output_dir)).name == "checkpoint-3"  # type: ignore[union-attr]


def test_a_clean_guarded_run_is_trls_run(make_trainer: MakeTrainer) -> None:
    """The guard looks on: weights are those of the unguarded run, with and without the KL probe."""
    for lora_adapter in (False, True):
        hashes = []
        for guard in (None, patient_guard()):
            trainer = make_trainer(
                max_steps=2,
                lora_adapter=lora_adapter,
                heldout_guard=guard,
                heldout_eval_fn=None if guard is None else lambda: 0.5,
            )
            trainer.train()
            hashes.append(parameter_sha256(trainer.model))
        assert hashes[0] == hashes[1]


def test_the_guard_is_asked_before_the_forward_and_its_kl_is_taken_only_with_a_reading(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def held_out() -> float | None:
        events.append("evaluation")
        return 0.5 if events.count("evaluation") % 2 else None

    trainer = make_trainer(
        max_steps=4,
        lora_adapter=True,
        heldout_guard=HeldOutGuard(min_steps=1000, ema_alpha=0.0),
        heldout_eval_fn=held_out,
        run_folder=RunFolder(tmp_path / "run"),
    )
    of_trl = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *rest: (events.append("loss"), of_trl(*rest))[1])
    hook = trainer.guard_hook
    initial = hook.as_initial_policy
    monkeypatch.setattr(hook, "as_initial_policy", lambda: (events.append("initial"), initial())[1])
    trainer.train()
    assert events == ["evaluation", "initial", "loss", "evaluation", "loss"] * 2


def test_the_kl_probe_agrees_with_a_plain_forward(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Oracle: log_softmax of transformers' own forward, with and without the adapter, on the same tokens."""
    by_hand: list[float] = []

    def token_logps(trainer: Any, inputs: Any) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = trainer.model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1]
        logps = (logits / trainer.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return logps[:, -inputs["completion_ids"].size(1) :]

    def held_out() -> float:
        inputs = seen[-1]
        policy = token_logps(trainer, inputs)
        with trainer.model.disable_adapter():
            initial = token_logps(trainer, inputs)
        by_hand.append(float((policy - initial)[inputs["completion_mask"].bool()].mean()))
        return 0.5

    trainer = make_trainer(
        max_steps=3,
        beta=0.0,
        learning_rate=3e-2,
        lora_adapter=True,
        heldout_guard=HeldOutGuard(min_steps=1000, ema_alpha=0.0, kl_hard_stop=1e9),
        heldout_eval_fn=held_out,
        run_folder=RunFolder(tmp_path / "run"),
    )
    seen: list[Any] = []
    compute_loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (seen.append(inputs), compute_loss(model, inputs))[1]
    trainer.train()
    rows = read_jsonl(trainer.run_folder.verdicts)
    kls = [row["kl_ema"] for row in rows]
    assert kls == pytest.approx(by_hand, rel=1e-3, abs=1e-6)
    assert kls[0] == pytest.approx(0.0, abs=1e-9)  # before the first update the policy is the initial one
    assert len(kls) == 3 and min(map(abs, kls[1:])) > 1e-5 and max(map(abs, kls)) > 1e-4
    assert {row["kl_path"] for row in rows} == {"estimated with the adapter off"}
    assert trainer.guard_hook.kl_path_off_reason is None
    assert [line["killswitch/kl_ema"] for line in read_jsonl(trainer.run_folder.metrics)] == kls


def test_a_kl_path_that_is_off_says_why(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        heldout_guard=patient_guard(), heldout_eval_fn=lambda: 0.5, run_folder=RunFolder(tmp_path / "run")
    )
    trainer.train()
    assert trainer.guard_hook.kl_path_off_reason
    assert caplog.text.count("KL path off") == 1
    rows = read_jsonl(trainer.run_folder.verdicts)
    assert all(
        row["kl_ema"] is None and trainer.guard_hook.kl_path_off_reason in row["kl_path"] for row in rows
    )


def test_an_evaluation_of_trls_own_never_folds(make_trainer: MakeTrainer) -> None:
    from datasets import Dataset

    folds: list[int] = []
    trainer = make_trainer(
        max_steps=2,
        eval_dataset=Dataset.from_dict({"prompt": ["def f(x):"]}),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        heldout_guard=patient_guard(),
        heldout_eval_fn=lambda: folds.append(trainer.state.global_step) or 0.5,
    )
    trainer.train()
    assert folds == [0, 1]
    trainer.evaluate()
    assert folds == [0, 1]


class InterruptAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_goes_on_to_the_same_weights(
    make_trainer: MakeTrainer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    whole = make_trainer(max_steps=4, output_dir=tmp_path / "whole")
    whole.train()
    broken = make_trainer(max_steps=4, callbacks=[InterruptAt(2)], run_folder=RunFolder(tmp_path / "run"))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    assert broken.state.global_step == 2
    resumed = make_trainer(max_steps=4, run_folder=RunFolder(tmp_path / "run"))
    resumed.train(resume_from_checkpoint=True)
    assert parameter_sha256(resumed.model) == parameter_sha256(whole.model)
    assert [line["step"] for line in read_jsonl(resumed.run_folder.metrics)] == [1, 2, 3, 4]


class Counter:
    """An extra state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def saved_run(make_trainer: MakeTrainer, **settings: Any) -> Any:
    trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=2, **settings)
    trainer.train()
    return trainer


def test_extra_states_and_the_guard_are_restored(make_trainer: MakeTrainer) -> None:
    counter, guard = Counter(), patient_guard()
    counter.count = 7
    settings: dict[str, Any] = {"heldout_eval_fn": lambda: 0.5, "split_fingerprint": "split-a"}
    saved_run(make_trainer, stateful={"counter": counter}, heldout_guard=guard, **settings)
    fresh, fresh_guard = Counter(), patient_guard()
    resumed = make_trainer(max_steps=3, stateful={"counter": fresh}, heldout_guard=fresh_guard, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert fresh.count == 7
    assert fresh_guard.last_status is not None
    assert fresh_guard.last_status.num_updates == 3


def test_a_reward_that_is_in_no_row_yet_is_in_the_checkpoint(make_trainer: MakeTrainer) -> None:
    """Rewards come at steps 0 and 4, TRL's row at 6, just before the fold there."""
    settings: dict[str, Any] = {"num_iterations": 4, "logging_steps": 6, "save_strategy": "steps"}
    settings |= {"save_steps": 5, "heldout_eval_fn": lambda: 0.5}
    make_trainer(max_steps=5, heldout_guard=patient_guard(), **settings).train()
    resumed = make_trainer(max_steps=7, heldout_guard=patient_guard(), **settings)
    resumed.train(resume_from_checkpoint=True)
    hook = resumed.guard_hook
    assert (hook.last_round_idx, hook.num_cadence_hits_without_new_reward) == (6, 0)


def test_another_runs_checkpoint_is_refused(make_trainer: MakeTrainer) -> None:
    settings: dict[str, Any] = {
        "stateful": {"counter": Counter()},
        "heldout_guard": patient_guard(),
        "heldout_eval_fn": lambda: 0.5,
    }
    saved_run(make_trainer, **settings)
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"stateful": {}}, "extra states"),
        ({"stateful": {"counter": Counter(), "other": Counter()}}, "extra states"),
        ({"heldout_guard": None, "heldout_eval_fn": None}, "under a guard"),
    )
    for changed, words in changes:
        other = make_trainer(**{**settings, **changed})
        with pytest.raises((InputError, TrainerSettingError), match=f"CR0884.*{words}"):
            other.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_weights_alone_is_not_trained_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    saved_run(make_trainer, save_only_model=True)
    with pytest.raises(InputError, match="optimizer and scheduler and random numbers") as caught:
        make_trainer(max_steps=3).train(resume_from_checkpoint=True)
    assert (caught.value.code, caught.value.where) == ("CR0706", str(tmp_path / "checkpoints/checkpoint-2"))
    assert make_trainer(max_steps=2).train(resume_from_checkpoint=True).global_step == 2


def test_old_checkpoints_go_only_when_the_new_one_is_whole(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = checkpoints.write_manifest, []

    def note(checkpoint: Path) -> None:
        seen.append(newest_whole_checkpoint(checkpoint.parent))
        real(checkpoint)

    monkeypatch.setattr(checkpoints, "write_manifest", note)
    trainer = make_trainer(max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    assert seen == [None, folder / "checkpoint-1", folder / "checkpoint-2"]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3"]


def test_too_few_prompts_for_one_step_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(num_prompts=7, steps_per_generation=8)
    with pytest.raises(TrainerSettingError, match=r"CR0760.*takes 8 prompts, but there are only 7"):
        trainer.train()
    assert make_trainer(num_prompts=8, steps_per_generation=8, max_steps=1).train().global_step == 1


def test_a_guard_needs_a_cadence(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(heldout_guard=patient_guard(), heldout_eval_fn=lambda: 0.5)
    trainer.args.logging_steps = 0
    with pytest.raises(TrainerSettingError, match="cadence"):
        trainer.train()


def test_a_guard_on_some_processes_alone_is_refused(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for its readings for ever."""
    trainer = make_trainer(heldout_guard=patient_guard(), heldout_eval_fn=lambda: 0.5)
    monkeypatch.setattr(processes, "gathered", lambda value: [value, not value])
    with pytest.raises(TrainerSettingError, match=r"CR0710.*some processes have a guard"):
        trainer.train()
