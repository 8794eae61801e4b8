"""Signals, initial KL, parameter hash, the TRL surface, and the callbacks."""

from __future__ import annotations

import inspect
import math
import os
import signal
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny_trainer import lora, tiny_model
from trl import GRPOTrainer

from composer_replication.trainer import processes as exchanges
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.guard import KlPath, kl_path_of
from composer_replication.trainer.metrics_log import InLoopSignals
from composer_replication.trainer.model_modes import evaluation_mode, parameter_sha256
from composer_replication.trainer.processes import InterruptOnce

# ---- signals


@given(st.lists(st.lists(st.floats(width=16), max_size=3), max_size=5))
def test_signals_remember_the_newest_finite_reward_over_any_clearings(batches: list[list[float]]) -> None:
    signals, metrics = InLoopSignals(), {"reward": []}
    for batch in batches:
        metrics["reward"].extend(batch)
        signals.read(metrics)
        metrics["reward"].clear()
        signals.read(metrics)
    finite = [value for batch in batches for value in batch if math.isfinite(value)]
    assert signals.reward == (finite[-1] if finite else None)
    assert signals.is_reward_new == bool(finite)


# ---- initial KL


@pytest.mark.parametrize(
    ("beta", "sync", "path"), [(0.1, False, KlPath.LOGGED), (0.1, True, KlPath.OFF), (0.0, False, KlPath.OFF)]
)
def test_the_kl_path_of_full_fine_tuning(beta: float, sync: bool, path: KlPath) -> None:
    found, reason = kl_path_of(tiny_model(), beta=beta, sync_ref_model=sync)
    assert found is path
    assert bool(reason) == (path is KlPath.OFF)


def test_a_fresh_adapter_can_be_switched_off() -> None:
    assert kl_path_of(get_peft_model(tiny_model(), lora()), beta=0.0, sync_ref_model=False) == (
        KlPath.ADAPTER_OFF,
        "",
    )


def test_an_adapter_that_is_not_the_identity_or_trains_biases_cannot() -> None:
    changed = get_peft_model(tiny_model(), lora())
    for name, parameter in changed.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.1)
    config = LoraConfig(r=2, target_modules=["q_proj"], bias="all", task_type="CAUSAL_LM")
    biased = get_peft_model(tiny_model(), config)
    for model in (changed, biased):
        path, reason = kl_path_of(model, beta=0.0, sync_ref_model=False)
        assert path is KlPath.OFF
        assert "only for LoRA that is zero before training and trains no biases" in reason


# ---- parameter hash


def test_equal_weights_have_equal_hashes_and_one_bit_changes_it() -> None:
    model = tiny_model(1)
    before = parameter_sha256(model)
    assert parameter_sha256(tiny_model(1)) == before
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-6
    assert parameter_sha256(model) != before


def test_the_hash_covers_names_dtypes_and_shapes() -> None:
    zeros = torch.zeros(2, 2)
    states = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.flatten()},
        {"a": zeros.int()},
        {"a": zeros, "b": torch.zeros(0)},
    ]
    models = [SimpleNamespace(state_dict=lambda state=state, **_: state) for state in states]
    assert len({parameter_sha256(model) for model in models}) == len(states)


def test_the_hash_does_not_depend_on_the_order_of_the_state() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    one = SimpleNamespace(state_dict=lambda **_: {"a": first, "b": second})
    other = SimpleNamespace(state_dict=lambda **_: {"b": second, "a": first})
    assert parameter_sha256(one) == parameter_sha256(other)


# ---- the methods of the installed TRL that the trainer overrides, with their parameters: an upgrade that renames one
# fails here, and not in a run

TRL_SURFACE: dict[str, tuple[str, ...]] = {
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
        *("compute_entropy", "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images"),
        *("pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes"),
        *("token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ),
    "_generate": ("prompts",),
    "_generate_single_turn": (
        *("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    ),
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_get_grad_norm": ("model", "grad_norm"),
    "_get_train_sampler": ("dataset",),
    "_save_checkpoint": ("model", "trial"),
    "create_optimizer": ("model",),
    "create_scheduler": ("num_training_steps", "optimizer"),
    "evaluate": ("eval_dataset", "ignore_keys", "metric_key_prefix"),
    "log": ("logs", "start_time"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}


def parameters(function: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(inspect.unwrap(function)).parameters if name != "self")


@pytest.mark.parametrize("name", sorted(TRL_SURFACE))
def test_the_installed_trl_has_the_methods_that_are_overridden(name: str) -> None:
    assert parameters(getattr(GRPOTrainer, name)) == TRL_SURFACE[name]
    own = parameters(vars(ComposerReplicationTrainer)[name])
    own = own[: own.index("multimodal")] if "multimodal" in own else own
    assert own == TRL_SURFACE[name][: len(own)] != () or own == ("args", "kwargs")  # handed on whole


def test_the_surface_is_exactly_what_the_trainer_overrides() -> None:
    overridden = {
        name
        for name, value in vars(ComposerReplicationTrainer).items()
        if inspect.isfunction(value) and hasattr(GRPOTrainer, name) and name != "__init__"
    }
    assert overridden == set(TRL_SURFACE)


# ---- callbacks and processes


def test_parts_go_back_to_the_mode_they_had() -> None:
    model = tiny_model().train()
    frozen = model.model.layers[1].eval()
    with suppress(KeyError), evaluation_mode(model):
        assert not any(part.training for part in model.modules())
        raise KeyError
    assert model.training and model.model.layers[0].training
    assert not any(part.training for part in frozen.modules())
    with evaluation_mode(None):  # a trainer without a model
        pass


def test_the_first_interrupt_asks_and_the_second_raises(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with InterruptOnce() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert "finishing this step" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("processes", [1, 2])
def test_orders_to_end_are_one_request_however_often_they_come(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, processes: int
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, signal.default_int_handler)
        request.addfinalizer(lambda number=number, before=before: signal.signal(number, before))
    monkeypatch.setattr(exchanges, "num_processes", lambda: processes)
    with InterruptOnce() as interrupt:  # one process that was asked ends all
        monkeypatch.setattr(exchanges, "gathered", lambda value: [value, True])
        assert interrupt.is_agreed() and interrupt.is_requested
    monkeypatch.setattr(exchanges, "gathered", lambda value: [value] * processes)
    with InterruptOnce() as interrupt:
        assert not interrupt.is_agreed()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.is_agreed()
        is_first = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert is_first == (processes == 1)  # several get a Ctrl-C twice, and end by it
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_another_programs_handler_is_left_alone() -> None:
    def own(number: int, frame: Any) -> None:
        return None

    before = signal.signal(signal.SIGINT, own)
    try:
        with InterruptOnce():
            assert signal.getsignal(signal.SIGINT) is own
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
