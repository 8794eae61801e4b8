"""A model's text is kept only if it tells nothing, and a server that fails costs nothing: against a real server."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from composer_replication.errors import InputError, MissingError, UsageError
from composer_replication.model_endpoint import Endpoint, EndpointFailed, open_endpoint
from composer_replication.tasks.instructions.written_instructions import (
    MAX_CHARS,
    REQUEST,
    WrittenInstruction,
    write_instructions,
    written_instruction,
)
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import packed_path, read_content, write_file

KEY = "sk-very-secret-key"
GOOD = (
    "The function `clamp` is missing. Given a number and two bounds it answers the number itself where it lies between "
    "them, and the bound that it passed where it does not. The vector class `Vector` needs its methods too."
)


@dataclass
class Served:
    """A server on this machine: what it was sent, and how it answers."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    answer: Callable[[BaseHTTPRequestHandler], None] = lambda handler: say(handler, GOOD)
    gate: threading.Event = field(default_factory=threading.Event)

    def endpoint(self, **changes: Any) -> Endpoint:
        return Endpoint(f"{self.url}/v1", "writer", **{"timeout_seconds": 30.0, "max_retries": 0, **changes})


def reply(handler: BaseHTTPRequestHandler, data: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **headers,
    }.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def say(handler: BaseHTTPRequestHandler, text: object, **choice: object) -> None:
    message = {
        "role": "assistant",
        "content": text,
        **{k: choice.pop(k) for k in ("refusal",) if k in choice},
    }
    reply(handler, json.dumps({"choices": [{"message": message, **choice}]}).encode())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.requests.append(json.loads(body))
            state.headers.append({name.title(): value for name, value in self.headers.items()})
            state.paths.append(self.path)
            state.answer(self)

        def log_message(self, *_: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Served(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    state.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_good_answer_is_kept_beside_the_plain_one(sized_store: TaskStore, served: Served) -> None:
    before = sized_store.fingerprint
    counts = write_instructions(sized_store, ["t-function-body", "t-class-whole"], served.endpoint())
    assert counts == {"written": 2}
    expected = WrittenInstruction("t-function-body", "writer", GOOD + "\n")
    store = TaskStore.open(sized_store.root)
    store.verify()
    assert written_instruction(store, "t-function-body") == expected
    assert written_instruction(store, "t-module-body") is None
    assert store.fingerprint != before  # it is listed in the manifest
    assert (store.root / "instructions" / "t-function-body.json.zst").is_file()


def test_only_public_information_is_sent(sized_store: TaskStore, served: Served) -> None:
    ids = sized_store.task_ids()
    write_instructions(sized_store, ids, served.endpoint())
    assert len(served.requests) == len(ids) == 9
    for task_id, request in zip(ids, served.requests, strict=True):
        assert request["model"] == "writer"
        assert [message["role"] for message in request["messages"]] == ["system", "user"]
        assert request["messages"][0]["content"] == REQUEST
        sent = json.dumps(request)
        for golden in ("min(x, high)", "other.x + self.y", "text.upper()", "letters[::-1]", "self.x = x"):
            assert golden not in sent
        for hidden in sized_store.secret(task_id).hidden:
            assert f"{hidden.rpartition('::')[2]}(" not in sent
    assert all(path == "/v1/chat/completions" for path in served.paths)


def test_what_is_kept_is_not_asked_again(sized_store: TaskStore, served: Served) -> None:
    write_instructions(sized_store, ["t-function-body"], served.endpoint())
    assert write_instructions(sized_store, ["t-function-body"], served.endpoint()) == {"kept": 1}
    assert len(served.requests) == 1
    other = Endpoint(served.endpoint().url, "another", timeout_seconds=30.0)
    assert write_instructions(sized_store, ["t-function-body"], other) == {"written": 1}
    kept = written_instruction(sized_store, "t-function-body")
    assert kept is not None
    assert kept.model == "another"


def test_the_key_is_sent_and_kept_nowhere(
    sized_store: TaskStore, served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WRITER_KEY", f" {KEY}\n")
    endpoint = replace(open_endpoint(served.url, "writer", "WRITER_KEY"), max_retries=0)
    assert write_instructions(sized_store, ["t-function-body"], endpoint) == {"written": 1}
    served.answer = lambda handler: reply(handler, KEY.encode(), 401)
    assert write_instructions(sized_store, ["t-class-body"], endpoint) == {"http-401": 1}
    assert [headers["Authorization"] for headers in served.headers] == [f"Bearer {KEY}"] * 2
    assert KEY not in repr(endpoint)
    assert KEY not in "".join(capfd.readouterr())
    for path in sized_store.root.rglob("*"):
        assert path.is_dir() or KEY.encode() not in read_content(path)


def test_no_key_of_another_server_is_sent(
    sized_store: TaskStore, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads variables that are meant for OpenAI's own server."""
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, KEY)
    write_instructions(sized_store, ["t-function-body"], served.endpoint())
    assert served.headers[0]["Authorization"] == "Bearer none"
    assert KEY not in str(served.headers)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            GOOD + "\n\n```python\n    if x < low:\n        return low\n    return min(x, high)\n```\n",
            "shows-code",
        ),
        (GOOD + " In short, `return  min( x, high )` does it.", "shows-code"),
        (GOOD + " See test_clamp_above for the upper bound.", "names-hidden-test"),
        (GOOD + " For instance 77341 gives 10.", "shows-hidden-value"),
        (GOOD + " It says 'far too large' then.", "shows-hidden-value"),
        (GOOD.replace("clamp", "clamped"), "without-symbol"),
        ("`clamp` clamps.", "too-short"),
        (GOOD + " word" * MAX_CHARS, "too-long"),
        ("", "too-short"),
        (GOOD + " Tests such as test_clamp_below, with 5 between 0 and 10, show it.", "written"),
        (GOOD + " 773 and 41 are no such numbers.", "written"),
    ],
)
def test_the_gates(make_store: Any, sized_tasks: Any, served: Served, text: str, reason: str) -> None:
    store = store_with_hidden_values(make_store, sized_tasks)
    served.answer = lambda handler: say(handler, text)
    assert write_instructions(store, ["t-function-body"], served.endpoint()) == {reason: 1}
    assert (written_instruction(store, "t-function-body") is not None) == (reason == "written")
    assert (store.root / "instructions").exists() == (reason == "written")


