"""Weights in parts are seen, and are whole while they are read: with a stand-in for DeepSpeed; the real one is in tests/interop."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from tiny_trainer import tiny_model

from composer_replication.config import parse_config
from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder
from composer_replication.trainer import model_modes
from composer_replication.trainer.checkpoints import write_manifest
from composer_replication.trainer.model_loading import load_checkpoint
from composer_replication.trainer.model_modes import parameter_sha256, weights_are_sharded, whole_tensors
from composer_replication.trainer.saved_model import gathered_weights


class StandInGathering:
    """As ``GatheredParameters``: whole inside, empty outside."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __enter__(self) -> None:
        for part in self.parts:
            part.data = part.kept

    def __exit__(self, *error: object) -> None:
        for part in self.parts:
            part.data = torch.empty(0)


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny model as ZeRO-3 leaves it between steps."""
    zero = SimpleNamespace(GatheredParameters=StandInGathering)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    model = tiny_model(3)
    for part in model.parameters():
        part.kept, part.ds_tensor = part.data, part.data[:1]
        part.data = torch.empty(0)
    return model


def test_weights_in_parts_are_whole_one_at_a_time(spread: Any) -> None:
    whole = dict(tiny_model(3).state_dict())
    seen = []
    for name, weight in whole_tensors(spread):
        assert torch.equal(weight, whole[name])
        seen.append(name)
    assert seen == sorted(whole)
    assert all(part.numel() == 0 for part in spread.parameters())


def test_the_hash_is_that_of_the_whole_weights(spread: Any) -> None:
    assert parameter_sha256(spread) == parameter_sha256(tiny_model(3))
    assert parameter_sha256(spread) != parameter_sha256(tiny_model(4))


def test_the_model_is_gathered_and_stays_when_the_parts_are_gone(spread: Any) -> None:
    gathered = gathered_weights(SimpleNamespace(model=spread))
    assert gathered is not None
    for name, weight in tiny_model(3).state_dict().items():
        assert torch.equal(gathered[name], weight)
    assert gathered_weights(SimpleNamespace(model=tiny_model(3))) is None


def test_parts_are_seen_without_any_launch(spread: Any) -> None:
    assert weights_are_sharded(spread)


@pytest.mark.parametrize(
    ("kind", "stage", "is_sharded"),
    [
        (DistributedType.FSDP, 0, True),
        (DistributedType.DEEPSPEED, 1, False),
        (DistributedType.DEEPSPEED, 2, False),
        (DistributedType.DEEPSPEED, 3, True),
        (DistributedType.MULTI_GPU, 0, False),
    ],
)
def test_zero3_and_fsdp_need_every_process_for_a_forward(
    monkeypatch: pytest.MonkeyPatch, kind: DistributedType, stage: int, is_sharded: bool
) -> None:
    state = SimpleNamespace(distributed_type=kind, deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    monkeypatch.setattr(model_modes, "is_initialized", lambda: True)
    monkeypatch.setattr(model_modes, "AcceleratorState", lambda: state)
    assert weights_are_sharded(tiny_model()) is is_sharded


def test_a_checkpoint_in_parts_is_not_taken_for_a_model(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    checkpoint = folder.checkpoints / "checkpoint-2"
    (checkpoint / "global_step2").mkdir(parents=True)
    (checkpoint / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"a part")
    write_manifest(checkpoint)
    config = parse_config({"model": {"name": "tiny-random"}, "tasks": {"source": ["p"]}}, where="test")
    with pytest.raises(InputError, match="has the weights in parts") as caught:
        load_checkpoint(config, folder)
    assert caught.value.code == "CR0706"
    assert str(folder.model) in str(caught.value.fix)
