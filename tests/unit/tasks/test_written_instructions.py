"""A model's text is kept only if it tells nothing, and a server that fails costs nothing: against a real server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_http import Fault, hang_up, no_http, no_json, status
from policy_server import PolicyServer, hold, says

from composer_replication.errors import InputError, MissingError, UsageError
from composer_replication.model_endpoint import Endpoint, EndpointFailed, open_endpoint
from composer_replication.tasks.instructions import (
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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyServer]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with PolicyServer.running(lambda _: says(GOOD)) as running:
        yield running


def endpoint(server: PolicyServer, **changes: Any) -> Endpoint:
    return Endpoint(f"{server.url}/v1", "writer", **{"timeout_seconds": 30.0, "max_retries": 0, **changes})


def fail(server: PolicyServer, act: Callable[[Any], None], times: int = 9) -> None:
    server.faults.append(Fault("POST", act, times))


def test_a_good_answer_is_kept_beside_the_plain_one(sized_store: TaskStore, server: PolicyServer) -> None:
    before = sized_store.fingerprint
    counts = write_instructions(sized_store, ["t-function-body", "t-class-whole"], endpoint(server))
    assert counts == {"written": 2}
    expected = WrittenInstruction("t-function-body", "writer", GOOD + "\n")
    store = TaskStore.open(sized_store.root)
    store.verify()
    assert written_instruction(store, "t-function-body") == expected
    assert written_instruction(store, "t-module-body") is None
    assert store.fingerprint != before  # it is listed in the manifest
    assert (store.root / "instructions" / "t-function-body.json.zst").is_file()


def test_only_public_information_is_sent(sized_store: TaskStore, server: PolicyServer) -> None:
    ids = sized_store.task_ids()
    write_instructions(sized_store, ids, endpoint(server))
    assert [route for route, _ in server.bodies] == ["/v1/chat/completions"] * len(ids)
    for task_id, (_, request) in zip(ids, server.bodies, strict=True):
        assert request["model"] == "writer"
        assert [message["role"] for message in request["messages"]] == ["system", "user"]
        assert request["messages"][0]["content"] == REQUEST
        sent = json.dumps(request)
        for golden in ("min(x, high)", "other.x + self.y", "text.upper()", "letters[::-1]", "self.x = x"):
            assert golden not in sent
        for hidden in sized_store.secret(task_id).hidden:
            assert f"{hidden.rpartition('::')[2]}(" not in sent


def test_what_is_kept_is_not_asked_again(sized_store: TaskStore, server: PolicyServer) -> None:
    write_instructions(sized_store, ["t-function-body"], endpoint(server))
    assert write_instructions(sized_store, ["t-function-body"], endpoint(server)) == {"kept": 1}
    assert len(server.seen) == 1
    other = replace(endpoint(server), model="another")
    assert write_instructions(sized_store, ["t-function-body"], other) == {"written": 1}
    kept = written_instruction(sized_store, "t-function-body")
    assert kept is not None
    assert kept.model == "another"


def test_the_key_is_sent_and_kept_nowhere(
    sized_store: TaskStore,
    server: PolicyServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WRITER_KEY", f" {KEY}\n")
    keyed = replace(open_endpoint(server.url, "writer", "WRITER_KEY"), max_retries=0)
    assert write_instructions(sized_store, ["t-function-body"], keyed) == {"written": 1}
    fail(server, status(401, KEY))
    assert write_instructions(sized_store, ["t-class-body"], keyed) == {"http-401": 1}
    assert server.authorizations == [f"Bearer {KEY}"] * 2
    assert KEY not in repr(keyed)
    assert KEY not in "".join(capfd.readouterr())
    for path in sized_store.root.rglob("*"):
        assert path.is_dir() or KEY.encode() not in read_content(path)


def test_no_key_of_another_server_is_sent(
    sized_store: TaskStore, server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads variables that are meant for OpenAI's own server."""
    headers: list[str] = []
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, KEY)
    fail(server, lambda handler: headers.append(str(handler.headers)) or hang_up(handler))
    write_instructions(sized_store, ["t-function-body"], endpoint(server))
    assert server.authorizations == ["Bearer none"]
    assert KEY not in headers[0]


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
def test_the_gates(make_store: Any, sized_tasks: Any, server: PolicyServer, text: str, reason: str) -> None:
    store = store_with_hidden_values(make_store, sized_tasks)
    server.reply = lambda _: says(text)
    assert write_instructions(store, ["t-function-body"], endpoint(server)) == {reason: 1}
    assert (written_instruction(store, "t-function-body") is not None) == (reason == "written")
    assert (store.root / "instructions").exists() == (reason == "written")


