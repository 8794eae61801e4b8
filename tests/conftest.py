"""Property tests have no deadline: how long an example takes says something about the machine only."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import pickle
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

TINY = Path(__file__).parents[1] / "recipes" / "tiny-cpu" / "project"
TINY_PINS = (
    "tinymath/numbers.py::absolute",
    "tinymath/numbers.py::clamp",
    "tinymath/numbers.py::mean",
    "tinymath/numbers.py::sign",
    "tinymath/numbers.py::square",
    "tinymath/text.py::initials",
    "tinymath/vector.py::Vector.length",
)

DURATIONS = Path(__file__).parents[1] / "build" / "durations"
LEAST_TESTS_OF_A_TABLE = 20  # a file run by hand needs none

BuildTiny = Callable[..., Path]
MadeOnce = Callable[[str, Callable[[], Any]], Any]

LONGEST_FIRST = (
    "e2e", "invariants", "unit/trainer", "negative", "conformance", "unit/tasks", "unit/sandbox", "unit/rollouts",
)  # fmt: skip


@pytest.hookimpl(trylast=True)  # in random order otherwise
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders whose files take long begin first: at the end no worker waits for another one's long file."""

    def place(item: pytest.Item) -> int:
        fits = (item.nodeid.startswith(f"tests/{folder}/") for folder in LONGEST_FIRST)
        return next((number for number, is_there in enumerate(fits) if is_there), len(LONGEST_FIRST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Bytecode is kept of the tests, and none is written by what they run.

    Two texts that a test writes in one second would be taken for one, and of a file that a full disk cut off the
    half would stay. What is there by now stays to the end: Transformers asks for garbage after each training, and
    would look through thousands of tests and all their libraries for it.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each test took, its set-up and end included, is kept: a line each in build/durations."""
    seconds: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
    if len(seconds) < LEAST_TESTS_OF_A_TABLE or "PYTEST_XDIST_WORKER" in os.environ:
        return
    DURATIONS.mkdir(parents=True, exist_ok=True)
    lines = [f"{spent:9.2f}  {name}\n" for name, spent in seconds.most_common()]
    (DURATIONS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt").write_text("".join(lines))


@pytest.fixture(scope="session")
def folder_of_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def made_once(folder_of_workers: Path) -> MadeOnce:
    """What is made under a name, by the worker that asks first; each gets a copy of its own."""

    def made(name: str, make: Callable[[], Any]) -> Any:
        kept = folder_of_workers / f"{name}.pickle"
        with (folder_of_workers / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_bytes(pickle.dumps(make()))
        return pickle.loads(kept.read_bytes())

    return made


@pytest.fixture(scope="session", autouse=True)
def one_selftest(made_once: MadeOnce) -> None:
    """The self-test of a jail of ours is made by one worker for all of them, as it is by one run for all its sandboxes.

    A further worker tries only the folders that its own run must not see. Tests of the self-test call the real one, or put
    another in its place.
    """
    from composer_replication.sandbox import bubblewrap, keeper_process, selftest

    real, guards = selftest.run_selftest, selftest.GUARDS
    ours = (bubblewrap.Bubblewrap, bubblewrap.WarmBubblewrap, keeper_process.Sandlock)

    def run(backend: Any, *, names: Any = guards, **asked: Any) -> Any:
        if type(backend) not in ours or names is not guards or selftest.GUARDS is not guards:
            return real(backend, names=names, **asked)
        own: list[Any] = []
        checks = made_once(f"selftest-{backend.name}", lambda: own.append(1) or real(backend, **asked))
        if own:
            return checks
        if not all(check.ok for check in checks):
            return real(backend, **asked)
        tried = {check.name: check for check in real(backend, names=["host_files"], **asked)}
        return [tried.get(check.name, check) for check in checks]

    selftest.run_selftest = run


@pytest.fixture(scope="session")
def build_tiny(folder_of_workers: Path) -> BuildTiny:
    """Builds a store of some of ``TINY_PINS``, in a folder that is not there yet; gives the folder.

    All of them are built once for all workers, and each choice of them once more: it goes on with a copy of that build,
    which leaves exactly what a build of the wanted ones gives, without a run in a sandbox.
    """

    def kept(pins: Sequence[str]) -> Path:
        from composer_replication.tasks.build import build_tasks

        folder = folder_of_workers / "-".join(["tiny", *(str(TINY_PINS.index(pin)) for pin in pins)])
        if not folder.exists():
            begun = folder_of_workers / "tiny-begun"
            if tuple(pins) != TINY_PINS:
                shutil.copytree(kept(TINY_PINS), begun, dirs_exist_ok=True)
            assert build_tasks([str(TINY)], begun, symbols={str(TINY): pins}).tasks == len(pins)
            begun.rename(folder)
        return folder

    def build(folder: Path, pins: Sequence[str] = TINY_PINS) -> Path:
        with (folder_of_workers / "tiny-tasks.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = kept(pins)
        shutil.copytree(found, folder)
        return folder

    return build