def store_with_hidden_values(make_store: Any, sized_tasks: Any) -> TaskStore:
    """The hidden test of ``clamp`` has a number and a text that no visible file has."""
    from dataclasses import replace
    from pathlib import Path

    project = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
    files = {path.relative_to(project).as_posix(): path.read_bytes() for path in project.rglob("*.py")}
    name = "tests/test_numbers.py"
    old, new = b"clamp(50, 0, 10) == 10", b'clamp(77341, 0, 10) == 10, "far too large"'
    assert old in files[name]
    files[name] = files[name].replace(old, new)
    task = sized_tasks["t-function-body"]
    return make_store(replace(task, without_hidden=task.without_hidden), files=files)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda h: reply(h, b"<html>no</html>"), "not-an-answer"),
        (lambda h: reply(h, b'{"choices": []}'), "not-an-answer"),
        (lambda h: reply(h, b"\xff\xfe"), "not-an-answer"),
        (lambda h: say(h, None), "not-an-answer"),
        (lambda h: say(h, [GOOD]), "not-an-answer"),
        (lambda h: say(h, None, refusal="I will not."), "refused"),
        (lambda h: say(h, GOOD, finish_reason="length"), "cut-off"),
        (lambda h: reply(h, b"oh no", 500), "http-500"),
        (lambda h: reply(h, b"", 302, Location="/elsewhere"), "http-302"),
        (lambda h: h.wfile.write(b"not http at all\r\n\r\n"), "unreachable"),
        (lambda h: h.connection.close(), "unreachable"),
    ],
)
def test_a_server_that_fails_leaves_the_plain_instruction(
    sized_store: TaskStore, served: Served, answer: Callable[[BaseHTTPRequestHandler], None], reason: str
) -> None:
    served.answer = answer
    before = sized_store.fingerprint
    assert write_instructions(sized_store, ["t-function-body"], served.endpoint()) == {reason: 1}
    assert sized_store.fingerprint == before
    assert len(served.requests) == 1  # it is followed nowhere else


def test_what_may_pass_is_asked_again(sized_store: TaskStore, served: Served) -> None:
    """By the client's own rules: a busy server, and not one that refuses."""
    busy = {"Retry-After": "0.01"}
    served.answer = lambda h: say(h, GOOD) if len(served.requests) == 2 else reply(h, b"", 503, **busy)
    endpoint = served.endpoint(max_retries=2)
    assert write_instructions(sized_store, ["t-function-body"], endpoint) == {"written": 1}
    assert len(served.requests) == 2
    served.answer = lambda h: reply(h, b"", 404)
    assert write_instructions(sized_store, ["t-class-body"], endpoint) == {"http-404": 1}
    assert len(served.requests) == 3


