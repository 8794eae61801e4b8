"""The comparison with swesmith measures what it says: verdicts, deliveries and the thief, by hand."""

from __future__ import annotations

import json
import py_compile
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.records import Outcome
from composer_replication.tasks.test_run import TestReport

FOLDER = Path(__file__).parents[3] / "benchmarks"

ORIGINAL = b'''"""Text."""


def double(number):
    """Twice."""
    total = number + number
    return total


def area(width, height):
    # a comment
    if width < 0:
        raise ValueError("negative width")
    return width * height
'''
BROKEN = ORIGINAL.replace(b"return width * height", b"return width + height")
TEST = b"from shapes import area\n\ndef test_area():\n    assert area(2, 3) == 6\n"


@pytest.fixture(autouse=True)
def _benchmarks_are_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("swesmith_peer", "swesmith_tasks")
    ]:
        del sys.modules[name]


@pytest.fixture
def robbery():
    from swesmith_peer import robbery

    return robbery


@pytest.fixture
def procedure():
    from swesmith_peer import procedure

    return procedure


def wanted(robbery, broken: bytes = BROKEN) -> dict[str, Any]:
    return robbery.target_of({"shapes.py": ORIGINAL, "test_shapes.py": TEST}, {"shapes.py": broken})


def rob_folder(robbery, tree: Path | None, target: dict[str, Any], outside: Path | None = None) -> list[str]:
    found = robbery.send_thief(str(tree or ""), [str(outside)] if outside else [], {"task": target})
    return found["task"]


# --- what the thief is after ---------------------------------------------------------------


def test_a_changed_line_that_occurs_once_is_the_target(robbery) -> None:
    target = wanted(robbery)
    assert target["runs"] == [["return width * height"]]
    assert [code[0] for code in target["codes"]] == ["<module>", "area"]


def test_a_line_that_stands_elsewhere_too_is_known_by_its_place(robbery) -> None:
    original = b"def f(a):\n    x = 1\n    return a\n\n\ndef g(a):\n    y = 2\n    return a\n"
    broken = b"def f(a):\n    x = 1\n\n\ndef g(a):\n    y = 2\n    return a\n"
    target = robbery.target_of({"m.py": original}, {"m.py": broken})
    assert target["runs"] == [["x = 1", "return a", "def g(a):"]]


def test_comments_blank_lines_and_hidden_tests_are_no_targets(robbery) -> None:
    bare = ORIGINAL.replace(b"    # a comment\n", b"").replace(b"\n\n\n", b"\n")
    assert wanted(robbery, bare)["runs"] == []
    assert wanted(robbery, ORIGINAL) == {"runs": [], "codes": []}


# --- what the thief finds ------------------------------------------------------------------


