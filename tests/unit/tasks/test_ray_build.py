"""Builds on a real Ray on this machine: the same bytes, workers that die, interruptions, and errors of one sentence."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from composer_replication.errors import MissingError, SandboxFailure, UsageError
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.repository import make_bench
from composer_replication.tasks.store import TaskStore

sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
from ray_head import free_port, processes, running_ray

pytest.importorskip("ray", reason="the extra ray is not installed")
from ray.exceptions import RaySystemError, RayTaskError

from composer_replication.tasks.workers import ray_cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
COMPOSER_RL = (  # a shell may have started all of this in the background, where Ctrl-C is ignored
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " from composer_replication.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
WITHOUT_RAY = f"import sys; sys.modules['ray'] = None; {COMPOSER_RL}"
PROJECTS = {
    "one": "def one(more):\n    return 11 + more\n\n\ndef zero():\n    return 0\n",
    "two": 'def twice(text):\n    """Text two times."""\n    first = text\n    second = text\n    return first + second\n',
}
TESTS = {
    "one": "import one\n\n\ndef test_one():\n    assert one.one(0) == 11\n\n\ndef test_more():\n    assert one.one(5) > 15\n\n\n"
    "def test_zero():\n    assert not one.zero()\n\n\ndef test_nothing():\n    pass\n",
    "two": "import two\n\n\ndef test_twice():\n    assert two.twice('ab') == 'abab'\n\n\ndef test_long():\n    assert"
    " len(two.twice('abc')) == 6\n\n\ndef test_nothing():\n    pass\n",
}


@dataclass(frozen=True)
class Cluster:
    """A head of our own with one processor; its nodes know no cache, and its token is not ours otherwise."""

    address: str
    environment: dict[str, str]
    cache: Path
    scratch: Path
    session: int

    def build(self, sources: list[str], out: Path, *more: str) -> subprocess.Popen[str]:
        """Ours is the usual cache: no index is asked."""
        options = ["--out", str(out), "--json", "--quiet", "--ray", self.address, *more]
        return composer_rl(["tasks", "build", *sources, *options], self.environment)

    def workers(self) -> list[int]:
        """Processes that do work of ours now, on this cluster."""
        found = []
        for pid, words in processes():
            with suppress(ProcessLookupError):
                if words.startswith("ray::composer-rl work") and os.getsid(pid) == self.session:
                    found.append(pid)
        return found


def composer_rl(
    words: list[str], environment: dict[str, str], program: str = COMPOSER_RL
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The one Ray of this file."""
    with running_ray(tmp_path_factory.mktemp("ray")) as head:
        yield Cluster(head.address, head.token, head.cache, head.scratch, head.session)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("projects")
    for name, text in PROJECTS.items():
        (root / name).mkdir()
        (root / name / "pyproject.toml").write_text(f'[project]\nname = "planted-{name}"\nversion = "1.0"\n')
        (root / name / f"{name}.py").write_text(text)
        (root / name / f"test_{name}.py").write_text(TESTS[name])
    return [str(root / name) for name in PROJECTS]


