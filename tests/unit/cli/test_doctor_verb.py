from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from composer_replication.cli import doctor_verb
from composer_replication.cli.main import main
from composer_replication.errors import MissingError
from composer_replication.records import Check
from composer_replication.sandbox import SandboxBackend, choice, selftest
from composer_replication.sandbox.bubblewrap import Bubblewrap
from composer_replication.sandbox.keeper_process import Sandlock

GOOD, BAD = Check("good", True, "fine"), Check("bad", False, "broken", "mend it")
OPTIONAL = [Check(name, False, "broken", "mend it") for name in ("gpu", "ports", "sandbox other")]


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(*found: Check) -> None:
        monkeypatch.setattr(doctor_verb, "all_checks", lambda progress: list(found))

    return use


@pytest.mark.parametrize(
    ("found", "is_ok"), [([GOOD], True), ([GOOD, BAD], False), ([GOOD, *OPTIONAL], True)]
)
def test_ok_means_all_that_is_required(
    findings: Callable[..., None], capsys: pytest.CaptureFixture[str], found: list[Check], *, is_ok: bool
) -> None:
    findings(*found)
    assert main(["doctor", "--json"]) == (0 if is_ok else 3)
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is is_ok
    assert result["checks"][0] == {"name": "good", "ok": True, "detail": "fine", "fix": ""}


