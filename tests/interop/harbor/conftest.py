"""The backend over an environment of ours that Harbor loads by its import path, and a tree."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.sandbox import SandboxBackend, choose_backend, harbor_backend
from composer_replication.sandbox.bwrap_program import find_bwrap
from composer_replication.sandbox.conformance.plugin import expect_failure, jail, tree

__all__ = ["jail", "tree"]  # fixtures
NAME = "harbor:bubblewrap_environment:BubblewrapEnvironment"
TESTS = ("commands", "files", "limits", "walls")
pytest.register_assert_rewrite(*(f"composer_replication.sandbox.conformance.test_{name}" for name in TESTS))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def machine() -> Iterator[None]:
    """Containers of ours can be made here; none is left."""
    if os.geteuid() != 0 or shutil.which("nsenter") is None or find_bwrap() is None:
        pytest.skip("the containers are made by bwrap and entered by nsenter, as root")
    before = set(Path(tempfile.gettempdir()).glob("harbor-composer-rl-*"))
    yield
    assert set(Path(tempfile.gettempdir()).glob("harbor-composer-rl-*")) <= before


@pytest.fixture
def backend_name() -> str:
    return NAME


@pytest.fixture
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SandboxBackend]:
    if request.node.originalname == "test_a_hundred_thousand_files":
        pytest.skip("what is tried is the machine's file system, not what a service is asked")
    chosen = choose_backend(NAME)
    expect_failure(request, chosen, request.node.originalname)
    yield chosen
    if any(
        tmp_path.glob("composer-rl-harbor-*")
    ):  # of a process with a temporary folder of its own, that was killed
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tempfile, "tempdir", str(tmp_path))
            harbor_backend._remove_orphans()
        assert not any(tmp_path.glob("harbor-composer-rl-*"))
