"""How long outer steps take with other bandwidths, sizes, failures and numbers of replicas: a model of time, not of learning.

A round: every replica trains its steps (its own speed, some noise), sends its payload, and waits until the round is decided: when
all that are waited for have offered, or ``grace`` after the quorum. Then it reads the others' payloads and merges them. A replica
fails at random, costs one wait, comes back after ``restart`` seconds and reads the whole outer state.

``--check`` runs the real protocol on a store in memory whose requests are slowed down to a given bandwidth and latency, and
compares wall time and bytes with the model. What the model assumes stands in ``ASSUMES``.

    python benchmarks/replicas_simulator.py --check
    python benchmarks/replicas_simulator.py
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from obstore.store import MemoryStore

from composer_replication.replicas.object_store import ObjectStore
from composer_replication.replicas.outer_precision import num_bytes
from composer_replication.replicas.outer_step import OuterState
from composer_replication.replicas.replica_loop import ReplicaLoop
from composer_replication.replicas.rounds import Contribution
from composer_replication.replicas.store_rounds import StoreRounds

ASSUMES = """assumes: each replica has its bandwidth for itself and the store serves all of them at once; sending, reading and merging follow
each other; speeds differ by a normal factor that is drawn once and noise that is drawn each step; failures are independent and
exponential; nothing is said of how well the model learns. "sharded" (each replica merges and publishes 1/N of the weights) is not built."""


@dataclass(frozen=True)
class Setting:
    """``topology`` flat: everybody reads everybody's payload, as built; sharded: a plan."""

    replicas: int
    weights: float
    step_seconds: float
    every: int
    rounds: int
    bandwidth: float  # bytes a second of one replica
    latency: float = 0.0  # seconds a request
    requests: int = 9  # of a replica in a round, without its reads of payloads
    speed_spread: float = 0.0
    step_noise: float = 0.0
    own_seconds: float | None = (
        None  # of coding, merging and hashing in a round; by default 4 bytes a weight at 1 GB/s each
    )
    failures_an_hour: float = 0.0
    restart: float = 300.0
    grace: float = 60.0
    poll: float = 0.5
    precision: str = "int8"
    topology: str = "flat"


def simulated(setting: Setting, seed: int = 0) -> dict[str, float]:
    """Wall seconds, share of it trained, bytes of one replica, and how many took part."""
    random = np.random.default_rng(seed)
    number = setting.replicas
    payload = float(num_bytes(int(setting.weights), setting.precision))  # type: ignore[arg-type]
    speed = np.maximum(1 + setting.speed_spread * random.standard_normal(number), 0.3)
    back_at = np.zeros(number)
    clock, part, trained = 0.0, [], 0.0
    for _ in range(setting.rounds):
        is_there = back_at <= clock
        noise = setting.step_noise * random.standard_normal(number) / np.sqrt(setting.every)
        compute = setting.every * setting.step_seconds * speed * (1 + noise)
        fails = random.random(number) < 1 - np.exp(-setting.failures_an_hour * compute / 3600)
        alive = is_there & ~fails
        if not alive.any():
            clock = float(back_at.min()) if (back_at > clock).any() else clock + setting.restart
            continue
        offered = compute[alive] + payload / setting.bandwidth + setting.latency
        waited = float(offered.max()) + (setting.grace if (is_there & fails).any() else 0.0)
        num_read = (
            int(alive.sum()) - 1
            if setting.topology == "flat"
            else 2 * (int(alive.sum()) - 1) / max(int(alive.sum()), 1)
        )
        reads = (
            num_read * payload / setting.bandwidth
            + (num_read if setting.topology == "flat" else 2) * setting.latency
        )
        merge = setting.own_seconds
        if merge is None:
            merge = (num_read + 3) * setting.weights * 4 / 1e9
        round_seconds = waited + setting.poll / 2 + setting.requests * setting.latency + reads + merge
        back_at = np.where(
            fails & is_there,
            clock + waited + setting.restart + 8 * setting.weights / setting.bandwidth,
            back_at,
        )
        clock += round_seconds
        trained += float(compute[alive].mean())
        part.append(float(alive.mean()))
    sent = payload * setting.rounds
    return {
        "seconds": clock,
        "trained": trained / clock,
        "sent": sent,
        "took part": statistics.fmean(part) if part else 0.0,
        "memory": setting.weights * 4 * 3 + payload,
    }


class SlowStore:
    """A store in memory behind a line of its own."""

    def __init__(self, store: Any, bandwidth: float, latency: float) -> None:
        self._store, self._bandwidth, self._latency = store, bandwidth, latency

    def put(self, key: str, data: bytes, **options: Any) -> None:
        time.sleep(self._latency + len(data) / self._bandwidth)
        self._store.put(key, data, **options)

    def get(self, key: str) -> Any:
        time.sleep(self._latency)
        found = self._store.get(key)
        time.sleep(found.meta["size"] / self._bandwidth)
        return found

    def __getattr__(self, name: str) -> Any:
        time.sleep(self._latency)
        return getattr(self._store, name)


