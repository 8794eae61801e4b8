"""Who is held to the contract: every backend that works on this machine, and those that need a service
over a fake one. A fake confines exactly as far as it is asked to, so what holds there was asked for;
that a real engine or cluster does what it is asked is not shown here. The tests themselves ship with
the package.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from composer_replication.interfaces import SandboxBackend
from composer_replication.sandbox import acceptance, choose_backend
from composer_replication.sandbox.bubblewrap import Bubblewrap
from composer_replication.sandbox.bwrap_program import find_bwrap
from composer_replication.sandbox.choice import BACKENDS
from composer_replication.sandbox.conformance.plugin import expect_failure, jail, tree
from composer_replication.sandbox.conformance.which_tests import (
    HARMLESS_WITHOUT_ISOLATION,
    RENAMES_TEMPORARY_FILES,
)

__all__ = ["jail", "tree"]  # fixtures
TESTS = ("bad_input", "commands", "ends", "files", "limits", "walls")
pytest.register_assert_rewrite(*(f"composer_replication.sandbox.conformance.test_{name}" for name in TESTS))

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

OVER_FAKES = ("docker-over-fake", "podman-over-fake", "kubernetes-over-fake")
NEVER_OVER_FAKES = {
    RENAMES_TEMPORARY_FILES: "it would rename all of /tmp if the fake had a hole",
    "test_a_hundred_thousand_files": "what is tried is the machine's file system, not what a service is asked",
}


DEEP_FOLDERS = "test_folders_too_deep_to_be_removed_do_not_stay"
BEST = "bubblewrap" if Bubblewrap().is_available().ok else "sandlock"
IN_EVERY_RUN = {
    BEST: TESTS,
    acceptance.WITHOUT_ISOLATION: TESTS,  # a few, without a jail to start
    "sandlock": ("walls",) if BEST != "sandlock" else TESTS,  # make test-sandlock holds it to all
    "bubblewrap-warm": ("walls", "ends"),  # the same jail, which stays: what may be left for the next command
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every run of the tests holds the best backend to the whole contract, the others to what they do otherwise.

    The long one holds all to all of it.
    """
    for item in items:
        part = getattr(item, "function", item).__module__.rpartition(".conformance.test_")[2]
        if part not in TESTS or "-over-" in item.name:
            continue
        name = item.callspec.params.get("backend", BEST)  # type: ignore[attr-defined]
        if part not in IN_EVERY_RUN.get(name, ()) or (item.name.startswith(DEEP_FOLDERS) and name != BEST):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def backend_name(backend: SandboxBackend) -> str:
    return backend.name


@pytest.fixture(
    params=[*sorted(BACKENDS), *(pytest.param(name, marks=pytest.mark.fakes) for name in OVER_FAKES)]
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxBackend]:
    name, _, fake = request.param.partition("-over-")
    test = request.node.originalname
    if name == acceptance.WITHOUT_ISOLATION and test not in HARMLESS_WITHOUT_ISOLATION:
        pytest.skip("not read as harmless: without a jail it might change what lies outside the tree")
    if fake and test in NEVER_OVER_FAKES:
        pytest.skip(NEVER_OVER_FAKES[test])
    with ExitStack() as stack:
        if fake:
            _start_fake(name, stack, monkeypatch)
        if name == acceptance.WITHOUT_ISOLATION:
            acceptance.accept([acceptance.EVERYTHING])
            stack.callback(acceptance.forget)
        chosen = choose_backend(name)
        expect_failure(request, chosen, test)
        if not fake:
            check = chosen.is_available()
            if not check.ok:
                pytest.skip(f"{name} is not available here: {check.detail}")
        yield chosen


def _start_fake(name: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_bwrap() is None:
        pytest.skip("the fakes run their containers with bwrap, which is not here")
    folder = Path(tempfile.mkdtemp(prefix="fake-"))  # short: a socket's path has 107 bytes
    folder.chmod(0o755)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    if name == "kubernetes":
        if os.geteuid() != 0 or shutil.which("nsenter") is None:
            pytest.skip("the fake cluster enters its containers with nsenter, which only root may")
        from cluster_server import FakeCluster

        cluster = stack.enter_context(FakeCluster(folder))
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(folder / "config")))
        monkeypatch.setenv("COMPOSER_RL_POD_IMAGE", "registry.example/trainer:1")
        return
    from engine_server import FakeEngine

    engine = stack.enter_context(FakeEngine(folder))
    if name == "podman":
        engine.api_version, engine.components = "1.41", [{"Name": "Podman Engine", "Version": "5.0.0"}]
    variable = "CONTAINER_HOST" if name == "podman" else "DOCKER_HOST"
    monkeypatch.setenv(variable, f"unix://{engine.socket_path}")
