"""Code of repositories runs in no sandbox whose self-test has not passed here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import Check, SandboxSpec
from composer_replication.tasks import trusted_sandbox
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.intake.cache_prune import prune
from composer_replication.tasks.leaks.leak_scan import scan_store
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.trusted_sandbox import require_trusted
from composer_replication.tasks.validate import validate_store


class Open:
    """A backend whose jail cannot be tried, so nothing is known to hold."""

    name = "open"

    def is_available(self) -> Check:
        return Check(self.name, True, "it is here.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxFailure("CR0302", "it does not start.")


PATH = f"{__name__}:Open"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the backends that were tried; the cache is a new one."""
    names: list[str] = []

    def remember(backend: SandboxBackend, **_: object) -> tuple[str, ...]:
        names.append(backend.name)
        return ()

    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trusted_sandbox, "require_selftest", remember)
    monkeypatch.setattr(trusted_sandbox, "REMEMBERED", {PATH})
    return names


def test_a_pass_is_remembered_until_the_machine_changes(
    tried: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_trusted(PATH)
    require_trusted(PATH)
    assert tried == ["open"]
    (passed,) = (tmp_path / "cache" / trusted_sandbox.FOLDER).iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(trusted_sandbox, "_namespace", lambda _: "of another container")
        require_trusted(PATH)
    with monkeypatch.context() as patch:
        boot = tmp_path / "boot"
        boot.write_text("another start\n")
        patch.setattr(trusted_sandbox, "_BOOT", boot)
        require_trusted(PATH)
    for name, value in {
        "_PROGRAMS": ("sh",),
        "_rights": lambda: ["CapEff: 0"],
        "_libraries": lambda: "another one",
        "_code": lambda: "of tomorrow",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(trusted_sandbox, name, value)
            require_trusted(PATH)
    with monkeypatch.context() as patch:
        patch.setenv("COMPOSER_RL_SANDBOX_RUNTIME", "runsc")
        require_trusted(PATH)
    assert tried == ["open"] * 8
    passed.unlink()
    require_trusted(PATH)
    assert tried == ["open"] * 9


def test_what_somebody_else_holds_is_tried_each_time(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted_sandbox, "REMEMBERED", frozenset({"bubblewrap"}))
    require_trusted(PATH)
    require_trusted(PATH)
    assert tried == ["open", "open"]


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(tried: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / trusted_sandbox.FOLDER).write_text("a file in the way")
    require_trusted(PATH)
    require_trusted(PATH)
    assert tried == ["open", "open"]


def test_what_was_only_accepted_is_not_remembered(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def accepted(backend: SandboxBackend, **_: object) -> tuple[str, ...]:
        tried.append(backend.name)
        return ("network",)

    monkeypatch.setattr(trusted_sandbox, "require_selftest", accepted)
    require_trusted(PATH)
    require_trusted(PATH)
    assert tried == ["open", "open"]


def test_the_cache_prunes_it(tried: list[str], tmp_path: Path) -> None:
    require_trusted(PATH)
    assert len(tried) == 1
    removed = prune(tmp_path / "cache").removed
    assert trusted_sandbox.FOLDER in {entry.kind for entry in removed}


@pytest.mark.parametrize(
    "use",
    [
        lambda folder, _, out: build_tasks([str(folder)], out, backend=PATH),
        lambda _, store, __: validate_store(store, backend=PATH),
        lambda _, store, __: scan_store(store, backend=PATH),
    ],
    ids=["build", "validate", "leakscan"],
)
def test_nothing_of_a_repository_runs_before(
    use: Callable[[Path, Path, Path], object],
    tiny_project: Path,
    tiny_store: TaskStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SandboxFailure, match="the sandbox open does not hold: network") as caught:
        use(tiny_project, tiny_store.root, tmp_path / "out")
    assert caught.value.code == "CR0306"
    assert not (tmp_path / "out" / "journal.jsonl").exists()
