"""Log-probabilities of the student's own tokens from a real local server, against a forward pass of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_http import Fault, status
from policy_server import PolicyServer, says
from served_model import served_model

from composer_replication.cli.main import main
from composer_replication.config import ModelSection
from composer_replication.records import ToolCall
from composer_replication.traces.ingest import TRACES_NAME
from composer_replication.traces.readers.messages import trace_row
from composer_replication.traces.trace_records import StepResult, Trace, TraceStep
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.model_server import ChatModel

TEXTS = ("I look at the file.", "ünïcode ≠ tokens, now I write", "and once more")


@pytest.fixture(scope="module")
def student() -> tuple[Any, Any]:
    model, tokenizer = load_model(ModelSection(name="tiny-tools"), seed=3)
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def url(student: tuple[Any, Any]) -> Iterator[str]:
    with served_model(*student, "teacher") as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A session of three edits."""
    trace = Trace("session", "codex", task_id="task")
    trace.add(TraceStep("user", "fix it"))
    for number, text in enumerate(TEXTS):
        call = ToolCall("Write", json.dumps({"file_path": "f", "content": "x"}), f"c{number}")
        trace.add(TraceStep("agent", text, calls=[call], results=[StepResult(call.call_id, "done")]))
    (tmp_path / TRACES_NAME).write_text(json.dumps(trace_row(trace)) + "\n")
    return tmp_path


def distill(
    capsys: pytest.CaptureFixture[str], folder: Path, *teachers: str, more: tuple[str, ...] = ()
) -> Any:
    words = ["traces", "distill", str(folder), "--model", "tiny-tools", "--out", str(folder / "out.jsonl")]
    words += [word for teacher in teachers for word in ("--teacher", teacher)]
    code = main([*words, *more, "--json", "--quiet"])
    return {**json.loads(capsys.readouterr().out), "code": code}


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_the_numbers_are_those_of_a_forward_pass(
    folder: Path, url: str, student: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    dry = distill(capsys, folder, f"mine={url}#teacher", more=("--dry-run",))
    assert (dry["steps"], dry["calls"], dry["dry_run"], dry["code"]) == (3, 3, True, 0)
    said = distill(capsys, folder, f"mine={url}#teacher")
    assert (said["rows"], said["sources"], said["code"]) == (3, {"mine": 3}, 0)
    assert 0 < said["tokens"] <= said["most_tokens"]
    rows = rows_in(folder)
    model, tokenizer = student
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, text in zip(rows, TEXTS, strict=True):
        assert tokenizer.decode(row["completion_ids"], skip_special_tokens=True) == text
        assert (row["trace_id"], row["source"], row["prompt_origin"]) == ("session", "mine", "rebuilt")
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
        first = len(row["prompt_ids"])
        wanted = [float(logp[place - 1, ids[0, place]]) for place in range(first, ids.shape[1])]
        assert row["teacher_logp"] == pytest.approx(wanted, abs=1e-4)
    again = distill(capsys, folder, f"mine={url}#teacher")
    assert (again["cached"], again["cost_usd"]) == (3, said["cost_usd"])
    assert rows_in(folder) == rows


def test_teachers_that_cannot_score_are_left_out_and_named(
    folder: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        PolicyServer.running(lambda _: says("x"), {}) as chats,
        PolicyServer.running(lambda _: says("x"), {}) as no,
    ):
        chats.sample = lambda _: ([1], [-0.5])
        no.faults = [Fault("POST", status(400, "unknown field prompt_logprobs"), times=100)]
        said = distill(capsys, folder, chats.spec("chats"), f"mine={url}#teacher")
        assert said["code"] == 6
        assert "prompt_logprobs" in said["teachers"]["chats"]["left_out"]
        assert {row["source"] for row in rows_in(folder)} == {"mine"}
        for server, reason in ((chats, "prompt_logprobs"), (no, "http-400")):
            error = distill(capsys, folder, server.spec("only"))["error"]
            assert error["code"] == "CR0944"
            assert "no teacher gave log-probabilities" in error["message"]
            assert reason in error["message"]


def test_a_teacher_with_another_tokenizer_is_left_out(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score = ChatModel.score

    def others(self: ChatModel, request: Any) -> dict[str, Any]:
        found = score(self, request)
        for row in filter(None, found["choices"][0]["prompt_logprobs"]):
            for each in row.values():
                each["decoded_token"] += "x"
        return found

    monkeypatch.setattr(ChatModel, "score", others)
    error = distill(capsys, folder, f"mine={url}#teacher")["error"]
    assert error["code"] == "CR0944"
    assert "its tokenizer is another one" in error["message"]


def test_the_budget_holds_and_held_out_tasks_are_not_written(
    folder: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from composer_replication.traces.ingest import read_traces
    from composer_replication.traces.pairs import chosen_steps
    from composer_replication.traces.replay import scoring_rows

    most = distill(capsys, folder, f"mine={url}#teacher", more=("--dry-run",))["most_tokens"]
    budget = int(0.36 * most)  # for a little more than one of three
    said = distill(
        capsys, folder, f"mine={url}#teacher", more=("--max-tokens", str(budget), "--concurrent", "1")
    )
    assert (said["code"], said["budget_is_spent"]) == (6, True)
    assert 0 < said["tokens"] <= budget
    chosen = chosen_steps(list(read_traces(folder)), 10)
    _, tokenizer = load_model(ModelSection(name="tiny-tools"), seed=3)
    rows, dropped = scoring_rows(
        chosen, tokenizer, lambda chats: {0} if chats[0]["task_id"] == "task" else set()
    )
    assert (len(rows), dropped) == (2, {"a held-out task, or its code in the text": 1})


@pytest.mark.parametrize(
    "request_body",
    [
        {},
        {"prompt": "text", "prompt_logprobs": 0},
        {"prompt": [1, 2]},
        {"prompt": [10**9], "prompt_logprobs": 0},
        {"messages": "x"},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
        {"messages": [{"role": "user", "content": "x"}], "temperature": -0.5},
        {"messages": [{"role": "user", "content": "x"}], "temperature": 100.0},
    ],
)
def test_the_server_refuses_what_it_cannot_answer(url: str, request_body: dict[str, Any]) -> None:
    import urllib.error
    import urllib.request

    route = "chat/completions" if "messages" in request_body else "completions"
    request = urllib.request.Request(f"{url}/{route}", json.dumps(request_body).encode())
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)
