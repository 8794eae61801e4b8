"""Claim: with the channels and prefix sharing off, our trainer takes under 1% longer than TRL's for the same steps.

TRL's ``GRPOTrainer`` and ours train the same weights on the same prompts, each by ``train()`` in a process of its own.
The two take turns step by step (one waits while the other steps, and each goes first every second time), so that both meet the
same load, and a step's CPU seconds count everything from its beginning to that of the next: sampling, rewards, loss,
backward, update, logging and callbacks; ours has its checks on. Printed is the median over steps of ours / TRL's - 1 with a
95% bootstrap interval, and whether both ended with the same weights: channels off are TRL, bit for bit.

    python benchmarks/trainer_overhead.py [--steps 60] [--prompts 128] [--completions 26] [--threads 1]

Exit code 1 where the weights differ.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from train_phase import GROUP, OFF, STOCK, VOCABULARY, build
from transformers import TrainerCallback

from composer_replication.trainer.parameter_hash import parameter_sha256

GOAL = 0.01
NUM_UNCOUNTED = 3  # steps at the beginning that fill caches
NUM_RESAMPLES = 4000


class Turns(TrainerCallback):
    """Steps when told to, and reports what the step took."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self.began: float | None = None

    def on_step_begin(self, *_state: Any, **_parts: Any) -> None:
        if self.began is not None:
            self.line.send(time.process_time() - self.began)
        self.line.recv()
        self.began = time.process_time()


def share_of_even_ids(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
    """A reward that tells the answers of a group apart."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def train(kind: str, arguments: argparse.Namespace, line: Connection) -> None:
    """One trainer's process: seconds of each step but the last go down the line, then the hashes of its weights."""
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = build(kind, Path(folder), arguments)
        trainer.args.max_steps, trainer.args.logging_steps = arguments.steps + 1, 1
        trainer.args.learning_rate, trainer.reward_funcs = 1e-3, [share_of_even_ids]  # weights have to move
        trainer.optimizer = None  # train() makes it, with its schedule
        trainer.add_callback(Turns(line))
        first = parameter_sha256(trainer.model)
        trainer.train()
        line.send((first, parameter_sha256(trainer.model)))


def measured(arguments: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, tuple[str, str]]]:
    """Seconds of each step, and the hashes of the first and the last weights, by kind of trainer."""
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    processes = []
    for kind in (STOCK, OFF):
        ours, theirs = context.Pipe()
        process = context.Process(target=train, args=(kind, arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        lines[kind] = ours
        processes.append(process)
    seconds: dict[str, list[float]] = {STOCK: [], OFF: []}
    for step in range(arguments.steps):
        for kind in (STOCK, OFF) if step % 2 else (OFF, STOCK):
            lines[kind].send(None)
            seconds[kind].append(lines[kind].recv())
    for line in lines.values():
        line.send(None)
    hashes: dict[str, tuple[str, str]] = {kind: line.recv() for kind, line in lines.items()}
    for process in processes:
        process.join()
    return seconds, hashes


def interval(values: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1]


def main() -> None:
    """Print one line of figures and one of the weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=128, dest="num_prompt")
    parser.add_argument("--completions", type=int, default=26, dest="num_completion")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.checkpointing = False
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    seconds, hashes = measured(arguments)
    stock, off = (seconds[kind][NUM_UNCOUNTED:] for kind in (STOCK, OFF))
    ratios = [ours / theirs - 1 for theirs, ours in zip(stock, off, strict=True)]
    low, high = interval(ratios)
    print(
        f"Llama, {arguments.layers} layers of {arguments.hidden}, V = {VOCABULARY}, float32, group {GROUP}, prompts of "
        f"{arguments.num_prompt}, completions of {arguments.num_completion}"
    )
    verdict = "met" if high < GOAL else "missed" if low > GOAL else "neither shown nor refuted"
    print(
        f"whole step, CPU seconds, median of {len(stock)}: TRL {statistics.median(stock):.3f}, ours, off "
        f"{statistics.median(off):.3f}; overhead {statistics.median(ratios):+.2%} (95%: {low:+.2%} to {high:+.2%}); "
        f"under {GOAL:.0%}: {verdict}"
    )
    first, last = hashes[STOCK]
    same = hashes[OFF] == (first, last) and first != last
    print(
        f"weights after {arguments.steps + 1} steps: {'moved, and the same' if same else 'NOT moved alike'}"
    )
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
