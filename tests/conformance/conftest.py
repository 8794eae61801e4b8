"""Who is held to the contract: every backend of this machine that works here. The tests themselves ship with the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from composer_replication.sandbox import SandboxBackend, acceptance, choose_backend
from composer_replication.sandbox.bubblewrap import Bubblewrap
from composer_replication.sandbox.choice import BACKENDS
from composer_replication.sandbox.conformance.plugin import (
    HARMLESS_WITHOUT_ISOLATION,
    expect_failure,
    jail,
    tree,
)

__all__ = ["jail", "tree"]  # fixtures
TESTS = ("commands", "files", "limits", "walls")
pytest.register_assert_rewrite(*(f"composer_replication.sandbox.conformance.test_{name}" for name in TESTS))

BEST = "bubblewrap" if Bubblewrap().is_available().ok else "sandlock"
# make test-sandlock: the other sandboxes, and no sandbox at all, are held to the contract in make test.
IS_REPEATED = "no_bubblewrap" in os.environ.get("PYTHONPATH", "")
IN_EVERY_RUN = {
    BEST: TESTS,
    acceptance.WITHOUT_ISOLATION: (
        "commands",
    ),  # its files are read and written by what serves every backend here
    "bubblewrap-warm": ("walls",),  # the same jail, which stays: what may be left for the next command
}


def is_long(item: pytest.Item) -> bool:
    """Whether its sandbox, or this part of the contract for it, waits for the long run."""
    named = getattr(getattr(item, "callspec", None), "params", {})
    name = named.get("backend", named.get("name", ""))
    if IS_REPEATED:
        return name != "sandlock"
    if name == "sandlock" != BEST:
        return True
    part = getattr(item, "function", item).__module__.rpartition(".conformance.test_")[2]
    if part not in TESTS:
        return False
    return part not in IN_EVERY_RUN.get(name, ())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every run of the tests holds the best backend to the whole contract; ``make test-sandlock`` has sandlock as the best.

    The long one holds all to all of it.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent and is_long(item):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def backend_name(backend: SandboxBackend) -> str:
    return backend.name


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[SandboxBackend]:
    name = request.param
    test = request.node.originalname
    if name == acceptance.WITHOUT_ISOLATION and test not in HARMLESS_WITHOUT_ISOLATION:
        pytest.skip("not read as harmless: without a jail it might change what lies outside the tree")
    with ExitStack() as stack:
        if name == acceptance.WITHOUT_ISOLATION:
            acceptance.accept([acceptance.EVERYTHING])
            stack.callback(acceptance.forget)
        chosen = choose_backend(name)
        expect_failure(request, chosen, test)
        check = chosen.is_available()
        if not check.ok:
            pytest.skip(f"{name} is not available here: {check.detail}")
        yield chosen
