"""A batch says of each run what a sandbox of its own would have said."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from composer_replication.records import Limits, Outcome
from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.choice import BACKENDS, ONLY_BY_NAME
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.running import bench
from composer_replication.tasks.running.bench import run_alone, run_batch
from composer_replication.tasks.test_run import Ended, TestReport, Trial

IDS = ["tests/test_package.py::test_answer", "tests/test_package.py::test_other"]
TESTS = "from package import answer\n\n\ndef test_answer():\n    assert answer() == 42\n\n\ndef test_other():\n    assert True\n"
FORGED = (
    "import json, os\n    for e in ('collected', 'test', 'end'):\n"
    "        os.write(1, (json.dumps({'nonce': '', 'event': e, 'id': '" + IDS[0] + "', 'outcome': 'passed',"
    " 'ids': [], 'places': [], 'exit_code': 0}) + '\\n').encode())\n    return 0"
)
DAEMON = (
    "import subprocess, sys\n    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(51)']{})\n"
    "    return 42"
)
BODIES = {
    "passes": "return 42",
    "fails": "return 1",
    "raises": "raise ValueError('no')",
    "os._exit": "import os; os._exit(0)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "kills its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "prints forged records": FORGED,
    "closes every descriptor": "import os; os.closerange(0, 100); return 42",
    "leaves a process behind": DAEMON.format(""),
    "leaves a daemon behind": DAEMON.format(", start_new_session=True"),
    "leaves a thread behind": "import threading, time\n    threading.Thread(target=time.sleep, args=(50,)).start()\n    return 42",
    "pytest.exit": "import pytest; pytest.exit('done', returncode=0)",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "recursion": "return answer()",
    "changes the folder": "import os; os.chdir('/'); return 42",
    "writes a lot to standard output": "print('x' * 10**6); return 42",
}


def project(body: str, **more: str) -> dict[str, bytes]:
    texts = {"package.py": f"def answer():\n    {body}\n", "tests/test_package.py": TESTS, **more}
    return {name.replace("__", "/"): text.encode() for name, text in texts.items()}


def files(**texts: str) -> dict[str, bytes]:
    return {f"{name}.py".replace("__", "/"): text.encode() for name, text in texts.items()}


def said(report: TestReport) -> TestReport:
    """All but the seconds and the place of the tree."""
    return replace(report, seconds=0.0, error=re.sub(r"/[^ ]*/(?=(tests|conftest)\b)", "", report.error))


NAMED = sorted(set(BACKENDS) - set(ONLY_BY_NAME))


@pytest.fixture(params=[None, *(pytest.param(name, marks=pytest.mark.long) for name in NAMED)])
def backend(request: pytest.FixtureRequest) -> str | None:
    """The best of this machine; a batch asks each of them for the same."""
    chosen = choose_backend(request.param)
    check = chosen.is_available()
    if not check.ok:
        pytest.skip(f"{chosen.name} is not available here: {check.detail}")
    return request.param


def assert_equal(
    runs: Mapping[str, Trial], environment: Environment, backend: str | None
) -> dict[str, TestReport]:
    """The reports of the runs together."""
    expected = {name: run_alone(run, environment, backend=backend) for name, run in runs.items()}
    found = dict(zip(runs, run_batch(list(runs.values()), environment, backend=backend), strict=True))
    for name in runs:
        assert said(found[name]) == said(expected[name]), name
    return found


@pytest.mark.long
def test_each_kind_of_end_is_reported_as_alone(environment: Environment, backend: str | None) -> None:
    runs = {name: Trial(project(body), IDS, 60.0) for name, body in BODIES.items()}
    runs["passes again"] = Trial(project("return 42"), IDS, 60.0)
    together = assert_equal(runs, environment, backend)
    # By hand, so that both cannot be wrong in the same way.
    assert together["passes again"].passed == set(IDS)
    assert together["fails"].outcomes == {IDS[0]: Outcome.FAILED, IDS[1]: Outcome.PASSED}
    for name in ("os._exit", "kills itself", "kills its group", "pytest.exit", "closes every descriptor"):
        assert together[name].error, name
        assert not together[name].passed
    assert "exit code 137" in together["kills its group"].error
    assert IDS[0] not in together["prints forged records"].passed
    assert together["leaves a daemon behind"].passed == set(IDS)


@pytest.mark.long
def test_other_trees_and_requests_are_reported_as_alone(environment: Environment) -> None:
    good = project("return 42")
    runs = {
        "everything": Trial(good, None, 60.0),
        "one test": Trial(good, IDS[:1], 60.0),
        "first failure": Trial(project("return 1"), IDS, 60.0, stop_at_first_failure=True),
        "a test is gone": Trial(good, [*IDS, "tests/test_package.py::test_gone"], 60.0),
        "no tests": Trial(files(package="X = 1\n"), None, 60.0),
        "collection error": Trial(good | files(tests__test_bad="import no_such_module\n"), None, 60.0),
        "syntax error": Trial(good | {"package.py": b"def answer(:\n"}, IDS, 60.0),
        "conftest exits": Trial(good | files(conftest="import sys\nsys.exit(3)\n"), IDS, 60.0),
        "other import mode": Trial(
            {"pytest.ini": b"[pytest]\naddopts = --import-mode=importlib\n"}
            | files(a__test_same="def test_same(): pass\n", b__test_same="def test_same(): pass\n"),
            None,
            60.0,
        ),
        "odd ids": Trial(
            files(
                test_odd="import pytest\n@pytest.mark.parametrize('x', ['ü', '\\ud800', 'n\\nl'])\ndef test_odd(x): pass\n"
            ),
            None,
            60.0,
        ),
        "src layout": Trial(
            {"src/thing.py": b"X = 1\n", "tests/test_t.py": b"import thing\n\ndef test_it():\n    assert thing.X == 1\n"},
            None,
            60.0,
        ),
        "places": Trial(
            files(
                test_place="import os, sys\n\ndef test_it():\n    here = os.getcwd()\n    assert os.environ['PYTHONPATH'] == here == sys.path[0]\n"
                "    assert os.path.dirname(__file__) == here and sys.argv == ['-c'] and '' not in sys.path\n"
                "    assert os.environ.get('PWD', here) == here and os.listdir(os.environ['TMPDIR']) == []\n"
            ),
            None,
            60.0,
        ),
    }  # fmt: skip
    together = assert_equal(runs, environment, None)
    assert together["conftest exits"].error.startswith(
        "the run ended without its closing record (exit code 3"
    )
    assert set(together["first failure"].outcomes.values()) == {Outcome.FAILED}
    assert len(together["places"].passed) == len(together["src layout"].passed) == 1
    assert "no_such_module" in together["collection error"].collect_errors["tests/test_bad.py"]


@pytest.mark.long
def test_a_run_that_hangs_costs_its_own_time_only(environment: Environment, backend: str | None) -> None:
    hangs = "import os, signal, time\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    os.fork()\n    time.sleep(60)"
    runs = {
        "hangs": Trial(project(hangs), IDS, 2.0),
        "good": Trial(project("return 42"), IDS, 60.0),
        "never ends": Trial(project("while True: pass"), IDS, 1.0, wall_factor=30.0),
        "conftest hangs": Trial(project("return 42") | files(conftest="import time\ntime.sleep(60)\n"), None, 2.0),
    }  # fmt: skip
    together = assert_equal(runs, environment, backend)
    assert together["hangs"].error.startswith("the tests ran longer than 2 s")
    assert together["never ends"].error.startswith("the tests ran longer than 1 s")
    assert together["good"].passed == set(IDS)


def test_modules_of_one_run_are_not_seen_by_the_next(environment: Environment) -> None:
    test = "import package\n\ndef test_it():\n    package.SEEN.append(1)\n    assert (package.VERSION, package.SEEN) == ({}, [1])\n"
    runs = [
        Trial(files(package=f"VERSION = {number}\nSEEN = []\n", test_it=test.format(number)), None, 60.0)
        for number in (1, 2, 2)
    ]
    assert [len(report.passed) for report in run_batch(runs, environment)] == [1, 1, 1]
    other = Trial(files(package="VERSION = 3\nSEEN = []\n", test_it=test.format(2)), None, 60.0)
    assert [len(report.passed) for report in run_batch([runs[1], other], environment)] == [1, 0]


def test_nothing_is_left_for_the_next_run(environment: Environment, backend: str | None) -> None:
    leave = """
