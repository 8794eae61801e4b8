"""A server that speaks as vLLM does: ``/v1/completions`` with ids, ``/v1/chat/completions``, and what it says of itself.

It continues ids by a rule, or by ``sample``, answers a chat by a function of the request, counts what it gave, and can go wrong.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import HTTPServer
from typing import Any

from faulty_http import FaultyHandler, FaultyServer

Message = dict[str, Any]


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        **says(""),
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


class PolicyServer(FaultyServer, HTTPServer):
    """``changes`` are put into every choice, ``usage`` beside it; ``authorizations`` are the headers that came.

    ``told`` are the answers to GET and to ``/tokenize``, by route; None is 404. ``reply`` gives the messages of a chat.
    ``given`` counts whole answers by the key of the request: what a provider would have charged for.
    """

    reply: Callable[[dict[str, Any]], Message]
    given: Counter[str]

    changes: dict[str, Any]
    told: dict[str, Any]
    sample: Callable[[dict[str, Any]], tuple[list[int], list[float]]] | None
    usage: Any
    authorizations: list[str | None]
    may_answer: threading.Event

    @classmethod
    @contextmanager
    def running(
        cls, reply: Callable[[dict[str, Any]], Message] = lambda _: says("hello"), usage: Any = None
    ) -> Iterator[PolicyServer]:
        server = cls(("127.0.0.1", 0), _Handler)
        server.prepare()
        server.changes = {}
        server.reply, server.usage, server.given = reply, usage, Counter()
        server.sample = None
        server.told = {"/v1/models": {"data": [{"id": "tiny", "max_model_len": 4096}]}}
        server.authorizations = []
        server.may_answer = threading.Event()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.may_answer.set()
            server.shutdown()
            server.cut_connections()
            server.server_close()
            thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spec(self, name: str) -> str:
        return f"{name}={self.url}/v1#{name}"


class _Handler(FaultyHandler):
    def respond(self) -> None:
        with suppress(OSError):
            if self.command == "GET" or self.route == "/tokenize":
                told = self.server.told.get(self.route)
                self.say(404 if told is None else 200, told)
                return
            self.say(200, answer_to(self.route, json.loads(self.data), self.server))
            with self.server.lock:
                self.server.given[self.headers.get("Idempotency-Key", "")] += 1

    def answer(self) -> None:
        self.server.authorizations.append(self.headers.get("Authorization"))
        super().answer()

    do_GET = do_POST = answer


def answer_to(route: str, request: dict[str, Any], server: PolicyServer) -> dict[str, Any]:
    server.bodies.append((route, request))
    if route.endswith("/chat/completions"):
        message = server.reply(request)
        choice = {"message": message, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
    else:
        ids, logps = (server.sample or by_rule)(request)
        choice = {
            "text": " ".join(map(str, ids)),
            "finish_reason": "length" if len(ids) == request["max_tokens"] else "stop",
            "token_ids": ids,
            "prompt_token_ids": request["prompt"],
            "logprobs": {"tokens": [f"token_id:{number}" for number in ids], "token_logprobs": logps},
        }
    choice = {name: value for name, value in {**choice, **server.changes}.items() if value is not None}
    known = {"id": "answer", "object": "chat.completion", "created": 0, "model": request.get("model")}
    return {**known, "choices": [{"index": 0, **choice}], "usage": server.usage}


def by_rule(request: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Up to four ids that depend on prompt and seed."""
    first = sum(request["prompt"]) + request["seed"]
    ids = [(first + n) % 1000 for n in range(min(4, request["max_tokens"]))]
    return ids, [-0.125 * (n + 1) for n in range(len(ids))]


def hold(handler: Any) -> None:
    """A fault: take the request and answer only when the server ends."""
    handler.server.may_answer.wait(30)
    handler.close_connection = True


def half_a_chunked_answer(handler: Any) -> None:
    """A fault: a stream that stops in its middle."""
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{"choice\r\n')
    handler.close_connection = True
    with suppress(OSError):
        handler.connection.close()
