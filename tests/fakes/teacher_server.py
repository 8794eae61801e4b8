"""A chat server that answers by a function of the request, counts what it gave, and can go wrong."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import HTTPServer
from typing import Any

from faulty_http import FaultyHandler, FaultyServer

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class TeacherServer(FaultyServer, HTTPServer):
    """``given`` counts whole answers by the key of the request: what a provider would have charged for."""

    answer: Answer
    given: Counter[str]
    may_answer: threading.Event
    tokens: tuple[int, int]

    @classmethod
    @contextmanager
    def running(cls, answer: Answer) -> Iterator[TeacherServer]:
        server = cls(("127.0.0.1", 0), _Handler)
        server.prepare()
        server.answer, server.given, server.may_answer = answer, Counter(), threading.Event()
        server.tokens = (100, 10)
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

    def spec(self, name: str) -> str:
        return f"{name}=http://127.0.0.1:{self.server_address[1]}/v1#{name}"


class _Handler(FaultyHandler):
    def respond(self) -> None:
        request = json.loads(self.data)
        self.server.bodies.append((self.route, request))
        num_in, num_out = self.server.tokens
        body = {
            "choices": [{"index": 0, "finish_reason": "stop", "message": self.server.answer(request)}],
            "usage": {"prompt_tokens": num_in, "completion_tokens": num_out},
        }
        with suppress(OSError):
            self.say(200, body)
            with self.server.lock:
                self.server.given[self.headers.get("Idempotency-Key", "")] += 1

    def answer(self) -> None:
        super().answer()

    do_POST = answer


def says(text: str) -> Answer:
    return lambda _: {"role": "assistant", "content": text}


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
