"""``composer-rl serve-env``: the tasks of a store as environments for OpenEnv's clients."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from composer_replication.cli.flags import add_isolation_flags, chosen_backend, number, whole_number
from composer_replication.errors import needs_extra
from composer_replication.records import MonitorMode

_INTERRUPTED = 130


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "serve-env",
        parents=[common],
        help="serve tasks as environments to OpenEnv clients",
        description="Serve the tasks of a store: each WebSocket session attempts tasks in sandboxes of its own, and is "
        "told the reward. The address is printed on standard error. SIGTERM ends the server with exit code 0, Ctrl-C with "
        "130; attempts that are under way are lost. There is no password: whoever reaches the port may use the sandboxes.",
    )
    parser.add_argument("tasks", metavar="DIR", type=Path, help="a task store")
    parser.add_argument("--port", type=int, required=True, metavar="N", help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default %(default)s")
    parser.add_argument(
        "--max-sessions",
        type=whole_number(most=1024),
        default=8,
        metavar="N",
        help="at the same time (default %(default)s)",
    )
    parser.add_argument(
        "--session-seconds",
        type=number(is_above=True),
        default=600.0,
        metavar="S",
        help="a session ends when nothing came for S seconds and the 300 that the longest call takes (default %(default)g)",
    )
    parser.add_argument(
        "--max-calls",
        type=whole_number(),
        default=100,
        metavar="N",
        help="then an attempt is graded as it stands (default %(default)s)",
    )
    parser.add_argument(
        "--grading-jobs", type=whole_number(), default=2, metavar="N", help="default %(default)s"
    )
    parser.add_argument(
        "--monitor",
        choices=get_args(MonitorMode),
        default="mask",
        help="of dishonest moves: pay 0 at most for them (mask, the default), tell of them, or do not look",
    )
    add_isolation_flags(parser)
    parser.set_defaults(run="composer_replication.cli.serve_env_verb:run")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Serve until a signal.

    Returns:
        ``url``, ``signal``, ``tasks``, ``attempts``, ``infrastructure_failures``, ``flagged``, ``masked``; exit code 0
        after SIGTERM, else 130.
    """
    from composer_replication.rollouts.environment.openenv_address import listen, url_of
    from composer_replication.rollouts.grading import Grader
    from composer_replication.tasks.store import TaskStore

    chosen_backend(args)
    store = TaskStore.open(args.tasks, backend=args.backend)
    num_tasks = len(store.require_task_ids())
    with listen(args.host, args.port) as listener:
        with needs_extra("openenv", "serving environments"):
            from composer_replication.rollouts.environment.openenv_server import EnvironmentServer
        grader = Grader(store, backend=args.backend or "", num_jobs=args.grading_jobs)
        try:
            server = EnvironmentServer(
                grader,
                max_sessions=args.max_sessions,
                session_seconds=args.session_seconds,
                max_calls=args.max_calls,
                monitor=args.monitor,
            )
            url = url_of(listener)
            _announce(url, num_tasks)  # clients wait in the listener's queue until they are served
            signal_name = server.serve(listener)
        finally:
            grader.stop_runs()  # a signal ended it: nobody waits for a grading any more
    names = ("attempts", "infrastructure_failures", "flagged", "masked")
    result: dict[str, object] = {"url": url, "signal": signal_name, "tasks": num_tasks}
    result |= {name: server.counts[name] for name in names}
    return result, 0 if signal_name == "SIGTERM" else _INTERRUPTED


def _announce(url: str, num_tasks: int) -> None:
    """Said even with ``--quiet``: with port 0 nobody knows the address otherwise."""
    print(f"serving {num_tasks} tasks at {url} (sessions: /ws, state: /health)", file=sys.stderr, flush=True)


def render(result: dict[str, Any]) -> str:
    return f"Ended by {result['signal']}: {result['attempts']} attempts ended, {result['infrastructure_failures']} without a reward, {result['masked']} masked by the monitor."
