"""``composer-rl replicas``: all trainers of one run here, or the lighthouse of those on one network; how one joins its run."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from composer_replication.cli.task_division import RunTasks
from composer_replication.config import ReplicasSection, RunConfig, load_config, parse_override, read_table
from composer_replication.errors import (
    HALTED_EXIT_CODE,
    MissingError,
    NothingToDoError,
    UsageError,
    needs_extra,
)
from composer_replication.replicas.object_store import open_store
from composer_replication.replicas.rounds import Rounds
from composer_replication.replicas.store_rounds import StoreRounds
from composer_replication.report.page import merged_outer_steps
from composer_replication.run_folder import RunFolder, append_jsonl, read_json, read_jsonl, write_json

_CHILD_PATIENCE_SECONDS = 30.0
TOKEN_VARIABLE = "COMPOSER_REPLICAS_TOKEN"  # noqa: S105 - the name of the variable


def run_start(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    out = (args.out or Path("runs") / args.recipe.resolve().parent.name).resolve()
    overrides = dict(parse_override(text) for text in args.overrides) | {"replicas.num_replicas": args.local}
    if "replicas" not in read_table(args.recipe) and "replicas.transport" not in overrides:
        overrides["replicas.transport"] = f"file://{out / 'store'}"
    load_config(args.recipe, overrides)  # what is wrong with it is said here, once
    out.mkdir(parents=True, exist_ok=True)
    children: list[Popen[bytes]] = []
    try:
        children.extend(_child(args, number, out, overrides) for number in range(args.local))
        codes = [child.wait() for child in children]
    finally:
        _end_all(children)  # none outlives this process
    code = HALTED_EXIT_CODE if HALTED_EXIT_CODE in codes else next((code for code in codes if code), 0)
    verdict = {0: "clean", HALTED_EXIT_CODE: "halted"}.get(code, "unfinished")
    folders = [RunFolder(out / f"replica-{number}") for number in range(args.local)]
    rows = [_row(folder, own) for folder, own in zip(folders, codes, strict=True)]
    result = {"runs": str(out), "replicas": rows, "verdict": verdict, **_together(folders)}
    write_json(out / "summary.json", result)
    return result, code


def run_lighthouse(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    table: dict[str, Any] = {"transport": f"torchft://{args.bind}", "grace_seconds": args.grace_seconds}
    options = ReplicasSection(**table, num_replicas=args.min_replicas, min_replicas=args.min_replicas)
    quiet_torchft()
    with needs_extra("replicas", "a lighthouse"):
        from composer_replication.replicas.lighthouse import Lighthouse
    with suppress(KeyboardInterrupt), closing(Lighthouse(replica_token(), options, folder=args.records)):
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return {"lighthouse": args.bind}, 0


def _child(args: argparse.Namespace, number: int, out: Path, overrides: dict[str, Any]) -> Popen[bytes]:
    """One replica as a process of its own, whose words go into ``replica-I.log``."""
    words = ["train", str(args.recipe), "--out", str(out / f"replica-{number}"), "--replica", str(number)]
    words += [part for key, value in overrides.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    words += ["--quiet", *(["--resume"] if args.resume else [])]
    command = [sys.executable, "-m", "composer_replication.cli.main", *words]
    with (out / f"replica-{number}.log").open("ab") as log:
        return Popen(command, stdin=DEVNULL, stdout=log, stderr=log)


def _end_all(children: list[Popen[bytes]]) -> None:
    """Those that still run are asked to save and end, and ended if they do not."""
    for child in children:
        child.send_signal(signal.SIGINT)  # does nothing to one that has ended
    for child in children:
        with suppress(TimeoutExpired):
            child.wait(_CHILD_PATIENCE_SECONDS)
        child.kill()
        child.wait()


def _together(folders: list[RunFolder]) -> dict[str, Any]:
    """Outer steps that were taken, whether all weights were equal after each of them, and what all sent."""
    steps = merged_outer_steps([folder.root for folder in folders])
    newest = [rows[-1]["bytes"] for folder in folders if (rows := read_jsonl(folder.outer_steps))]
    return {
        "outer_steps": max((step["outer_step"] for step in steps), default=0),
        "fragments_equal": all(step["agreed"] == "equal" for step in steps),
        "bytes_sent": sum(n for one in newest for name, n in one.items() if name.startswith("sent/")),
    }


def _row(run: RunFolder, code: int) -> dict[str, Any]:
    summary = read_json(run.summary) if run.summary.is_file() else {}
    return {
        "run": str(run.root),
        "exit_code": code,
        "outer_steps": max((row["outer_step"] for row in read_jsonl(run.outer_steps)), default=0),
        "parameter_sha256": summary.get("parameter_sha256"),
        "reason": summary.get("reason", ""),
    }


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of several: its number, and its way to the others."""

    number: int
    options: ReplicasSection
    rounds: Rounds

    def share_of(self, tasks: RunTasks, seed: int) -> RunTasks:
        """Its part of the tasks to train on: all of them shuffled by the run's seed and dealt out."""
        dealt = list(tasks.train)
        random.Random(seed).shuffle(dealt)  # noqa: S311 - a division that all replicas share
        own = tuple(dealt[self.number :: self.options.num_replicas])
        if len(dealt) < self.options.num_replicas:
            problem = f"{len(dealt)} tasks cannot be shared out among {self.options.num_replicas} replicas."
            fix = "build more tasks, or take fewer replicas."
            raise NothingToDoError("CR0604", problem, where="replicas.num_replicas", fix=fix)
        return replace(tasks, train=own)

    def attach(self, trainer: Any, folder: RunFolder, identity: dict[str, str]) -> None:
        """Compare with the others' run, and tie the trainer to it; ``identity`` is what every replica must share."""
        from composer_replication.replicas.outer_step import OuterState
        from composer_replication.replicas.replica_loop import ReplicaLoop
        from composer_replication.trainer.guard import ReplicaCallback

        self.rounds.records.agree(identity)
        state = OuterState(trainer.model, self.options)
        keep = partial(append_jsonl, folder.outer_steps)
        loop = ReplicaLoop(self.rounds, state, self.options, on_merge=keep)
        trainer.add_callback(ReplicaCallback(trainer.guard_hook, trainer.interrupt, loop, identity))


