"""Saved weights load with transformers alone and are the trained ones; weights in parts are whole while they are read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from tiny_trainer import tiny_model
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from composer_replication.config import ModelSection, parse_config
from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder
from composer_replication.trainer import model_modes
from composer_replication.trainer.checkpoints import write_manifest
from composer_replication.trainer.model_loading import (
    gathered_weights,
    load_checkpoint,
    load_model,
    save_model,
)
from composer_replication.trainer.model_modes import parameter_sha256, weights_are_sharded

IDS = torch.arange(1, 9).unsqueeze(0)


def describe(folder: Path) -> None:
    (folder / "README.md").write_text("a card")


@pytest.fixture
def tiny() -> tuple[Any, Any]:
    return load_model(ModelSection(name="tiny-random"), seed=3)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(IDS).logits
    return result


def test_whole_weights_come_back_bit_for_bit(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "of-another-run.txt").write_text("old")
    save_model(model, tokenizer, tmp_path / "model", describe)
    assert not (tmp_path / "model" / "of-another-run.txt").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert parameter_sha256(loaded) == parameter_sha256(model)
    base = AutoModel.from_pretrained(tmp_path / "model")
    assert torch.equal(base.get_input_embeddings().weight, model.get_input_embeddings().weight)
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.encode("def f():\n") == tokenizer.encode("def f():\n")
    assert again.chat_template == tokenizer.chat_template
    assert (tmp_path / "model" / "README.md").read_text() == "a card"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def adapted(model: Any, std: float, **config: Any) -> Any:
    """With an adapter whose every trained weight has moved."""
    result: Any = get_peft_model(model, LoraConfig(r=4, **config))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in result.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * std)
    return result


KINDS: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear"},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings and head as one": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "whole embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]},
    "dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("whole embeddings", torch.bfloat16)]
)
def test_whatever_an_adapter_is_on_the_saved_model_is_the_trained_one(
    tiny: tuple[Any, Any], tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    """The model's head and embeddings are one weight, which some of these adapters part."""
    model, tokenizer = tiny
    assert model.config.tie_word_embeddings
    before = logits(model).float().log_softmax(-1)
    trained = adapted(model.to(dtype), 0.05, **KINDS[kind])
    expected = logits(trained).float().log_softmax(-1)
    save_model(trained, tokenizer, tmp_path / "model", describe)
    assert not list((tmp_path / "model").glob("adapter*"))
    answer = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")).float().log_softmax(-1)
    assert float((before - expected).abs().max()) > 0.03
    assert float((answer - expected).abs().max()) < (1e-4 if dtype is torch.float32 else 0.1)


def test_an_adapter_elsewhere_leaves_head_and_embeddings_one(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    save_model(adapted(tiny[0], 0.05, target_modules=["q_proj"]), tiny[1], tmp_path / "model", describe)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.tie_word_embeddings


def test_a_longer_vocabulary_and_a_head_of_its_own_come_back(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    tokenizer.add_tokens(["<one more>"])
    model.resize_token_embeddings(len(tokenizer))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    trained = logits(model)
    save_model(model, tokenizer, tmp_path / "model", describe)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), trained)


@pytest.mark.parametrize("place", [0, 3])
def test_each_added_token_is_compared(tiny: tuple[Any, Any], tmp_path: Path, place: int) -> None:
    """Their rows stand amid others that nobody asks, and the head, another weight, does not show them."""
    model, tokenizer = tiny
    tokenizer.add_tokens([f"<{number}>" for number in range(4)])
    model.resize_token_embeddings(len(tokenizer) + 2000)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)

    def spoil(folder: Path) -> None:
        saved = AutoModelForCausalLM.from_pretrained(folder)
        saved.get_input_embeddings().weight.data[len(tokenizer) - 4 + place] += 1.0
        saved.save_pretrained(folder)

    with pytest.raises(InputError, match=r"CR0890.*would not be the trained one"):
        save_model(model, tokenizer, tmp_path / "model", spoil)


def test_an_update_of_16_bits_is_saved_in_32(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    trained = adapted(model.to(torch.bfloat16), 1e-4, target_modules=["q_proj"])
    save_model(trained, tokenizer, tmp_path / "model", describe)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype is torch.float32


def test_another_model_than_the_trained_one_is_refused(
    tiny: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny
    trained = adapted(model, 0.05, target_modules=["q_proj"])
    monkeypatch.setattr(trained.base_model, "merge_and_unload", trained.base_model.unload)
    with pytest.raises(InputError, match=r"CR0890.*would not be the trained one"):
        save_model(trained, tokenizer, tmp_path / "model", describe)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_leaves_the_old_one(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("old")

    def full(_folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"CR0209.*No space left on device"):
        save_model(*tiny, folder, full)
    assert (folder / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


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


def test_the_hash_is_that_of_the_whole_weights(spread: Any) -> None:
    assert parameter_sha256(spread) == parameter_sha256(tiny_model(3))
    assert parameter_sha256(spread) != parameter_sha256(tiny_model(4))


def test_the_model_is_gathered_and_stays_when_the_parts_are_gone(spread: Any) -> None:
    gathered = gathered_weights(SimpleNamespace(model=spread))
    assert gathered is not None
    for name, weight in tiny_model(3).state_dict().items():
        assert torch.equal(gathered[name], weight)
    assert gathered_weights(SimpleNamespace(model=tiny_model(3))) is None


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
