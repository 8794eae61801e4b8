"""The pytest plugin of the contract's tests: which backend, its known failures, a tree and a sandbox around it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import SandboxSpec
from composer_replication.sandbox.choice import choose_backend
from composer_replication.sandbox.conformance.which_tests import HARMLESS_WITHOUT_ISOLATION, known_failures
from composer_replication.sandbox.selftest import run_selftest

OPTION = "--sandbox-backend"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--sandbox-backend NAME``."""
    parser.addoption(
        OPTION,
        metavar="NAME",
        help="whom to hold to the contract of sandboxes: a known name, or package.module:Class",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Say what our markers mean."""
    config.addinivalue_line("markers", "long: takes more than some seconds")


@pytest.fixture
def backend_name(request: pytest.FixtureRequest) -> str:
    """What ``choose_backend`` is given, here and in processes that a test starts."""
    name = request.config.getoption(OPTION)
    if not name:
        raise pytest.UsageError(f"{OPTION} NAME says whom to test")
    return str(name)


@lru_cache
def unheld_guards(name: str) -> tuple[str, ...]:
    """The guards of the self-test that this backend does not hold; asked once."""
    return tuple(check.name for check in run_selftest(choose_backend(name)) if not check.ok)


@pytest.fixture
def backend(request: pytest.FixtureRequest, backend_name: str) -> SandboxBackend:
    """The backend, once its self-test has said what may be tried on it."""
    chosen = choose_backend(backend_name)
    test = getattr(request.node, "originalname", request.node.name)
    unheld = unheld_guards(backend_name)
    if unheld and test not in HARMLESS_WITHOUT_ISOLATION:
        pytest.skip(f"it would get out: the self-test says that these do not hold: {', '.join(unheld)}")
    expect_failure(request, chosen, test)
    return chosen


def expect_failure(request: pytest.FixtureRequest, chosen: SandboxBackend, test: str) -> None:
    """Let a test that is known to fail, fail, with its reason; it counts against the backend when it does not."""
    reason = known_failures(chosen).get(test)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An empty folder beside one secret."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (tmp_path / "secret").write_text("hush")
    return folder


@pytest.fixture
def jail(backend: SandboxBackend, tree: Path) -> Iterator[Sandbox]:
    """An open sandbox around ``tree``."""
    with backend.open(SandboxSpec(tree)) as sandbox:
        yield sandbox
