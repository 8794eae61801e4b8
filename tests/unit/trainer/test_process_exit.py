"""Gloo's threads are waited for, by their state, before the interpreter ends."""

from __future__ import annotations

import atexit
import hashlib
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_trainer import build_trainer

from composer_replication.safety import HeldOutGuard
from composer_replication.trainer import composer_trainer, guard_callback, processes
from composer_replication.trainer.processes import wait_for_idle_threads

NAME = "pt_gloo_test"


def test_threads_of_the_name_are_waited_for_until_they_sleep() -> None:
    has_begun, may_end, steps = threading.Event(), threading.Event(), []

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME)
        has_begun.set()
        hashlib.sha256(bytes(300_000_000)).digest()  # without Python's lock, some tenths of a second
        steps.append("worked")
        may_end.wait()  # asleep, and not ended

    thread = threading.Thread(target=work)
    thread.start()
    has_begun.wait()
    wait_for_idle_threads("pt_gloo")
    assert steps == ["worked"]
    may_end.set()
    thread.join()
    wait_for_idle_threads("pt_gloo")


@pytest.mark.parametrize("module", [composer_trainer, guard_callback], ids=["trainer", "callback"])
def test_whoever_trains_in_several_processes_has_them_waited_for(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(module, "wait_for_gloo_at_exit", processes.wait_for_gloo_at_exit.__wrapped__)
    if module is composer_trainer:
        build_trainer(output_dir=tmp_path)
    else:
        guard_callback.HeldOutGuardCallback(HeldOutGuard(), lambda: 0.5)
    assert (wait_for_idle_threads, "pt_gloo") in registered
