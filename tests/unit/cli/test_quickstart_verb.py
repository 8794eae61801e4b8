"""``composer-rl quickstart``: the shipped recipe, in the type that the machine multiplies fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.cli import train_verb
from composer_replication.cli.main import build_parser
from composer_replication.trainer.run_setup import fast_dtype


@pytest.mark.parametrize(("has_gpu", "gpu", "processor"), [(False, False, True), (True, True, False)])
def test_sixteen_bits_only_where_they_are_fast(
    has_gpu: bool, gpu: bool, processor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(of_gpu: bool, of_processor: bool) -> str:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: of_gpu)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: of_processor)
        return fast_dtype()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert say(gpu, processor) == "bfloat16"
    assert say(not gpu, not processor) == "float32"


def test_what_is_given_and_the_type_go_to_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def run_recipe(
        recipe: Path, overrides: dict[str, Any], out: Path, **_: Any
    ) -> tuple[dict[str, Any], int]:
        seen.append(overrides)
        return {}, 0

    monkeypatch.setattr(train_verb, "run_recipe", run_recipe)
    for words in ([], ["--seed", "0", "--steps", "3"]):
        train_verb.run_quickstart(build_parser(only="quickstart").parse_args(["quickstart", *words]))
    assert seen == [
        {"model.dtype": fast_dtype()},
        {"trl.max_steps": 3, "seed": 0, "model.dtype": fast_dtype()},
    ]
