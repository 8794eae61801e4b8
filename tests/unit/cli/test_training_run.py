"""How a run of ``train`` ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.cli.training_run import _train
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
