"""What the parent believes of a watched run: lines that are signed in order, tests that ran in turn; and what a forked
process, a path to a process's memory and honest processes mean to it.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.records import ExecResult, Outcome
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.running import watched_run
from composer_replication.tasks.running.watched_run import judge_watched, run_watched
from composer_replication.tasks.test_run import TestReport, Trial

RUNNER = runpy.run_path(str(Path(watched_run.__file__).with_name("watched_runner.py")))
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
        ["report", node_id, ""],
        ["call", node_id, how],
        ["report", node_id, outcome],
        ["report", node_id, ""],
        ["finish", node_id, "0.25"],
    ]


COLLECTED = ["collected", "ff", *IDS]
END = ["end", "1", "0.5"]
GOOD = [COLLECTED, *story_of(IDS[0]), *story_of(IDS[1], "failed"), END]


def judged(records: Sequence[Sequence[str]] | str, **changes: object) -> TestReport:
    values: dict[str, object] = {
        "exit_code": 0, "stdout": records if isinstance(records, str) else signed(records), "stderr": "words\n",
        "truncated": False, "timed_out": False, "out_of_memory": False, "seconds": 1.0,
    }  # fmt: skip
    return judge_watched(ExecResult(**{**values, **changes}), KEY, Trial({}, IDS, 5.0))  # type: ignore[arg-type]


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
        ([*GOOD, END], {}, "out of order: end"),
        ([COLLECTED, *A, END], {}, "not every test ran"),
        ([COLLECTED, *B, *A, END], {}, "out of order: start"),
        ([COLLECTED, *A, *A, END], {}, "out of order: start"),
        ([COLLECTED, *A, *B[:-1], END], {}, "has no end"),
        ([COLLECTED, A[0], *B, END], {}, "out of order: start"),
        ([COLLECTED, *A, ["report", IDS[0], "passed"], *B, END], {}, "out of order: report"),
        ([COLLECTED, COLLECTED, *A, *B, END], {}, "out of order: collected"),
        ([["collected", "fff", *IDS, IDS[0]], *A, *B, END], {}, "out of order: collected"),
        ([["collected", "f", IDS[0]], *A, END], {}, "not the stored ones"),
        ([["collected", "fff", *IDS, "x"], *A, *B, *story_of("x"), END], {}, "not the stored ones"),
        ([["end", "0", "0.1"]], {}, "not the stored ones"),
        ([COLLECTED, ["start"], END], {}, "out of order: start"),
        ([*GOOD[:-1], ["end", "one", "0.1"]], {}, "invalid literal"),
        ([*GOOD[:-1], ["end"]], {}, "not enough values"),
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
        ([B[0], ["report", IDS[1], "error"], B[4], B[5]], "error", set()),
        ([B[0], ["report", IDS[1], "skipped"], B[4], B[5]], "skipped", set()),
        ([*B[:3], ["report", IDS[1], "skipped"], *B[4:]], "skipped", set()),
        ([*B[:4], ["report", IDS[1], "error"], B[5]], "error", set()),
        ([B[0], B[1], B[4], B[5]], "missing", set()),
        ([*B[:2], ["call", IDS[1], "raised"], *B[3:]], "passed", {"did not return"}),
        ([*B[:2], *B[3:]], "passed", {"did not return"}),
        ([*B[:3], B[2], *B[3:]], "passed", {"did not return"}),
        ([*B[:3], ["report", IDS[1], "failed"], B[3], *B[4:]], "failed", set()),
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
) -> TestReport:
    write_tree(folder, files)
    trial = Trial({}, ids, 30.0, wall_factor=10.0, shuffle_seed=7, backwards=backwards)
    return run_watched(folder, environment, trial)


def test_a_real_run_of_honest_code(tmp_path: Path, environment: Environment) -> None:
    ids = ["t/test_x.py::test_a", "t/test_x.py::test_b", "t/test_x.py::TestC::test_c"]
    report = run_tree(tmp_path / "tree", environment, {"package.py": PACKAGE, "t/test_x.py": TESTS}, ids)
    assert (report.error, report.pytest_exit_code) == ("", 1)
    assert {name[-1]: outcome.value for name, outcome in report.outcomes.items()} == {
        "a": "passed", "b": "failed", "c": "passed",
    }  # fmt: skip
    assert odd(report) == []


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
        ("import _pytest.runner as r\ndel r.show_test_item\n", "_pytest.runner.show_test_item changed"),
        (
            "import _pytest.runner as r\nvars(r)['later'] = vars(r).pop('show_test_item')\n",
            "_pytest.runner.show_test_item changed",
        ),
        (
            "import _pytest.runner as r\nr.show_test_item.__code__ = (lambda item: None).__code__\n",
            "code of a function replaced",
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


# --- processes and paths into them ---


def odd(report: TestReport) -> list[str]:
    """The flags without what pytest's own plugin for old paths exchanges for the time of a run."""
    return [flag for flag in report.flags if not flag.startswith("_pytest.")]


