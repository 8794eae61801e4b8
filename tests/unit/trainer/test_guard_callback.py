"""The guard's callback inside real trainers of transformers and TRL, and what it does not share with the hook."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from guarded_steps import CallbackSteps
from tiny_trainer import build_trainer, lora, tiny_model, tiny_tokenizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.run_folder import read_jsonl
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.guard_callback import STATE_KEY, HeldOutGuardCallback

TEXTS = ["def add(a, b):", "def twice(x):", "def first(s):", "def size(c):"] * 4
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 6,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "learning_rate": 1e-3,
    "bf16": False,
}


def falling(by: float = 10.0) -> Callable[[], float]:
    """A truth that loses ``by`` at each evaluation, beginning with 0."""
    values = iter(-by * k for k in range(10_000))
    return lambda: next(values)


def quick_guard(**settings: Any) -> HeldOutGuard:
    """Without smoothing: with a truth that falls by 10 it fires at update 3, whatever the proxy does."""
    return HeldOutGuard(
        **{"min_steps": 3, "ema_alpha": 0.0, "kl_hard_stop": 99.0, "max_proxy_real_gap": 5.0, **settings}
    )


def token_rows(texts: list[str]) -> Dataset:
    rows = [tiny_tokenizer()(text)["input_ids"][:8] for text in texts]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def plain_trainer(folder: Path, callback: TrainerCallback, **settings: Any) -> Trainer:
    arguments = TrainingArguments(output_dir=str(folder), **{**COMMON, **settings})
    return Trainer(model=tiny_model(), args=arguments, train_dataset=token_rows(TEXTS), callbacks=[callback])


def sft_trainer(folder: Path, callback: TrainerCallback, **settings: Any) -> Trainer:
    return SFTTrainer(
        model=tiny_model(),
        args=SFTConfig(output_dir=str(folder), max_length=16, **{**COMMON, **settings}),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tiny_tokenizer(),
        callbacks=[callback],
    )


def dpo_trainer(folder: Path, callback: TrainerCallback, **settings: Any) -> Trainer:
    rows = {"prompt": TEXTS, "chosen": [" return 1"] * len(TEXTS), "rejected": [" pass"] * len(TEXTS)}
    return DPOTrainer(
        model=tiny_model(),
        args=DPOConfig(output_dir=str(folder), max_length=32, **{**COMMON, **settings}),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tiny_tokenizer(),
        peft_config=lora(),
        callbacks=[callback],
    )


def grpo_trainer(folder: Path, callback: TrainerCallback, **settings: Any) -> Any:
    return build_trainer(
        output_dir=folder, trainer_class=GRPOTrainer, callbacks=[callback], max_steps=6, **settings
    )


def logged(trainer: Trainer, name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize(
    ("make", "proxy_key", "settings"),
    [
        (plain_trainer, "-loss", {}),
        (sft_trainer, "mean_token_accuracy", {}),
        (dpo_trainer, "rewards/margins", {}),
        (grpo_trainer, "reward", {"beta": 0.1, "lora_adapter": True}),
    ],
    ids=["transformers", "sft", "dpo", "grpo"],
)
def test_the_guard_stops_a_real_trainer(
    tmp_path: Path, make: Callable[..., Trainer], proxy_key: str, settings: dict[str, Any]
) -> None:
    callback = HeldOutGuardCallback(quick_guard(), falling(), proxy_key=proxy_key)
    trainer = make(tmp_path, callback, **settings)
    with pytest.raises(CollapseStopError, match="Hacking Gap") as caught:
        trainer.train()
    assert (trainer.state.global_step, callback.halted_at) == (3, 3)
    # What was folded is what the trainer logged; nothing is smoothed here.
    bare, sign = proxy_key.lstrip("-"), -1 if proxy_key.startswith("-") else 1
    proxies = [sign * value for _, value in logged(trainer, bare)]
    assert [value for _, value in logged(trainer, "killswitch/in_loop_ema")] == proxies
    assert logged(trainer, "heldout/score") == [(1, 0.0), (2, -10.0), (3, -20.0)]
    assert logged(trainer, "killswitch/fire") == [(1, 0.0), (2, 0.0), (3, 1.0)]
    gap = proxies[2] - proxies[0] + 20.0
    assert caught.value.status.proxy_real_gap == pytest.approx(gap)
    # On disk before it raised: the checkpoint with the verdict in its log, and the guard's state.
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["log_history"][2]["killswitch/fire"] == 1.0
    assert state["stateful_callbacks"][STATE_KEY]["guard"] == callback.guard.state_dict()
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file() or make is not plain_trainer
    rows = read_jsonl(tmp_path / "verdicts.jsonl")
    assert [(row["round_idx"], row["fire"]) for row in rows] == [(1, False), (2, False), (3, True)]
    assert rows[2]["reason"] == caught.value.status.reason
    kls = [value for _, value in logged(trainer, "kl")] if proxy_key == "reward" else []
    expected: list[Any] = kls or [None] * 3
    assert [row["kl_ema"] for row in rows] == expected
    assert rows[0]["kl_path"] == ("logged as kl" if kls else "off (no row has had a finite KL)")


def test_an_honest_run_is_left_alone(tmp_path: Path) -> None:
    """Rows come every second step; asked at the first that is three steps after the last fold. Weights end as without it."""
    seen: list[tuple[bool, bool, bool]] = []

    def evaluate() -> float:
        model: Any = guarded.model
        seen.append((model.training, model.model.layers[0].training, torch.is_grad_enabled()))
        return 0.5

    callback = HeldOutGuardCallback(HeldOutGuard(), evaluate, proxy_key="-loss", every=3)
    guarded = plain_trainer(tmp_path / "a", callback, logging_steps=2)
    plain = plain_trainer(tmp_path / "b", TrainerCallback(), logging_steps=2)
    for trainer in (guarded, plain):
        trainer.train()
    assert [step for step, _ in logged(guarded, "killswitch/fire")] == [2, 6]
    assert seen == [(False, False, False)] * 2
    assert guarded.model.training
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, guarded.model.state_dict()[name]), name
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["verdicts.jsonl"]


def test_evaluation_rows_are_never_folded(tmp_path: Path) -> None:
    """GRPO logs eval_reward in rows of their own; the guard sees rewards of training alone."""
    callback = HeldOutGuardCallback(HeldOutGuard(ema_alpha=0.0), lambda: 0.5)
    trainer = grpo_trainer(
        tmp_path,
        callback,
        eval_dataset=Dataset.from_dict({"prompt": TEXTS[:4]}),
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 3
    assert logged(trainer, "killswitch/in_loop_ema") == logged(trainer, "reward")


# ------------------------------------------------------------------ single rows, by hand


def test_rows_without_a_proxy_are_counted_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = CallbackSteps(tmp_path, HeldOutGuard(), lambda: pytest.fail("the evaluation was called"))
    with caplog.at_level(logging.WARNING):
        run.log(1, reward=math.nan)
        run.log(2)
    assert run.callback.num_rows_without_proxy == 2
    assert caplog.text.count("no finite 'reward', so the guard was not asked") == 1


@pytest.mark.parametrize(("kl_key", "words"), [("kl", "no row has 'kl'"), (None, "kl_key is None")])
def test_a_kl_path_that_is_off_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kl_key: str | None, words: str
) -> None:
    run = CallbackSteps(tmp_path, HeldOutGuard(), lambda: 0.5, kl_key=kl_key)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            run.log(step, reward=0.5, **({} if kl_key else {"kl": 1e9}))
    assert caplog.text.count(f"the KL path is off: {words}") == 1
    assert "killswitch/kl_ema" not in run.said[3]


def test_after_the_halt_nothing_is_asked_any_more_and_no_other_run_begins(tmp_path: Path) -> None:
    truth = iter([0.5, 0.5])
    run = CallbackSteps(tmp_path, quick_guard(min_steps=1), truth.__next__, strict=False)
    for step, reward in enumerate([0.0, 9.0, 9.0]):
        run.log(step, reward=reward)
    assert (run.callback.halted_at, run.control.should_training_stop, run.control.should_save) == (
        1,
        True,
        True,
    )
    assert run.said.keys() == {0, 1}
    with pytest.raises(CollapseStopError):
        run.callback.on_train_begin(*run.of_trainer)


# --------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: saved.pop("guard"), "the guard's state in the checkpoint cannot be used: 'guard'"),
        (lambda saved: saved["guard"].update(version=9), ".* version 9"),
    ],
)
def test_a_state_that_cannot_be_used(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    run = CallbackSteps(tmp_path, HeldOutGuard(), lambda: 0.5)
    run.log(1, reward=0.5)
    change(run.state.stateful_callbacks[STATE_KEY])
    with pytest.raises(InputError, match=f"CR0884: {words}"):
        run.callback.on_train_begin(*run.of_trainer)


@pytest.mark.parametrize(
    ("had_guard", "settings", "num_updates"),
    [(True, {}, 6), (True, {"restore_callback_states_from_checkpoint": True}, 6), (False, {}, 3)],
    ids=["as usual", "restored by transformers, who would make callbacks anew", "a guard that is new"],
)
def test_a_resumed_run_goes_on_under_the_guard_that_it_is_given(
    tmp_path: Path, had_guard: bool, settings: dict[str, Any], num_updates: int
) -> None:
    def build(*, has_guard: bool) -> tuple[Trainer, TrainerCallback]:
        callback = HeldOutGuardCallback(HeldOutGuard(), lambda: 0.5, proxy_key="-loss")
        saving = {"save_strategy": "steps", "save_steps": 3, **settings}
        return plain_trainer(tmp_path, callback if has_guard else TrainerCallback(), **saving), callback

    build(has_guard=had_guard)[0].train()
    trainer, callback = build(has_guard=True)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback in trainer.callback_handler.callbacks
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"][STATE_KEY]["guard"]["memory"]["num_updates"] == num_updates
