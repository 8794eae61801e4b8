"""Code of repositories runs in no sandbox whose self-test has not passed here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, SandboxSpec
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.leaks.leak_scan import scan_store
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.validate import validate_store


class Open:
    """A backend whose jail cannot be tried, so nothing is known to hold."""

    name = "open"

    def is_available(self) -> Check:
        return Check(self.name, True, "it is here.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxFailure("CR0302", "it does not start.")


PATH = f"{__name__}:Open"


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