SIGN = """
import gc, os, sys
me = sys._getframe()
while me and "item" not in me.f_locals:
    me = me.f_back
child = FORK
if child:
    os.waitpid(child, 0)
    os._exit(0)
gc.unfreeze()
send = next(f for f in gc.get_objects() if getattr(f, "__qualname__", "") == "open_transcript.<locals>.send"
            and hasattr(f, "__closure__"))
name = me.f_locals["item"].nodeid
for record in [("call", name, "returned"), ("report", name, "passed"), ("report", name, ""),
               ("finish", name, "0.001"), ("end", "0", "0.1")]:
    send(record)
os._exit(0)
"""
RAW_FORK = "__import__('ctypes').CDLL(None).fork()"


@pytest.mark.parametrize(
    ("fork", "sign"),
    [("os.fork()", "something else"), ("os.forkpty()[0]", "something else"), (RAW_FORK, "ctypes.dlsym")],
)
def test_a_forked_process_cannot_sign(tmp_path: Path, environment: Environment, fork: str, sign: str) -> None:
    body = textwrap.indent(SIGN.replace("FORK", fork), "    ")
    files = {"package.py": f"def answer():{body}", "t/test_x.py": TESTS}
    report = run_tree(tmp_path / "tree", environment, files, ["t/test_x.py::test_a"])
    assert report.outcomes["t/test_x.py::test_a"] is Outcome.FAILED or sign in report.flags
    assert sign in report.error or sign in report.flags


LOOK = """
import gc, sys
found = set()
def look(frame):
    while frame is not None:
        if frame.f_code.co_filename == "<runner>":
            found.update({"send", "hook", "flag", "state", "update"} & set(frame.f_locals))
        frame = frame.f_back
def follow(error):
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            look(trace.tb_frame)
            trace = trace.tb_next
        error = error.__context__
class Curious(str):
    __slots__ = ()
    __hash__ = str.__hash__
    def __eq__(self, other):
        look(sys._getframe())
        return False
def attempt(call, *args):
    try:
        call(*args)
    except BaseException as error:
        follow(error)
class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        look(sys._getframe())
WAY
if found:
    raise SystemExit(f"found {sorted(found)}")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "is_flagged"),
    [
        ("attempt(sys.audit, 'open')", False),
        ("attempt(sys.audit, 'object.__setattr__')", False),
        ("attempt(sys.audit, 'object.__setattr__', 1, Curious('__code__'))", False),
        ("attempt(sys.audit, 'open', Curious('/proc/self/mem'))", True),
        ("def down():\n    attempt(gc.get_objects)\n    down()\nattempt(down)", True),
        (
            (
                "import os\nkept = [(number, os.dup(number)) for number in range(3, 9) if os.path.exists(f'/proc/self/fd/{number}')]\n"
                "[os.close(number) for number, _ in kept]\nattempt(gc.get_objects)\n[os.dup2(b, a) for a, b in kept]"
            ),
            True,
        ),
        (
            (
                "gc.callbacks.append(lambda *args: look(sys._getframe()))\ngc.set_threshold(1, 1, 1)\n"
                "for number in range(99):\n    Cycle()\n    sys.audit('gc.get_referrers', number)"
            ),
            True,
        ),
    ],
)
def test_no_way_leads_to_the_frames_of_the_hook(
    tmp_path: Path, environment: Environment, way: str, is_flagged: bool
) -> None:
    files = {"package.py": PACKAGE + LOOK.replace("WAY", way), "t/test_x.py": TESTS}
    report = run_tree(tmp_path / "tree", environment, files, ["t/test_x.py::test_a"])
    if "os.close" in way:  # a line is lost, and with it the run
        assert "something else" in report.error
        return
    assert report.error == ""
    assert report.outcomes["t/test_x.py::test_a"] is Outcome.PASSED
    assert bool(odd(report)) is is_flagged


HONEST_PROCESSES = """
import multiprocessing, os, subprocess, sys, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import pytest
from package import answer

def test_a_fork_of_its_own():
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, str(answer()).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(read, 9) == b"42"