def store_with_hidden_values(make_store: Any, sized_tasks: Any) -> TaskStore:
    """The hidden test of ``clamp`` has a number and a text that no visible file has."""
    project = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
    files = {path.relative_to(project).as_posix(): path.read_bytes() for path in project.rglob("*.py")}
    name = "tests/test_numbers.py"
    old, new = b"clamp(50, 0, 10) == 10", b'clamp(77341, 0, 10) == 10, "far too large"'
    assert old in files[name]
    files[name] = files[name].replace(old, new)
    task = sized_tasks["t-function-body"]
    return make_store(replace(task, without_hidden=task.without_hidden), files=files)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (no_json, "not-an-answer"),
        (lambda h: h.say(200, {"choices": []}), "not-an-answer"),
        (lambda h: h.say(200, {"choices": [{"message": {**says(""), "content": None}}]}), "not-an-answer"),
        (lambda h: h.say(200, {"choices": [{"message": {**says(""), "content": [GOOD]}}]}), "not-an-answer"),
        (lambda h: h.say(200, {"choices": [{"message": {**says(""), "refusal": "No."}}]}), "refused"),
        (lambda h: h.say(200, {"choices": [{"message": says(GOOD), "finish_reason": "length"}]}), "cut-off"),
        (status(500, "oh no"), "http-500"),
        (lambda h: h.say(302, headers={"Location": "/elsewhere"}), "http-302"),
        (no_http, "unreachable"),
        (hang_up, "unreachable"),
    ],
)
def test_a_server_that_fails_leaves_the_plain_instruction(
    sized_store: TaskStore, server: PolicyServer, act: Callable[[Any], None], reason: str
) -> None:
    fail(server, act)
    before = sized_store.fingerprint
    assert write_instructions(sized_store, ["t-function-body"], endpoint(server)) == {reason: 1}
    assert sized_store.fingerprint == before
    assert len(server.seen) == 1  # it is followed nowhere else


def test_what_may_pass_is_asked_again(sized_store: TaskStore, server: PolicyServer) -> None:
    """By the client's own rules: a busy server, and not one that refuses."""
    fail(server, status(503, "busy", {"Retry-After": "0.01"}), times=1)
    patient = endpoint(server, max_retries=2)
    assert write_instructions(sized_store, ["t-function-body"], patient) == {"written": 1}
    assert len(server.seen) == 2
    fail(server, status(404, "no"), times=1)
    assert write_instructions(sized_store, ["t-class-body"], patient) == {"http-404": 1}
    assert len(server.seen) == 3
    fail(server, hold)
    impatient = endpoint(server, timeout_seconds=0.2)
    assert write_instructions(sized_store, ["t-class-body"], impatient) == {"timed-out": 1}


def test_without_the_package_one_sentence_says_what_to_install(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingError, match=r"CR0101.*composer-replication\[openai\]"):
        endpoint(server).ask([])


def test_after_three_failures_in_a_row_nobody_is_asked(sized_store: TaskStore, server: PolicyServer) -> None:
    steps: list[int] = []
    fail(server, status(503, "busy"))
    ids = sized_store.task_ids()
    counts = write_instructions(
        sized_store, ids, endpoint(server), progress=lambda done, *_: steps.append(done)
    )
    assert counts == {"http-503": 3, "not-asked": 6}
    assert len(server.seen) == 3
    assert steps == list(range(10))


def test_control_characters_are_taken_out(sized_store: TaskStore, server: PolicyServer) -> None:
    server.reply = lambda _: says(f"  {GOOD}\x1b[31m\ttab\x00\n\n")
    write_instructions(sized_store, ["t-function-body"], endpoint(server))
    kept = written_instruction(sized_store, "t-function-body")
    assert kept is not None
    assert kept.text.split() == [*f"{GOOD}[31m".split(), "tab"]
    assert not set(kept.text) & set("\x1b\t\x00") and kept.text.endswith("tab\n")


def test_tasks_that_go_take_their_texts_along(sized_store: TaskStore, server: PolicyServer) -> None:
    write_instructions(sized_store, ["t-function-body", "t-class-whole"], endpoint(server))
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


def test_a_text_that_was_changed_on_disk_is_a_damaged_store(
    sized_store: TaskStore, server: PolicyServer
) -> None:
    write_instructions(sized_store, ["t-function-body"], endpoint(server))
    path = sized_store.root / "instructions" / "t-function-body.json"
    write_file(path, read_content(packed_path(path)).replace(b"missing", b"lost"))
    with pytest.raises(InputError, match="CR0411"):
        written_instruction(TaskStore.open(sized_store.root), "t-function-body")


def test_addresses() -> None:
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/chat/completions"):
        assert open_endpoint(given, "m").url == "http://h:1/v1"
    assert open_endpoint("https://h/x/v1/chat/completions", "m").url == "https://h/x/v1"
    assert open_endpoint("http://[::1]:8000/v1", "m").url == "http://[::1]:8000/v1"


@pytest.mark.parametrize(
    ("url", "model", "variable"),
    [
        *((url, "m", "") for url in ("", "h:8000", "file:///etc/passwd", "http://h:99999", "http://[")),
        *((url, "m", "") for url in (f"http://user:{KEY}@h", f"http://h/v1?key={KEY}")),
        *(("http://h", *more) for more in (("", ""), ("m", "NO_SUCH_VARIABLE"), ("m", "TWO_LINES"))),
    ],
)
def test_flags_that_do_not_work(monkeypatch: pytest.MonkeyPatch, url: str, model: str, variable: str) -> None:
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    monkeypatch.setenv("TWO_LINES", f"{KEY}\nX-Other: 1")
    with pytest.raises(UsageError, match="CR0206") as caught:
        open_endpoint(url, model, variable)
    assert KEY not in str(caught.value)


def test_a_failure_names_neither_address_nor_key(server: PolicyServer) -> None:
    fail(server, status(403, "no"))
    with pytest.raises(EndpointFailed) as caught:
        endpoint(server, key=KEY).ask([])
    assert (str(caught.value), caught.value.__cause__) == ("http-403", None)
