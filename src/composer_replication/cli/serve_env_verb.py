"""``composer-rl serve-env``: the tasks of a store as environments for OpenEnv's clients."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from composer_replication.cli.flags import add_acceptance_flag, whole_number
from composer_replication.records import MonitorMode

_INTERRUPTED = 130
_BOUNDS: dict[str, tuple[type, int, str]] = {
    "--max-sessions": (int, 8, "at the same time"),
    "--session-seconds": (float, 600, "a session ends when nothing came for S seconds"),
    "--call-seconds": (float, 300, "the longest that a tool may take"),
    "--max-calls": (int, 100, "then an attempt is graded as it stands"),
    "--drain-seconds": (float, 10, "what attempts have left when the server is told to end"),
}
"""In the order of ``ServeOptions``."""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Register the verb; ``common`` carries ``--json`` and ``--quiet``."""
    parser = subparsers.add_parser(
        "serve-env",
        parents=[common],
        help="serve tasks as environments to OpenEnv clients",
        description="Serve the tasks of a store: each WebSocket session attempts tasks in sandboxes of its own, and is "
        "told the reward. The address is printed on standard error. SIGTERM lets attempts end and "
        "exits with 0, Ctrl-C does so with 130, a second one does not wait. There is no password: whoever reaches the "
        "port may use the sandboxes.",
    )
    parser.add_argument("tasks", metavar="DIR", type=Path, help="a task store")
    parser.add_argument("--port", type=int, required=True, metavar="N", help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default %(default)s")
    for flag, (kind, default, what) in _BOUNDS.items():
        metavar = "N" if kind is int else "S"
        parser.add_argument(
            flag, type=kind, default=default, metavar=metavar, help=f"{what} (default {default})"
        )
    parser.add_argument(
        "--grading-jobs", type=whole_number(), default=2, metavar="N", help="default %(default)s"
    )
    parser.add_argument(
        "--monitor",
        choices=get_args(MonitorMode),
        default="mask",
        help="of dishonest moves: no reward for them (mask, the default), tell of them, or do not look",
    )
    parser.add_argument(
        "--backend", metavar="NAME", default="", help="sandbox backend (default: the best here)"
    )
    add_acceptance_flag(parser, "do without a guard of the self-test, as in composer-rl sandbox")
    parser.set_defaults(run="composer_replication.cli.serve_env_verb:run")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Serve until a signal.

    Returns:
        ``url``, ``signal``, ``tasks``, and ``sessions``, ``refused``, ``observations``, ``attempts``,
        ``infrastructure_failures``, ``flagged``, ``masked`` (numbers); exit code 0 after SIGTERM, else 130.

    Raises:
        UsageError: a number out of range (CR0206), an address that cannot be taken (CR0850), an unknown backend.
        InputError: no store (CR0410), or a damaged one.
        NothingToDoError: the store holds no tasks (CR0604).
        MissingError: OpenEnv is not installed (CR0101), no sandbox here (CR0301).
        SandboxFailure: the sandbox does not hold (CR0304).
    """
    from composer_replication.errors import needs_extra
    from composer_replication.rollouts.environment.openenv_options import ServeOptions, listen, url_of
    from composer_replication.rollouts.grading import Grader
    from composer_replication.sandbox import choose_backend
    from composer_replication.sandbox.acceptance import accept
    from composer_replication.tasks.store import TaskStore

    options = ServeOptions(
        args.max_sessions, args.session_seconds, args.call_seconds, args.max_calls, args.drain_seconds
    )
    accept(args.accepted)
    choose_backend(args.backend or None)
    store = TaskStore.open(args.tasks, backend=args.backend or None)
    num_tasks = len(store.require_task_ids())
    with listen(args.host, args.port) as listener:
        with needs_extra("openenv", "serving environments"):
            from composer_replication.rollouts.environment.openenv_server import EnvironmentServer
        grader = Grader(store, backend=args.backend, num_jobs=args.grading_jobs)
        try:
            server = EnvironmentServer(grader, options, monitor=args.monitor)
            url = url_of(listener)
            signal_name = server.serve(listener, lambda url: _announce(url, num_tasks))
        finally:
            grader.close()
    counts = server.counts
    result: dict[str, object] = {
        "url": url,
        "signal": signal_name,
        "tasks": num_tasks,
        "sessions": counts.num_sessions,
        "refused": counts.num_refused,
        "observations": counts.num_observations,
        "attempts": counts.num_attempts_ended,
        "infrastructure_failures": counts.num_infrastructure_failures,
        "flagged": counts.num_flagged,
        "masked": counts.num_masked,
    }
    return result, 0 if signal_name == "SIGTERM" else _INTERRUPTED


def _announce(url: str, num_tasks: int) -> None:
    """Said even with ``--quiet``: with port 0 nobody knows the address otherwise."""
    print(f"serving {num_tasks} tasks at {url} (sessions: /ws, state: /health)", file=sys.stderr, flush=True)


def render(result: dict[str, Any]) -> str:
    return (
        f"Ended by {result['signal']}: {result['sessions']} sessions, {result['refused']} refused; "
        f"{result['attempts']} attempts ended, {result['infrastructure_failures']} without a reward, {result['masked']} masked by the monitor."
    )
