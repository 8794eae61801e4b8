"""A chat server over a model of this process, as OpenAI-compatible clients expect one: a teacher of one's own.

Tools go through the model's chat template. Answers carry their log-probabilities and token counts, and so do ids that are
given (``prompt_logprobs``, as of vLLM). One request at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from composer_replication.errors import InputError
from composer_replication.records import StopReason, ToolSpec
from composer_replication.rollouts.episodes.policies import SampleOptions
from composer_replication.rollouts.tokens.call_dialects import dialect_of, read_completion
from composer_replication.trainer.policy import ModelSampler, chat_prompt_ids, end_token_ids

MAX_REQUEST_BYTES = 64 * 1024**2
_UNKNOWN = {"error": {"message": "known are /v1/models, /v1/chat/completions and /v1/completions"}}


class ChatModel:
    """Answers requests of ``/v1/chat/completions`` and ``/v1/completions``; safe to use from several threads.

    Model and tokenizer are of ``load_model``. What cannot be answered is a ``ValueError`` that says why.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.name, self._model, self._tokenizer = name, model, tokenizer
        self._sampler = ModelSampler(model, None, tokenizer, eos_token_ids=end_token_ids(model, tokenizer))
        self._dialect = dialect_of(tokenizer.chat_template, tokenizer, refuses=False)
        self._max_tokens = int(getattr(model.config, "max_position_embeddings", 0) or 2**20)
        self._lock = threading.Lock()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        tokenizer = self._tokenizer
        try:
            messages = [_for_template(each) for each in request["messages"]]
            tools = request.get("tools") or []
            functions = [tool["function"] for tool in tools]
            specs = tuple(ToolSpec(of["name"], of.get("parameters", {})) for of in functions)
            limit = int(request.get("max_tokens") or request.get("max_completion_tokens") or 1024)
            temperature, seed = float(request.get("temperature", 1.0)), int(request.get("seed") or 0)
            if limit < 1 or not 0 <= temperature < 100:
                raise ValueError("max_tokens has to be at least 1, temperature from 0 to 100")
            if self._dialect == "fenced" and (tools or any(each["role"] == "tool" for each in messages)):
                raise ValueError(f"the chat template of {self.name} knows no tools: serve another model")
            prompt = chat_prompt_ids(tokenizer, messages, tools=tools or None)
        except (InputError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"the request cannot be read: {type(error).__name__}: {error}") from error
        room = self._max_tokens - len(prompt)
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} of {self._max_tokens} tokens: no room to answer")
        options = SampleOptions(min(limit, room), temperature, seed % 2**63)
        with self._lock:
            (completion,) = self._sampler([tuple(prompt)], [options])
        ids, said = completion.token_ids, completion.text
        reason = "stop" if completion.stop_reason is StopReason.FINISHED else "length"
        message: dict[str, Any] = {"role": "assistant", "content": said or None}
        calls = read_completion(tokenizer, prompt, ids, self._dialect, tools=specs) if tools else ()
        if calls:
            reason, message["content"] = "tool_calls", said.split("<tool_call>")[0].strip() or None
            names = [call.call_id or f"call_{number}" for number, call in enumerate(calls)]
            own = [{"name": call.name, "arguments": call.arguments} for call in calls]
            named = zip(names, own, strict=True)
            message["tool_calls"] = [{"id": name, "type": "function", "function": of} for name, of in named]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason}
        if request.get("logprobs"):
            pairs = zip(ids, completion.token_logp, strict=True)
            tokens = [{"token": tokenizer.decode([n]), "token_id": n, "logprob": logp} for n, logp in pairs]
            choice["logprobs"] = {"content": tokens}
        return self._told("chatcmpl-local", "chat.completion", choice, len(prompt), len(ids))

    def score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A completion without text, which says of each id of its prompt but the first what the model gave it, at temperature 1."""
        ids: Any = request.get("prompt")
        every = range(len(self._tokenizer))
        is_known = isinstance(ids, list) and all(type(token) is int and token in every for token in ids)
        if not is_known or not 0 < len(ids) <= self._max_tokens or request.get("prompt_logprobs") is None:
            raise ValueError("prompt has to be a list of the model's token ids, beside prompt_logprobs")
        with self._lock, torch.inference_mode():
            ids_1T = torch.tensor([ids], device=self._model.device)
            logits_TV = self._model(input_ids=ids_1T).logits[0, :-1].float()
            logp_T = logits_TV.gather(-1, ids_1T[0, 1:, None])[:, 0] - logits_TV.logsumexp(-1)
        pairs = zip(ids[1:], logp_T.tolist(), strict=True)
        said = [{n: {"logprob": logp, "decoded_token": self._tokenizer.decode([n])}} for n, logp in pairs]
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": [None, *said]}
        return self._told("cmpl-local", "text_completion", choice, len(ids), 0)

    def _told(self, name: str, kind: str, choice: Any, num_in: int, num_out: int) -> dict[str, Any]:
        usage = {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out}
        return {"id": name, "object": kind, "model": self.name, "choices": [choice], "usage": usage}


class ModelServer(ThreadingHTTPServer):
    """``ChatModel`` behind HTTP; ``serve_forever`` until ``shutdown``."""

    def __init__(self, chat_model: ChatModel, host: str, port: int) -> None:
        self.chat_model = chat_model
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_GET(self) -> None:
        if self.path.rstrip("/").endswith("/models"):
            models = [{"id": self.server.chat_model.name, "object": "model"}]
            self._say(200, {"object": "list", "data": models})
        else:
            self._say(404, _UNKNOWN)

    def do_POST(self) -> None:
        model = self.server.chat_model
        routes = {"/chat/completions": model.answer, "/completions": model.score}
        respond = next((act for end, act in routes.items() if self.path.endswith(end)), None)
        if respond is None:
            self._say(404, _UNKNOWN)
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 < length <= MAX_REQUEST_BYTES:
                raise ValueError("the length of the request")
            request = json.loads(self.rfile.read(length))
            if not isinstance(request, dict) or request.get("stream"):
                raise ValueError("an object without stream is wanted")
            self._say(200, respond(request))
        except (ValueError, RecursionError) as error:
            self._say(400, {"error": {"message": str(error)}})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name of the overridden method
        """Nothing: whoever serves says where."""

    def _say(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    found = deepcopy({**message, "content": message.get("content") or ""})
    for call in found.get("tool_calls") or ():
        with suppress(TypeError, ValueError):  # an object already, or no JSON
            call["function"]["arguments"] = json.loads(call["function"].get("arguments"))
    return found
