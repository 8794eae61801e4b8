"""``composer-rl serve-env``: the tasks of a store as environments for OpenEnv's clients."""

from __future__ import annotations

import argparse

from composer_replication.cli.flags import chosen_backend
from composer_replication.cli.terminal import note
from composer_replication.errors import INTERRUPTED_EXIT_CODE, needs_extra
from composer_replication.rollouts.environment.hosted_attempt import listen, url_of
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Serve until a signal; exit code 0 after SIGTERM, else 130."""
    chosen_backend(args)
    store = TaskStore.open(args.tasks, backend=args.backend)
    num_tasks = len(store.require_task_ids())
    with listen(args.host, args.port) as listener:
        with needs_extra("openenv", "serving environments"):
            from composer_replication.rollouts.environment.openenv_server import serve
        grader = Grader(store, backend=args.backend or "", num_jobs=args.grading_jobs)
        try:
            grader.attempt_backend()  # its self-test is no client's time
            url = url_of(listener)
            signal_name, counts = serve(
                listener,
                grader,
                max_sessions=args.max_sessions,
                session_seconds=args.session_seconds,
                max_calls=args.max_calls,
                monitor=args.monitor,
                # Said even with --quiet: with port 0 nobody knows the address otherwise. Clients wait in the listener's queue.
                on_ready=lambda: note(f"serving {num_tasks} tasks at {url} (sessions: /ws, state: /health)"),
            )
        finally:
            grader.stop_runs()  # a signal ended it: nobody waits for a grading any more
    names = ("attempts", "infrastructure_failures", "flagged", "masked")
    result = {"url": url, "signal": signal_name, "tasks": num_tasks, **{name: counts[name] for name in names}}
    return result, 0 if signal_name == "SIGTERM" else INTERRUPTED_EXIT_CODE