import os, pathlib, subprocess, sys, tempfile

def places():
    return [os.path.expanduser('~'), os.environ['TMPDIR'], '/tmp', '/dev/shm', os.path.join(os.getcwd(), '..', '..')]

def test_leaves():
    for place in places():
        try:
            (pathlib.Path(place) / 'left' / 'deep').mkdir(parents=True)
            (pathlib.Path(place) / 'left' / 'deep' / 'file').write_text('x')
            (pathlib.Path(place) / 'left' / 'deep').chmod(0)
            (pathlib.Path(place) / 'left').chmod(0)
        except OSError:
            assert place.startswith('/tmp') or place.startswith('/dev')
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(52)'])

def test_finds_nothing():
    assert not [place for place in places() if os.path.lexists(os.path.join(place, 'left'))]
"""
    tree = files(test_l=leave)
    runs = [
        Trial(tree, [f"test_l.py::test_{name}"], 60.0)
        for name in ("finds_nothing", "leaves", "finds_nothing")
    ]
    reports = run_batch(runs, environment, backend=backend)
    assert [(report.error, len(report.passed)) for report in reports] == [("", 1)] * 3
    both = run_batch([Trial(tree, None, 60.0, stop_at_first_failure=True)], environment, backend=backend)[0]
    assert both.outcomes["test_l.py::test_finds_nothing"] is Outcome.FAILED  # it does look
    commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    assert not [command for command in commands if b"time.sleep(52)" in command and b"-P" not in command]


def test_a_place_that_others_share_is_never_cleared(tmp_path: Path) -> None:
    """Started without a sandbox by mistake, the server must leave the host's ``/tmp`` alone."""
    private, shared, secret = (tmp_path / name for name in ("private", "shared", "secret"))
    for folder, mode in ((private, 0o700), (shared, 0o1777), (secret, 0o750)):
        folder.mkdir()
        folder.chmod(mode)
    code = f"{bench.program_text('running.batch_server')}\nimport json\nprint(json.dumps([is_private(p) for p in sys.argv[1:]]))"
    paths = [str(path) for path in (private, shared, secret, Path("/tmp"), tmp_path / "missing")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, check=True)
    assert json.loads(done.stdout) == [True, False, False, False, False]


