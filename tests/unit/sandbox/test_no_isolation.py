"""No isolation, and what a person accepts to do without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import Check, Limits, SandboxSpec
from composer_replication.sandbox import LocalSandbox, acceptance, choose_backend, require_selftest, selftest
from composer_replication.sandbox.keeper_process import NoIsolation


@pytest.fixture(autouse=True)
def nothing_accepted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    acceptance.forget()
    monkeypatch.setattr(selftest, "_passed", {})
    yield
    acceptance.forget()


class Lacking:
    """A backend whose self-test finds two guards missing."""

    name = "lacking"

    def is_available(self) -> Check:
        return Check(self.name, True, "here")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        raise SandboxFailure("CR0302", f"never opened for {spec.tree}.")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def run(backend: object, **_: object) -> list[Check]:
        found.append(str(backend))
        return [Check(name, name not in ("disk", "memory"), "tried") for name in selftest.GUARDS]

    monkeypatch.setattr(selftest, "run_selftest", run)
    return found


def test_the_names_are_those_of_the_self_test() -> None:
    assert tuple(selftest.GUARDS) == acceptance.GUARD_NAMES


@pytest.mark.parametrize("name", ["none", "composer_replication.sandbox.keeper_process:NoIsolation"])
def test_it_is_refused_until_everything_is_accepted(name: str) -> None:
    for names in ([], ["disk"], list(acceptance.GUARD_NAMES)):
        acceptance.accept(names)
        with pytest.raises(UsageError, match="CR0340"):
            choose_backend(name)
    acceptance.accept(["everything"])
    assert choose_backend(name).name == "none"


def test_an_unknown_guard() -> None:
    with pytest.raises(UsageError, match="did you mean disk") as caught:
        acceptance.accept(["dsik"], where="sandbox.accept_no_isolation")
    assert (caught.value.code, caught.value.where) == ("CR0340", "sandbox.accept_no_isolation")
    assert acceptance.accepted() == ()
    with pytest.raises(UsageError):
        require_selftest(Lacking(), accepted=("zzz",))


def test_a_reward_needs_every_guard_that_is_not_accepted(tried: list[str]) -> None:
    with pytest.raises(SandboxFailure, match=r"CR0306.*memory.*disk"):
        require_selftest(Lacking())
    with pytest.raises(SandboxFailure) as caught:
        require_selftest(Lacking(), accepted=("disk", "network"))
    assert "memory" in str(caught.value)
    assert "disk (" not in str(caught.value)
    assert require_selftest(Lacking(), accepted=("disk", "memory")) == ("memory", "disk")
    assert len(tried) == 3


def test_what_was_let_through_once_is_still_held_to_what_is_accepted(tried: list[str]) -> None:
    assert require_selftest(Lacking(), accepted=("everything",)) == ("memory", "disk")
    with pytest.raises(SandboxFailure, match="memory"):
        require_selftest(Lacking(), accepted=("disk",))
    acceptance.accept(["disk", "memory"])
    assert require_selftest(Lacking()) == ("memory", "disk")
    assert len(tried) == 1


def test_without_any_isolation_nothing_is_tried(tried: list[str]) -> None:
    with pytest.raises(SandboxFailure):
        require_selftest(NoIsolation())
    assert require_selftest(NoIsolation(), accepted=("everything",)) == ("everything",)
    assert len(tried) == 1


def test_limits_are_set(tmp_path: Path) -> None:
    limits = Limits(disk_bytes=1 << 20, num_open_files=33, memory_bytes=256 << 20)
    with NoIsolation().open(SandboxSpec(tmp_path, limits=limits)) as sandbox:
        result = sandbox.exec("ulimit -n; ulimit -f; ulimit -c", timeout_seconds=30)
        assert result.stdout.split() == ["33", "2048", "0"]
        over = sandbox.exec("head -c 5000000 /dev/zero > big", timeout_seconds=30)
    assert over.exit_code != 0
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def test_a_program_that_cannot_be_started_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NoIsolation().open(SandboxSpec(tmp_path)) as sandbox:
        monkeypatch.setattr("sys.executable", "/nonexistent/python")
        with pytest.raises(SandboxFailure) as caught:
            sandbox.exec(["true"], timeout_seconds=30)
    assert caught.value.code == "CR0302"
