"""The processes of one node, started by torchrun: ``python -m composer_replication.trainer.node_processes``.

    … --nodes 2 --processes 8 --node-rank 0 --head node-0 -- train run.toml --out runs/a --resume

What follows ``--`` are words of ``composer-rl``. torchrun itself ends with code 1 however its processes end; here the code is
theirs, so that a scheduler can tell a run that the guard has halted (5) from a crash.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer_replication.errors import HALTED_EXIT_CODE, INTERRUPTED_EXIT_CODE

PROGRAM = "composer_replication.cli.main"


def build_parser() -> argparse.ArgumentParser:
    """The options; what each scheduler fills in is rendered by ``launch``."""
    parser = argparse.ArgumentParser(prog="node_processes", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="on each node, usually one a GPU")
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--head", default="127.0.0.1", help="name or address of the node of rank 0")
    parser.add_argument("--port", type=int, default=29500, help="a free port of that node")
    parser.add_argument("--sagemaker", metavar="FILE", help="take rank and head from its resourceconfig.json")
    parser.add_argument("--accelerate", metavar="FILE", help="its configuration, for sharded weights")
    parser.add_argument("--grace-seconds", type=int, default=110, help="for a last checkpoint after SIGTERM")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- WORDS")
    return parser


def sagemaker_place(file: Path) -> tuple[int, str]:
    """Rank and head of this host, by the file that SageMaker puts into each container."""
    place = json.loads(file.read_text())
    hosts = sorted(place["hosts"])
    return hosts.index(place["current_host"]), hosts[0]


def exit_code_of(codes: Sequence[int]) -> int:
    """One code for all processes: a halt counts most, since it must not be tried again; a signal's is 128 and its number."""
    if HALTED_EXIT_CODE in codes:
        return HALTED_EXIT_CODE
    first = next((code for code in codes if code), 0)
    return first if first >= 0 else 128 - first


def sharding_environment(file: str, num_processes: int) -> Mapping[str, str]:
    """What ``accelerate launch`` would put into the environment for this file, as accelerate itself says it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = ["--config_file", file, "--num_processes", str(num_processes), "script"]
    arguments = launch_command_parser().parse_args(words)
    _validate_launch_command(arguments)
    is_multi_gpu = not arguments.use_deepspeed
    given = prepare_multi_gpu_env(arguments) if is_multi_gpu else prepare_deepspeed_cmd_env(arguments)[1]
    return {name: value for name, value in given.items() if os.environ.get(name) != value}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the processes of this node to their end; the exit code is theirs."""
    options = build_parser().parse_args(argv)
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    rank, head = options.node_rank, options.head
    if options.sagemaker:
        rank, head = sagemaker_place(Path(options.sagemaker))
    if options.nodes * options.processes == 1:
        os.execv(sys.executable, [sys.executable, "-m", PROGRAM, *words])  # noqa: S606 - our own program, no shell
    if options.accelerate:
        os.environ.update(sharding_environment(options.accelerate, options.nodes * options.processes))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    with tempfile.TemporaryDirectory(prefix="composer-rl-torchrun-") as logs:
        arguments = [
            *("--nnodes", str(options.nodes), "--nproc-per-node", str(options.processes)),
            *("--node-rank", str(rank), "--master-addr", head, "--master-port", str(options.port)),
            *("--max-restarts", "0", "--shutdown-timeout", str(options.grace_seconds)),
            *("--log-dir", logs, "-m", PROGRAM, *words),
        ]
        try:
            run(parse_args(arguments))  # type: ignore[no-untyped-call]
        except ChildFailedError as failed:
            return exit_code_of([failure.exitcode for failure in failed.failures.values()])
        except SignalException:
            return INTERRUPTED_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
