"""Fakes of a container engine and of a cluster, over real sockets."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.sandbox.bwrap_program import find_bwrap

sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's."""
    folder = Path(tempfile.mkdtemp(prefix="fake-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engine(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    from engine_server import FakeEngine

    if find_bwrap() is None:
        pytest.skip("the fake runs its containers with bwrap, which is not here")
    with FakeEngine(short_folder) as running:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{running.socket_path}")
        yield running


@pytest.fixture
def cluster(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    from cluster_server import FakeCluster

    if find_bwrap() is None or os.geteuid() != 0 or shutil.which("nsenter") is None:
        pytest.skip("the fake runs its containers with bwrap and enters them with nsenter, as root")
    with FakeCluster(short_folder) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.write_kubeconfig(short_folder / "config")))
        monkeypatch.setenv("COMPOSER_RL_POD_IMAGE", "registry.example/trainer:1")
        yield running


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder
