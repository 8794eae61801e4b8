"""Replicas under faults, seeded: every run has to end with equal weights, or with a stated refusal; nothing may hang or stay behind.

Processes are forked from this one, which has imported everything, so that a replica starts in milliseconds. A run has two or
three of them on a model of some hundred weights. Faults of processes: SIGKILL and return, SIGSTOP (some beyond the end), the lighthouse
gone. Faults of the store, inside a replica, each request by chance: an error before or after it was done, no space, slow, twice. An
outer step is checked by the hash of all outer weights that each replica wrote for it.

    python benchmarks/replicas_chaos.py --runs 20
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")

import torch
from obstore.store import from_url

from composer_replication.cli.replicas_verb import _free_port
from composer_replication.errors import ComposerError
from composer_replication.replicas.lighthouse import Lighthouse
from composer_replication.replicas.object_store import ObjectStore
from composer_replication.replicas.outer_step import OuterState
from composer_replication.replicas.replica_loop import ReplicaLoop
from composer_replication.replicas.rounds import Rounds
from composer_replication.replicas.store_rounds import StoreRounds
from composer_replication.replicas.torchft_rounds import TorchftRounds

STEPS, INTERVAL, STEP_SECONDS, FAULT_SECONDS, RUN_SECONDS = 160, 4, 0.03, 30.0, 240.0
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
            kind = self._chance.choice(["error", "lost answer", "no space", "slow", "twice"])
            with self._log.open("a") as handle:
                handle.write(kind + "\n")
            if kind == "error":
                raise OSError(errno.EIO, "503 slow down")
            if kind == "no space":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if kind == "slow":
                time.sleep(0.5)
            answer = method(*args, **kwargs)
            if kind == "lost answer":
                raise OSError(errno.ECONNRESET, "the answer was lost")
            if kind == "twice" and name != "delete":
                method(*args, **kwargs)
            return answer

        return call


def replica(number: int, run: dict[str, Any], life: int, step: int) -> None:
    """A whole life of one replica; its last word is a line of ``words``."""
    os.setsid()
    torch.set_num_threads(1)
    folder = Path(run["folder"])
    sys.stderr = (folder / f"replica-{number}.log").open("a")
    os.dup2(sys.stderr.fileno(), 2)

    def write(name: str, row: dict[str, Any]) -> None:
        with (folder / name).open("a") as handle:
            handle.write(json.dumps({"replica": number, "life": life, **row}) + "\n")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    data = torch.Generator().manual_seed(100 * number + life)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    rounds = None
    try:
        rounds = _rounds(number, run, life)
        state = OuterState(
            model, num_fragments=run["fragments"], lr=0.7, momentum=0.9, precision=run["precision"]
        )
        loop = ReplicaLoop(
            rounds,
            state,
            replica=number,
            interval=INTERVAL,
            delay=run["delay"],
            on_merge=lambda row: write("outer_steps", {k: row[k] for k in ("outer_step", "outer_sha256")}),
        )
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


def _rounds(number: int, run: dict[str, Any], life: int) -> Rounds:
    if run["transport"] == "torchft":
        return TorchftRounds(
            lighthouse=run["lighthouse"],
            token="chaos",
            replica=number,
            num_replicas=run["replicas"],
            grace_seconds=8.0,
            deadline_seconds=45.0,
        )
    plain = from_url(f"file://{run['folder']}/store", mkdir=True)
    faulty = FaultyStore(
        plain, 1000 * run["seed"] + 10 * number + life, Path(run["folder"], "store-faults"), 0.03
    )
    return StoreRounds(
        ObjectStore(faulty, address="file", patience_seconds=20.0),
        replica=number,
        num_replicas=run["replicas"],
        grace_seconds=2.0,
        deadline_seconds=45.0,
        poll_seconds=0.05,
        state_every=4,
    )


def lighthouse(run: dict[str, Any]) -> None:
    """A process that serves until it is ended."""
    os.setsid()
    host, _, port = run["lighthouse"].rpartition(":")
    served = Lighthouse(
        "chaos",
        host=host,
        port=int(port),
        grace_seconds=2.0,
        heartbeat_seconds=1.5,
        folder=Path(run["folder"], "records"),
    )
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while served is not None:
        time.sleep(60)


class Run:
    """One run with its processes and faults."""

    def __init__(self, seed: int, transport: str, folder: str) -> None:
        self.chance = random.Random(seed)
        self.table: dict[str, Any] = {
            "seed": seed,
            "transport": transport,
            "folder": folder,
            "replicas": self.chance.choice([2, 3]),
            "fragments": self.chance.choice([1, 2]),
            "delay": self.chance.choice([0, 1, 3]),
            "precision": self.chance.choice(["fp32", "int8", "int4"]),
            "lighthouse": f"127.0.0.1:{_free_port()}",
        }
        self.folder = Path(folder)
        self.processes: dict[int, Any] = {}
        self.lives: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.light: Any = None

    def play(self) -> dict[str, Any]:
        began = time.monotonic()
        if self.table["transport"] == "torchft":
            self._light_up()
        for number in range(self.table["replicas"]):
            self._start(number)
        later: list[tuple[float, str, int]] = []
        next_fault = began + 1.5
        while any(p.is_alive() for p in self.processes.values()) or later:
            now = time.monotonic()
            if now - began > RUN_SECONDS:
                break
            for item in [item for item in later if item[0] <= now]:
                later.remove(item)
                self._mend(item[1], item[2])
            if now >= next_fault and now - began < FAULT_SECONDS:
                next_fault = now + self.chance.uniform(0.3, 1.5)
                later += self._fault(now)
            time.sleep(0.05)
        return self._judged(time.monotonic() - began)

    def _fault(self, now: float) -> list[tuple[float, str, int]]:
        kinds = ["kill", "kill", "stop", "stop", "long stop"]
        kind = self.chance.choice([*kinds, "lighthouse"] if self.table["transport"] == "torchft" else kinds)
        number = self.chance.randrange(self.table["replicas"])
        seconds = self.chance.uniform(0.2, 3.0)
        if kind == "lighthouse":
            if self.light is None:
                return []
            self.light.kill()
            self.light.join()
            self.light = None
            self.faults[kind] += 1
            return [(now + seconds, "lighthouse", 0)]
        process = self.processes[number]
        if not process.is_alive():
            return []
        self.faults[kind] += 1
        if kind == "kill":
            process.kill()
            process.join()
            return [(now + seconds, "start", number)]
        os.kill(process.pid, signal.SIGSTOP)
        return [(now + (seconds if kind == "stop" else 15.0), "go on", number)]

    def _mend(self, what: str, number: int) -> None:
        if what == "lighthouse":
            self._light_up()
        elif what == "start" and not self.processes[number].is_alive():
            self._start(number)
        elif what == "go on" and self.processes[number].is_alive():
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
        hashes: dict[int, set[str]] = {}
        for row in self._rows("outer_steps"):
            hashes.setdefault(row["outer_step"], set()).add(row["outer_sha256"])
        finals = {row["sha"] for row in words.values() if row["end"] == "finished"}
        ends = [words.get(number, {"end": "no word"})["end"] for number in range(self.table["replicas"])]
        for line in (
            (self.folder / "store-faults").read_text().splitlines()
            if (self.folder / "store-faults").is_file()
            else []
        ):
            self.faults[f"store: {line}"] += 1
        forks = sum(len(found) > 1 for found in hashes.values())
        stated = all(end == "finished" or (end.startswith("CR") and len(end) == 6) for end in ends)
        is_good = not hung and stated and len(finals) <= 1 and not forks
        return {
            "good": is_good,
            "ends": ends,
            "hung": hung,
            "outer_steps": len(hashes),
            "forks": forks,
            "seconds": round(seconds, 1),
        }

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.is_file():
            return []
        rows = []
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # a process was killed while it wrote
                continue
        return rows


def main() -> int:
    """Play the runs, and say what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=["store", "torchft", "both"], default="both")
    args = parser.parse_args()
    faults: Counter[str] = Counter()
    num_good = num_hung = 0
    ends: Counter[str] = Counter()
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
    print(
        f"{num_good} of {args.runs} runs ended equal or with a stated refusal; {num_hung} hung; {len(orphans)} orphans"
    )
    print(
        f"faults of processes {sum(n for k, n in faults.items() if not k.startswith('store'))}, of the store "
        f"{sum(n for k, n in faults.items() if k.startswith('store'))}: {dict(faults)}"
    )
    print(f"how replicas ended: {dict(ends)}")
    return 0 if num_good == args.runs and not orphans else 1


if __name__ == "__main__":
    sys.exit(main())
