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
        ({"layers": ["no_such_module_of_ours:hint"]}, "CR0210"),
        ({"layers": ["no_such_module_of_ours:other"]}, "CR0210"),
    ],
)
def test_hints_that_nobody_can_write_are_refused_before_the_run(writing: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError, match=code):
        check_recipe(recipe(writing), Path())
