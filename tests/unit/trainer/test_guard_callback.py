"""The guard's callback inside real trainers of transformers and TRL, on a tiny random model."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
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


def plain_trainer(folder: Path, callback: TrainerCallback, parts: Any = None, **settings: Any) -> Trainer:
    arguments = TrainingArguments(output_dir=str(folder), **{**COMMON, **settings})
    return Trainer(
        model=tiny_model(),
        args=arguments,
        train_dataset=token_rows(TEXTS),
        callbacks=[callback],
        **(parts or {}),
    )


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
    assert [(row["round_idx"], row["fire"], row["num_updates"]) for row in rows] == [
        (1, False, 1),
        (2, False, 2),
        (3, True, 3),
    ]
    assert rows[2]["reason"] == caught.value.status.reason
    kls = [value for _, value in logged(trainer, "kl")] if proxy_key == "reward" else []
    expected: list[Any] = kls or [None] * 3
    assert [row["kl_ema"] for row in rows] == expected
    assert rows[0]["kl_path"] == ("logged as kl" if kls else "off (no row has had a finite KL)")


def test_without_strict_the_run_ends_and_returns(tmp_path: Path) -> None:
    callback = HeldOutGuardCallback(quick_guard(), falling(), proxy_key="-loss", strict=False)
    trainer = plain_trainer(tmp_path, callback)
    assert trainer.train().global_step == 3
    assert callback.halted_at == 3
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").is_file()


def test_an_honest_run_is_left_alone(tmp_path: Path) -> None:
    """The guard is asked at each row, and weights end as without it."""
    guarded = plain_trainer(
        tmp_path / "a", HeldOutGuardCallback(HeldOutGuard(), lambda: 0.5, proxy_key="-loss")
    )
    plain = plain_trainer(tmp_path / "b", TrainerCallback())
    for trainer in (guarded, plain):
        trainer.train()
    assert len(logged(guarded, "killswitch/fire")) == 6
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, guarded.model.state_dict()[name]), name
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["verdicts.jsonl"]


def test_every(tmp_path: Path) -> None:
    """Of rows of every second step, the first that is three steps after the last fold."""
    callback = HeldOutGuardCallback(HeldOutGuard(), lambda: 0.5, proxy_key="-loss", every=3)
    trainer = plain_trainer(tmp_path, callback, logging_steps=2)
    trainer.train()
    assert [step for step, _ in logged(trainer, "killswitch/fire")] == [2, 6]


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


def test_the_model_is_in_evaluation_mode_meanwhile(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def evaluate() -> float:
        model: Any = trainer.model
        layer = model.model.layers[0]
        seen.append((model.training, layer.training, torch.is_grad_enabled()))
        return 0.5

    trainer = plain_trainer(
        tmp_path, HeldOutGuardCallback(HeldOutGuard(), evaluate, proxy_key="-loss"), max_steps=1
    )
    trainer.train()
    assert seen == [(False, False, False)]
    assert trainer.model.training


# ------------------------------------------------------------------ single rows, by hand


class Handle:
    """The callback's side of a trainer's log, without a trainer."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.evaluations = 0
        self.score: Any = 0.5
        self.guard = settings.pop("guard", HeldOutGuard())
        self.callback = HeldOutGuardCallback(self.guard, self.evaluate, **settings)
        self.args = SimpleNamespace(output_dir=str(folder))
        self.state = SimpleNamespace(global_step=0, log_history=[], stateful_callbacks={})
        self.control = SimpleNamespace(should_save=False, should_training_stop=False)
        self.callback.on_train_begin(self.args, self.state, self.control)

    def evaluate(self) -> Any:
        self.evaluations += 1
        if isinstance(self.score, Exception):
            raise self.score
        return self.score

    def log(self, **row: Any) -> dict[str, Any]:
        self.state.global_step += 1
        self.callback.on_log(self.args, self.state, self.control, logs=row, model=None)
        return row

    @property
    def num_updates(self) -> int:
        return self.guard.last_status.num_updates if self.guard.last_status else 0


