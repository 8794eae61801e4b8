"""Replicas under faults, seeded: every run has to end with equal weights, or with a stated refusal; nothing may hang or stay behind.

Processes are forked from this one, which has imported everything (torch's optimisers only import the rest when one is made), so that
a replica starts in milliseconds. A run has two or
three of them on a model of some hundred weights. Faults of processes: SIGKILL and return, SIGSTOP (once beyond the end), the lighthouse
gone (once in a run for 30 s), a jump of the replica's wall clock by up to a year. Faults of the store, inside a replica, each request by
chance: an error before or after it was done, no space, slow, twice, long after its sender has given up. An outer step is checked by
the hash of all outer weights that each replica wrote for it.

    python benchmarks/replicas_chaos.py --runs 20 [--transport store]   # seeds from --seed on; both transports take turns
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations, starmap
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")

import torch
from command_line import options
from obstore.exceptions import BaseError
from obstore.store import from_url

from composer_replication.config import ReplicasSection
from composer_replication.errors import ComposerError
from composer_replication.replicas.lighthouse import Lighthouse
from composer_replication.replicas.object_store import ObjectStore
from composer_replication.replicas.outer_step import OuterState
from composer_replication.replicas.replica_loop import ReplicaLoop
from composer_replication.replicas.rounds import Rounds
from composer_replication.replicas.store_rounds import StoreRounds
from composer_replication.replicas.torchft_rounds import TorchftRounds

STEPS, INTERVAL, STEP_SECONDS, FAULT_SECONDS, RUN_SECONDS = 400, 4, 0.05, 30.0, 240.0
FORK = multiprocessing.get_context("fork")


class FaultyStore:
    """What ``obstore`` offers, with faults by chance; each is a line in ``log``."""

    def __init__(self, store: Any, seed: int, log: Path, share: float) -> None:
        self._store, self._chance, self._log, self._share = store, random.Random(seed), log, share

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._chance.random() >= self._share:
                return method(*args, **kwargs)
            kind = self._chance.choice(["error", "lost answer", "no space", "slow", "twice", "late"])
            with self._log.open("a") as handle:
                handle.write(json.dumps(kind) + "\n")
            if kind == "error":
                raise OSError(errno.EIO, "503 slow down")
            if kind == "no space":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if kind == "late":
                threading.Timer(2.0, _arrive_late, (method, args, kwargs)).start()
                raise OSError(errno.ETIMEDOUT, "no answer")
            if kind == "slow":
                time.sleep(0.5)
            answer = method(*args, **kwargs)
            if kind == "lost answer":
                raise OSError(errno.ECONNRESET, "the answer was lost")
            if kind == "twice" and name != "delete":
                method(*args, **kwargs)
            return answer

        return call


def _arrive_late(method: Any, args: Any, kwargs: Any) -> None:
    with contextlib.suppress(OSError, BaseError):
        method(*args, **kwargs)


def shift_clock(seed: int) -> None:
    """Each SIGUSR1 moves what ``time.time`` says in this process by up to a year, either way."""
    chance, clock, offset = random.Random(seed), (time.time, time.time_ns), [0]

    def jump(*_: object) -> None:
        offset[0] = chance.randrange(-31_536_000, 31_536_000)

    time.time = lambda: clock[0]() + offset[0]
    time.time_ns = lambda: clock[1]() + offset[0] * 10**9
    signal.signal(signal.SIGUSR1, jump)


def small_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same first weights for everybody."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def replica(number: int, run: dict[str, Any], life: int, step: int) -> None:
    """A whole life of one replica; its last word is a line of ``words``."""
    os.setsid()
    shift_clock(10 * run["seed"] + number)
    torch.set_num_threads(1)
    folder = Path(run["folder"])
    sys.stderr = (folder / f"replica-{number}.log").open("a")
    os.dup2(sys.stderr.fileno(), 2)

    def write(name: str, row: dict[str, Any]) -> None:
        with (folder / name).open("a") as handle:
            handle.write(json.dumps({"replica": number, "life": life, "at": time.monotonic(), **row}) + "\n")

    model, inner = small_model()
    data = torch.Generator().manual_seed(100 * number + life)
    rounds = None
    try:
        options = ReplicasSection(**run["options"])
        rounds, state = _rounds(number, run, life, options), OuterState(model, options)
        loop = ReplicaLoop(rounds, state, options, partial(write, "outer_steps"))
        end = loop.begin({"seed": str(run["seed"])}, max_steps=STEPS, step=step, tokens=step)
        while end is None and step < STEPS:
            step += 1
            inputs = torch.randn(4, 8, generator=data)
            inner.zero_grad()
            (model(inputs) - inputs[:, :2]).square().mean().backward()
            inner.step()
            time.sleep(STEP_SECONDS)
            (folder / f"step-{number}").write_text(str(step))
            end = loop.after_step(step, step)
        loop.finish()
        write("words", {"end": "finished", "sha": state.fingerprint()})
    except ComposerError as error:
        write("words", {"end": error.code, "sha": ""})
    except BaseException as error:  # noqa: BLE001 - it is what this looks for
        write("words", {"end": f"{type(error).__name__}: {error}", "sha": ""})
    if rounds is not None:
        rounds.close()
    os._exit(0)


def _rounds(number: int, run: dict[str, Any], life: int, options: ReplicasSection) -> Rounds:
    if options.lighthouse:
        return TorchftRounds(options, token="chaos", replica=number)
    plain = from_url(options.transport, mkdir=True)
    faulty = FaultyStore(
        plain, 1000 * run["seed"] + 10 * number + life, Path(run["folder"], "store-faults"), 0.03
    )
    store = ObjectStore(faulty, "file", patience_seconds=20.0)
    return StoreRounds(store, options, replica=number, poll_seconds=0.05, state_every=4)


def lighthouse(run: dict[str, Any]) -> None:
    """A process that serves until it is ended."""
    os.setsid()
    options = ReplicasSection(**(run["options"] | {"grace_seconds": 2.0}))
    _served = Lighthouse("chaos", options, heartbeat_seconds=1.5, folder=Path(run["folder"], "records"))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.pause()


class Run:
    """One run with its processes and faults."""

    def __init__(self, seed: int, transport: str, folder: str) -> None:
        self.chance = random.Random(seed)
        self.number = self.chance.choice([2, 3])
        fragments, is_torchft = self.chance.choice([1, 2]), transport == "torchft"
        options: dict[str, Any] = {
            "num_replicas": self.number, "sync_every": INTERVAL * fragments, "fragments": fragments,
            "delay": self.chance.choice([0, 1, 3]), "precision": self.chance.choice(["fp32", "int8", "int4"]),
        }  # fmt: skip
        if is_torchft:
            where = {"transport": f"torchft://127.0.0.1:{20_000 + 2 * seed}"}
            options |= where | {"grace_seconds": 8.0, "deadline_seconds": 75.0}
        else:
            options |= {"transport": f"file://{folder}/store", "grace_seconds": 2.0, "deadline_seconds": 45.0}
        self.table: dict[str, Any] = {"seed": seed, "folder": folder, "options": options}
        self.is_torchft, self.folder = is_torchft, Path(folder)
        self.processes: dict[int, Any] = {}
        self.lives, self.faults = Counter[int](), Counter[str]()
        self.deaths: dict[tuple[int, int], float] = {}
        self.light: Any = None
        self.later: list[tuple[float, Callable[[], None]]] = []
        """When what was broken is mended, and how."""

    def play(self) -> dict[str, Any]:
        began = time.monotonic()
        if self.is_torchft:
            self._light_up()
        for number in range(self.number):
            self._start(number)
        next_fault = began + 1.5
        while any(p.is_alive() for p in self.processes.values()) or self.later:
            now = time.monotonic()
            if now - began > RUN_SECONDS:
                break
            for item in [item for item in self.later if item[0] <= now]:
                self.later.remove(item)
                item[1]()
            if now - began >= FAULT_SECONDS and not self.later:
                self._sleep_to_the_end()
            elif now >= next_fault and now - began < FAULT_SECONDS:
                next_fault = now + self.chance.uniform(0.3, 1.5)
                self._fault(now)
            time.sleep(0.05)
        return self._judged(time.monotonic() - began)

    def _fault(self, now: float) -> None:
        kinds = ["kill", "kill", "stop", "stop", "long stop", "clock"]
        kind = self.chance.choice([*kinds, "lighthouse"] if self.is_torchft else kinds)
        number = self.chance.randrange(self.number)
        seconds = self.chance.uniform(0.2, 3.0)
        if kind == "lighthouse":
            if self.light is None:
                return
            self.light.kill()
            self.light.join()
            self.light = None
            is_first = not self.faults[kind] + self.faults["lighthouse for 30 s"]
            self.faults["lighthouse for 30 s" if is_first else kind] += 1
            self.later.append((now + (30.0 if is_first else seconds), self._light_up))
            return
        process = self.processes[number]
        if not process.is_alive():
            return
        self.faults[kind] += 1
        if kind == "kill":
            process.kill()
            process.join()
            self.deaths[number, self.lives[number] - 1] = time.monotonic()
            self.later.append((now + seconds, partial(self._start, number)))
        elif kind == "clock":
            os.kill(process.pid, signal.SIGUSR1)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            self.later.append((now + (seconds if kind == "stop" else 15.0), partial(self._go_on, number)))

    def _sleep_to_the_end(self) -> None:
        """The last replica is stopped once all other faults are over, and goes on when all others have ended."""
        *others, last = (self.processes[number] for number in range(self.number))
        if not self.faults["stop beyond the end"] and last.is_alive() and any(p.is_alive() for p in others):
            self.faults["stop beyond the end"] += 1
            os.kill(last.pid, signal.SIGSTOP)
        elif self.faults["stop beyond the end"] and not any(p.is_alive() for p in others):
            self._go_on(self.number - 1)

    def _go_on(self, number: int) -> None:
        if self.processes[number].is_alive():
            os.kill(self.processes[number].pid, signal.SIGCONT)

    def _start(self, number: int) -> None:
        path = self.folder / f"step-{number}"
        text = path.read_text() if path.is_file() else ""
        step = int(text) // 10 * 10 if text else 0  # as from a checkpoint every ten steps
        process = FORK.Process(target=replica, args=(number, self.table, self.lives[number], step))
        process.start()
        self.lives[number] += 1
        self.processes[number] = process

    def _light_up(self) -> None:
        self.light = FORK.Process(target=lighthouse, args=(self.table,))
        self.light.start()

    def _judged(self, seconds: float) -> dict[str, Any]:
        hung = [number for number, process in self.processes.items() if process.is_alive()]
        for process in [*self.processes.values(), *([self.light] if self.light else [])]:
            if process.is_alive():
                process.kill()
            process.join()
        words = {row["replica"]: row for row in self._rows("words")}  # the last life's word counts
        taken: dict[int, list[dict[str, Any]]] = {}
        for row in self._rows("outer_steps"):
            taken.setdefault(row["outer_step"], []).append(row)
        finals = {row["sha"] for row in words.values() if row["end"] == "finished"}
        ends = [words.get(number, {"end": "no word"})["end"] for number in range(self.number)]
        for row in self._rows("store-faults"):
            self.faults[f"store: {row}"] += 1
        forks = sum(any(starmap(self._differ, combinations(rows, 2))) for rows in taken.values())
        stated = all(end == "finished" or (end.startswith("CR") and len(end) == 6) for end in ends)
        is_good = not hung and stated and len(finals) <= 1 and not forks
        return {
            "good": is_good, "ends": ends, "hung": hung, "outer_steps": len(taken), "forks": forks, "seconds": round(seconds, 1),
        }  # fmt: skip

    def _differ(self, one: dict[str, Any], later: dict[str, Any]) -> bool:
        """Whether two took an outer step differently; what a process knew that had been killed by then is gone with it."""
        died_at = self.deaths.get((one["replica"], one["life"]), math.inf)
        return bool(one["outer_sha256"] != later["outer_sha256"] and died_at > later["at"])

    def _rows(self, name: str) -> list[Any]:
        path, rows = self.folder / name, []
        for line in path.read_text().splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError):  # a process was killed while it wrote
                rows.append(json.loads(line))
        return rows


def main() -> int:
    """Play the runs, and say what came of them."""
    args = options(__doc__, runs=20, seed=0, transport=("both", "store", "torchft"))
    torch.set_num_threads(1)  # no threads before a fork
    small_model()  # so that no replica imports what optimisers need
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a new replica listens
    faults, ends, num_good, num_hung = Counter[str](), Counter[str](), 0, 0
    for seed in range(args.seed, args.seed + args.runs):
        transport = ("store", "torchft")[seed % 2] if args.transport == "both" else args.transport
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            run = Run(seed, transport, folder)
            result = run.play()
        faults += run.faults
        num_good += result["good"]
        num_hung += len(result["hung"])
        ends.update(result["ends"])
        print(seed, transport, json.dumps(result), dict(run.faults), flush=True)
    orphans = [process for process in multiprocessing.active_children() if process.is_alive()]
    of_store = sum(n for k, n in faults.items() if k.startswith("store"))
    said = f"{num_good} of {args.runs} runs ended equal or with a stated refusal"
    print(f"{said}; {num_hung} hung; {len(orphans)} orphans")
    print(f"faults of processes {faults.total() - of_store}, of the store {of_store}: {dict(faults)}")
    print(f"how replicas ended: {dict(ends)}")
    return 0 if num_good == args.runs and not orphans else 1


if __name__ == "__main__":
    sys.exit(main())