def measured(setting: Setting) -> dict[str, float]:
    """The real protocol, with steps that sleep; from the first outer step to the last."""
    memory, rows = MemoryStore(), [[] for _ in range(setting.replicas)]  # type: ignore[var-annotated]
    ends: list[list[float]] = [[] for _ in range(setting.replicas)]

    def run(n: int) -> None:
        model = torch.nn.Linear(int(setting.weights), 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        store = ObjectStore(SlowStore(memory, setting.bandwidth, setting.latency), address="slow")
        rounds = StoreRounds(
            store, replica=n, num_replicas=setting.replicas, poll_seconds=setting.poll, state_every=10**9
        )
        state = OuterState(model, num_fragments=1, lr=0.7, momentum=0.9, precision=setting.precision)  # type: ignore[arg-type]

        def merged(row: dict[str, Any]) -> None:
            rows[n].append(row)
            ends[n].append(time.monotonic())

        loop = ReplicaLoop(rounds, state, replica=n, interval=setting.every, on_merge=merged)
        loop.begin({"a": "b"}, max_steps=setting.every * (setting.rounds + 1), step=0, tokens=0)
        for step in range(1, setting.every * (setting.rounds + 1) + 1):
            time.sleep(setting.step_seconds)
            loop.after_step(step, step)
        loop.close()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(setting.replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent = rows[0][-1]["bytes"]["sent/outer"] - rows[0][0]["bytes"]["sent/outer"]
    return {"seconds": ends[0][-1] - ends[0][0], "sent": float(sent)}


def calibrated(setting: Setting) -> Setting:
    """What a step and a replica's own work in a round take on this machine now, with as many threads as the run has."""
    steps: list[float] = []
    work: list[float] = []

    def measure(_: int) -> None:
        model = torch.nn.Linear(int(setting.weights), 1, bias=False)
        state = OuterState(model, num_fragments=1, lr=0.7, momentum=0.9, precision=setting.precision)  # type: ignore[arg-type]
        for _ in range(4):
            began = time.monotonic()
            for _ in range(10):
                time.sleep(setting.step_seconds)
            steps.append((time.monotonic() - began) / 10)
            began = time.monotonic()
            state.fingerprint()
            payload = state.fragments[0].offer()
            hashlib.sha256(payload)
            state.fragments[0].merge(
                [Contribution(n, 1, payload) for n in range(setting.replicas)], is_included=True
            )
            state.fingerprint()
            work.append(time.monotonic() - began)

    threads = [threading.Thread(target=measure, args=(n,)) for n in range(setting.replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replace(setting, step_seconds=statistics.fmean(steps), own_seconds=statistics.fmean(work))


def check() -> int:
    """The model gets two figures of this machine, a step's time and a replica's own work, and foretells the rest."""
    base = Setting(2, 200_000, 0.05, 20, 6, bandwidth=1e6, latency=0.01, poll=0.05)
    is_good = True
    print("replicas  weights  H    MB/s  precision  measured s  model s  off by  bytes off by")
    for setting in (
        base,
        replace(base, replicas=4),
        replace(base, every=40, rounds=4),
        replace(base, bandwidth=2.5e5),
        replace(base, precision="int4", weights=800_000),
    ):
        real, model = measured(setting), simulated(calibrated(setting))
        off, bytes_off = model["seconds"] / real["seconds"] - 1, model["sent"] / real["sent"] - 1
        is_good &= abs(off) <= 0.1 and abs(bytes_off) <= 0.1
        print(
            f"{setting.replicas:<9} {int(setting.weights):<8} {setting.every:<4} {setting.bandwidth / 1e6:<5} {setting.precision:<10} "
            f"{real['seconds']:<11.2f} {model['seconds']:<8.2f} {off:<+7.1%} {bytes_off:+.1%}",
            flush=True,
        )
    return 0 if is_good else 1


def plan() -> int:
    """Print what it says of sizes that no machine here has."""
    print(ASSUMES)
    print(
        "replicas  weights  GB/s   H    topology  s a round  trained  took part  sent GB a round  outer state GB"
    )
    for replicas, weights, bandwidth, topology in (
        (4, 7e9, 0.125, "flat"),
        (16, 7e9, 0.125, "flat"),
        (64, 70e9, 1.25, "flat"),
        (1000, 70e9, 1.25, "flat"),
        (1000, 70e9, 1.25, "sharded"),
        (10_000, 1e12, 12.5, "flat"),
        (10_000, 1e12, 12.5, "sharded"),
    ):
        setting = Setting(
            replicas, weights, 60.0, 100, 20, bandwidth * 1e9, latency=0.05, speed_spread=0.05, step_noise=0.1,
            failures_an_hour=0.01, topology=topology,
        )  # fmt: skip
        found = simulated(setting)
        print(
            f"{replicas:<9} {weights:<8.0e} {bandwidth:<6} {setting.every:<4} {topology:<9} {found['seconds'] / setting.rounds:<10.0f} "
            f"{found['trained']:<8.1%} {found['took part']:<10.1%} {found['sent'] / setting.rounds / 1e9:<16.1f} {found['memory'] / 1e9:.0f}"
        )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="against the real protocol on slowed stores")
    sys.exit(check() if parser.parse_args().check else plan())
