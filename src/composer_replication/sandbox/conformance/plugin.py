"""The pytest plugin of the contract's tests: which backend, its known failures, a tree and a sandbox around it; what the tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from composer_replication.records import ExecResult, Limits, SandboxSpec
from composer_replication.sandbox.choice import SandboxBackend, choose_backend
from composer_replication.sandbox.host_paths import base_python
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.selftest import run_selftest

OPTION = "--sandbox-backend"
MIB = 1 << 20
LONG_SECONDS = 60.0
_PAUSE_SECONDS = 0.02
# A test that tries to get out does get out where nothing holds it, and changes this very machine (one of
# them renames all of /tmp). So this is a list of what may run without a jail: a test is not on it
# until somebody has read that it touches nothing but its tree.
HARMLESS_WITHOUT_ISOLATION = frozenset(
    """
    test_what_comes_back test_one_text_is_for_the_shell
    test_large_stdin_and_stdout_do_not_block_each_other
    test_environment_holds_what_env_names_and_nothing_of_ours
    test_each_stream_is_cut test_time_out_kills_daemons
    test_a_child_that_keeps_the_output_open_does_not_hold_us test_several_commands_in_one_sandbox_at_once
    test_memory_of_one_process test_paths_that_cannot_be_shown_are_refused
    test_what_is_written_is_read_inside_and_outside test_a_written_file_belongs_to_the_user_inside
    test_writing_replaces_files_alone_and_leaves_nothing_beside test_links_inside_are_followed
    test_an_unknown_snapshot_and_a_closed_sandbox_are_refused
    test_a_tree_that_a_command_closed_is_open_to_the_next_call
    test_what_a_command_closed_is_kept_and_comes_back
    test_a_closed_folder_is_listed_and_open_again_afterwards
    test_what_is_no_call_is_refused_before_anything_starts test_limits_that_nothing_can_hold_are_refused
    test_a_tree_that_is_gone_is_a_failure_of_the_sandbox test_a_socket_in_the_tree_is_refused
    test_a_command_that_is_too_long_is_an_ordinary_result
    test_text_that_no_call_of_the_system_takes_is_refused
""".split()
)


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
    named: Mapping[str, str] = getattr(chosen, "known_failures", {})
    reason = named.get(test)
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
def jail(backend: SandboxBackend, tree: Path) -> Iterator[LocalSandbox]:
    """An open sandbox around ``tree``."""
    with backend.open(SandboxSpec(tree)) as sandbox:
        yield sandbox


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A backend with a guard that does not hold fails, though the tests that need it were not run."""
    name = session.config.getoption(OPTION)
    if name and session.exitstatus == pytest.ExitCode.OK and unheld_guards(str(name)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def python(code: str) -> list[str]:
    """The command that runs ``code`` with the interpreter that every sandbox shows."""
    return [str(base_python()), "-I", "-c", code]


def run(sandbox: LocalSandbox, command: Any, **given: Any) -> ExecResult:
    """One command with plenty of time."""
    return sandbox.exec(command, timeout_seconds=LONG_SECONDS, **given)


def run_limited(backend: SandboxBackend, tree: Path, command: Any, **limits: int) -> ExecResult:
    """One command in a sandbox of its own, with these limits."""
    with backend.open(SandboxSpec(tree, limits=Limits(**limits))) as sandbox:
        return run(sandbox, command)


def living(token: str) -> list[int]:
    """Processes anywhere on this machine whose command line holds the token."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if token in (entry / "cmdline").read_text(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition: Callable[[], object], patience_seconds: float = 30.0) -> None:
    """Look until it is so; an ``AssertionError`` when patience is over."""
    deadline = time.monotonic() + patience_seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError("it did not come about")
        time.sleep(_PAUSE_SECONDS)


def open_to_all(path: Path) -> None:
    """Open a folder to every user: as root the jail runs as another one, and only the jail may be what stops it."""
    for entry in (path, *path.rglob("*")):
        entry.chmod(0o755 if entry.is_dir() else 0o644)


def start_ours(code: str, temporary: Path) -> subprocess.Popen[str]:
    """Start ``code`` in an interpreter that imports what this one does, with a temporary folder of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
