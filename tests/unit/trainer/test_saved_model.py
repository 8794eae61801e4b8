"""Saved weights load with transformers alone and are the trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from composer_replication.config import ModelSection
from composer_replication.errors import InputError
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.saved_model import save_model

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
    save_model(model, tokenizer, tmp_path / "model", describe)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
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


def test_an_update_that_16_bits_would_lose_is_saved_in_32(tiny: tuple[Any, Any], tmp_path: Path) -> None:
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


def test_what_was_there_is_replaced_as_a_whole(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "of-another-run.txt").write_text("old")
    save_model(*tiny, folder, describe)
    assert not (folder / "of-another-run.txt").exists()


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
