"""Tools over a sandbox in memory: what each answers, and that nothing a policy asks is ever a traceback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from episode_parts import ask
from fake_sandbox import FakeSandbox, done
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import SandboxFailure
from composer_replication.records import ToolCall, ToolResult
from composer_replication.rollouts.tools import toolbox
from composer_replication.rollouts.tools.tool_context import VisibleTests, clip
from composer_replication.rollouts.tools.toolbox import ACTIONS, TOOLS, Toolbox, near_matches

FILES = {
    "src/one.py": b"def one():\n    return 1\n\n\ndef two():\n    return 1\n",
    "src/blob.bin": b"\0\1\2",
    "src/latin.py": b"name = '\xe9'\n",
    "tests/test_one.py": b"def test_one():\n    assert True\n",
}
TESTS = VisibleTests(("tests/test_one.py::test_one",), {"tests/test_one.py": FILES["tests/test_one.py"]})


def box_of(answer: Any = None, **limits: Any) -> Toolbox:
    return Toolbox(FakeSandbox(FILES, answer), TESTS, **limits)


def test_every_named_tool_has_an_action() -> None:
    assert [tool.name for tool in TOOLS] == list(ACTIONS)
    box = box_of()
    for tool in TOOLS:
        box.call(ToolCall(tool.name, "{}"))
    assert box.is_over


def test_what_a_tool_says_is_no_refusal_whatever_its_words_are() -> None:
    box = box_of()
    said = ask(box, "read_file", path="Not run: at most 1")
    assert said.is_error and said.text.startswith("Not run: at most 1") and said.fault == "missing-file"
    wrong = [ask(box, "fly_away"), ask(box, "read_file"), ask(box, "submit"), ask(box, "list_files")]
    assert [each.fault for each in wrong] == ["invalid", "invalid", "", "invalid"]
    assert box.num_invalid == 3


def test_bash_tells_output_errors_and_exit_code() -> None:
    box = box_of(done("out\n", "err\n", 2))
    result = ask(box, "bash", command="make", timeout_seconds=7)
    assert result.text == "out\n[stderr]\nerr\n[exit code 2]"
    assert (result.exit_code, result.is_error, result.failed) == (2, False, True)
    assert box.sandbox.commands[0][0][-1] == "make"
    assert box.sandbox.commands[0][2] == 7


def test_bash_caps_its_time_out_and_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "MAX_COMMAND_SECONDS", 5.0)
    box = box_of(done("part", exit_code=-9, timed_out=True))
    result = ask(box, "bash", command="sleep 100", timeout_seconds=10**6)
    assert box.sandbox.commands[0][2] == 5.0
    assert result.timed_out
    assert "longer than 5 s" in result.text
    assert ask(box_of(), "bash", command="true").text == "[no output]"


@pytest.mark.parametrize(("tool", "arguments"), [("bash", {"command": "python big.py"}), ("run_tests", {})])
@pytest.mark.parametrize("exit_code", [137, 1])
def test_a_command_killed_for_its_memory_says_so_and_is_found(
    tool: str, arguments: dict[str, Any], exit_code: int
) -> None:
    box = box_of(done("cat: no.txt: command not found\n", exit_code=exit_code, out_of_memory=True))
    result = ask(box, tool, **arguments)
    assert "more memory than it may" in result.text
    assert result.fault == "out-of-memory"


def test_long_output_is_cut_in_the_middle_and_its_end_stays() -> None:
    text = "".join(f"line {number}\n" for number in range(5000))
    result = ask(box_of(done(text, exit_code=1), max_characters=1000), "bash", command="x")
    assert len(result.text) <= 1000
    assert result.text.startswith("line 0\n")
    assert result.text.endswith("line 4999\n[exit code 1]")
    assert "lines left out: write it to a file" in result.text


@given(st.text(alphabet="ab \n", max_size=3000), st.integers(400, 1500))
def test_clipping_keeps_beginning_and_end_and_counts_what_it_leaves_out(text: str, room: int) -> None:
    shown = clip(text, room, "do this")
    assert len(shown) <= room
    if len(text) <= room:
        assert shown == text
        return
    head, _, rest = shown.partition("\n[... ")
    number, _, rest = rest.partition(" characters, ")
    tail = rest.partition("do this ...]\n")[2]
    assert text.startswith(head) and text.endswith(tail)
    assert len(head) + int(number) + len(tail) == len(text)
    assert tail or not text


def test_read_file_numbers_lines_and_pages() -> None:
    shown = ask(box_of(), "read_file", path="src/one.py", first_line=5)
    assert shown.text == "     5\tdef two():\n     6\t    return 1"
    box = box_of(max_characters=1000)
    box.sandbox.files["long.txt"] = b"".join(b"row %d\n" % number for number in range(1, 301))
    seen: list[str] = []
    first = 1
    while True:
        result = ask(box, "read_file", path="long.txt", first_line=first)
        *rows, last = result.text.split("\n")
        seen += rows
        if "left out" not in last:
            seen.append(last)
            break
        assert last.endswith(f"go on with first_line {first + len(rows)}]")
        first += len(rows)
    assert [row.split("\t")[1] for row in seen] == [f"row {number}" for number in range(1, 301)]


def test_read_file_shows_a_line_that_is_too_long_in_part() -> None:
    box = box_of(max_characters=1000)
    box.sandbox.files["wide.txt"] = b"x" * 9000
    result = ask(box, "read_file", path="wide.txt")
    assert "more characters of this line" in result.text
    assert len(result.text) <= 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"path": "src/on.py"}, "src/on.py: No such file or directory. Did you mean src/one.py"),
        ({"path": "one.py"}, "Did you mean src/one.py?"),
        ({"path": "src"}, "is a folder. Use list_files"),
        ({"path": "src/blob.bin"}, "binary, 3 bytes"),
        ({"path": "src/one.py", "first_line": 99}, "has 6 lines"),
        ({"path": "src/one.py", "first_line": 0}, "counts from 1"),
        ({"path": "src/one.py", "first_line": 5, "last_line": 2}, "counts from 1"),
        ({"path": "../../etc/passwd"}, "not in the repository"),
        ({"path": "/etc/passwd"}, "not in the repository"),
        ({"path": "a\0b"}, "No such file"),
    ],
)
def test_read_file_teaches(arguments: dict[str, Any], said: str) -> None:
    result = ask(box_of(), "read_file", **arguments)
    assert result.is_error
    assert said in result.text


def test_a_file_in_another_encoding_is_shown_but_not_edited() -> None:
    assert "name = '\ufffd'" in ask(box_of(), "read_file", path="src/latin.py").text
    result = ask(box_of(), "str_replace", path="src/latin.py", old_str="name", new_str="x")
    assert result.is_error and "not UTF-8 (byte 8)" in result.text


def test_a_file_that_is_too_large_is_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch) -> None:
    box = box_of()
    monkeypatch.setattr(toolbox, "MAX_FILE_BYTES", 10)
    assert "more than 10 bytes" in ask(box, "read_file", path="src/one.py").text
    monkeypatch.setattr(toolbox, "MAX_FILE_BYTES", 100)
    assert "may have 100" in ask(box, "write_file", path="new.py", content="x" * 101).text
    grown = ask(box, "str_replace", path="src/one.py", old_str="def one", new_str="d" * 101)
    assert grown.is_error and "would have" in grown.text
    assert box.sandbox.files == FILES


def test_write_file_writes_and_refuses_half_a_character() -> None:
    box = box_of()
    written = ask(box, "write_file", path="new/a.py", content="x = 1\ny = 2\n")
    assert written.text == "wrote 12 bytes, 2 lines, to new/a.py"
    assert box.sandbox.files["new/a.py"] == b"x = 1\ny = 2\n"
    result = box.call(ToolCall("write_file", '{"path": "b.py", "content": "\\ud800"}'))
    assert result.is_error and "surrogate" in result.text
    assert "b.py" not in box.sandbox.files
    assert ask(box, "write_file", path="src", content="").is_error


def test_str_replace_changes_one_place_and_shows_it() -> None:
    box = box_of()
    old, new = "def one():\n    return 1", "def one():\n    return 3"
    result = ask(box, "str_replace", path="src/one.py", old_str=old, new_str=new)
    assert not result.is_error
    assert "     2\t    return 3" in result.text
    assert box.sandbox.files["src/one.py"] == FILES["src/one.py"].replace(b"1", b"3", 1)


@pytest.mark.parametrize(
    ("old_str", "said"),
    [
        ("    return 1\n", "stands 2 times in src/one.py, at line 2, 6"),
        ("def one():\n  return 1", "The same lines stand there with other spaces:\n     1\tdef one():"),
        ("def one():\n    return 11\n", "The nearest place is:\n     1\tdef one():"),
        ("class Nowhere(Something):", "Nothing in the file is like it"),
        ("", "old_str is empty"),
        ("def two", "would change"),
    ],
)
def test_str_replace_says_why_it_did_nothing(old_str: str, said: str) -> None:
    box = box_of()
    result = ask(box, "str_replace", path="src/one.py", old_str=old_str, new_str="def two")
    assert result.is_error
    assert said in result.text
    assert box.sandbox.files == FILES
    if "stands" in said or "place" in said:
        assert result.fault == "edit-not-applied"


def test_an_edit_of_windows_lines_says_so() -> None:
    assert r"\r\n" in near_matches("a = 1\r\nb = 2\r\n", "a = 1\nb = 2\n")


def test_near_matches_of_hostile_texts_end() -> None:
    texts = ("a\n" * 30_000, "ab" * 9000, "\n" * 9000)
    for text, wanted in zip(texts, ("ab\n" * 500, "ba" * 9000, "\n" * 90), strict=True):
        assert len(near_matches(text, wanted)) < 20_000


def test_list_files_hides_what_git_keeps_and_marks_folders() -> None:
    box = box_of()
    box.sandbox.files[".git/HEAD"] = b"ref"
    box.sandbox.files["src/bad\nname"] = b""
    lines = ask(box, "list_files").text.split("\n")
    assert ".git/" in lines and "src/one.py (50 bytes)" in lines and r"src/bad\nname (0 bytes)" in lines
    assert not any("HEAD" in line for line in lines)
    assert ask(box, "list_files", path="tests").text == "tests/test_one.py (32 bytes)"
    assert "Use read_file" in ask(box, "list_files", path="src/one.py").text
    assert "No such file" in ask(box, "list_files", path="scr").text
    assert ask(Toolbox(FakeSandbox(), TESTS), "list_files").text == "[. is empty]"


@pytest.mark.parametrize(
    ("answer", "said", "is_error"),
    [
        (done("src/one.py:1:def one():\n"), "src/one.py:1:def one():", False),
        (done(), "[no line matches]", False),
        (done("missing )\n", exit_code=3), "is no regular expression: missing )", True),
        (done(exit_code=4), "src: No such file or directory", True),
        (done(exit_code=1, stderr="a\nMemoryError\n"), "the search failed: MemoryError", True),
        (done(exit_code=-9, timed_out=True), "took longer than 20 s", True),
    ],
)
def test_search_tells_what_came_of_it(answer: Any, said: str, is_error: bool) -> None:
    result = ask(box_of(answer), "search", pattern="def one", path="src")
    assert said in result.text
    assert result.is_error is is_error


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("bash", {"command": "  "}),
        ("bash", {"command": "ls", "timeout_seconds": 0}),
        ("search", {"pattern": ""}),
        ("search", {"pattern": "x" * 3000}),
        ("search", {"pattern": "x", "path": "/usr"}),
    ],
)
def test_what_is_no_command_and_no_search_is_refused_without_a_run(
    tool: str, arguments: dict[str, Any]
) -> None:
    box = box_of()
    assert ask(box, tool, **arguments).is_error
    assert box.sandbox.commands == []


def test_run_tests_puts_test_files_back_and_names_what_grading_leaves_out() -> None:
    tests = VisibleTests(TESTS.node_ids, TESTS.files, is_left_out=lambda path: path == "conftest.py")
    box = Toolbox(FakeSandbox(FILES, done("1 passed\n")), tests)
    assert ask(box, "run_tests").text == "1 passed"
    box.sandbox.files["tests/test_one.py"] = b"def test_one(): pass\n"
    box.sandbox.files["conftest.py"] = b""
    assert ask(box, "run_tests").text == (
        "[put back as they were: tests/test_one.py]\n[not taken into grading: conftest.py]\n1 passed"
    )
    assert box.sandbox.files["tests/test_one.py"] == FILES["tests/test_one.py"]
    assert json.loads(box.sandbox.commands[0][1])[-1] == ["tests/test_one.py::test_one"]


def test_after_submit_every_call_is_refused_and_counted() -> None:
    box = box_of()
    assert not ask(box, "submit").is_error
    for tool in ("submit", "run_tests"):
        result = ask(box, tool)
        assert result.is_error and "the attempt is over" in result.text
    assert (box.num_calls, box.num_invalid) == (3, 2)
    assert box.sandbox.commands == []


def test_a_sandbox_that_breaks_is_no_result() -> None:
    box = box_of()
    box.sandbox.is_broken = True
    for tool, arguments in (("bash", {"command": "ls"}), ("read_file", {"path": "a"}), ("list_files", {})):
        with pytest.raises(SandboxFailure):
            ask(box, tool, **arguments)


@given(st.sampled_from([*ACTIONS, "", "x"]) | st.text(max_size=20), st.text(max_size=60))
def test_no_text_is_a_traceback(name: str, arguments: str) -> None:
    assert isinstance(box_of().call(ToolCall(name, arguments)), ToolResult)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = sorted({argument for tool in TOOLS for argument in tool.parameters["properties"]})


@given(
    st.sampled_from(list(ACTIONS)),
    st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=5), _JSON, max_size=5),
)
def test_no_object_is_a_traceback(name: str, arguments: dict[str, Any]) -> None:
    assert isinstance(box_of().call(ToolCall(name, json.dumps(arguments))), ToolResult)
