"""Builds on a real local Ray: the same bytes, workers that die, refusals that are final, addresses that lead nowhere."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from composer_replication.errors import ComposerError, InputError, MissingError, SandboxFailure, UsageError
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.gates import GateFailed
from composer_replication.tasks.intake.lock import UnusableRepository, wheel_path

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
from composer_replication.tasks import ray_connection, ray_pool  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MakeProject = Callable[[Mapping[str, str]], Path]
SMALL = {
    "planted.py": "def one():\n    return 11\n\n\ndef zero():\n    return 0\n",
    "test_planted.py": "import planted\n\n\ndef test_one():\n    assert planted.one() == 11\n\n\ndef test_two():\n    assert"
    " planted.one() > 10\n\n\ndef test_zero():\n    assert not planted.zero()\n\n\ndef test_nothing():\n    pass\n",
}


def open_pool(address: str) -> ray_pool.RayPool:
    return ray_pool.RayPool(
        address, jobs=2, backend=None, read_wheel=lambda wheel: wheel_path(wheel).read_bytes()
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_pool.RayPool]:
    """The one Ray of this file; functions of this file travel whole, a worker cannot import it."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with open_pool("local") as pool:
        yield pool
        folder = pool._connection._folder
    assert folder is not None and not folder.exists()
    assert not ray.is_initialized()


def note(log: Path) -> int:
    """One line a try; how many there are now."""
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return len(log.read_text().splitlines())


def refuse(log: Path) -> None:
    note(log)
    raise GateFailed("stub-passes", "planted")


def refuse_repository(log: Path) -> None:
    note(log)
    raise UnusableRepository("red-baseline", "planted")


def break_sandbox(log: Path) -> None:
    note(log)
    raise SandboxFailure("CR0302", "planted")


def find_damage(log: Path) -> None:
    note(log)
    raise InputError("CR0411", "planted", where="here")


def die_at_first(log: Path, times: int) -> int:
    tries = note(log)
    if tries <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return tries


def sleep_long(log: Path) -> None:
    note(log)
    time.sleep(600)


@pytest.mark.parametrize(
    ("work", "expected", "num_tries"),
    [(refuse, GateFailed, 1), (refuse_repository, UnusableRepository, 1), (find_damage, InputError, 1), (break_sandbox, SandboxFailure, 3)],
)  # fmt: skip
def test_refusals_are_final_and_broken_sandboxes_are_tried_again(
    cluster: ray_pool.RayPool, tmp_path: Path, work: Callable[[Path], None], expected: type[Exception], num_tries: int
) -> None:  # fmt: skip
    with pytest.raises(expected, match="planted") as caught:
        cluster.call(work, tmp_path / "log")
    assert len((tmp_path / "log").read_text().splitlines()) == num_tries
    assert type(caught.value) is expected
    if isinstance(caught.value, ComposerError):
        assert caught.value.message == "planted"


def test_a_worker_that_dies_is_replaced_twice_and_then_named(
    cluster: ray_pool.RayPool, tmp_path: Path
) -> None:
    assert cluster.call(die_at_first, tmp_path / "twice", 2) == 3
    with pytest.raises(SandboxFailure, match="CR0492"):
        cluster.call(die_at_first, tmp_path / "ever", 99)
    assert len((tmp_path / "ever").read_text().splitlines()) == 3


def test_an_interruption_kills_the_workers(cluster: ray_pool.RayPool, tmp_path: Path) -> None:
    pool = open_pool("auto")
    waiting = pool.submit(sleep_long, tmp_path / "log")
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text().endswith("\n"):
        time.sleep(0.05)
    pid = int((tmp_path / "log").read_text())
    pool.interrupt()
    with pytest.raises(SandboxFailure, match="CR0302"):
        waiting.result(60)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
    with pytest.raises(SandboxFailure, match="CR0302"):
        pool.submit(note, tmp_path / "log")
    pool.close()
    assert cluster.call(note, tmp_path / "after") == 1


def workers_at_work() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ray::composer-rl work"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_build_has_the_bytes_of_a_local_one_though_a_worker_is_killed(
    cluster: ray_pool.RayPool, make_project: MakeProject, tmp_path: Path
) -> None:
    source = str(make_project(SMALL))
    here = build_tasks([source], tmp_path / "here", jobs=2, with_truth=True)
    over, killed = threading.Event(), list[int]()

    def kill_one() -> None:
        while not killed and not over.is_set():
            for pid in workers_at_work()[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        there = build_tasks([source], tmp_path / "there", jobs=2, with_truth=True, ray_address="auto")
    finally:
        over.set()
        killer.join()
    assert len(killed) == 1
    assert there.tasks == here.tasks == 1
    assert there.fingerprint == here.fingerprint
    assert (tmp_path / "there" / "journal.jsonl").read_bytes() == (
        tmp_path / "here" / "journal.jsonl"
    ).read_bytes()


def test_this_program_is_in_one_cluster_only(cluster: ray_pool.RayPool) -> None:
    with pytest.raises(UsageError, match=r"CR0490.*cannot join local too"):
        open_pool("local")
    assert cluster.call(os.getpid) != os.getpid()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nothing_answers(form: str, make_project: MakeProject, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"CR0490: no Ray cluster can be joined") as caught:
        build_tasks([str(make_project(SMALL))], tmp_path / "out", ray_address=form.format(closed_port()))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "address", ["", "nowhere", "host:", "host:0", "host:70000", "http://host:80", "a b:1"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match=r"CR0490.*is no address"):
        ray_connection.RayConnection(address, 1)


def test_another_version_of_ray_is_one_sentence() -> None:
    told = "Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.9.1\nThis process was started with:\n    Ray: 2.60.0\n"
    error = ray_connection._refusal("auto", RuntimeError(told))
    assert error.code == "CR0493"
    assert "Ray 2.1.0, Python 3.9.1" in error.message
    assert ray_connection._refusal("auto", RuntimeError("anything else")).code == "CR0490"


def test_a_node_with_another_version_or_a_jail_that_breaks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_jail.py").write_text(
        "from composer_replication.errors import SandboxFailure\n\n\nclass Jail:\n    name = 'planted'\n\n"
        "    def is_available(self):\n        return None\n\n    def open(self, spec):\n        raise SandboxFailure('CR0302', 'planted')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    old = ray_pool.work(ray_pool._Call(os.getpid, (), {}, None, "0.0.0"))
    broken = ray_pool.work(ray_pool._Call(os.getpid, (), {}, "planted_jail:Jail", ray_pool.__version__))
    for answer, what in ((old, "and not 0.0.0"), (broken, "cannot be used")):
        with pytest.raises(MissingError, match=rf"CR0491: the node {socket.gethostname()} .*{what}"):
            answer.get()


def test_without_ray_the_extra_is_named(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "composer_replication.tasks.ray_pool", None)
    monkeypatch.delattr("composer_replication.tasks.ray_pool", raising=False)
    with pytest.raises(MissingError, match=r"CR0101.*needs ray") as caught:
        build_tasks([str(make_project(SMALL))], tmp_path / "out", ray_address="local")
    assert caught.value.fix == "pip install 'composer-replication[ray]'"
