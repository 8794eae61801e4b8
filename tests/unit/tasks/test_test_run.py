"""What a test run says, and what cannot make it lie."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from composer_replication.records import ExecResult, Limits, Outcome
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.repository import cut_off
from composer_replication.tasks.running import bench as bench_module
from composer_replication.tasks.running.bench import Bench, run_alone, run_batch
from composer_replication.tasks.test_run import Ended, TestReport, Trial, judge, read_records

PACKAGE = "def answer():\n    {body}\n"
TESTS = "from package import answer\n\n\ndef test_answer():\n    assert answer() == 42\n\n\ndef test_other():\n    assert True\n"
IDS = ["tests/test_package.py::test_answer", "tests/test_package.py::test_other"]


@pytest.fixture
def run(environment: Environment):
    written: dict[str, bytes] = {}

    def run_files(
        files: Mapping[str, str],
        node_ids: Sequence[str] | None = None,
        *,
        seconds: float = 30.0,
        limits: Limits | None = None,
        **options: object,
    ) -> TestReport:
        written.update({name: text.encode() for name, text in files.items()})
        return run_alone(Trial(dict(written), node_ids, seconds, **options), environment, limits=limits)

    return run_files


def with_body(body: str) -> dict[str, str]:
    return {"package.py": PACKAGE.format(body=body), "tests/test_package.py": TESTS}


OUTCOMES = """
import pytest, unittest

@pytest.fixture
def broken():
    raise ValueError

@pytest.fixture
def breaks_later():
    yield
    raise ValueError

def test_passes(): pass
def test_fails(): assert False
def test_errors(broken): pass
def test_errors_after(breaks_later): pass
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.mark.xfail
def test_unexpected(): pass
class TestUnit(unittest.TestCase):
    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
    def test_fine(self):
        pass
def test_leaves():
    raise SystemExit(0)
