"""The layers that write hints: what each says, in which order, how long, and what none may say."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, tokenizer_of
from hint_rollouts import cases, observe
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from composer_replication.channel_tables import HintWritingSection
from composer_replication.errors import UsageError
from composer_replication.records import ToolSpec
from composer_replication.rollouts.hints.detector import find_faults
from composer_replication.rollouts.hints.hint_context import (
    FailedTest,
    Fault,
    HintContext,
    ObservedRollout,
)
from composer_replication.rollouts.hints.hint_judge import MAX_FAILURES, NUM_PASSED_OVER, open_judge
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker
from composer_replication.rollouts.hints.layers import (
    MAX_CHARACTERS,
    MAX_SIBLING_CHARACTERS,
    clamp,
    clean_text,
    open_layers,
    write_hint,
)
from composer_replication.rollouts.hints.templates import TEMPLATES, nearest_paths, signature, template_hint


def context_of(name: str, **changes: Any) -> HintContext:
    observed = replace(observe(next(case for case in cases() if case["name"] == name)), **changes)
    return HintContext(observed, find_faults(observed)[0])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a tool that does not exist", "There is no tool named open_file. The available tools are: bash, read_file, write_file, str_replace, list_files, search, run_tests, submit."),
        ("arguments that are no JSON", "It is called as read_file(path: string, start?: integer, end?: integer | null)."),
        ("an integer as a string", 'Start is a string ("3"), not integer. It is called as read_file(path: string'),
        ("a value outside the enumeration", 'search(pattern: string, kind?: "text" | "regex")'),
        ("a required argument left out", "The argument 'text' is required. It is called as write_file(path: string, text: string)."),
        ("an argument that is not there", "It is called as str_replace(path: string, old: string, new: string)."),
        ("cat of a missing file", "There is no src/books.py. The nearest paths are: src/shelf/books.py"),
        ("a command that is not installed", "The command rg is not installed here"),
        ("a replacement that does not stand there", "must stand in the file exactly once"),
        ("a file that does not parse belongs to the turn that wrote it", "does not parse: SyntaxError: '[' was never closed."),
        ("a module that is not installed", "numpyy cannot be imported here"),
        ("a command that never ends", "The command ran longer than allowed"),
        ("tests that ran too long belong to the last change", "The tests ran longer than allowed"),
        ("a command killed for its memory", "more memory than allowed"),
        ("the same listing twice in a row", "list_files again tells nothing new"),
        ("an empty answer", "Call one of the tools: bash"),
        ("failing tests belong to the last change", "test_last fails."),
    ],
)  # fmt: skip
def test_templates_say_what_is_known(name: str, says: str) -> None:
    text = template_hint(context_of(name))
    assert text is not None
    assert says in text


def test_every_kind_but_a_tools_own_words_has_a_template() -> None:
    assert "tool-error" not in TEMPLATES
    assert template_hint(context_of("a tool's own refusal in other words")) is None


def test_a_failing_test_is_told_with_its_assertion() -> None:
    tests = (
        FailedTest("t.py::test_a", "last(['a', 'b'])\n  == 'b'", "assert 'a' == 'b'"),
        FailedTest("t.py::test_b[1-2]"),
        FailedTest("t.py::test_c"),
    )
    text = template_hint(context_of("failing tests belong to the last change", failed_tests=tests))
    assert text == (
        "test_a fails: it checks `last(['a', 'b']) == 'b'`. It said: assert 'a' == 'b'.\ntest_b[1-2] fails. And 1 more."
    )


def test_without_a_template_the_next_layer_speaks() -> None:
    context = context_of("a tool's own refusal in other words")
    hint = write_hint(context, open_layers(HintWritingSection()))
    assert hint is not None
    assert (hint.source, hint.kind, hint.turn_idx) == ("environment", "tool-error", 0)
    assert hint.text == "Hint: The environment answered: the tree has no changes"


def test_nearest_paths() -> None:
    tree = ["src/a/books.py", "src/b/books.py", "src/b/loans.py"]
    assert nearest_paths("books.py", tree)[:2] == ["src/a/books.py", "src/b/books.py"]
    assert nearest_paths("/src/b/loan.py", tree)[0] == "src/b/loans.py"
    assert nearest_paths("zzz", tree) == []


def test_signatures() -> None:
    schema = {"properties": {"a": {"type": ["string", "null"]}, "b": {}, "c": 3}, "required": ["b"]}
    assert signature(ToolSpec("f", schema)) == "f(a?: string | null, b: any, c?: any)"
    assert signature(ToolSpec("g")) == "g()"


def lesson(context: HintContext) -> str | None:
    return f"lesson on {context.fault.kind}" if context.fault.kind == "missing-file" else None


def broken_lesson(context: HintContext) -> str | None:
    raise RuntimeError("no lesson today\nsecond line")


def odd_lesson(context: HintContext) -> Any:
    return 3


def no_lesson() -> None:
    return None


def test_layers_of_the_user_come_where_they_are_named() -> None:
    options = HintWritingSection(layers=[f"{__name__}:lesson", "template"])
    first = write_hint(context_of("cat of a missing file"), open_layers(options))
    assert first is not None
    assert (first.text, first.source) == ("Hint: lesson on missing-file", f"{__name__}:lesson")
    second = write_hint(context_of("a command that is not installed"), open_layers(options))
    assert second is not None
    assert second.source == "template"


@pytest.mark.parametrize("name", ["no_lesson", "nothing", "MESSAGE"])
def test_a_layer_that_cannot_be_used(name: str) -> None:
    with pytest.raises(UsageError, match="CR0221") as caught:
        open_layers(HintWritingSection(layers=[f"{__name__}:{name}"]))
    assert name in caught.value.message
    with pytest.raises(UsageError, match="CR0221"):
        open_layers(HintWritingSection(layers=["no.such.module:f"]))


MESSAGE = "not callable"


@pytest.mark.parametrize(("name", "says"), [("broken_lesson", "no lesson today"), ("odd_lesson", "gave 3")])
def test_a_layer_that_breaks_is_named(name: str, says: str) -> None:
    options = HintWritingSection(layers=[f"{__name__}:{name}"])
    with pytest.raises(UsageError, match="CR0221") as caught:
        write_hint(context_of("cat of a missing file"), open_layers(options))
    assert name in caught.value.message
    assert says in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("layers", [[], ["templates"], ["template", "template"]])
def test_layers_that_cannot_be(layers: list[str]) -> None:
    with pytest.raises(ValidationError, match="each once"):
        HintWritingSection(layers=layers)


def test_the_judge_is_off_by_default() -> None:
    assert "judge" not in [name for name, _ in open_layers(HintWritingSection())]


# ---- siblings ------------------------------------------------------------------------------------

OURS = "\n    return min(x, low)"
THEIRS = "\n    bounded = max(low, x)  # not below\n    return min(bounded, high, key='name')"


OPTIONS = HintWritingSection(layers=["sibling"])


def with_sibling() -> HintContext:
    plain = context_of("failing tests belong to the last change", answer=OURS)
    return replace(plain, siblings=(replace(plain.observed, answer=THEIRS),))


def whole_sibling(context: HintContext) -> str | None:
    return context.siblings[0].answer


def test_a_sibling_shows_the_names_that_it_uses() -> None:
    hint = write_hint(with_sibling(), open_layers(OPTIONS))
    assert hint is not None
    assert hint.text == "Hint: Another attempt that passed also uses: bounded, max, high, key."


def test_what_a_sibling_shows_is_clamped() -> None:
    context, options = with_sibling(), OPTIONS
    long = replace(context.siblings[0], answer="\n    " + " ".join(f"name_{idx}" for idx in range(90)))
    hint = write_hint(replace(context, siblings=(long,)), open_layers(options))
    assert hint is not None
    assert hint.text.endswith("...."), hint.text
    assert len(hint.text) <= 50 + MAX_SIBLING_CHARACTERS
    assert write_hint(replace(context, siblings=()), open_layers(options)) is None


# ---- what no hint may say ------------------------------------------------------------------------


def test_a_hint_that_shows_what_is_hidden_is_thrown_away_and_the_next_layer_asked() -> None:
    context, own = with_sibling(), f"{__name__}:whole_sibling"
    options = HintWritingSection(layers=[own, "template"])

    def leaking(text: str) -> bool:
        return "return min(bounded" in text

    guarded = replace(context, observed=replace(context.observed, is_leak=leaking))
    shown = write_hint(context, open_layers(options))
    hidden = write_hint(guarded, open_layers(options))
    assert shown is not None
    assert hidden is not None
    assert (shown.source, hidden.source) == (own, "template")
    nothing = replace(context, observed=replace(context.observed, is_leak=lambda _: True))
    assert write_hint(nothing, open_layers(options)) is None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_no_control_token_survives_cleaning(family: Any) -> None:
    for token in [*tokenizer_of(family).control, "<think>", "</tool_call>", "[/INST]", "<<SYS>>"]:
        assert token not in clean_text(f"before {token} after")
    assert clean_text("a < b and b > c, x[0], <div>, <|, |>") == "a < b and b > c, x[0], <div>, <|, |>"


@given(st.text(max_size=120), st.integers(1, 60))
def test_clamped_texts_are_short_and_begin_alike(text: str, most: int) -> None:
    short = clamp(text, most)
    assert len(short) <= most
    assert text.strip().startswith(short.removesuffix("...").rstrip()) or most < 4


def test_clamping_cuts_at_a_word() -> None:
    assert clamp("one two three four", 15) == "one two..."
    assert clamp("one", 15) == "one"
    assert clamp("a" * 20, 10) == "a" * 7 + "..."


# ---- the judge -----------------------------------------------------------------------------------


@dataclass
class Served:
    """A server on this machine: what it was sent, and what it answers."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    status: int = 200
    text: str = "Look at the folder first."


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            state.keys.append(self.headers["Authorization"])
            data = json.dumps({"choices": [{"message": {"content": state.text}}]}).encode()
            self.send_response(state.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Served(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


JudgeOptions = Callable[..., HintWritingSection]


@pytest.fixture
def judge_options(served: Served, monkeypatch: pytest.MonkeyPatch) -> JudgeOptions:
    monkeypatch.setenv("HINT_KEY", "sk-very-secret-key")

    def make(**changes: Any) -> HintWritingSection:
        known = {
            "layers": ["judge"],
            "judge_url": served.url,
            "judge_model": "wise",
            "judge_key_variable": "HINT_KEY",
        }
        return HintWritingSection(**{**known, **changes})

    return make


def test_the_judge_is_asked_once_and_then_read_from_disk(
    served: Served, judge_options: JudgeOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options, context = judge_options(), context_of("cat of a missing file")
    judge = open_judge(options, folder=tmp_path)
    hint = write_hint(context, [("judge", judge)])
    assert hint is not None
    assert (hint.text, hint.source) == ("Hint: Look at the folder first.", "judge")
    again = open_judge(options, folder=tmp_path)
    assert write_hint(context, [("judge", again)]) == hint
    assert len(served.requests) == 1
    assert (judge.counts, again.counts) == ({"judge/asked": 1}, {"judge/cached": 1})
    sent = served.requests[0]["messages"][1]["content"]
    assert "missing-file: cat: src/books.py: No such file or directory" in sent
    assert "read_file(path: string" in sent
    assert served.keys == ["Bearer sk-very-secret-key"]
    everything = (
        "".join(path.read_text() for path in tmp_path.iterdir()) + repr(judge.endpoint) + caplog.text + sent
    )
    assert "sk-very" not in everything
    # another question is asked
    write_hint(context_of("a command that is not installed"), [("judge", again)])
    assert len(served.requests) == 2


def test_the_judges_answer_is_clamped(served: Served, judge_options: JudgeOptions, tmp_path: Path) -> None:
    served.text = "word " * 500
    options = judge_options()
    hint = write_hint(context_of("cat of a missing file"), [("judge", open_judge(options, folder=tmp_path))])
    assert hint is not None
    assert len(hint.text.removeprefix("Hint: ")) <= MAX_CHARACTERS


@pytest.mark.long
def test_a_failing_judge_is_passed_over_for_a_while_and_then_asked_again(
    served: Served, judge_options: JudgeOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served.status = 500
    counts: Counter[str] = Counter()
    layers = open_layers(judge_options(), judge_folder=tmp_path, counts=counts)
    judge, context = layers[0][1], context_of("cat of a missing file")
    assert [judge(context) for _ in range(MAX_FAILURES + NUM_PASSED_OVER)] == [None] * (
        MAX_FAILURES + NUM_PASSED_OVER
    )
    assert counts == {"judge/http-500": MAX_FAILURES, "judge/not-asked": NUM_PASSED_OVER}
    assert not list(tmp_path.iterdir())
    assert [judge(context) for _ in range(1 + NUM_PASSED_OVER)] == [None] * (1 + NUM_PASSED_OVER)
    tries = 1 + judge.endpoint.max_retries  # the client asks again by itself
    assert len(served.requests) == (MAX_FAILURES + 1) * tries
    served.status = 200
    assert judge(context) == "Look at the folder first."
    assert counts["judge/asked"] == 1
    assert ["failed 3 times in a row (http-500)" in record.message for record in caplog.records] == [True]


def test_what_the_judge_did_is_among_the_counts_of_the_hints(
    judge_options: JudgeOptions, tmp_path: Path
) -> None:
    case = next(case for case in cases() if case["name"] == "cat of a missing file")
    maker = HintedTurnMaker(
        tokenizer_of(next(iter(FAMILIES))),
        observe=lambda _: observe(case),
        options=judge_options(),
        strict=False,
        judge_folder=tmp_path,
    )
    maker.hinted_turns([observe(case).rollout])
    assert (maker.counts["faults"], maker.counts["judge/asked"]) == (1, 1)


def test_a_damaged_answer_on_disk_is_asked_for_again(
    served: Served, judge_options: JudgeOptions, tmp_path: Path
) -> None:
    judge, context = open_judge(judge_options(), folder=tmp_path), context_of("cat of a missing file")
    judge(context)
    (path,) = tmp_path.iterdir()
    path.write_text('{"text": ')
    assert judge(context) == "Look at the folder first."
    assert len(served.requests) == 2


@pytest.mark.parametrize(
    "changes",
    [{"judge_url": ""}, {"judge_url": "ftp://a"}, {"judge_model": ""}, {"judge_key_variable": "NO_SUCH_KEY"}],
)
def test_a_judge_that_cannot_be_asked(judge_options: JudgeOptions, changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="CR0221") as caught:
        open_layers(judge_options(**changes))
    assert "hints.writing.judge_url" in caught.value.where
    assert "instructions" not in str(caught.value)


def test_no_field_of_a_context_holds_golden_code() -> None:
    """What a layer can reach is listed here, so that a new field is a decision."""
    assert set(ObservedRollout.__slots__) == {
        "rollout", "turns", "tools", "tree", "path", "answered_text", "answer", "indent", "failed_tests", "is_leak",
    }  # fmt: skip
    assert set(HintContext.__slots__) == {"observed", "fault", "siblings"}
    assert set(Fault.__slots__) == {"turn_idx", "kind", "evidence", "subject", "call_idx"}
