"""``composer-rl serve-model MODEL``: a local model behind an OpenAI-compatible address."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from composer_replication.errors import UsageError, needs_extra


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "serve-model",
        parents=[common],
        help="serve a local model to OpenAI-compatible clients",
        description="Answer /v1/chat/completions from a model of this machine, tools and log-probabilities included, and score given tokens at /v1/completions: a teacher for traces replay and traces distill.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a model folder or name, package:NAME==VERSION, a run's model/"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="default %(default)s: this machine alone; there is no password"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="default %(default)s; 0 takes a free one"
    )
    parser.add_argument(
        "--dtype", default="float32", metavar="NAME", help="of the weights (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights of tiny-random and tiny-tools")
    parser.set_defaults(run="composer_replication.cli.serve_model_verb:run")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Serve until a signal."""
    from composer_replication.config import parse_config

    with needs_extra("train", "serving a model"):
        from composer_replication.trainer.model_loading import load_model
        from composer_replication.trainer.model_server import ChatModel, ModelServer
    table = {"model": {"name": args.model, "dtype": args.dtype}, "tasks": {"store": "."}}
    section = parse_config(table, where="composer-rl serve-model").model
    model, tokenizer = load_model(section, seed=args.seed, needs_chat_template=True)
    try:
        server = ModelServer(ChatModel(model.eval(), tokenizer, args.model), args.host, args.port)
    except (OSError, OverflowError) as error:
        problem = f"the address cannot be taken: {error}."
        fix = "choose another --port."
        raise UsageError("CR0850", problem, where=f"{args.host}:{args.port}", fix=fix) from error
    url = f"http://{args.host}:{server.server_address[1]}/v1"
    print(f"serving {args.model} at {url}", file=sys.stderr, flush=True)
    try:
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return {"url": url, "model": args.model}, 0


def render(result: dict[str, Any]) -> str:
    """What a person reads at its end."""
    return f"Ended: {result['model']} at {result['url']}."