def test_a_fork_that_closes_everything():
    child = os.fork()
    if not child:
        os.closerange(0, 256)
        os.open(os.devnull, os.O_RDWR)
        os._exit(answer())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42

@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes(how):
    with multiprocessing.get_context(how).Pool(1) as pool:
        assert pool.apply(answer) == 42
    with ProcessPoolExecutor(1, multiprocessing.get_context(how)) as pool:
        assert pool.submit(answer).result() == 42

def test_programs():
    words = [sys.executable, "-c", "import package; print(package.answer())"]
    assert subprocess.run(words, stdout=-1, preexec_fn=os.setsid).stdout == b"42\\n"
    assert subprocess.run(words, stdout=-1, env=dict(os.environ)).stdout == b"42\\n"

def test_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(answer())) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: answer(), range(4)), *found] == [42] * 12

def test_a_child_that_fails_and_goes_on_like_its_parent():
    if not os.fork():
        raise SystemError("this process goes on with the tests, and nobody believes it")
    os.wait()

def test_files(tmp_path):
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "3").write_text("memory")
    os.symlink(tmp_path / "fd" / "3", tmp_path / "link")
    assert open(os.fsencode(tmp_path / "link")).read() == "memory"
    assert open("/proc/self/stat").read() and open("/proc/meminfo").read() and os.listdir("/proc/self/fd")
    os.chdir(tmp_path)
""".replace("\\\\n", "\\n")


def test_honest_tests_that_start_processes_and_threads_pass_and_are_not_flagged(
    tmp_path: Path, environment: Environment
) -> None:
    files = {"package.py": PACKAGE, "t/test_x.py": HONEST_PROCESSES}
    names = "fork_of_its_own fork_that_closes_everything child_that_fails_and_goes_on_like_its_parent".split()
    ids = [*(f"test_a_{name}" for name in names), *(f"test_processes[{h}]" for h in ("fork", "spawn"))]
    ids = [f"t/test_x.py::{name}" for name in [*ids, "test_programs", "test_threads", "test_files"]]
    report = run_tree(tmp_path / "tree", environment, files, ids)
    assert report.error == ""
    assert dict(report.outcomes) == dict.fromkeys(ids, Outcome.PASSED)
    assert odd(report) == []


class Name(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise AssertionError("code of the tree was called")

    __getitem__ = __iter__ = __str__  # type: ignore[assignment]


INSIDE = (
    *"/proc/self/mem /proc/1/task/1/mem mem /proc/self /proc/self/ //proc/./self/fd/../ /proc".split(),
    *"/proc/self/fd/1 //proc//self/fd//1 ../proc/self/fd/1 /dev/fd/1 /proc/self/map_files/0-1".split(),
    *(b"/proc/self/mem", bytearray(b"/proc/self/mem"), b"../../mem", b"/proc/self/fd"),
    *(Name("/proc/self/mem"), Path("/proc/self/mem")),
)
OUTSIDE = (
    *"/proc/self/stat /proc/meminfo /etc/passwd a/fd/3 3 memory mem.txt nothing\0here \ud800".split(" "),
    *(b"/proc/self/status", 7, None),
)


@pytest.mark.parametrize(
    ("path", "is_inside"), [*((path, True) for path in INSIDE), *((path, False) for path in OUTSIDE)]
)
def test_which_paths_lead_into_a_process(path: object, is_inside: bool) -> None:
    assert RUNNER["make_is_inside"]()(path) is is_inside


@pytest.mark.parametrize("target", ["/proc/self/mem", "/proc/self", "/proc/self/fd"])
def test_a_link_into_a_process_is_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "one").symlink_to(target)
    (tmp_path / "two").symlink_to("one")
    (tmp_path / "honest").symlink_to("/proc/self/stat")
    look = RUNNER["make_is_inside"]()
    assert [look(str(tmp_path / name)) for name in ("one", "two", "honest")] == [True, True, False]


def test_the_key_does_not_stay_where_it_was_read() -> None:
    key = bytearray(b"k" * 32)
    read, write = os.pipe()
    send, forked = RUNNER["open_transcript"](write, key)
    assert key == bytes(32)
    send(("start", "x" * 5000, ""))
    os.close(write)
    with open(read, "rb") as pipe:
        signed_line = pipe.read()
    body = f"{b'start'.hex()}.{b'x'.hex() * 5000}."
    mac = hashlib.blake2s(f"{body}\n".encode(), key=b"k" * 32, digest_size=16).hexdigest()
    assert signed_line.decode() == f"{mac} {body}\n"
    assert forked == []
