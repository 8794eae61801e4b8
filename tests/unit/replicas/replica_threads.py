"""Replicas as threads of one process, on a model that learns in milliseconds."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from composer_replication.config import ReplicasSection
from composer_replication.replicas.outer_step import OuterState
from composer_replication.replicas.replica_loop import ReplicaLoop
from composer_replication.replicas.rounds import Rounds
from composer_replication.replicas.run_records import RunEnd

IDENTITY = {"recipe": "a", "model": "b"}


def section(**options: Any) -> ReplicasSection:
    """A recipe's table; without a key it sends numbers in full."""
    return ReplicasSection(**({"transport": "memory:///", "precision": "fp32"} | options))


def small_model() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def weights_sha(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


class SmallReplica:
    """One replica that learns a fixed function from data of its own."""

    def __init__(
        self,
        rounds: Rounds,
        replica: int,
        *,
        steps: int = 24,
        after_step: Callable[[int, SmallReplica], None] = lambda step, replica: None,
        **options: Any,
    ) -> None:
        self.model = small_model()
        self.rows: list[dict[str, Any]] = []
        self.rounds, self.steps, self._after_step = rounds, steps, after_step
        settings = section(sync_every=4 * options.get("fragments", 1), **options)
        self.state = OuterState(self.model, settings)
        self.loop = ReplicaLoop(rounds, self.state, settings, on_merge=self.rows.append)
        self._data = torch.Generator().manual_seed(replica)
        self._inner = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train(self, *, first_step: int = 0) -> RunEnd:
        end = self.loop.begin(IDENTITY, max_steps=self.steps, step=first_step, tokens=10 * first_step)
        for step in range(first_step + 1, self.steps + 1):
            if end is not None:
                break
            inputs = torch.randn(4, 8, generator=self._data)
            loss = (self.model(inputs) - inputs[:, :2]).square().mean()
            self._inner.zero_grad()
            loss.backward()
            self._inner.step()
            self._after_step(step, self)
            end = self.loop.after_step(step, 10 * step)
        if end is None or end.kind == "finished":
            end = self.loop.finish()
        self.loop.close()
        return end


def together(*works: Callable[[], Any], seconds: float = 60.0) -> list[Any]:
    """Run them at the same time; results in order, an exception as the result of its own."""
    results: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        try:
            results[place] = works[place]()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
    return results