KILLERS = {
    "its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); return 42",
    "the whole batch": (
        "import os, signal\n    for n in os.listdir('/proc'):\n        if n.isdigit() and int(n) not in (1, os.getpid()):\n"
        "            os.kill(int(n), signal.SIGKILL)\n    import time; time.sleep(1)\n    return 42"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("killer", KILLERS)
def test_a_run_that_takes_the_batch_down_is_done_again_alone(environment: Environment, killer: str) -> None:
    runs = {
        "before": Trial(project("return 42"), IDS, 60.0),
        "killer": Trial(project(KILLERS[killer]), IDS, 60.0),
        "after": Trial(project("return 1"), IDS, 60.0),
    }
    together = dict(zip(runs, run_batch(list(runs.values()), environment, backend="bubblewrap"), strict=True))
    assert together["before"].passed == set(IDS)
    # Its last words depend on how soon it is ended itself.
    assert together["killer"].error.startswith("the run ended without its closing record (exit code 137")
    assert together["after"].passed == {IDS[1]}


@pytest.mark.long
def test_a_run_over_the_limits_of_the_sandbox_is_named_and_harms_no_other(environment: Environment) -> None:
    eats = "pieces = [b'x' * 10**7 for _ in range(30)]; import os, time; [os.fork() for _ in range(3)]\n    pieces = [bytearray(p) for p in pieces]; time.sleep(20); return 42"
    good = Trial(project("return 42"), IDS, 60.0)
    reports = run_batch(
        [good, Trial(project(eats), IDS, 60.0), good], environment, limits=Limits(memory_bytes=700 * 1024**2)
    )
    assert [len(report.passed) for report in reports] == [2, 0, 2]
    assert reports[1].error.startswith("the tests used more memory than allowed")


# --- whose records count -----------------------------------------------------------------


def test_records_with_another_runs_nonce_do_not_count(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is told the nonce of another one can neither speak for it nor use it for itself."""
    nonces = iter("0123456789abcdef")
    monkeypatch.setattr(bench.secrets, "token_hex", lambda _: next(nonces) * 32)
    forger = (
        "import gc, json, os\n    record = {'event': 'test', 'id': '%s', 'outcome': 'passed', 'nonce': '%s' * 32}\n"
        "    for fd in range(64):\n        try: os.write(fd, (json.dumps(record) + '\\n').encode())\n        except OSError: pass\n"
        "    return 1"
    )
    told = {2: "0", 3: "1", 4: "5", 6: "6"}  # that of the batch, of a run before, of the run behind, its own
    bodies = [forger % (IDS[0], told[number]) if number in told else "return 1" for number in range(1, 8)]
    reports = run_batch([Trial(project(body), IDS, 60.0) for body in bodies], environment)
    own = reports.pop(5)
    assert "has a second result" in own.error
    assert [(report.error, sorted(report.passed)) for report in reports] == [("", [IDS[1]])] * 6


# --- code that is compiled once ----------------------------------------------------------------


def test_code_is_shared_by_content(environment: Environment) -> None:
    """Trees that differ in a module or in a test, and hold a helper alike, at one path."""
    test = (
        "import os\nimport package, helper\n\ndef test_it():\n    here = os.getcwd()\n"
        "    assert [helper.f.__code__.co_filename, package.f.__code__.co_filename, "
        "test_it.__code__.co_filename] == [os.path.join(here, name) for name in ('helper.py', 'package.py', 'test_it.py')]\n"
        "    assert here.endswith(os.path.join('run', 'tree'))\n\ndef test_sum():\n    assert helper.f() + package.f() == 3\n\n"
        "def test_num_compiled():\n    from pathlib import Path\n    assert len([*Path('../../compiled' + os.getcwd()).rglob('*.pyc')]) == {}\n"
    )
    good = files(helper="def f(): return 1\n", package="def f(): return 2\n", test_it=test.format(3))
    runs = {
        "good": Trial(good, None, 60.0),
        "good again": Trial(good, None, 60.0),
        "other module": Trial(good | files(package="def f(): return 5\n"), None, 60.0),
        "other test": Trial(
            good | files(test_it=test.format(3).replace("+ package.f() == 3", "+ package.f() == 4")),
            None,
            60.0,
        ),
    }
    reports = dict(zip(runs, run_batch(list(runs.values()), environment), strict=True))
    passed = {
        name: sorted(test.partition("::")[2] for test in report.passed) for name, report in reports.items()
    }
    assert passed == {
        "good": ["test_it", "test_num_compiled", "test_sum"],
        "good again": ["test_it", "test_num_compiled", "test_sum"],
        "other module": ["test_it", "test_num_compiled"],
        "other test": ["test_it", "test_num_compiled"],
    }


# --- how a batch is cut ---------------------------------------------------------------------


@pytest.mark.long
def test_many_runs_are_parted(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Trial(project("return 42", data=f"{number}"), IDS, 60.0) for number in range(5)]
    sizes: list[int] = []
    original = bench._run_part

    def spy(part, *args, **options):  # type: ignore[no-untyped-def]
        sizes.append(len(part))
        return original(part, *args, **options)

    monkeypatch.setattr(bench, "_run_part", spy)
    monkeypatch.setattr(bench, "MAX_RUNS", 2)
    reports = run_batch(runs, environment)
    assert (sizes, [len(report.passed) for report in reports]) == ([2, 2, 1], [2] * 5)


MANY = (
    "import package\n\n"
    + "".join(f"\ndef test_{name}():\n    assert package.answer({name!r})\n\n" for name in "abcd")
).encode()


def many(body: str, **options: bool) -> Trial:
    files = {"package.py": f"def answer(name):\n    {body}\n".encode(), "tests/test_many.py": MANY}
    ids = [f"tests/test_many.py::test_{name}" for name in "abcd"]
    return Trial(files, ids, 60.0, wall_factor=10.0, **options)


def test_a_run_may_end_when_one_test_has_failed(environment: Environment) -> None:
    runs = [many("return name == 'a'", stop_at_first_failure=True), many("return 0")]
    reports = run_batch(runs, environment)
    assert [report.error for report in reports] == [""] * 2
    outcomes = [{test[-1]: outcome.value for test, outcome in report.outcomes.items()} for report in reports]
    assert outcomes == [{"a": "passed", "b": "failed"}, dict.fromkeys("abcd", "failed")]


def test_a_run_alone_ends_as_early_as_in_a_batch(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps ``IDLE_SECONDS`` and ``stop_at_first_failure``: a run that waits for ever is not given all of its time."""
    monkeypatch.setattr(bench, "IDLE_SECONDS", 1.0)
    waits = "import threading\n\n\ndef test_fails():\n    assert False\n\n\ndef test_waits():\n    threading.Event().wait()\n"
    files, tests = {"test_a.py": waits.encode()}, ["test_a.py::test_fails", "test_a.py::test_waits"]
    stops = Trial(files, tests, 120.0, stop_at_first_failure=True)
    reports = [run_alone(run, environment) for run in (Trial(files, tests, 120.0), stops)]
    assert reports[0].ended is Ended.TIME
    assert reports[1].error == ""
    assert reports[1].outcomes == {tests[0]: Outcome.FAILED}
    assert max(report.seconds for report in reports) < 60.0