def test_the_broken_tree_alone_gives_nothing(robbery, tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_bytes(BROKEN)
    py_compile.compile(str(tmp_path / "shapes.py"), doraise=True)
    with zipfile.ZipFile(tmp_path / "old.whl", "w") as archive:
        archive.writestr("shapes.py", BROKEN)
    assert rob_folder(robbery, tmp_path, wanted(robbery), tmp_path) == []


def test_a_copy_an_archive_and_bytecode_are_found(robbery, tmp_path: Path) -> None:
    for name in ("copy", "archive", "bytecode"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shapes.py").write_bytes(BROKEN)
    (tmp_path / "copy" / "build").mkdir()
    (tmp_path / "copy" / "build" / "shapes.py").write_bytes(ORIGINAL)
    with zipfile.ZipFile(tmp_path / "archive" / "old.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("shapes.py", ORIGINAL)
    source = tmp_path / "elsewhere.py"
    source.write_bytes(ORIGINAL)
    py_compile.compile(str(source), str(tmp_path / "bytecode" / "shapes.pyc"), doraise=True)
    found = {
        name: rob_folder(robbery, tmp_path / name, wanted(robbery))
        for name in ("copy", "archive", "bytecode")
    }
    assert found == {"copy": ["file"], "archive": ["archive"], "bytecode": ["pyc"]}


def test_outside_the_tree_a_short_line_is_no_theft_and_a_long_one_is(robbery, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_bytes(b"def size(width, height):\n    return width * height\n")
    assert rob_folder(robbery, None, wanted(robbery), tmp_path) == []
    longer = BROKEN.replace(b"    total = number + number\n    return total\n", b"    ...\n").replace(
        b'        raise ValueError("negative width")\n', b"        pass\n"
    )
    target = wanted(robbery, longer)
    assert sum(len(line) for run in target["runs"] for line in run) >= 60
    assert rob_folder(robbery, None, target, tmp_path) == []
    (tmp_path / "installed.py").write_bytes(ORIGINAL)
    assert rob_folder(robbery, None, target, tmp_path) == ["installed"]


def test_git_gives_what_only_an_unreachable_object_holds(robbery, procedure, tmp_path: Path) -> None:
    procedure.git(tmp_path, "init", "-q")
    (tmp_path / "shapes.py").write_bytes(ORIGINAL)
    procedure.git(tmp_path, "add", ".")
    (tmp_path / "shapes.py").write_bytes(BROKEN)
    procedure.git(tmp_path, "add", ".")
    procedure.git(tmp_path, "commit", "-q", "-m", "only the broken one")
    target = wanted(robbery)
    assert rob_folder(robbery, tmp_path, target) == ["git"]
    procedure.git(tmp_path, "reflog", "expire", "--expire=now", "--all")
    procedure.git(tmp_path, "gc", "-q", "--prune=now")
    assert rob_folder(robbery, tmp_path, target) == []


# --- what the peer's procedure makes -------------------------------------------------------


def report(outcomes: dict[str, str], *, error: str = "", broken: tuple[str, ...] = ()) -> TestReport:
    return TestReport(
        outcomes={name: Outcome(outcome) for name, outcome in outcomes.items()},
        collected=tuple(outcomes),
        error=error,
        seconds=1.0,
        collect_errors=dict.fromkeys(broken, "SyntaxError"),
    )


@pytest.mark.parametrize(
    ("outcomes", "error", "broken", "reason"),
    [
        ({"a": "failed", "b": "passed"}, "", (), ""),
        ({"a": "error", "b": "passed"}, "", (), ""),
        ({"a": "failed", "b": "passed"}, "", ("always.py",), ""),
        ({"a": "failed", "b": "passed"}, "", ("test_new.py",), "does not collect"),
        ({"a": "failed", "b": "passed"}, "the tests ran longer than 90 s", (), "runs too long"),
        ({"a": "failed", "b": "failed"}, "nothing was collected (exit code 4)", (), "does not collect"),
        ({"a": "failed", "b": "passed"}, "the records are cut off", (), "run fails"),
        ({"a": "passed", "b": "passed", "flaky": "failed"}, "", (), "no failing test"),
        ({"a": "failed", "b": "failed", "flaky": "passed"}, "", (), "nothing passes"),
    ],
)
def test_a_rewrite_is_valid_by_swesmiths_rule(procedure, outcomes, error, broken, reason) -> None:
    verdict = procedure.judge_rewrite(
        report(outcomes, error=error, broken=broken), frozenset({"a", "b"}), ["always.py"]
    )
    assert verdict[0] == reason
    if not reason:
        assert verdict[1:] == (["a"], ["b"])


def test_a_delivered_clone_is_the_bug_without_its_tests_on_top_of_the_original(
    procedure, robbery, tmp_path: Path
) -> None:
    files = {"shapes.py": ORIGINAL, "test_shapes.py": TEST, "test_more.py": b"def test_more():\n    pass\n"}
    bench = SimpleNamespace(source=SimpleNamespace(name="shapes", sha256="ab" * 32, files=files))
    rewrite = {
        "path": "shapes.py",
        "new_text": BROKEN.decode(),
        "modifier": "func_pm_op_change",
        "patch": "@@",
    }
    row = procedure.row_of(bench, 3, rewrite, ["test_shapes.py::test_area"], ["test_more.py::test_more"])
    assert row["instance_id"] == "swesmith__shapes.abababab.func_pm_op_change__00000003"
    (tree,) = procedure.deliver(bench, [(row, rewrite)], tmp_path)
    assert robbery.shown_files(tree.folder) == {"shapes.py": BROKEN, "test_more.py": files["test_more.py"]}
    said = subprocess.run(
        ["git", "-C", str(tree.folder), "log", "--format=%s"], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["Remove F2P Tests", "Bug Patch", "Initial commit"]
    loot = robbery.rob(files, str(FOLDER / "swesmith_peer"), [tree])
    assert (loot.found, loot.num_control) == ({tree.name: frozenset({"git"})}, 1)


def test_an_interpreter_without_swesmith_is_named_in_one_sentence(procedure) -> None:
    with (
        pytest.raises(SystemExit, match=r"swesmith cannot be run \(.+\): give --swesmith-python"),
        procedure.peer_python("/nowhere/python"),
    ):
        pass
    bare = [sys.executable, "-I", "-S", str(FOLDER / "swesmith_peer" / "modifiers.py"), "--check"]
    assert subprocess.run(bare, capture_output=True, check=False).returncode != 0


def test_the_modifiers_take_turns_and_no_text_comes_twice() -> None:
    from swesmith_peer.modifiers import drawn

    def rewrites(modifier: str, *texts: str) -> list[dict[str, str]]:
        return [{"path": "m.py", "new_text": text, "modifier": modifier} for text in texts]

    columns = [rewrites("a", "1", "2", "3", "4"), rewrites("b", "1", "9"), rewrites("c")]
    found = [(each["modifier"], each["new_text"]) for each in drawn(columns, 4)]
    assert found == [("a", "1"), ("b", "9"), ("a", "2"), ("a", "3")]


def test_the_figures_are_ratios_of_the_sums() -> None:
    from swesmith_tasks import Side

    one = Side(candidates=10, valid=4, preparation_seconds=6, work_seconds=24, fixed_bytes=100, bytes=500)
    two = Side(
        candidates=10, valid=2, preparation_seconds=0, work_seconds=30, judged=2, recovered=1, control=2
    )
    rows = (one + two).rows()
    assert rows["yield"] == "30.0%"
    assert rows["valid tasks per minute"] == "6.0"  # 6 tasks in 60 seconds
    assert rows["valid tasks per minute of work"] == "6.7"  # 6 in 54
    assert rows["bytes per task"] == "83"
    assert rows["recovered by the thief"] == "1 of 2"
    assert Side().rows()["yield"] == "-"
    assert json.dumps(rows)
