from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_replication.errors import MissingError, SandboxFailure, UsageError
from composer_replication.records import Check, Limits, SandboxSpec
from composer_replication.sandbox import (
    LocalSandbox,
    bwrap_program,
    choice,
    choose_backend,
    keeper_process,
    open_sandbox,
)
from composer_replication.sandbox.bubblewrap import Bubblewrap
from composer_replication.sandbox.calls import to_result
from composer_replication.sandbox.supervised_run import Ended, Verdict


class Absent:
    """A backend that does not work here."""

    name = "absent"

    def is_available(self) -> Check:
        return Check(self.name, False, "it is not here.")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        raise SandboxFailure("CR0302", f"opened for {spec.tree}.")


class Present(Absent):
    name = "present"

    def is_available(self) -> Check:
        return Check(self.name, True, "here.")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bublewrap", ["bubblewrap"]),
        ("docker", ["harbor:docker"]),  # a container is Harbor's
        ("podman", ["harbor:podman"]),
        ("harbor", ["harbor:docker"]),
        ("zzz", [*choice.BACKENDS]),  # like no other
        ("nosuch", []),
        *((path, []) for path in ("no_such_package:Class", "json:NoSuchClass", "json:JSONDecoder", "json:")),
    ],
)
def test_what_leads_to_no_backend_is_refused_with_its_neighbours(name: str, told: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        choose_backend(name)
    assert caught.value.code == "CR0305"
    assert all(other in caught.value.fix for other in told)
    assert "none?" not in caught.value.fix  # nobody is led to no isolation


def test_harbor_is_asked_for_where_it_is_missing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harbor.environments.factory", None)
    backend = choose_backend("harbor:docker")
    with pytest.raises(MissingError, match=r"3\.12 or newer") as caught:
        backend.open(SandboxSpec(tree))
    assert caught.value.code == "CR0101"
    assert "composer-replication[harbor]" in caught.value.fix
    assert not backend.is_available().ok


def test_the_first_that_works_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "BACKENDS", {"a": f"{__name__}:Absent", "b": f"{__name__}:Present"})
    assert choose_backend().name == "present"


def test_none_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "BACKENDS", {"a": f"{__name__}:Absent"})
    with pytest.raises(MissingError) as caught:
        choose_backend()
    assert caught.value.code == "CR0301"
    assert "it is not here" in caught.value.message
    assert "install" in caught.value.fix


def test_open_takes_a_name_or_an_object(tmp_path: Path) -> None:
    for chosen in (f"{__name__}:Present", Present()):
        with pytest.raises(SandboxFailure, match="opened for"):
            open_sandbox(SandboxSpec(tmp_path), chosen)


def test_a_first_start_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = choose_backend("bubblewrap")
    if not backend.is_available().ok:
        pytest.skip("not available here")
    monkeypatch.setattr(bwrap_program, "_remembered", {})

    def no_process(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", no_process)
        check = backend.is_available()
    assert (check.ok, os.strerror(errno.EAGAIN) in check.detail) == (False, True)
    assert backend.is_available().detail == check.detail  # a start that hangs costs its time once a minute
    now += 61
    assert backend.is_available().ok


def test_a_kernel_without_the_newest_landlock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_process, "_landlock_version", lambda: 5)
    check = keeper_process.Sandlock().is_available()
    if importlib.util.find_spec("sandlock") is not None:
        assert (check.ok, "has Landlock version 5 and sandlock needs 6" in check.detail) == (False, True)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'bwrap: no user namespaces' >&2; exit 1", "no user namespaces"),
        ("exit 0", "does not start a jail"),
        ("exec /nonexistent", "does not start a jail"),
    ],
)
def test_a_bwrap_that_fails_is_never_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (programs / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(bwrap_program, "_packaged", lambda: None)
    (tmp_path / "tree").mkdir()
    with (
        Bubblewrap().open(SandboxSpec(tmp_path / "tree")) as sandbox,
        pytest.raises(SandboxFailure) as caught,
    ):
        sandbox.exec(["true"], timeout_seconds=30)
    assert caught.value.code == "CR0302"
    assert said in caught.value.message


def test_a_sandlock_that_fails_is_never_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = choose_backend("sandlock")
    if not backend.is_available().ok:
        pytest.skip("sandlock is not available here")
    (tmp_path / "tree").mkdir()
    with backend.open(SandboxSpec(tmp_path / "tree")) as sandbox:
        monkeypatch.setattr(keeper_process, "_sandlock_path", lambda: str(tmp_path))
        with pytest.raises(SandboxFailure) as caught:
            sandbox.exec(["true"], timeout_seconds=30)
    assert caught.value.code == "CR0302"
    assert "sandlock" in caught.value.message


def test_a_sandlock_without_the_call_that_we_need_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is none of the library's public names, so that another version may not have it."""
    backend = choose_backend("sandlock")
    if not backend.is_available().ok:
        pytest.skip("sandlock is not available here")
    (tmp_path / "tree").mkdir()
    (tmp_path / "sandlock").mkdir()
    (tmp_path / "sandlock" / "__init__.py").touch()
    (tmp_path / "sandlock" / "_sdk.py").write_text("_lib = object()\n")
    handler = "class Handler: ...\nclass ExceptionPolicy: DENY_EPERM = 1\n"
    (tmp_path / "sandlock" / "handler.py").write_text(handler)
    with backend.open(SandboxSpec(tmp_path / "tree")) as sandbox:
        monkeypatch.setattr(keeper_process, "_sandlock_path", lambda: str(tmp_path))
        with pytest.raises(SandboxFailure, match="has no such call any more: pip install") as caught:
            sandbox.exec(["true"], timeout_seconds=30)
    assert caught.value.code == "CR0302"


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        (b'Traceback (most recent call last):\n  File "x", line 1\nOSError: refused\n', "OSError: refused."),
        (b" \n", "exit code 70."),
    ],
)
def test_why_it_did_not_start_is_one_line(stderr: bytes, why: str) -> None:
    ended = Ended(Verdict.ENDED, 70, b"", stderr, truncated=False, seconds=0.1)
    with pytest.raises(SandboxFailure) as caught:
        to_result(ended, b"<marker>", Limits(), backend="sandlock")
    assert caught.value.message == f"sandlock did not start the command: {why}"
