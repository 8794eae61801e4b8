"""Joins several replicas to a run: their flags, the share of the tasks of each, and what ties a trainer to the others."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from composer_replication import __version__
from composer_replication.errors import MissingError, NothingToDoError, UsageError, needs_extra

if TYPE_CHECKING:
    from composer_replication.channel_tables import ReplicasSection
    from composer_replication.cli.task_division import RunTasks
    from composer_replication.config import RunConfig
    from composer_replication.replicas.rounds import Rounds
    from composer_replication.run_folder import RunFolder

TOKEN_VARIABLE = "COMPOSER_REPLICAS_TOKEN"  # noqa: S105 - the name of the variable


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of several: its number, and its way to the others."""

    number: int
    options: ReplicasSection
    rounds: Rounds

    def share_of(self, tasks: RunTasks, seed: int) -> RunTasks:
        """Its part of the tasks to train on: all of them shuffled by the run's seed and dealt out.

        Raises:
            NothingToDoError: there are fewer tasks than replicas (CR0604).
        """
        dealt = list(tasks.train)
        random.Random(seed).shuffle(dealt)  # noqa: S311 - a division that all replicas share
        own = tuple(dealt[self.number :: self.options.num_replicas])
        if len(dealt) < self.options.num_replicas:
            raise NothingToDoError(
                "CR0604",
                f"{len(dealt)} tasks cannot be shared out among {self.options.num_replicas} replicas.",
                where="replicas.num_replicas",
                fix="build more tasks, or take fewer replicas.",
            )
        return replace(tasks, train=own)

    def attach(self, trainer: Any, folder: RunFolder, identity: dict[str, str]) -> None:
        """Compare with the others' run, and tie the trainer to it.

        Raises:
            UsageError: the run at this address is another one (CR1103).
            MissingError: it cannot be reached (CR1101).
        """
        from composer_replication.replicas.outer_step import OuterState
        from composer_replication.replicas.replica_loop import ReplicaLoop
        from composer_replication.run_folder import append_jsonl
        from composer_replication.trainer.run_callback import ReplicaCallback

        self.rounds.records.agree(identity)
        state = OuterState(trainer.model, self.options)
        loop = ReplicaLoop(
            self.rounds, state, self.options, on_merge=lambda row: append_jsonl(folder.outer_steps, row)
        )
        trainer.add_callback(ReplicaCallback(trainer, loop, identity))


def add_replica_flags(parser: argparse.ArgumentParser) -> None:
    """``--replica I --of N``."""
    parser.add_argument(
        "--replica",
        metavar="I",
        type=int,
        help="join as replica I, counted from 0; the recipe has [replicas]",
    )
    parser.add_argument("--of", dest="num_replicas", metavar="N", type=int, help="sets replicas.num_replicas")


def identity_of(config: RunConfig, store: str, tasks: RunTasks, model: str) -> dict[str, str]:
    """What every replica of a run must share."""
    from composer_replication.cli.assembly import recipe_sha256

    return {
        "version": __version__,
        "recipe": recipe_sha256(config),
        "tasks": store,
        "split": tasks.split.fingerprint if tasks.split else "",
        "model": model,
    }


@contextmanager
def open_replica(config: RunConfig, number: int | None) -> Iterator[Replica | None]:
    """This replica with an open way to the others; None where a run has one only, of which nothing is built.

    Raises:
        UsageError: ``[replicas]`` without ``--replica`` or the other way round, or a number out of range (CR0206); a store
            without conditional writes (CR1102).
        MissingError: a package is missing (CR0101); store or lighthouse cannot be used (CR1101).
    """
    options = config.replicas
    _check_number(options, number)
    if options is None or options.num_replicas == 1 or number is None:
        yield None
        return
    opened = _torchft_rounds if options.transport == "torchft" else _store_rounds
    rounds = opened(options, number)
    try:
        yield Replica(number, options, rounds)
    finally:
        rounds.close()


def _check_number(options: ReplicasSection | None, number: int | None) -> None:
    num_replicas = 1 if options is None else options.num_replicas
    problem = ""
    if options is None and number is not None:
        problem = "--replica needs a [replicas] table in the recipe"
    elif num_replicas > 1 and number is None:
        problem = f"the recipe has {num_replicas} replicas: say which one this is"
    elif number is not None and not 0 <= number < num_replicas:
        problem = f"there is no replica {number} of {num_replicas}: they are counted from 0"
    if problem:
        raise UsageError(
            "CR0206",
            f"{problem}.",
            where="composer-rl train",
            fix="composer-rl train RECIPE.toml --replica I --of N, or composer-rl replicas start RECIPE.toml --local N",
        )


def _store_rounds(options: ReplicasSection, number: int) -> Rounds:
    with needs_extra("replicas", "an object store for replicas"):
        import obstore  # noqa: F401

    from composer_replication.replicas.object_store import open_store
    from composer_replication.replicas.store_rounds import StoreRounds

    store = open_store(options.transport, patience_seconds=options.deadline_seconds)
    store.probe()
    return StoreRounds(store, options, replica=number)


def _torchft_rounds(options: ReplicasSection, number: int) -> Rounds:
    quiet_torchft()
    with needs_extra("replicas", "torchft"):
        from composer_replication.replicas.torchft_rounds import TorchftRounds

    rounds = TorchftRounds(options, token=replica_token(), replica=number)
    rounds.probe()
    return rounds


def replica_token() -> str:
    """What replicas on one network show each other.

    Raises:
        MissingError: it is not in the environment (CR1101).
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise MissingError(
            "CR1101",
            "the replicas' shared token is missing.",
            where=TOKEN_VARIABLE,
            fix=f"export {TOKEN_VARIABLE}=... with the same secret for the lighthouse and every replica.",
        )
    return token


def quiet_torchft() -> None:
    """Before torchft is loaded: it would write a line on standard error for everything that it does."""
    os.environ.setdefault("RUST_LOG", "error")
