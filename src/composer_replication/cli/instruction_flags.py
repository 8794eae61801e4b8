"""The flags of ``tasks build`` that have a model write instructions, and what is done for them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.cli.progress_bar import Report
    from composer_replication.model_endpoint import Endpoint


def add_instruction_flags(build: argparse.ArgumentParser) -> None:
    """Add the three flags."""
    build.add_argument(
        "--instructions-from",
        metavar="URL",
        help="have a model write each task's text too, like an issue: a server with /v1/chat/completions; it is sent "
        "the plain instruction, never deleted code or hidden tests, and what it answers is searched for both",
    )
    build.add_argument("--instructions-model", metavar="NAME", default="", help="the model's name there")
    build.add_argument(
        "--instructions-key-env",
        metavar="VARIABLE",
        default="",
        help="environment variable that holds the server's key; it is stored and shown nowhere",
    )


def named_endpoint(args: argparse.Namespace) -> Endpoint | None:
    """The endpoint of the flags; None where no text is asked for.

    Raises:
        UsageError: the flags name no server, no model or an empty variable (CR0206).
    """
    from composer_replication.model_endpoint import open_endpoint

    if args.instructions_from is None and not (args.instructions_model or args.instructions_key_env):
        return None
    return open_endpoint(args.instructions_from or "", args.instructions_model, args.instructions_key_env)


def have_written(folder: Path, endpoint: Endpoint, report: Report | None) -> dict[str, Any]:
    """Have instructions written for a finished store; the keys of ``tasks build`` that change.

    The Parquet file tells of every record, so it is made anew.

    Raises:
        UsageError: another process holds the store (CR0203).
        InputError: the store is damaged (CR0411).
    """
    from composer_replication.run_folder import RunFolder
    from composer_replication.tasks.instructions.written_instructions import write_instructions
    from composer_replication.tasks.parquet import write_parquet
    from composer_replication.tasks.store import TaskStore

    with RunFolder(folder).locked():
        store = TaskStore.open(folder)
        has_parquet = bool(store.derived)
        counts = write_instructions(store, store.task_ids(), endpoint, progress=report)
        if has_parquet and not store.derived:
            write_parquet(store)
        return {
            "instructions": dict(sorted(counts.items())),
            "bytes": store.num_bytes(),
            "fingerprint": store.fingerprint,
        }
