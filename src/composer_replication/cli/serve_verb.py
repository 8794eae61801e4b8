"""``composer-rl serve-env`` and ``serve-model``: tasks for OpenEnv's clients, a local model for those of OpenAI."""

from __future__ import annotations

import argparse
from contextlib import suppress

from composer_replication.cli.flags import chosen_backend
from composer_replication.cli.terminal import note
from composer_replication.config import ModelSection
from composer_replication.errors import INTERRUPTED_EXIT_CODE, UsageError, needs_extra
from composer_replication.rollouts.environment.hosted_attempt import listen, url_of
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore


def run_env(args: argparse.Namespace) -> tuple[dict[str, object], int]:
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


def run_model(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    with needs_extra("train", "serving a model"):
        from composer_replication.trainer.model_loading import load_model
        from composer_replication.trainer.model_server import ChatModel, ModelServer
    section = ModelSection(name=args.model, dtype=args.dtype)
    model, tokenizer = load_model(section, seed=args.seed, needs_chat_template=True)
    try:
        server = ModelServer(ChatModel(model.eval(), tokenizer, args.model), args.host, args.port)
    except (OSError, OverflowError) as error:
        problem = f"the address cannot be taken: {error}."
        fix = "choose another --port."
        raise UsageError("CR0850", problem, where=f"{args.host}:{args.port}", fix=fix) from error
    url = f"http://{args.host}:{server.server_address[1]}/v1"
    note(f"serving {args.model} at {url}")
    with server, suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.1)
    return {"url": url, "model": args.model}, 0