@pytest.fixture(scope="module")
def local(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this machine builds without a cluster."""
    out = tmp_path_factory.mktemp("local") / "store"
    summary = build_tasks(sources, out, jobs=2, with_truth=True)
    assert summary.tasks == 2
    return out


def finished(build: subprocess.Popen[str]) -> dict[str, object]:
    told, complaint = build.communicate()
    assert build.returncode == 0, complaint
    return json.loads(told)


def assert_same(built: Path, local: Path) -> None:
    assert TaskStore.open(built).fingerprint == TaskStore.open(local).fingerprint
    assert (built / "journal.jsonl").read_bytes() == (local / "journal.jsonl").read_bytes()


def test_a_build_on_a_cluster_has_the_bytes_of_a_local_one(
    cluster: Cluster, sources: list[str], local: Path, tmp_path: Path
) -> None:
    result = finished(cluster.build(sources, tmp_path / "out"))
    assert (result["tasks"], result["rejected"]) == (2, {"stub-passes": 1})
    assert result["fingerprint"] == TaskStore.open(local).fingerprint
    assert_same(tmp_path / "out", local)
    assert any((cluster.cache / "environments").iterdir()), (
        "the node had none, and made it from what was sent"
    )


def wait_until_clean(cluster: Cluster) -> None:
    """No worker of ours is left there; the test's time-out ends it."""
    while cluster.workers():
        time.sleep(0.02)


def test_an_interrupted_or_killed_build_leaves_nothing_there_and_goes_on_though_one_is_killed(
    cluster: Cluster, sources: list[str], local: Path, tmp_path: Path
) -> None:
    build = cluster.build(sources, tmp_path / "out")
    while not cluster.workers():
        assert build.poll() is None, build.communicate()
        time.sleep(0.02)
    build.send_signal(signal.SIGINT)
    told, complaint = build.communicate()
    assert build.returncode == 130
    assert json.loads(told)["error"]["code"] == "CR0103"
    assert complaint.startswith("CR0103: interrupted.")
    assert complaint.count("\n") == 1
    wait_until_clean(cluster)

    build = cluster.build(sources, tmp_path / "out")
    while not (cluster.workers() and list(cluster.scratch.glob("composer-rl-scratch-*"))):
        assert build.poll() is None, build.communicate()
        time.sleep(0.02)
    build.kill()
    build.communicate()
    wait_until_clean(cluster)

    build = cluster.build(sources, tmp_path / "out")
    killed: list[int] = []
    while build.poll() is None and not killed:
        for pid in cluster.workers()[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        time.sleep(0.02)
    finished(build)
    assert len(killed) == 1
    assert_same(tmp_path / "out", local)


# --- errors ---------------------------------------------------------------------------


def only_sentence(build: subprocess.Popen[str], code: str) -> str:
    """What a build that cannot start says, on both of its outputs."""
    told, complaint = build.communicate()
    assert complaint.startswith(f"{code}: ")
    assert complaint.count("\n") == 1
    error = json.loads(told)["error"]
    assert error["code"] == code
    assert error["fix"]
    return str(error["message"])


def test_a_cluster_that_wants_another_token_is_one_sentence(
    cluster: Cluster, sources: list[str], tmp_path: Path
) -> None:
    other = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    stranger = replace(cluster, environment=other)
    build = stranger.build(sources, tmp_path / "out")
    assert "it wants a token" in only_sentence(build, "CR0490")
    assert build.returncode == 3


def test_without_ray_the_extra_is_named(sources: list[str], tmp_path: Path) -> None:
    words = ["tasks", "build", *sources, "--out", str(tmp_path / "out"), "--json", "--quiet", "--ray", "auto"]
    build = composer_rl(words, {}, WITHOUT_RAY)
    assert only_sentence(build, "CR0101") == "a build on a Ray cluster needs ray, which is not installed."
    assert build.returncode == 3


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nothing_answers(form: str) -> None:
    with pytest.raises(
        MissingError, match=r"^CR0490: the Ray cluster cannot be joined: [^\n]*refused[^\n]*$"
    ):
        ray_cluster.joined(form.format(free_port())).__enter__()


@pytest.mark.parametrize("address", ["", "nowhere", "local", "host:", "host:0", "host:70000", "http://host:80", "a b:1", "host:" + "1" * 5000])  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match=r"CR0490.*is no address"):
        ray_cluster.joined(address).__enter__()


def test_a_name_that_no_machine_has_is_one_sentence() -> None:
    with pytest.raises(MissingError, match=r"^CR0490: the Ray cluster cannot be joined: [^\n]*$"):
        ray_cluster.joined("a" * 64 + ":80").__enter__()


def test_the_wheels_of_a_repository_are_sent_once(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[object] = []
    monkeypatch.setattr(ray_cluster.ray, "put", lambda value: put.append(value) or len(put))
    store = TaskStore.create(tmp_path / "store")
    monkeypatch.setattr(store, "wheel", lambda wheel: wheel.sha256.encode())
    pool, bench = ray_cluster.RayPool(store), make_bench({}, environment, None)
    references = [pool._send(one) for one in (bench, bench, replace(bench, suite_seconds=1.0))]
    assert references[0] == references[1] != references[2]
    assert len([value for value in put if isinstance(value, dict)]) == 1


def test_another_version_of_ray_is_one_sentence() -> None:
    told = "Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.9.1\nThis process was started with:\n    Ray: 2.60.0\n"
    error = ray_cluster._refusal("auto", RuntimeError(told))
    assert error.code == "CR0490"
    assert (
        "started with: Ray: 2.1.0 Python: 3.9.1 This process was started with: Ray: 2.60.0" in error.message
    )
    assert ray_cluster._refusal("auto", RuntimeError("anything. else")).message == (
        "the Ray cluster cannot be joined: anything. else."
    )


def test_a_node_that_would_give_other_bytes_or_whose_jail_breaks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_jail.py").write_text(
        "from composer_replication.errors import SandboxFailure\n\n\nclass Jail:\n    name = 'planted'\n\n"
        "    def is_available(self):\n        return None\n\n    def open(self, spec):\n        raise SandboxFailure('CR0302', 'planted')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    _, programs = ray_cluster.needs_of(None)
    for needs, kind, what in (
        ((None, "other programs"), MissingError, f"has {programs} and not other programs"),
        (
            ("planted_jail:Jail", programs),
            SandboxFailure,
            "cannot be used: the sandbox planted does not hold",
        ),
    ):
        with pytest.raises(MissingError, match=rf"CR0491: the node {socket.gethostname()} {what}") as caught:
            ray_cluster.do_work(needs, os.getpid, {})
        assert type(caught.value) is kind, "what Ray tries again"


def test_what_ray_says_of_a_node_without_this_program_is_one_sentence() -> None:
    told = "The remote function failed to import on the worker. This may be because\nModuleNotFoundError: planted"
    with pytest.raises(MissingError, match=r"^CR0491: a node of the cluster cannot import .* Next: pip"):
        ray_cluster.raise_of_work(RayTaskError("f", "", RuntimeError(told)))
    lost = RaySystemError("No module named 'planted'. And\nmore")
    assert ray_cluster.raise_of_work(RayTaskError("f", "", lost)) is lost
    own = KeyError("a bug of ours")
    with pytest.raises(KeyError) as caught:
        ray_cluster.raise_of_work(RayTaskError("f", "", own))
    assert caught.value is own
