"""What both channels refuse, warn about and keep; a channel that is off leaves no trace."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_vocabulary import gradients, sharpened
from tiny_trainer import HintEveryTurn, share_of_low_bytes, tiny_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from trl import GRPOTrainer

from composer_replication.config import HintsSection, ReplaySection
from composer_replication.errors import ComposerError, InputError
from composer_replication.records import PreferencePair
from composer_replication.trainer import model_modes
from composer_replication.trainer.checkpoints import write_manifest
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.loss_channels import STATE_FILE, LossChannels
from composer_replication.trainer.model_modes import parameter_sha256, states_problem
from composer_replication.trainer.preset_settings import TrainerSettingError

PAIRS = (PreferencePair((5, 6), (40, 41), (42,)), PreferencePair((7,), (43,), (44, 45)))


def above(completions: list[str], **_: Any) -> list[float]:
    """Some rollouts of each group pass."""
    return [2.5 * share for share in share_of_low_bytes(completions)]


BOTH = {
    "reward": above,
    "alpha_sdpo": 0.5,
    "hint_source": HintEveryTurn(),
    "beta_replay": 0.5,
    "replay_pairs": PAIRS,
    "replay": ReplaySection(sibling_pairs=True, pairs_per_step=3),
}


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"alpha_sdpo": -1.0, "hint_source": HintEveryTurn()}, "CR0722"),
        ({"alpha_sdpo": "0.5", "hint_source": HintEveryTurn()}, "CR0722"),
        ({"alpha_sdpo": True, "hint_source": HintEveryTurn()}, "CR0722"),
        ({"beta_replay": math.nan, "replay_pairs": PAIRS}, "CR0722"),
        ({"beta_replay": None, "replay_pairs": PAIRS}, "CR0722"),
        ({"alpha_sdpo": 0.5}, "CR0755"),
        ({"beta_replay": 0.5}, "CR0755"),
        ({"beta_replay": 0.5, "replay_pairs": [PreferencePair((1,), (2,), (3,), weight=0.0)]}, "CR0755"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_before_any_model(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], code: str
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda self, *args, **kwargs: calls.append(1))
    with pytest.raises(ComposerError, match=code):
        ComposerReplicationTrainer(**settings)
    assert calls == []


def test_lora_off_needs_an_adapter(make_trainer: Callable[..., Any]) -> None:
    settings = {"alpha_sdpo": 0.5, "hint_source": HintEveryTurn(), "hints": HintsSection(teacher="lora-off")}
    with pytest.raises(TrainerSettingError, match=r"CR0757.*without its adapter, and this model has none"):
        make_trainer(**settings).train()
    make_trainer(**settings, lora_adapter=True).channels.begin()


@pytest.mark.parametrize("measures", [False, True])  # a run asks before it measures
def test_a_model_whose_head_cannot_be_taken_apart_is_refused(
    make_trainer: Callable[..., Any], *, measures: bool
) -> None:
    trainer = make_trainer(alpha_sdpo=0.5, hint_source=HintEveryTurn())
    trainer.model.set_output_embeddings(nn.Sequential(nn.Linear(32, 258)))
    with pytest.raises(TrainerSettingError, match="CR0757"):
        (trainer.channels.check_model if measures else trainer.train)()


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ({"fsdp_version": 1}, "not by FSDP2"),
        ({"cpu_offload": CPUOffloadPolicy()}, "fsdp_offload_params"),
        ({"cpu_ram_efficient_loading": True}, "fsdp_cpu_ram_efficient_loading"),
        ({}, None),
    ],
    ids=["fsdp1", "offloaded", "loaded once", "fsdp2"],
)
def test_how_fsdp_spreads_weights_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, plugin: dict[str, Any], words: str | None
) -> None:
    usual = {"fsdp_version": 2, "cpu_offload": None, "cpu_ram_efficient_loading": False}
    monkeypatch.setattr(model_modes, "weights_are_sharded", lambda model: True)
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**usual | plugin))
    monkeypatch.setattr(model_modes, "is_initialized", lambda: True)
    monkeypatch.setattr(model_modes, "AcceleratorState", lambda: state)
    problem = states_problem(tiny_model())
    assert problem is None if words is None else words in str(problem)


def test_logits_that_are_not_made_by_the_head_alone_are_refused() -> None:
    """A soft cap under a name that is not known, as a forward of the model itself shows."""
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        block_types=["recurrent", "attention"],
        lru_width=16,
        logits_soft_cap=3.0,
    )
    model = RecurrentGemmaForCausalLM(config)
    sharpened(model)
    problem = states_problem(model)
    assert (
        problem
        == "the logits of RecurrentGemmaForCausalLM are not what its head makes of its last hidden states."
    )
    for plain in (tiny_model(), tiny_model().bfloat16()):
        sharpened(plain)
        assert states_problem(plain) is None


def one_step(make_trainer: Callable[..., Any], output_dir: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Gradients of one micro-batch, TRL's loss and the channels together."""
    trainer = make_trainer(output_dir=output_dir, **settings)
    if trainer.channels is not None:
        trainer.channels.begin()
    trainer.model.train()
    torch.manual_seed(3)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, inputs).backward()
    return gradients(trainer.model)