@pytest.fixture
def handle(tmp_path: Path) -> Callable[..., Handle]:
    return lambda **settings: Handle(tmp_path, **settings)


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "0.5", True])
def test_no_value_is_invented(
    handle: Callable[..., Handle], reward: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = handle()
    with caplog.at_level(logging.WARNING):
        one.log(loss=1.0, reward=reward)
        one.log(loss=1.0)
    assert (one.evaluations, one.num_updates, one.callback.num_rows_without_proxy) == (0, 0, 2)
    assert caplog.text.count("no finite 'reward', so the guard was not asked") == 1


@pytest.mark.parametrize(("kl_key", "words"), [("kl", "no row has 'kl'"), (None, "kl_key is None")])
def test_a_kl_path_that_is_off_is_said_once(
    handle: Callable[..., Handle], caplog: pytest.LogCaptureFixture, kl_key: str | None, words: str
) -> None:
    one = handle(kl_key=kl_key)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            row = one.log(reward=0.5, **({} if kl_key else {"kl": 1e9}))
    assert caplog.text.count(f"the KL path is off: {words}") == 1
    assert "killswitch/kl_ema" not in row


def test_an_evaluation_that_fails_ends_the_run(handle: Callable[..., Handle]) -> None:
    one = handle()
    one.score = ZeroDivisionError("no task")
    with pytest.raises(ZeroDivisionError):
        one.log(reward=0.5)
    assert one.num_updates == 0


@pytest.mark.parametrize("strict", [False, True])
def test_an_evaluation_that_gives_up_halts(handle: Callable[..., Handle], *, strict: bool) -> None:
    one = handle(strict=strict)
    one.score = CollapseStopError(SimpleNamespace(fire=True, reason="nobody knows the truth"))
    one.log(reward=0.5)
    assert (one.callback.halted_at, one.control.should_training_stop) == (1, True)
    assert one.callback.last_verdict is not None
    assert one.callback.last_verdict["reason"] == "nobody knows the truth"
    if strict:
        with pytest.raises(CollapseStopError, match="nobody knows the truth"):
            one.callback.on_train_end(one.args, one.state, one.control)


def test_after_the_halt_nothing_is_asked_any_more(handle: Callable[..., Handle]) -> None:
    one = handle(guard=quick_guard(min_steps=1))
    one.log(reward=0.0)
    one.log(reward=9.0)
    assert (one.callback.halted_at, one.control.should_training_stop, one.control.should_save) == (
        2,
        True,
        True,
    )
    row = one.log(reward=9.0)
    assert (one.evaluations, set(row)) == (2, {"reward"})


def test_a_fired_guard_trains_nothing(tmp_path: Path) -> None:
    guard = quick_guard(min_steps=1)
    guard.update(1, in_loop_reward=0.0, heldout_score=0.5)
    guard.update(2, in_loop_reward=9.0, heldout_score=0.5)
    trainer = plain_trainer(
        tmp_path, HeldOutGuardCallback(guard, lambda: 0.5, proxy_key="-loss", strict=False)
    )
    with pytest.raises(CollapseStopError):
        trainer.train()
    assert trainer.state.global_step == 0


# --------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda saved: saved.pop("guard"),
            "CR0884: the guard's state in the checkpoint cannot be used: 'guard'",
        ),
        (lambda saved: saved["guard"].update(version=9), "CR0884: .* version 9"),
        (lambda saved: saved.update(split_fingerprint="x"), "CR0884: it was measured on split x"),
    ],
)
def test_a_state_that_cannot_be_used(
    handle: Callable[..., Handle], change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    one = handle(split_fingerprint="abc")
    one.log(reward=0.5)
    saved = json.loads(json.dumps(one.state.stateful_callbacks[STATE_KEY]))
    change(saved)
    state = SimpleNamespace(global_step=1, stateful_callbacks={STATE_KEY: saved})
    with pytest.raises(InputError, match=words):
        one.callback.on_train_begin(one.args, state, one.control)


@pytest.mark.parametrize("restores_callbacks", [False, True])
def test_transformers_own_restoring_is_no_obstacle(tmp_path: Path, *, restores_callbacks: bool) -> None:
    """It makes callbacks anew out of stored arguments, which would lose the guard."""

    def build() -> tuple[Trainer, HeldOutGuardCallback]:
        callback = HeldOutGuardCallback(HeldOutGuard(), lambda: 0.5, proxy_key="-loss")
        settings = {"save_strategy": "steps", "save_steps": 3}
        if restores_callbacks:
            settings["restore_callback_states_from_checkpoint"] = True
        return plain_trainer(tmp_path, callback, **settings), callback

    build()[0].train()
    trainer, callback = build()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback in trainer.callback_handler.callbacks
    assert callback.guard.last_status.num_updates == 6


def test_a_guard_may_be_added_to_a_run_that_had_none(tmp_path: Path) -> None:
    plain_trainer(tmp_path, TrainerCallback(), save_strategy="steps", save_steps=3).train()
    callback = HeldOutGuardCallback(HeldOutGuard(), lambda: 0.5, proxy_key="-loss")
    trainer = plain_trainer(tmp_path, callback, save_strategy="steps", save_steps=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"][STATE_KEY]["guard"]["memory"]["num_updates"] == 3
