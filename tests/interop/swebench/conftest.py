"""The store of the faces' tests, and what lies beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from composer_replication.tasks.store import TaskStore

sys.path[:0] = [
    str(Path(__file__).parents[1]),
    str(Path(__file__).parents[2] / "fakes"),
]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    from tiny_store import build_store

    return build_store(tmp_path_factory.mktemp("face-store") / "tasks")
