"""The self-test can fail: a backend without isolation, or with one guard missing, is named and refused."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox import (
    LocalSandbox,
    SandboxBackend,
    choose_backend,
    require_selftest,
    run_selftest,
    selftest,
)


class PlainSandbox(LocalSandbox):
    """A subprocess in the tree and nothing else: what must never run a model's code."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec, None)

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        started = time.monotonic()
        code, is_late = 137, False
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                code = subprocess.run(
                    argv,
                    cwd=self.tree,
                    input=stdin,
                    stdout=out,
                    stderr=err,
                    timeout=timeout_seconds,
                    env={**environment, **os.environ},
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                is_late = True
            out.seek(0)
            err.seek(0)
            stdout, stderr = out.read().decode(errors="replace"), err.read().decode(errors="replace")
        return ExecResult(code, stdout, stderr, False, is_late, False, time.monotonic() - started)


class Plain:
    name = "plain"

    def is_available(self) -> Check:
        return Check(self.name, True, "a subprocess")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        return PlainSandbox(spec)


class Leaky:
    """A real backend that hands the parent's environment in."""

    name = "leaky"

    def __init__(self) -> None:
        self._real = choose_backend()

    def is_available(self) -> Check:
        return self._real.is_available()

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        return LeakySandbox(spec, self._real)


class LeakySandbox(PlainSandbox):
    def __init__(self, spec: SandboxSpec, real: SandboxBackend) -> None:
        super().__init__(spec)
        self._real = real.open(spec)

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        leak = {name: value for name, value in os.environ.items() if name.startswith("COMPOSER_RL_BAIT")}
        given = {**leak, "PATH": environment["PATH"]}
        return self._real.exec(argv, timeout_seconds=timeout_seconds, stdin=stdin, env=given)

    def close(self) -> None:
        self._real.close()
        super().close()


class Shows:
    """A real backend that shows one folder too many."""

    name = "shows"

    def __init__(self, folder: Path) -> None:
        self._real = choose_backend()
        self._folder = folder

    def is_available(self) -> Check:
        return self._real.is_available()

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        return self._real.open(replace(spec, read_only=(*spec.read_only, self._folder)))


class Broken(Plain):
    """A backend whose jail never starts."""

    name = "broken"

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        raise SandboxFailure("CR0302", "it does not start.")


@pytest.fixture
def works_here() -> None:
    try:
        choose_backend()
    except MissingError as error:
        pytest.skip(f"no sandbox here: {error}")


def test_a_plain_subprocess_fails_every_guard_and_is_refused_by_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Check] = []

    def tell(backend: SandboxBackend, **options: Any) -> list[Check]:
        tried.extend(run_selftest(backend, **options))
        return tried

    monkeypatch.setattr(selftest, "run_selftest", tell)
    monkeypatch.setattr(selftest, "_DISK_KINDS", dict.fromkeys(selftest._DISK_KINDS, 0.1))  # nobody looks
    with pytest.raises(SandboxFailure) as caught:
        require_selftest(Plain())
    # Privileges depend on who runs the tests; every other guard is absent for certain.
    assert {check.name for check in tried if not check.ok} | {"privilege"} == set(selftest.GUARDS)
    assert caught.value.code == "CR0306"
    for name in ("network", "host_files", "environment", "writes", "signals", "timeout", "disk", "memory"):
        assert name in str(caught.value)
    (host_files,) = (check for check in tried if check.name == "host_files")
    assert "runs/run.toml" in host_files.detail and "tasks/secrets/hidden.py" in host_files.detail


@pytest.mark.long
@pytest.mark.usefixtures("works_here")
def test_one_missing_guard_is_named_alone() -> None:
    failed = [check for check in run_selftest(Leaky()) if not check.ok]
    assert [check.name for check in failed] == ["environment"]
    assert failed[0].fix


@pytest.mark.usefixtures("works_here")
def test_a_run_folder_that_is_shown_is_refused_when_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The planted ones stay hidden, so only the real folder tells; also after the backend was let through."""
    monkeypatch.setattr(selftest, "_passed", {})
    monkeypatch.setattr(
        selftest, "GUARDS", {"host_files": selftest.GUARDS["host_files"]}
    )  # the others take long
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "rollouts" / "first.jsonl").write_text("{}")
    (tmp_path / "run" / "LOCK").touch()
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    backend = Shows(tmp_path / "run")
    assert require_selftest(backend) == ()
    for _ in range(2):
        with pytest.raises(SandboxFailure, match=r"CR0306.*host_files \(could read .*first\.jsonl"):
            require_selftest(backend, unseen=[tmp_path / "run"])
    assert require_selftest(backend, ["host_files"], unseen=[tmp_path / "run"]) == ("host_files",)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").rename(tmp_path / "runs")  # as the current folder's it is tried without being named
    (check,) = run_selftest(Shows(tmp_path / "runs"), names=["host_files"])
    assert not check.ok


def test_a_jail_that_does_not_start_passes_nothing() -> None:
    checks = run_selftest(Broken())
    assert [check.name for check in checks if check.ok] == []
    assert "CR0302" in checks[0].detail


@pytest.mark.usefixtures("works_here")
def test_only_success_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def count(backend: SandboxBackend, **_: object) -> list[Check]:
        tried.append(backend.name)
        return [Check("network", backend.name == "leaky", "counted")]

    monkeypatch.setattr(selftest, "run_selftest", count)
    monkeypatch.setattr(selftest, "_passed", {})
    require_selftest(Leaky())
    require_selftest(Leaky())
    for _ in range(2):
        with pytest.raises(SandboxFailure):
            require_selftest(Broken())
    assert tried == ["leaky", "broken", "broken"]
