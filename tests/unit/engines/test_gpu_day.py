"""The checks of ``make gpu`` at a small size on the processor, so that a GPU's minutes are not spent on a misspelt name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).parents[3] / "scripts" / "gpu_day.py"


@pytest.fixture
def gpu_day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_day", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 1200}
    for name, value in {"DEVICE": "cpu", "NUM_TOKENS": 8, "NUM_HEAD_TOKENS": 16, "MODEL": small}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.long
def test_the_checks_run(gpu_day: ModuleType) -> None:
    assert gpu_day.training_step()["loss"] > 0
    assert gpu_day.packed_prompts()["mean_difference"] < 0.02
    gpu_day.head_memory()
    assert 0 < gpu_day.heldout_reading()["tokens"] <= 64 * 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_called_measured(
    gpu_day: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_day.py"])
    assert gpu_day.main() == 3
    assert "no GPU here; nothing was measured" in capsys.readouterr().err