def test_a_person_sees_the_next_step_of_what_fails(
    findings: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    findings(GOOD, BAD)
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "-> mend it" in out
    assert out.count("->") == 1


def test_on_this_machine_every_check_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing, but for most guards of each self-test: the shape and the exit code fit whatever the answers are."""
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path))
    few = {name: selftest.GUARDS[name] for name in ("network", "writes")}
    monkeypatch.setattr(selftest, "GUARDS", few)
    exit_code = main(["doctor", "--json", "--quiet"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    assert exit_code == (0 if result["ok"] else 3)
    names = [check["name"] for check in result["checks"]]
    assert names[:2] == ["platform", "python"]
    assert {"cores", "memory", "cache", "disk", "torch", "sandbox", "ports", "gpu"} <= set(names)
    assert len(names) == len(set(names))
    assert all(check["detail"] for check in result["checks"])
    assert all(check["fix"] for check in result["checks"] if not check["ok"])


def test_elsewhere_than_linux_it_is_said_first() -> None:
    check = doctor_verb.check_platform("darwin")
    assert not check.ok
    assert "guard and reports run here" in check.detail
    assert "docker or podman" in check.fix
    assert doctor_verb.check_platform("linux").ok


def test_a_loopback_that_is_down_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_verb.check_loopback().ok
    down = Mock(side_effect=OSError(99, "Cannot assign requested address"))
    monkeypatch.setattr(doctor_verb.socket, "create_server", down)
    check = doctor_verb.check_loopback()
    assert not check.ok and "Cannot assign requested address" in check.detail and "lo up" in check.fix


@pytest.mark.parametrize(("gigabytes", "is_enough"), [(5.9, False), (6.0, True), (64.0, True)])
def test_memory_of_the_quick_start(gigabytes: float, *, is_enough: bool) -> None:
    check = doctor_verb.check_room("memory", int(gigabytes * 10**9), 6 * 10**9, "a larger machine")
    assert (check.ok, check.fix) == (is_enough, "" if is_enough else "a larger machine")
    assert check.detail == f"{gigabytes:.1f} GB free, the quick start needs 6 GB"


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 32000000 kB\nMemAvailable:   16000000 kB\n")
    assert doctor_verb.available_memory_bytes(meminfo, tmp_path) == 16_000_000 * 1024
    (tmp_path / "memory.max").write_text("4000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    assert doctor_verb.available_memory_bytes(meminfo, tmp_path) == 3_000_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor_verb.available_memory_bytes(meminfo, tmp_path) == 16_000_000 * 1024
    assert doctor_verb.available_memory_bytes(tmp_path / "none", tmp_path / "none") is None


def test_a_package_that_is_not_there_names_the_command_that_brings_it() -> None:
    missing = doctor_verb.check_package("no-such-package-anywhere")
    assert not missing.ok and missing.fix.startswith("pip install")


def test_the_cache_shows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    cache, disk = doctor_verb.check_cache()
    assert (cache.ok, cache.detail, disk.name) == (True, str(tmp_path / "cache"), "disk")


def test_a_cache_that_cannot_be_made_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "file" / "cache"))
    (check,) = doctor_verb.check_cache()
    assert not check.ok
    assert "COMPOSER_RL_CACHE" in check.fix


class First(Bubblewrap):
    """A jail of ours under another name, which can be there or not."""

    name = "first"
    is_here = True

    def is_available(self) -> Check:
        return Check(self.name, self.is_here, "fine" if self.is_here else "its program is not on PATH.")


class Second(First):
    name = "second"


@pytest.mark.parametrize(
    ("here", "holding", "run_takes", "is_ok"),
    [
        ("first second", "first second", "first", True),
        ("second", "second", "second", True),
        ("first second", "second", "first", False),  # a run does not try another one by itself
        ("first second", "", "first", False),
        ("", "", "", False),
    ],
)
def test_the_sandbox_that_is_named_is_the_one_that_a_run_takes(
    monkeypatch: pytest.MonkeyPatch, here: str, holding: str, run_takes: str, *, is_ok: bool
) -> None:
    names = {"first": First, "second": Second}
    monkeypatch.setattr(choice, "BACKENDS", {name: f"{__name__}:{names[name].__name__}" for name in names})
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    for name, kind in names.items():
        monkeypatch.setattr(sys.modules[__name__], kind.__name__, kind, raising=False)
        monkeypatch.setattr(kind, "is_here", name in here)

    def guards(backend: SandboxBackend) -> list[Check]:
        return [GOOD, GOOD if backend.name in holding else BAD]

    monkeypatch.setattr("composer_replication.sandbox.selftest.run_selftest", guards)
    heard: list[str] = []
    *each, union = doctor_verb.check_sandboxes(heard.append)
    assert [check.name for check in (*each, union)] == ["sandbox first", "sandbox second", "sandbox"]
    assert [check.ok for check in each] == [name in holding for name in names]
    assert (union.ok, len(heard)) == (is_ok, 2)
    if run_takes:
        assert choice.choose_backend().name == run_takes
        assert f"rollouts would use {run_takes}" in union.detail
    else:
        with pytest.raises(MissingError):
            choice.choose_backend()
    assert is_ok or union.fix
    assert ("--backend second" in union.fix) == (run_takes == "first" and holding == "second")


def test_without_bubblewrap_both_say_sandlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real backends, the first of which is not here."""
    if not Sandlock().is_available().ok:
        pytest.skip("sandlock does not work here")
    monkeypatch.setattr("composer_replication.sandbox.bwrap_program.find_bwrap", lambda: None)
    monkeypatch.setattr("composer_replication.sandbox.selftest.run_selftest", lambda backend: [GOOD])
    *_, union = doctor_verb.check_sandboxes(lambda text: None)
    assert choice.choose_backend().name == "sandlock"
    assert union.detail.startswith("rollouts would use sandlock:")


@pytest.mark.parametrize(
    ("script", "is_ok", "said"),
    [
        ("echo 'H200, 143771 MiB'", True, "H200, 143771 MiB"),
        ("exit 9", False, "nvidia-smi fails"),
        (None, True, "none found"),
    ],
)
def test_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, said: str, *, is_ok: bool
) -> None:
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/nonexistent")
    check = doctor_verb.check_gpu()
    assert check.ok is is_ok
    assert said in check.detail


# ---- the verb ``explain``


@pytest.mark.parametrize("given", ["CR0204", "cr0204", " CR0204 "])
def test_a_code_is_explained(capsys: pytest.CaptureFixture[str], given: str) -> None:
    assert main(["explain", given, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["code", "meaning", "causes", "fixes"]
    assert result["code"] == "CR0204"
    assert result == {"code": "CR0204", **doctor_verb.load_explanations()["CR0204"]}


def test_a_person_reads_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "CR0231"]) == 0
    out = capsys.readouterr().out
    entry = doctor_verb.load_explanations()["CR0231"]
    assert out.startswith(f"CR0231: {entry['meaning']}\n")
    for text in [*entry["causes"], *entry["fixes"]]:
        assert f"  - {text}\n" in out


@pytest.mark.parametrize(
    ("given", "nearest"), [("CR0200", "CR0201"), ("CR0215", "CR0211"), ("0206x", "CR0206"), ("x", "CR0100")]
)
def test_an_unknown_code_names_the_nearest(
    capsys: pytest.CaptureFixture[str], given: str, nearest: str
) -> None:
    assert main(["explain", given]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"CR0206: there is no error code {given!r}.")
    assert f"composer-rl explain {nearest}" in err
