"""What the parent believes of a watched run: lines that are signed in order, and tests that ran in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.records import ExecResult, Outcome
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.running.watched_run import WatchedReport, judge_watched, run_watched

KEY = "0123456789abcdef" * 4
IDS = ["t.py::test_a", "t.py::test_ü[\ud800]"]


def signed(records: Sequence[Sequence[str]], key: str = KEY) -> str:
    """Lines as the runner writes them, made by the definition: the digest of everything so far."""
    lines, so_far = [], b""
    for record in records:
        body = ".".join(text.encode("utf-8", "surrogatepass").hex() for text in record).encode()
        so_far += body + b"\n"
        mac = hashlib.blake2s(so_far, key=bytes.fromhex(key), digest_size=16).hexdigest()
        lines.append(f"{mac} {body.decode()}\n")
    return "".join(lines)


def story_of(node_id: str, outcome: str = "passed") -> list[list[str]]:
    how = "returned" if outcome == "passed" else "raised"
    return [
        ["start", node_id],
        ["report", node_id, "setup", "passed", ""],
        ["call", node_id, how],
        ["report", node_id, "call", outcome, ""],
        ["report", node_id, "teardown", "passed", ""],
        ["finish", node_id, "0.25"],
    ]


COLLECTED = ["collected", "ff", *IDS]
END = ["end", "1", "0.5"]
GOOD = [COLLECTED, *story_of(IDS[0]), *story_of(IDS[1], "failed"), END]


def judged(records: Sequence[Sequence[str]] | str, **changes: object) -> WatchedReport:
    values: dict[str, object] = {
        "exit_code": 0, "stdout": records if isinstance(records, str) else signed(records), "stderr": "words\n",
        "truncated": False, "timed_out": False, "out_of_memory": False, "seconds": 1.0,
    }  # fmt: skip
    return judge_watched(ExecResult(**{**values, **changes}), KEY, IDS, timeout_seconds=5.0)  # type: ignore[arg-type]


def test_a_good_run_is_read() -> None:
    report = judged(GOOD)
    assert (report.error, report.flags) == ("", frozenset())
    assert dict(report.outcomes) == {IDS[0]: Outcome.PASSED, IDS[1]: Outcome.FAILED}
    assert dict(report.test_seconds) == dict.fromkeys(IDS, 0.25)
    assert (report.pytest_exit_code, report.cpu_seconds) == (1, 0.5)


LINES = signed(GOOD).splitlines(keepends=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("".join([LINES[0], *LINES[2:]]), "something else"),
        ("".join([LINES[1], LINES[0], *LINES[2:]]), "something else"),
        ("".join([*LINES[:3], "hello\n", *LINES[3:]]), "something else"),
        ("".join([*LINES[:3], LINES[2], *LINES[3:]]), "something else"),
        ("".join([*LINES, "\n"]), "something else"),
        ("".join(LINES).replace(b"failed".hex(), b"passed".hex()), "something else"),
        (signed(GOOD, "ab" * 32), "something else"),
        ("".join([*LINES[:3], "child 66\n", *LINES[3:]]), "something else"),
        ("".join(LINES)[:-1], "cut off"),
        ("".join(LINES[:-1]), "closing record"),
        ("", "closing record"),
    ],
)
def test_a_transcript_that_was_touched_fails_the_run(text: str, words: str) -> None:
    report = judged(text)
    assert words in report.error
    assert dict(report.outcomes) == dict.fromkeys(IDS, Outcome.FAILED)


A, B = story_of(IDS[0]), story_of(IDS[1])


@pytest.mark.parametrize(
    ("records", "changes", "words"),
    [
        ([*GOOD, ["flag", "x"]], {}, "closing record"),
        ([*GOOD, END], {}, "follow the closing one"),
        ([COLLECTED, *A, END], {}, "not every test ran"),
        ([COLLECTED, *B, *A, END], {}, "out of turn"),
        ([COLLECTED, *A, *A, END], {}, "out of turn"),
        ([COLLECTED, *A, *B[:-1], END], {}, "has no end"),
        ([COLLECTED, A[0], *B, END], {}, "out of turn"),
        ([COLLECTED, *A, ["report", IDS[0], "call", "passed", ""], *B, END], {}, "not running"),
        ([COLLECTED, COLLECTED, *A, *B, END], {}, "collected twice"),
        ([["collected", "fff", *IDS, IDS[0]], *A, *B, END], {}, "same node id"),
        ([["collected", "f", IDS[0]], *A, END], {}, "not the stored ones"),
        ([["collected", "fff", *IDS, "x"], *A, *B, *story_of("x"), END], {}, "not the stored ones"),
        ([["end", "0", "0.1"]], {}, "nothing was collected"),
        ([COLLECTED, ["start"], END], {}, "malformed"),
        ([*GOOD[:-1], ["end", "one", "0.1"]], {}, "malformed"),
        (GOOD, {"exit_code": 1}, "after its closing record"),
        (GOOD, {"exit_code": 137}, "after its closing record"),
        (GOOD, {"timed_out": True}, "ran longer than 5 s"),
        (GOOD, {"out_of_memory": True}, "more memory"),
        (GOOD, {"truncated": True}, "cut off"),
    ],
)
def test_what_is_out_of_order_fails_the_run(
    records: list[list[str]], changes: Mapping[str, object], words: str
) -> None:
    report = judged(records, **changes)
    assert words in report.error
    assert dict(report.outcomes) == dict.fromkeys(IDS, Outcome.FAILED)


@pytest.mark.parametrize(
    ("story", "outcome", "flags"),
    [
        (story_of(IDS[1], "failed"), "failed", set()),
        ([B[0], ["report", IDS[1], "setup", "failed", ""], B[4], B[5]], "error", set()),
        ([B[0], ["report", IDS[1], "setup", "skipped", ""], B[4], B[5]], "skipped", set()),
        ([*B[:3], ["report", IDS[1], "call", "passed", "xfail"], *B[4:]], "skipped", set()),
        ([*B[:4], ["report", IDS[1], "teardown", "failed", ""], B[5]], "error", set()),
        ([B[0], B[1], B[4], B[5]], "missing", set()),
        ([*B[:2], ["call", IDS[1], "raised"], *B[3:]], "passed", {"did not return"}),
        ([*B[:2], *B[3:]], "passed", {"did not return"}),
        ([*B[:3], B[2], *B[3:]], "passed", {"did not return"}),
        ([*B[:4], B[3], *B[4:]], "passed", {"three steps"}),
        ([*B[:3], ["report", IDS[1], "call", "failed", ""], B[3], *B[4:]], "failed", {"three steps"}),
    ],
)
def test_what_became_of_one_test(story: list[list[str]], outcome: str, flags: set[str]) -> None:
    report = judged([COLLECTED, *A, *story, END])
    assert (report.error, report.outcomes[IDS[1]].value) == ("", outcome)
    assert len(report.flags) == len(flags)
    assert all(any(words in flag for flag in report.flags) for words in flags)


PACKAGE = "def answer():\n    return 42\n"
TESTS = (
    "import unittest\nfrom package import answer\n\n\ndef test_a():\n    assert answer() == 42\n\n\n"
    "def test_b():\n    assert answer() == 43\n\n\n"
    "class TestC(unittest.TestCase):\n    def test_c(self):\n        self.assertEqual(answer(), 42)\n"
)


def run_tree(
    folder: Path,
    environment: Environment,
    files: Mapping[str, str],
    ids: Sequence[str],
    *,
    backwards: bool = False,
) -> WatchedReport:
    write_tree(folder, files)
    return run_watched(
        folder,
        environment,
        ids,
        timeout_seconds=30.0,
        wall_factor=10.0,
        shuffle_seed=7,
        backwards=backwards,
    )


def test_a_real_run_of_honest_code(tmp_path: Path, environment: Environment) -> None:
    ids = ["t/test_x.py::test_a", "t/test_x.py::test_b", "t/test_x.py::TestC::test_c"]
    report = run_tree(tmp_path / "tree", environment, {"package.py": PACKAGE, "t/test_x.py": TESTS}, ids)
    assert (report.error, report.pytest_exit_code) == ("", 1)
    assert {name[-1]: outcome.value for name, outcome in report.outcomes.items()} == {
        "a": "passed", "b": "failed", "c": "passed",
    }  # fmt: skip
    # pytest's own plugin for old paths exchanges functions for the time of a run
    assert all(flag.startswith("_pytest.") for flag in report.flags)


def test_an_order_and_the_same_backwards(tmp_path: Path, environment: Environment) -> None:
    names = [f"test_{number}" for number in range(6)]
    files = {"test_x.py": "".join(f"def {name}():\n    pass\n" for name in names)}
    ids = [f"test_x.py::{name}" for name in names]
    first, second = (
        list(run_tree(tmp_path / str(backwards), environment, files, ids, backwards=backwards).test_seconds)
        for backwards in (False, True)
    )
    assert first == second[::-1] != ids


@pytest.mark.parametrize(
    ("added", "flag"),
    [
        ("import gc\ngc.get_objects()\n", "gc.get_objects"),
        ("import sys\nsys.settrace(None)\n", "sys.settrace"),
        ("import _pytest.runner as r\nr.show_test_item = len\n", "_pytest.runner.show_test_item changed"),
        (
            "import _pytest.reports as r\nr.BaseReport.passed = property(lambda self: True)\n",
            "_pytest.reports.BaseReport.passed changed",
        ),
        ("answer.__code__ = (lambda: 42).__code__\n", "code of a function replaced"),
        (
            (
                "try:\n    import _xxsubinterpreters as inner\nexcept ImportError:\n    import _interpreters as inner\n"
                "inner.create()\n"
            ),
            "cpython.PyInterpreterState_New",
        ),
        (
            "import os\nos.open('mem', os.O_RDONLY, dir_fd=os.open('/proc/self', os.O_RDONLY))\n",
            "open of its own memory or descriptors",
        ),
        (
            "import subprocess\nsubprocess.run(['ln', '-s', '/proc/self/mem', 'plain.txt'])\nopen(b'plain.txt', 'rb')\n",
            "open of its own memory or descriptors",
        ),
        (
            (
                "import gc\ndef down():\n    try:\n        down()\n    except RecursionError:\n        gc.get_objects()\n"
                "try:\n    down()\nexcept RecursionError:\n    gc.get_objects()\n"
            ),
            "gc.get_objects",
        ),
        (
            (
                "import unittest.case as c\nreal = c.TestCase.run\nc.TestCase.run = lambda self, result: None\n"
                "def answer():\n    c.TestCase.run = real\n    return 42\n"
            ),
            "unittest.case.TestCase.run changed",
        ),
    ],
)
def test_what_is_done_in_the_process_is_flagged(
    tmp_path: Path, environment: Environment, added: str, flag: str
) -> None:
    files = {"package.py": PACKAGE + added, "t/test_x.py": TESTS}
    report = run_tree(tmp_path / "tree", environment, files, ["t/test_x.py::test_a"])
    assert report.error == ""
    assert flag in report.flags
