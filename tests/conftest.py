"""Property tests have no deadline: how long an example takes says something about the machine only."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

TINY = Path(__file__).parents[1] / "recipes" / "tiny-cpu" / "project"
TINY_PINS = (
    "tinymath/numbers.py::clamp",
    "tinymath/numbers.py::mean",
    "tinymath/numbers.py::sign",
    "tinymath/text.py::initials",
    "tinymath/text.py::is_palindrome",
    "tinymath/vector.py::Vector.length",
)

BuildTiny = Callable[[Path, Sequence[str]], Path]


@pytest.fixture(scope="session")
def build_tiny(tmp_path_factory: pytest.TempPathFactory) -> BuildTiny:
    """Builds a store of some of ``TINY_PINS``, in a folder that is not there yet; gives the folder.

    All of them are built once for all workers. Each call goes on with that build in a copy of it,
    which leaves exactly what a build of the wanted ones gives, without a run in a sandbox.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def build(folder: Path, pins: Sequence[str]) -> Path:
        from composer_replication.tasks.build import build_tasks

        with (shared / "tiny-tasks.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            build_tasks([str(TINY)], shared / "tiny-tasks", symbols={str(TINY): TINY_PINS})
        shutil.copytree(shared / "tiny-tasks", folder)
        assert set(pins) <= set(TINY_PINS)
        assert build_tasks([str(TINY)], folder, symbols={str(TINY): pins}).tasks == len(pins)
        return folder

    return build
