"""Do replicas that talk once in H steps end where synchronous data parallel ends, and with how few bytes?

A policy of two layers learns by group-relative policy gradients which of eight actions a context rewards. Each replica
has contexts of its own; the synchronous run averages the gradients of the same number of replicas at every step, so that
both see as many samples. Per setting and seed: reward and loss on contexts that nobody trained on. Bytes are those that one
replica sends: the payloads counted by the transport, against a ring all-reduce, 2 (N - 1) / N values a step.

    python benchmarks/replicas_equality.py                   2 and 4 replicas, H 20 and 100, int8 and int4, three seeds
    python benchmarks/replicas_equality.py --transport torchft --precisions int8
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("RUST_LOG", "error")

import torch
from command_line import options

from composer_replication.config import ReplicasSection
from composer_replication.replicas.object_store import open_store
from composer_replication.replicas.outer_step import OuterState
from composer_replication.replicas.replica_loop import ReplicaLoop
from composer_replication.replicas.rounds import Rounds
from composer_replication.replicas.store_rounds import StoreRounds

NUM_INPUTS, NUM_HIDDEN, NUM_ACTIONS, NUM_CONTEXTS, GROUP = 16, 128, 8, 16, 8
KL_WEIGHT = 0.05


class Task:
    """Contexts, and which action is rewarded: that of a fixed random network, by the seed."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(1000 + seed)
        self._answer = torch.randn(NUM_INPUTS, NUM_ACTIONS, generator=generator)
        self.heldout = torch.randn(2000, NUM_INPUTS, generator=generator)

    def right(self, contexts: torch.Tensor) -> torch.Tensor:
        return (contexts @ self._answer).argmax(dim=1)

    def figures(self, model: torch.nn.Module) -> tuple[float, float]:
        """Expected reward, and the loss that is minimised: KL_WEIGHT KL(policy || uniform) - reward."""
        with torch.no_grad():
            logp = model(self.heldout).log_softmax(dim=1)
        reward = float(logp.gather(1, self.right(self.heldout)[:, None]).exp().mean())
        return reward, KL_WEIGHT * float(_kl_to_uniform(logp)) - reward


class Learner:
    """One replica's model, data and inner optimiser."""

    def __init__(self, task: Task, seed: int, replica: int, steps: int = 1) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = torch.nn.Sequential(
                torch.nn.Linear(NUM_INPUTS, NUM_HIDDEN), torch.nn.Tanh(), torch.nn.Linear(NUM_HIDDEN, NUM_HIDDEN),
                torch.nn.Tanh(), torch.nn.Linear(NUM_HIDDEN, NUM_ACTIONS),
            )  # fmt: skip
        self._task = task
        self._data = torch.Generator().manual_seed(10_000 * seed + replica)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
        self._decay = torch.optim.lr_scheduler.LinearLR(self.inner, 1.0, 0.0, total_iters=steps)

    def gradients(self) -> None:
        contexts = torch.randn(NUM_CONTEXTS, NUM_INPUTS, generator=self._data)
        logp = self.model(contexts).log_softmax(dim=1)
        actions = torch.multinomial(logp.detach().exp(), GROUP, replacement=True, generator=self._data)
        rewards = (actions == self._task.right(contexts)[:, None]).float()
        advantages = rewards - rewards.mean(dim=1, keepdim=True)
        self.inner.zero_grad()
        loss = KL_WEIGHT * _kl_to_uniform(logp) - (advantages * logp.gather(1, actions)).mean()
        loss.backward()

    def step(self) -> None:
        self.inner.step()
        self._decay.step()


def _kl_to_uniform(logp: torch.Tensor) -> torch.Tensor:
    """Mean over the contexts of sum_a p_a log(p_a / (1 / A)), in nats; ``logp`` [contexts, A]."""
    return (logp.exp() * logp).sum(dim=1).mean() + math.log(logp.shape[1])


def synchronous(task: Task, seed: int, number: int, steps: int) -> torch.nn.Module:
    """Gradients averaged at every step, on one model."""
    learners = [Learner(task, seed, n, steps) for n in range(number)]
    first = learners[0]
    for learner in learners[1:]:
        learner.model = first.model
    for _ in range(steps):
        total = [torch.zeros_like(p) for p in first.model.parameters()]
        for learner in learners:
            first.model.zero_grad()
            learner.gradients()
            for mean, p in zip(total, first.model.parameters(), strict=True):
                mean.add_(p.grad, alpha=1 / number)
        for mean, p in zip(total, first.model.parameters(), strict=True):
            p.grad = mean
        first.step()
    return first.model


