"""What the environments share: a small store of real tasks, and the places of the tests' own modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from composer_replication.tasks.store import TaskStore

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / folder) for folder in (".", "openenv", "verifiers", "../fakes")]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    from tiny_store import build_store

    return build_store(tmp_path_factory.mktemp("interop-store") / "tasks")