def test_without_the_package_one_sentence_says_what_to_install(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingError, match=r"CR0101.*composer-replication\[openai\]"):
        served.endpoint().ask([])


def test_a_server_that_hangs(sized_store: TaskStore, served: Served) -> None:
    served.answer = lambda _: served.gate.wait(60) and None
    endpoint = served.endpoint(timeout_seconds=0.2)
    assert write_instructions(sized_store, ["t-function-body"], endpoint) == {"timed-out": 1}


def test_after_three_failures_in_a_row_nobody_is_asked(sized_store: TaskStore, served: Served) -> None:
    steps: list[int] = []
    served.answer = lambda handler: reply(handler, b"", 503)
    counts = write_instructions(
        sized_store,
        sized_store.task_ids(),
        served.endpoint(),
        progress=lambda done, total, _: steps.append(done),
    )
    assert counts == {"http-503": 3, "not-asked": 6}
    assert len(served.requests) == 3
    assert steps == list(range(10))


def test_control_characters_are_taken_out(sized_store: TaskStore, served: Served) -> None:
    served.answer = lambda handler: say(handler, f"  {GOOD}\x1b[31m\ttab\x00\n\n")
    write_instructions(sized_store, ["t-function-body"], served.endpoint())
    kept = written_instruction(sized_store, "t-function-body")
    assert kept is not None
    assert kept.text.startswith(f"{GOOD}[31m")
    assert not set(kept.text) & set("\x1b\t\x00")
    assert kept.text.endswith("tab\n")


def test_tasks_that_go_take_their_texts_along(sized_store: TaskStore, served: Served) -> None:
    write_instructions(sized_store, ["t-function-body", "t-class-whole"], served.endpoint())
    sized_store.drop_task("t-function-body")
    assert not (sized_store.root / "instructions" / "t-function-body.json.zst").exists()
    keep = {"repositories/tinymath-1.0.json", "tasks/t-class-whole.json", "secrets/t-class-whole.json"}
    sized_store.drop_records(keep)
    store = TaskStore.open(sized_store.root)
    store.verify()
    assert store.task_ids() == ["t-class-whole"]
    assert written_instruction(store, "t-class-whole") is not None
    store.drop_records({"repositories/tinymath-1.0.json"})
    assert written_instruction(store, "t-class-whole") is None


def test_a_text_that_was_changed_on_disk_is_a_damaged_store(sized_store: TaskStore, served: Served) -> None:
    write_instructions(sized_store, ["t-function-body"], served.endpoint())
    path = sized_store.root / "instructions" / "t-function-body.json"
    write_file(path, read_content(packed_path(path)).replace(b"missing", b"lost"))
    with pytest.raises(InputError, match="CR0411"):
        written_instruction(TaskStore.open(sized_store.root), "t-function-body")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/v1", "https://h/v1"),
        ("https://h/x/v1/chat/completions", "https://h/x/v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
    ],
)
def test_addresses(given: str, asked: str) -> None:
    assert open_endpoint(given, "m").url == asked


@pytest.mark.parametrize(
    ("url", "model", "variable"),
    [
        ("", "m", ""),
        ("h:8000", "m", ""),
        ("file:///etc/passwd", "m", ""),
        ("http://h:99999", "m", ""),
        ("http://[", "m", ""),
        (f"http://user:{KEY}@h", "m", ""),
        (f"http://h/v1?key={KEY}", "m", ""),
        ("http://h", "", ""),
        ("http://h", "m", "NO_SUCH_VARIABLE"),
        ("http://h", "m", "TWO_LINES"),
    ],
)
def test_flags_that_do_not_work(monkeypatch: pytest.MonkeyPatch, url: str, model: str, variable: str) -> None:
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    monkeypatch.setenv("TWO_LINES", f"{KEY}\nX-Other: 1")
    with pytest.raises(UsageError) as caught:
        open_endpoint(url, model, variable)
    assert caught.value.code == "CR0206"
    assert KEY not in str(caught.value)


def test_a_failure_names_neither_address_nor_key(served: Served) -> None:
    served.answer = lambda handler: reply(handler, b"", 403)
    with pytest.raises(EndpointFailed) as caught:
        served.endpoint(key=KEY).ask([])
    assert (str(caught.value), caught.value.__cause__) == ("http-403", None)