def replicated(
    task: Task, seed: int, rounds: list[Rounds], options: ReplicasSection, steps: int
) -> tuple[torch.nn.Module, list[list[dict[str, Any]]]]:
    """The same with replicas; the first's model, and each one's rows."""
    rows: list[list[dict[str, Any]]] = [[] for _ in rounds]
    learners = [Learner(task, seed, n, steps) for n in range(len(rounds))]

    def run(n: int) -> None:
        learner = learners[n]
        state = OuterState(learner.model, options)
        loop = ReplicaLoop(rounds[n], state, options, on_merge=rows[n].append)
        loop.begin({"seed": str(seed)}, max_steps=steps, step=0, tokens=0)
        for step in range(1, steps + 1):
            learner.gradients()
            learner.step()
            loop.after_step(step, step)
        loop.finish()
        loop.close()

    with ThreadPoolExecutor(len(rounds)) as pool:
        list(pool.map(run, range(len(rounds))))
    return learners[0].model, rows


def opened(options: ReplicasSection) -> tuple[list[Rounds], Callable[[], None]]:
    """A way to each other for every replica, and how to close it."""
    numbers = range(options.num_replicas)
    if not options.lighthouse:
        how = {"poll_seconds": 0.002, "state_every": 10**9}
        stores = [open_store(options.transport) for _ in numbers]
        return [StoreRounds(stores[n], options, replica=n, **how) for n in numbers], lambda: None
    from composer_replication.replicas.lighthouse import Lighthouse
    from composer_replication.replicas.torchft_rounds import TorchftRounds

    lighthouse = Lighthouse("benchmark", options)
    return [TorchftRounds(options, token="benchmark", replica=n) for n in numbers], lighthouse.close


def main() -> int:
    """Print a line for each setting."""
    settings = {"numbers": [2, 4], "every": [20, 100], "precisions": ["int8", "int4"]}
    args = options(__doc__, steps=1000, seeds=3, **settings, transport=("store", "torchft"))
    torch.set_num_threads(1)
    num_weights = sum(p.numel() for p in Learner(Task(0), 0, 0).model.parameters())
    print(f"{num_weights} weights, {args.steps} steps, {args.seeds} seeds, transport {args.transport}")
    print(
        "replicas  H    sent as  reward (sd)      loss (sd)        bytes sent   fp32 DDP /  bf16 DDP /  equal states"
    )
    is_good = True
    for number in args.numbers:
        plain = [
            Task(seed).figures(synchronous(Task(seed), seed, number, args.steps))
            for seed in range(args.seeds)
        ]
        ring = 2 * (number - 1) / number * num_weights * args.steps
        print(f"{number:<9} 1    all-reduce {_cells(plain)} {int(4 * ring):<12}")
        for every in args.every:
            for precision in args.precisions:
                is_good &= _compare(args, number, every, precision, plain=plain, ring=ring)
    return 0 if is_good else 1


def _compare(
    args: Namespace, number: int, every: int, precision: str, *, plain: list[tuple[float, float]], ring: float
) -> bool:  # fmt: skip
    found, sent, is_equal = [], 0, True
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            where = {"transport": f"file://{scratch}"}
            if args.transport == "torchft":
                where = {"transport": f"torchft://127.0.0.1:{20_000 + 2 * seed}"}
            options = ReplicasSection(
                **where, num_replicas=number, min_replicas=number, sync_every=every, precision=precision
            )
            rounds, close = opened(options)
            model, rows = replicated(Task(seed), seed, rounds, options, args.steps)
            close()
        hashes = [[row["outer_sha256"] for row in own] for own in rows]
        is_equal &= all(own == hashes[0] and len(own) == -(-args.steps // every) for own in hashes)
        found.append(Task(seed).figures(model))
        sent = rows[0][-1]["bytes"]["sent/outer"]
    reward, reward_noise = _gap(found, plain, 0)
    loss, loss_noise = _gap(found, plain, 1)
    is_within = reward >= -reward_noise and loss <= loss_noise
    print(
        f"{number:<9} {every:<4} {precision:<10} {_cells(found)} {sent:<12} {4 * ring / sent:<11.0f} {2 * ring / sent:<11.0f} "
        f"{'equal' if is_equal else 'DIFFERENT'}; reward {reward:+.4f}, loss {loss:+.4f}: "
        f"{'within' if is_within else 'NOT WITHIN'} two deviations of seeds, {reward_noise:.4f} and {loss_noise:.4f}",
        flush=True,
    )
    return is_equal and is_within


def _gap(found: list[tuple[float, float]], plain: list[tuple[float, float]], which: int) -> tuple[float, float]:  # fmt: skip
    """How far the mean of a figure is from the synchronous run's, and two standard deviations over the seeds."""
    ours, theirs = [row[which] for row in found], [row[which] for row in plain]
    noise = 2 * max(statistics.stdev(ours), statistics.stdev(theirs))
    return statistics.fmean(ours) - statistics.fmean(theirs), noise


def _cells(found: list[tuple[float, float]]) -> str:
    cells = [f"{statistics.fmean(v):.4f} ({statistics.stdev(v):.4f})" for v in zip(*found, strict=True)]
    return "  ".join(cells) + " "


if __name__ == "__main__":
    sys.exit(main())
