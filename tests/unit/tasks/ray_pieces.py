"""Pieces of work that go wrong, given to a cluster: ``ray_pieces.py ADDRESS FOLDER`` prints what became of each.

A program of its own, since a process reads its token for Ray once. A worker cannot import it:
the functions of a program travel whole.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, SandboxFailure
from composer_replication.tasks.intake.lock import UnusableRepository, wheel_path
from composer_replication.tasks.subject import GateFailed
from composer_replication.tasks.workers.workers import load_ray


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


def die_ever(log: Path) -> None:
    note(log)
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long(log: Path) -> None:
    note(log)
    time.sleep(6000)


def outcome(work: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """What it gave, or the type, text and attributes of what it raised."""
    try:
        return {"value": work(*args)}
    except Exception as error:  # noqa: BLE001  whatever it is, the test looks at it
        return {"type": type(error).__qualname__, "text": str(error), "has": vars(error)}


def main(address: str, folder: Path) -> None:
    """Print one JSON object."""
    before = signal.getsignal(signal.SIGTERM)
    told: dict[str, Any] = {}
    pool_class = load_ray()
    from composer_replication.tasks.workers.ray_connection import RayConnection

    with pool_class(address, backend=None, read_wheel=lambda wheel: wheel_path(wheel).read_bytes()) as pool:
        told["keeps_sigterm"] = signal.getsignal(signal.SIGTERM) is before
        for work in (refuse, refuse_repository, break_sandbox, find_damage, die_ever):
            log = folder / work.__name__
            told[work.__name__] = outcome(pool.call, work, log) | {"tries": len(log.read_text().splitlines())}
        told["second"] = outcome(RayConnection, "auto")
        waiting = threading.Thread(
            target=lambda: told.update(sleep=outcome(pool.call, sleep_long, folder / "log"))
        )
        waiting.start()
        while not (folder / "log").exists() or not (folder / "log").read_text().endswith("\n"):
            time.sleep(0.02)
        pool.interrupt()
        waiting.join()
        told["after"] = outcome(pool.call, note, folder / "after")
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
