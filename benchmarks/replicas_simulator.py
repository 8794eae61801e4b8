"""How long outer steps take with other bandwidths, sizes, failures and numbers of replicas: a model of time, not of learning.

It follows each replica through a round as ``StoreRounds`` goes: train the steps, send the payload, look at the store until all that
are waited for have offered (or ``grace`` seconds long where one has failed), be the first to write down who counts or find that
written, read the others' payloads, merge. A replica fails at random, comes back after ``restart`` seconds and reads the outer state.

``--check`` runs the real protocol on a store in memory whose requests are slowed down to a given bandwidth and latency, and
compares wall time and bytes with the model. What a step, a request's delay and a replica's own work really take on this machine is
measured in that very run; how these come together is the model's. docs/replicas.md says what it assumes. "sharded" is a plan.

    python benchmarks/replicas_simulator.py --check
    python benchmarks/replicas_simulator.py
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from obstore.store import MemoryStore

from composer_replication.config import ReplicasSection
from composer_replication.replicas.object_store import ObjectStore
from composer_replication.replicas.outer_precision import num_bytes
from composer_replication.replicas.outer_step import OuterState
from composer_replication.replicas.replica_loop import ReplicaLoop
from composer_replication.replicas.store_rounds import StoreRounds

REPEATS = 3


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
    speed_spread: float = 0.0
    step_noise: float = 0.0
    own_seconds: float | None = None  # of coding, merging and hashing in a round
    failures_an_hour: float = 0.0
    restart: float = 300.0
    grace: float = 60.0
    poll: float = 0.5
    precision: str = "int8"
    topology: str = "flat"


def simulated(setting: Setting, seed: int = 0) -> dict[str, float]:
    """Wall seconds, share of it trained, bytes of one replica, and how many took part."""
    random = np.random.default_rng(seed)
    number, latency = setting.replicas, setting.latency
    payload = float(num_bytes(int(setting.weights), setting.precision))
    speed = np.maximum(1 + setting.speed_spread * random.standard_normal(number), 0.3)
    start, back_at = np.zeros(number), np.zeros(number)
    part, trained = [], 0.0
    for _ in range(setting.rounds):
        noise = setting.step_noise * random.standard_normal(number) / np.sqrt(setting.every)
        compute = setting.every * setting.step_seconds * speed * (1 + noise)
        is_there = back_at <= start
        fails = is_there & (random.random(number) < 1 - np.exp(-setting.failures_an_hour * compute / 3600))
        alive = is_there & ~fails
        if not alive.any():
            back_at[fails] = start[fails] + setting.restart
            start[:] = back_at.min()
            continue
        offered = start + compute + 2 * latency + payload / setting.bandwidth
        merged_at, decided_at = _decided(setting, offered, alive, fails)
        num_here = int(alive.sum())
        num_read = num_here - 1 if setting.topology == "flat" else 2 * (num_here - 1) / num_here
        requests = num_read if setting.topology == "flat" else 2
        own = setting.own_seconds
        if own is None:
            own = (num_read + 3) * setting.weights * 4 / 1e9
        done = decided_at + num_read * payload / setting.bandwidth + (requests + 1) * latency + own
        back_at[fails] = merged_at + setting.restart + 8 * setting.weights / setting.bandwidth
        start = np.where(alive, done, done[alive].max())
        trained += float(compute[alive].mean())
        part.append(float(alive.mean()))
    return {
        "seconds": float(start.max()),
        "trained": trained / float(start.max()),
        "sent": payload * setting.rounds,
        "took part": statistics.fmean(part) if part else 0.0,
        "memory": setting.weights * 4 * 3 + payload,
    }


def _decided(setting: Setting, offered: Any, alive: Any, fails: Any) -> tuple[float, Any]:
    """When the round is decided, and when each replica knows.

    A look at the store is four requests: is it decided, is the run over, who has offered, who is waited for. Between two looks
    lies ``poll``. Who sees all offers writes the decision (a fifth request); one that is too late for that reads what is there.
    """
    latency, begun = setting.latency, offered + setting.latency
    period = 4 * latency + setting.poll
    complete = offered[alive].max() + (setting.grace if fails.any() else 0.0)
    sees = begun + period * np.ceil(np.maximum(complete - 3 * latency - begun, 0.0) / period)
    writes = sees + 5 * latency
    merged_at = float(writes[alive].min())
    finds = begun + period * np.ceil(np.maximum(merged_at - latency - begun, 0.0) / period) + latency
    return merged_at, np.minimum(finds, writes + np.where(writes == merged_at, latency, 2 * latency))


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The same, and what each call takes goes into ``seconds``."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append(time.monotonic() - began)

    return watched


class SlowStore:
    """A store in memory behind a line of its own."""

    def __init__(self, store: Any, setting: Setting, requests: list[float]) -> None:
        self._store, self._bandwidth = store, setting.bandwidth
        self._request = partial(timed(time.sleep, requests), setting.latency)

    def put(self, key: str, data: bytes, **options: Any) -> None:
        self._request()
        time.sleep(len(data) / self._bandwidth)
        self._store.put(key, data, **options)

    def get(self, key: str) -> Any:
        self._request()
        found = self._store.get(key)
        time.sleep(found.meta["size"] / self._bandwidth)
        return found

    def __getattr__(self, name: str) -> Any:
        self._request()
        return getattr(self._store, name)


def measured(setting: Setting) -> tuple[dict[str, float], Setting]:
    """The real protocol, with steps that sleep, from the first outer step to the last; and what this machine took for each part."""
    options = ReplicasSection(
        transport="memory:///",
        num_replicas=setting.replicas,
        sync_every=setting.every,
        precision=setting.precision,
    )
    memory, rows = MemoryStore(), [[] for _ in range(setting.replicas)]
    steps, requests, work = [], [], []
    train = timed(time.sleep, steps)

    def run(n: int) -> None:
        model = torch.nn.Linear(int(setting.weights), 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        store = ObjectStore(SlowStore(memory, setting, requests), "slow")
        own = StoreRounds(store, options, replica=n, poll_seconds=setting.poll, state_every=10**9)
        state = OuterState(model, options)
        (part,) = state.fragments
        for owner, name in ((state, "fingerprint"), (part, "offer"), (part, "merge")):
            setattr(owner, name, timed(getattr(owner, name), work))

        loop = ReplicaLoop(own, state, options, lambda row: rows[n].append((time.monotonic(), row)))
        loop.begin({"a": "b"}, max_steps=setting.every * (setting.rounds + 1), step=0, tokens=0)
        for step in range(1, setting.every * (setting.rounds + 1) + 1):
            train(setting.step_seconds)
            loop.after_step(step, step)
        loop.close()

    with ThreadPoolExecutor(setting.replicas) as pool:
        list(pool.map(run, range(setting.replicas)))
    sent = rows[0][-1][1]["bytes"]["sent/outer"] - rows[0][0][1]["bytes"]["sent/outer"]
    seconds = max(own[-1][0] for own in rows) - max(own[0][0] for own in rows)
    step, request = statistics.fmean(steps), statistics.fmean(requests)
    found = replace(
        setting,
        step_seconds=step,
        step_noise=statistics.stdev(steps) / step,
        latency=request,
        poll=setting.poll + request - setting.latency,  # a sleep of the same kind
        own_seconds=sum(work) / setting.replicas / (setting.rounds + 1),
    )
    return {"seconds": seconds, "sent": float(sent)}, found


def check() -> int:
    """The model gets three figures of this machine, what a step, a request and a replica's own work took, and foretells the rest."""
    base = Setting(2, 200_000, 0.05, 20, 6, bandwidth=1e6, latency=0.01, poll=0.05)
    is_good = True
    print(f"medians of {REPEATS} runs each")
    print("replicas  weights  H    MB/s  precision  measured s  model s  off by  (each run)  bytes off by")
    for setting in (
        base,
        replace(base, replicas=4),
        replace(base, every=40, rounds=4),
        replace(base, bandwidth=2.5e5),
        replace(base, precision="int4", weights=800_000),
    ):
        runs = []
        for _ in range(REPEATS):
            real, found = measured(setting)
            model = simulated(found)
            runs.append((model["seconds"] / real["seconds"] - 1, real, model))
        off, real, model = sorted(runs, key=lambda run: run[0])[REPEATS // 2]
        bytes_off = model["sent"] / real["sent"] - 1
        is_good &= abs(off) <= 0.1 and abs(bytes_off) <= 0.1
        print(
            f"{setting.replicas:<9} {int(setting.weights):<8} {setting.every:<4} {setting.bandwidth / 1e6:<5} {setting.precision:<10} "
            f"{real['seconds']:<11.2f} {model['seconds']:<8.2f} {off:<+7.1%} ({', '.join(f'{run[0]:+.1%}' for run in runs)})  {bytes_off:+.1%}",
            flush=True,
        )
    return 0 if is_good else 1


def plan() -> int:
    """Print what it says of sizes that no machine here has."""
    print(
        "replicas  weights  GB/s   H    topology  s a round  trained  took part  sent GB a round  memory GB"
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
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="against the real protocol on slowed stores")
    sys.exit(check() if parser.parse_args().check else plan())