@contextmanager
def open_replica(config: RunConfig, number: int | None) -> Iterator[Replica | None]:
    """This replica with an open way to the others; None where a run has one only, of which nothing is built."""
    options, problem = config.replicas, ""
    num_replicas = 1 if options is None else options.num_replicas
    if options is None and number is not None:
        problem = "--replica needs a [replicas] table in the recipe"
    elif num_replicas > 1 and number is None:
        problem = f"the recipe has {num_replicas} replicas: say which one this is"
    elif number is not None and not 0 <= number < num_replicas:
        problem = f"there is no replica {number} of {num_replicas}: they are counted from 0"
    if problem:
        fix = "composer-rl train RECIPE.toml --replica I --of N, or composer-rl replicas start RECIPE.toml --local N"
        raise UsageError("CR0206", f"{problem}.", where="composer-rl train", fix=fix)
    if options is None or num_replicas == 1 or number is None:
        yield None
        return
    rounds: Rounds
    if options.lighthouse:
        quiet_torchft()
        with needs_extra("replicas", "torchft"):
            from composer_replication.replicas.torchft_rounds import TorchftRounds
        rounds = TorchftRounds(options, token=replica_token(), replica=number)
        rounds.probe()
    else:
        with needs_extra("replicas", "an object store for replicas"):
            import obstore  # noqa: F401
        store = open_store(options.transport, patience_seconds=options.deadline_seconds)
        store.probe()
        rounds = StoreRounds(store, options, replica=number)
    with closing(rounds):
        yield Replica(number, options, rounds)


def replica_token() -> str:
    """What replicas on one network show each other."""
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        return token
    fix = f"export {TOKEN_VARIABLE}=... with the same secret for the lighthouse and every replica."
    raise MissingError("CR1101", "the replicas' shared token is missing.", where=TOKEN_VARIABLE, fix=fix)


def quiet_torchft() -> None:
    """Before torchft is loaded: it would write a line on standard error for everything that it does."""
    os.environ.setdefault("RUST_LOG", "error")
