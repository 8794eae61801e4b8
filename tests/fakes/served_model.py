"""A real local model behind HTTP, for whoever asks an OpenAI-compatible server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer_replication.trainer.model_server import ChatModel, ModelServer


@contextmanager
def served_model(model: Any, tokenizer: Any, name: str) -> Iterator[str]:
    """Its address, which ends with ``/v1``."""
    with ModelServer(ChatModel(model.eval(), tokenizer, name), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()