def test_a_channels_gradient_is_there_when_on_and_absent_when_off(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    off = one_step(make_trainer, tmp_path / "off", reward=above)
    given = one_step(make_trainer, tmp_path / "given", **{**BOTH, "alpha_sdpo": 0.0, "beta_replay": 0.0})
    assert all(torch.equal(off[name], given[name]) for name in off)
    for name in ("alpha_sdpo", "beta_replay"):
        on = one_step(
            make_trainer, tmp_path / name, **{**BOTH, "alpha_sdpo": 0.0, "beta_replay": 0.0, name: 0.5}
        )
        size = math.sqrt(sum(float(((on[key] - off[key]) ** 2).sum()) for key in off))
        assert size > 1e-7


def test_evaluation_has_no_channel_in_it(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(**BOTH)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: 2.0)
    trainer._in_evaluation = True
    assert trainer._compute_loss(trainer.model, {}) == 2.0


def run(make_trainer: Callable[..., Any], folder: Path, **settings: Any) -> Any:
    trainer = make_trainer(
        **{
            "output_dir": folder,
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            "steps_per_generation": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            **BOTH,
            **settings,
        }
    )
    trainer.train(resume_from_checkpoint=True)
    return trainer


@pytest.mark.long
def test_a_resumed_run_goes_on_exactly_and_needs_what_was_kept(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    whole = run(make_trainer, tmp_path / "whole")
    for name in ("resumed", "without", "other"):
        shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / name / "checkpoint-2")
    resumed = run(make_trainer, tmp_path / "resumed")
    assert parameter_sha256(resumed.model) == parameter_sha256(whole.model)
    for name, weight in whole.channels.hints.weights.tensors().items():
        assert torch.equal(resumed.channels.hints.weights.tensors()[name], weight)
    # the teacher of the start in the place of the one that was kept: the end is another
    path = tmp_path / "without" / "checkpoint-2" / STATE_FILE
    kept = torch.load(path, weights_only=True)
    kept["teacher"] = kept["first"]
    torch.save(kept, path)
    write_manifest(path.parent)
    changed = run(make_trainer, tmp_path / "without")
    assert parameter_sha256(changed.model) != parameter_sha256(whole.model)
    with pytest.raises(InputError, match="CR0884"):
        run(make_trainer, tmp_path / "other", hints=HintsSection(jsd_alpha=1.0))
    with pytest.raises(InputError, match="CR0884"):
        run(make_trainer, tmp_path / "other", alpha_sdpo=0.0, beta_replay=0.0)


def test_a_checkpoint_of_before_a_key_left_is_still_this_runs() -> None:
    """Its digest was made of all keys that the table had."""
    settings = HintsSection(jsd_alpha=1.0)
    of_before = settings.model_dump() | {"turns_per_step": 4, "ema_rate": 0.05, "top_k": 100, "strict": True}
    of_before |= {"writing": {"layers": ["template", "environment"]}}
    kept = json.dumps(["hints", of_before, []], sort_keys=True)
    trainer: Any = SimpleNamespace(args=SimpleNamespace(seed=3))
    channels = LossChannels(trainer, SimpleNamespace(table="hints", records=[], settings=settings), None)
    assert channels.fingerprint() == hashlib.sha256(f"3{kept}".encode()).hexdigest()
