"""The hint channel joined to a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.assembly import check_recipe
from composer_replication.config import RunConfig, parse_config
from composer_replication.errors import UsageError

RECIPE = {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}}


def recipe(writing: dict[str, Any]) -> RunConfig:
    tables = {"trainer": {"alpha_sdpo": 0.1}, "hints": {"writing": writing}}
    return parse_config({**RECIPE, **tables}, where="run.toml")


@pytest.mark.parametrize(
    ("writing", "code"),
    [
        ({"layers": ["no_such_module_of_ours:hint"]}, "CR0221"),
        ({"layers": ["no_such_module_of_ours:other"]}, "CR0221"),
    ],
)
def test_hints_that_nobody_can_write_are_refused_before_the_run(writing: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_recipe(recipe(writing), Path())
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("environment", "is_refused"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, True),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, True),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, False),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, False),
    ],
    ids=["fsdp1", "zero3", "zero2", "fsdp2"],
)
def test_of_spread_weights_those_of_fsdp2_alone_can_be_distilled(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_refused: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not is_refused:
        check_recipe(recipe({}), Path())
        return
    with pytest.raises(UsageError, match="not by FSDP2") as raised:
        check_recipe(recipe({}), Path())
    assert raised.value.code == "CR0757"