"""
ODD = ["a b", "ü", "[x]", "a::b", "n\nl", '"', "", "-k", "%s", "\ud800"]
DECORATED = (
    "import functools, pytest\nfrom package import answer\n\n\ndef wrap(f):\n    @functools.wraps(f)\n"
    "    def inner(*a, **k):\n        return f(*a, **k)\n    return inner\n\n\n@pytest.mark.parametrize('x', [1, 2])\n@wrap\n"
    "def test_a(x):\n    assert answer()\n"
)
SKIPS = {
    "test_a.py": "import pytest\n\n\n@pytest.mark.skip('not today')\ndef test_a():\n    pass\n",
    "test_b.py": "import pytest\n\npytest.importorskip('no_such_module')\n\n\ndef test_b():\n    pass\n",
}
HOOK = "def {}:\n    raise RuntimeError('start the database first')\n"
CHILD = "import subprocess, sys; return int(subprocess.check_output([sys.executable, '-c', 'import package; print(42)']))"
GOOD_BODY = with_body("return 42")
AT_ONCE: dict[str, tuple[Mapping[str, str], Sequence[str] | None]] = {
    "configure": ({"conftest.py": HOOK.format("pytest_configure(config)"), **GOOD_BODY}, None),
    "session": ({"conftest.py": HOOK.format("pytest_sessionstart(session)"), **GOOD_BODY}, None),
    "outcomes": ({"test_x.py": OUTCOMES}, None),
    "one of two": (GOOD_BODY | {"tests/test_more.py": "raise ValueError('never imported')\n"}, IDS[:1]),
    "odd": ({"test_odd.py": f"import pytest\n\n\n@pytest.mark.parametrize('x', {ODD!a})\ndef test_odd(x):\n    pass\n"}, None),
    "src": (
        {
            "src/thing.py": "X = 1\n",
            "thing-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 2.0\n",
            "tests/test_t.py": "import importlib.metadata as m\nimport thing\n\n\ndef test_it():\n    assert thing.X == 1 and m.version('thing') == '2.0'\n",
        },
        None,
    ),
    "decorated": ({"package.py": PACKAGE.format(body="return 42"), "test_a.py": DECORATED}, None),
    "bad import": (GOOD_BODY | {"tests/test_bad.py": "import no_such_module\n"}, None),
    "import fails": (GOOD_BODY | {"package.py": "raise RuntimeError('at import')\n"}, IDS),
    "test gone": (GOOD_BODY, [*IDS, "tests/test_package.py::test_gone"]),
    "file gone": (GOOD_BODY, [*IDS, "tests/test_missing.py::test_gone"]),
    "child": (with_body(CHILD), IDS),
    "skips": (SKIPS, None),
    "host": (with_body("import os; return 1 if 'MY_API_TOKEN' in os.environ else 42"), IDS),
}  # fmt: skip


@pytest.fixture(scope="module")
def at_once(environment: Environment) -> Mapping[str, TestReport]:
    """Reports of runs that share a sandbox, and need no more; ``test_test_batch`` shows that alone they say the same."""
    trials = [
        Trial({name: text.encode() for name, text in files.items()}, ids, 30.0)
        for files, ids in AT_ONCE.values()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_API_TOKEN", "secret-value")
        patch.setenv("PYTEST_ADDOPTS", "--nonsense")
        return dict(zip(AT_ONCE, run_batch(trials, environment), strict=True))


@pytest.mark.parametrize("hook", ["configure", "session"])
def test_a_hook_that_ends_pytest_is_told(at_once: Mapping[str, TestReport], hook: str) -> None:
    assert "RuntimeError: start the database first" in at_once[hook].error


def test_all_outcomes(at_once: Mapping[str, TestReport]) -> None:
    report = at_once["outcomes"]
    assert report.error == ""
    found = {name.rpartition("::")[2]: outcome.value for name, outcome in report.outcomes.items()}
    assert found == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_errors": "error",
        "test_errors_after": "error",
        "test_skipped": "skipped",
        "test_expected": "skipped",
        "test_unexpected": "skipped",
        "test_sub": "failed",
        "test_fine": "passed",
        "test_leaves": "failed",
    }
    assert tuple(report.outcomes) == report.collected


@pytest.mark.parametrize(
    ("name", "num_passed"),
    [("one of two", 1), ("odd", 10), ("src", 1), ("bad import", 2), ("child", 2), ("host", 2)],
)
def test_what_passes(at_once: Mapping[str, TestReport], name: str, num_passed: int) -> None:
    """Only the requested ones run; nothing of the host environment is seen; a child process finds the package."""
    report = at_once[name]
    assert (report.error, len(report.passed), len(report.outcomes)) == ("", num_passed, num_passed)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("import fails", "the tests are not the stored ones"),
        ("test gone", "not the stored ones"),
        ("file gone", "nothing was collected"),
    ],
)
def test_tests_that_came_or_went_are_an_error(
    at_once: Mapping[str, TestReport], name: str, words: str
) -> None:
    assert words in at_once[name].error
    assert at_once[name].passed == frozenset()


def test_odd_parametrisations_can_be_asked_for(run, at_once: Mapping[str, TestReport]) -> None:
    again = run(AT_ONCE["odd"][0], list(at_once["odd"].collected))
    assert (again.error, again.passed) == ("", at_once["odd"].passed)


def test_what_is_said_of_places_errors_and_skips(at_once: Mapping[str, TestReport]) -> None:
    assert set(at_once["decorated"].places.values()) == {("test_a.py", 12, "test_a")}
    assert "no_such_module" in at_once["bad import"].collect_errors["tests/test_bad.py"]
    skips = at_once["skips"]
    assert skips.skips["test_a.py::test_a"] == "Skipped: not today"
    assert "could not import 'no_such_module'" in skips.skips["test_b.py"]
    assert dict(skips.outcomes) == {"test_a.py::test_a": Outcome.SKIPPED}


def test_what_only_passes_with_more_rights_than_an_answer_has_is_no_green_test(run) -> None:
    tests = "import os\n\n\ndef test_beside():\n    open('../left', 'w')\n\n\ndef test_above():\n    open('../../left', 'w')\n"
    tests += "\n\ndef test_session():\n    assert os.getsid(0) == os.getpid()\n"
    report = run({"test_t.py": tests})
    assert (report.error, len(report.outcomes), report.passed) == ("", 3, frozenset())


@pytest.mark.parametrize("root", ["", "src/"])
def test_the_package_comes_from_the_tree_though_the_environment_has_it_too(
    own_environment: Environment, root: str
) -> None:
    """A build refuses such an environment; should one slip through, no old code is imported in its place."""
    for packages in own_environment.root.glob("lib/python*/site-packages"):
        (packages / "thing.py").write_text("X = 'installed'\n")
    test = (
        "import os, subprocess, sys, thing\n\n\ndef test_it():\n    assert thing.X == 'of the tree'\n"
        "    assert thing.__file__.startswith(os.getcwd() + os.sep)\n\n\ndef test_child():\n"
        "    subprocess.run([sys.executable, '-c', 'import thing; assert thing.X == \"of the tree\"'], check=True)\n"
    )
    tree = {f"{root}thing.py": b"X = 'of the tree'\n", "test_t.py": test.encode()}
    report = run_alone(Trial(tree, None, 30.0), own_environment)
    assert (report.error, len(report.passed)) == ("", 2)


def test_time_out(run) -> None:
    report = run(with_body("import time; time.sleep(60)"), IDS, seconds=2.0)
    assert report.error.startswith("the tests ran longer than 2 s")
    assert set(report.outcomes.values()) == {Outcome.FAILED}


@pytest.mark.long
def test_what_computes_is_ended_though_it_ignores_the_signal(run) -> None:
    body = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n    while True:\n        pass"
    report = run(with_body(body), IDS[:1], seconds=1.0, wall_factor=500)
    assert report.error
    assert dict(report.outcomes) == {IDS[0]: Outcome.FAILED}


def test_a_daemon_neither_blocks_nor_survives(run, tmp_path: Path) -> None:
    body = (
        "import subprocess, sys\n    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(50)'], start_new_session=True)\n"
        "    import threading, time\n    threading.Thread(target=time.sleep, args=(50,)).start()\n    return 42"
    )
    report = run(with_body(body), IDS, seconds=25.0)
    assert (report.error, len(report.passed)) == ("", 2)
    assert report.seconds < 25.0
    commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    assert not [
        command for command in commands if b"import time; time.sleep(50)" in command and b"-P" not in command
    ]


def test_memory_is_limited(run) -> None:
    report = run(
        with_body("x = b'x' * (3 * 10**8); return 42"), IDS, limits=Limits(memory_bytes=200 * 1024**2)
    )
    assert IDS[0] not in report.passed


# --- records that a candidate with knowledge of the nonce could write -----------------------

NONCE = "n"
COLLECTED = {"event": "collected", "ids": IDS, "places": []}
PASSED = [{"event": "test", "id": node_id, "outcome": "passed"} for node_id in IDS]
END = {"event": "end", "exit_code": 0}
GOOD = [COLLECTED, *PASSED, END]


def judged(records: Sequence[Mapping[str, object]], *, nonce: str = NONCE, **changes: object) -> TestReport:
    stdout = "".join(json.dumps({"nonce": nonce, **record}) + "\n" for record in records)
    values: dict[str, object] = {
        "exit_code": 0, "stdout": stdout, "stderr": "last words\n", "truncated": False, "timed_out": False,
        "out_of_memory": False, "seconds": 1.0,
    }  # fmt: skip
    result = ExecResult(**{**values, **changes})  # type: ignore[arg-type]
    return judge(result, read_records(result.stdout, [NONCE]), Trial({}, IDS, 5.0))


def test_a_good_run_is_believed() -> None:
    report = judged(GOOD)
    assert (report.error, report.passed) == ("", set(IDS))
    noise = judged([{"event": "chatter"}], nonce="other").error
    assert "closing record" in noise


@pytest.mark.parametrize(
    ("records", "changes", "words"),
    [
        (GOOD[:-1], {}, "closing record"),
        ([*GOOD, END], {}, "more than one closing record"),
        ([*GOOD, PASSED[0]], {}, "closing record"),
        ([COLLECTED, PASSED[0], END], {}, "not every test ran"),
        ([COLLECTED, *PASSED, PASSED[0], END], {}, "has a second result, or was not collected"),
        (
            [COLLECTED, *PASSED, {**PASSED[0], "id": "x::y"}, END],
            {},
            "has a second result, or was not collected",
        ),
        ([COLLECTED, *GOOD], {}, "collected twice"),
        ([{**COLLECTED, "ids": [*IDS, IDS[0]]}, *PASSED, END], {}, "collected twice"),
        ([{**COLLECTED, "ids": [*IDS, "x::y"]}, *PASSED, END], {}, "not the stored ones"),
        ([{**COLLECTED, "ids": IDS[:1]}, PASSED[0], END], {}, "not the stored ones"),
        ([*PASSED, END], {}, "has a second result, or was not collected"),
        ([END], {}, "nothing was collected"),
        ([COLLECTED, {"event": "test"}, END], {}, "malformed"),
        ([COLLECTED, {**PASSED[0], "outcome": "great"}, END], {}, "malformed"),
        (GOOD, {"timed_out": True}, "ran longer than 5 s"),
        (GOOD, {"out_of_memory": True}, "more memory"),
        (GOOD, {"truncated": True}, "cut off"),
    ],
)
def test_anything_out_of_order_fails_the_whole_run(
    records: list[dict[str, object]], changes: dict[str, object], words: str
) -> None:
    report = judged(records, **changes)
    assert words in report.error
    assert dict(report.outcomes) == dict.fromkeys(IDS, Outcome.FAILED)
    assert report.passed == frozenset()


@pytest.mark.parametrize(
    ("records", "running"),
    [
        ([COLLECTED], IDS[0]),
        ([COLLECTED, PASSED[0]], IDS[1]),
        ([COLLECTED, *PASSED], ""),
        ([], ""),
        ([{**COLLECTED, "ids": 3}], ""),
        ([COLLECTED, {"event": "test", "id": []}], ""),
    ],
)
def test_the_test_in_which_a_run_broke_off_is_named(records: list[dict[str, object]], running: str) -> None:
    report = judged(records)
    assert "closing record" in report.error
    assert report.running == running
    refusal = cut_off(report, 5.0).detail
    assert refusal.endswith(f"; {running} was running") is bool(running)


# --- a test that ends the run for all others ------------------------------------------------------

FINE = "def test_fine():\n    pass\n"
BAD_TESTS = {
    "hangs": ("import threading", "threading.Event().wait()", "it waited 1 s"),
    "dies": ("import os", "os._exit(3)", "it ends the process (exit code 3)"),
    "leaves": ("import pytest", "pytest.exit('no server')", "it ends the whole run: Exit: no server"),
    "interrupts": ("", "raise KeyboardInterrupt", "it ends the whole run: KeyboardInterrupt"),
    "doubles": ("import os, time", "os.fork()", "it forks, and both processes go on"),
}


@pytest.mark.parametrize("kind", BAD_TESTS)
def test_a_test_that_ends_the_run_is_named(run, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "IDLE_SECONDS", 1.0)
    imports, body, words = BAD_TESTS[kind]
    tests = f"{imports}\n\n\ndef test_first():\n    pass\n\n\ndef test_bad():\n    {body}\n\n\n{FINE}"
    report = run({"test_a.py": tests})
    assert (report.running, report.broke[: len(words)]) == ("test_a.py::test_bad", words)
    assert report.done["test_a.py::test_first"] is Outcome.PASSED
    again = run({}, left_out=["test_a.py::test_bad"])
    assert (again.error, set(again.passed)) == ("", {"test_a.py::test_first", "test_a.py::test_fine"})


def test_what_a_suite_prints_never_says_which_limit_ended_it(run) -> None:
    words = "[sandbox] stopped: it wrote more to disk than the limit"
    tests = f"import os, sys\n\n\ndef test_bad():\n    os.write(2, b'{words}')\n    os._exit(137)\n"
    report = run({"test_a.py": tests})
    assert cut_off(report, 5.0).reason == "red-baseline"


# --- runs are limited by processor time ---


BUSY = """
import time

def test_works_for_a_moment():
    begin, end = time.process_time(), time.monotonic() + 1.5
    while time.process_time() - begin < 0.2:
        pass
    time.sleep(max(0, end - time.monotonic()))

def test_never_ends():
    while True:
        pass

def test_waits():
    time.sleep(60)
"""
MOMENT, ENDLESS, WAITS = (
    f"test_busy.py::test_{name}" for name in ("works_for_a_moment", "never_ends", "waits")
)


@pytest.mark.parametrize(
    ("wall_factor", "test", "passes"),
    [
        (1, MOMENT, False),
        (100, MOMENT, True),  # the limit is processor time
        (100, ENDLESS, False),
        (2, WAITS, False),  # of which what waits has none
    ],
)
def test_how_long_a_run_may_take(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, wall_factor: int, test: str, passes: bool
) -> None:
    monkeypatch.setattr(bench_module, "WALL_FACTOR", wall_factor)
    files = {"test_busy.py": BUSY.encode()}
    bench = Bench(files, environment, None, suite_seconds=1.0, test_seconds=1.0)
    (report,) = bench.run_all([Trial(files, [test])])
    assert report.passed == ({test} if passes else set())
    assert (report.error == "", report.ended is Ended.TIME) == (passes, not passes)
