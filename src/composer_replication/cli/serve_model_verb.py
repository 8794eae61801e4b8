"""``composer-rl serve-model MODEL``: a local model behind an OpenAI-compatible address."""

from __future__ import annotations

import argparse
from contextlib import suppress

from composer_replication.cli.terminal import note
from composer_replication.config import ModelSection
from composer_replication.errors import UsageError, needs_extra


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
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
