"""How a run of ``train`` ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.cli.training_run import _keep_recipe, _train
from composer_replication.config import parse_config
from composer_replication.errors import UsageError
from composer_replication.run_folder import RunFolder
from composer_replication.safety import HeldOutGuard


@pytest.mark.parametrize(("halted_at", "halted"), [(None, False), (6, True)])
def test_a_halt_by_missed_evaluations_counts_though_no_guard_fired(
    tmp_path: Path, halted_at: int | None, halted: bool
) -> None:
    """With ``strict_killswitch = false`` the trainer stops without an error."""
    trainer = SimpleNamespace(heldout_guard=HeldOutGuard(), halted_at=halted_at, train=lambda **_: None)
    parts: Any = SimpleNamespace(folder=RunFolder(tmp_path), trainer=trainer)
    assert _train(parts, lambda _: None) is halted


def test_a_run_goes_on_at_another_cluster_and_not_with_another_seed(tmp_path: Path) -> None:
    def recipe(**tables: Any) -> Any:
        table = {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}, **tables}
        return parse_config(table, where="here")

    folder = RunFolder(tmp_path)
    first = recipe(ray={"address": "auto"})
    _keep_recipe(first, folder)
    folder.metrics.write_text("{}\n")  # it has begun
    for same in (first, recipe(), recipe(ray={"address": "h:6379", "resources": {"jail": 1.0}})):
        _keep_recipe(same, folder)
    with pytest.raises(UsageError, match="seed is 1 now and was not set") as raised:
        _keep_recipe(recipe(seed=1, ray={"address": "h:6379"}), folder)
    assert raised.value.code == "CR0208"
