"""Small enough to read, and named by what it does."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "composer_replication"
MOST_LINES_OF_A_FILE = 800
MOST_LINES_OF_A_FUNCTION = 80
# Lines of *.py in each folder (of the package itself: beside its folders), of *.toml in explanations. Lowered when a folder has shrunk; raised for a new part of a folder that is below its share of the design.
CEILINGS = {
    "src": 49721,
    "src/composer_replication": 1197,
    "src/composer_replication/cli": 3498,
    "src/composer_replication/engines": 696,
    "src/composer_replication/launch": 1300,
    "src/composer_replication/losses": 886,
    "src/composer_replication/replicas": 1399,
    "src/composer_replication/report": 2200,
    "src/composer_replication/rollouts": 8485,
    "src/composer_replication/safety": 2198,
    "src/composer_replication/sandbox": 7500,
    "src/composer_replication/tasks": 12252,
    "src/composer_replication/traces": 2299,
    "src/composer_replication/trainer": 5796,
    "src/composer_replication/cli/explanations": 434,
    "benchmarks": 5993,
    "tests": 57417,
}
BANNED = {"utils", "util", "common", "core", "helpers", "helper", "manager", "handler", "base", "misc"}


def long_files(root: Path) -> list[str]:
    counts = {path: len(path.read_text().splitlines()) for path in root.rglob("*.py")}
    return [f"{path.name}: {count}" for path, count in counts.items() if count > MOST_LINES_OF_A_FILE]


def num_lines(folder: Path, pattern: str = "*.py") -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob(pattern))


def folders_over(ceilings: Mapping[str, int], root: Path) -> list[str]:
    """Folders with more lines than they may have, and folders of the package that no ceiling is set for."""
    found = []
    for name, ceiling in ceilings.items():
        folder = root / name
        count = num_lines(folder, "*.toml" if folder.name == "explanations" else "*.py")
        if folder.name == "composer_replication":
            count -= sum(num_lines(inner) for inner in folder.iterdir() if inner.is_dir())
        if count > ceiling:
            found.append(f"{name}: {count}, at most {ceiling}")
    package = root / "src" / "composer_replication"
    folders = (path.parent.relative_to(root).as_posix() for path in package.glob("*/__init__.py"))
    return found + [f"{name}: no ceiling" for name in sorted(folders) if name not in ceilings]


def long_functions(root: Path) -> list[str]:
    found: list[str] = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                if num_lines > MOST_LINES_OF_A_FUNCTION:
                    found.append(f"{path.name}:{node.name}: {num_lines}")
    return found


def banned_names(root: Path) -> list[str]:
    """Modules and folders whose name, or a word of it, says nothing."""
    return [
        path.name
        for path in root.rglob("*")
        if path.suffix in ("", ".py") and BANNED & set(path.stem.lower().split("_"))
    ]


def folders_without_answer(root: Path) -> list[str]:
    """Folders of code whose ``__init__.py`` has no docstring."""
    folders = {path.parent for path in root.rglob("*.py")}
    return [
        folder.name
        for folder in folders
        if not (folder / "__init__.py").is_file()
        or not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    ]


def siblings_reached(root: Path) -> list[str]:
    """Parts of the trainer that another part reads from the trainer instead of being given it."""
    own = ast.parse((SOURCE / "trainer" / "composer_trainer.py").read_text())
    (trainer,) = (node for node in own.body if isinstance(node, ast.ClassDef))
    parts = {"channels", "checks", "parts", "halted_at"}
    for node in trainer.body:
        if isinstance(node, ast.Assign) and "cached_property" in ast.unparse(node.value):
            parts |= {ast.unparse(target) for target in node.targets}
    found = []
    for path in sorted(root.rglob("*.py")):
        if path.stem == "composer_trainer":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in parts:
                owner = ast.unparse(node.value)
                if owner.split(".")[-1] in ("trainer", "_trainer"):
                    found.append(f"{path.name}: {owner}.{node.attr}")
    return found


def test_parts_are_given_their_siblings(tmp_path: Path) -> None:
    assert siblings_reached(SOURCE / "trainer") == []
    (tmp_path / "part.py").write_text(
        "def f(self, trainer):\n    trainer.checks, self._trainer.guard_hook, trainer.args\n"
    )
    found = ["part.py: trainer.checks", "part.py: self._trainer.guard_hook"]
    assert sorted(siblings_reached(tmp_path)) == sorted(found)


@pytest.mark.parametrize("find", [long_files, long_functions, banned_names, folders_without_answer])
def test_the_package_keeps_the_guide(find: object) -> None:
    assert callable(find)
    assert find(SOURCE) == []


@pytest.mark.parametrize("folder", ["scripts", "benchmarks", "tests"])
def test_no_banned_name_elsewhere(folder: str) -> None:
    assert banned_names(ROOT / folder) == []


def test_every_folder_keeps_its_ceiling() -> None:
    assert folders_over(CEILINGS, ROOT) == []


def test_a_line_too_many_and_a_folder_without_a_ceiling_are_named(tmp_path: Path) -> None:
    for place, number in (
        ("src/composer_replication", 2),
        ("src/composer_replication/cli", 3),
        ("src/composer_replication/cli/explanations", 2),
        ("src/composer_replication/new", 1),
        ("tests", 5),
    ):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "__init__.py").write_text("X = 1\n" * number)
    (tmp_path / "src/composer_replication/cli/explanations/a.toml").write_text("a = 1\nb = 1\n")
    ceilings = {
        "src": 8,
        "src/composer_replication": 1,
        "src/composer_replication/cli": 4,
        "src/composer_replication/cli/explanations": 1,
        "tests": 5,
    }
    assert folders_over(ceilings, tmp_path) == [
        "src/composer_replication: 2, at most 1",
        "src/composer_replication/cli: 5, at most 4",
        "src/composer_replication/cli/explanations: 2, at most 1",
        "src/composer_replication/new: no ceiling",
    ]


def test_each_rule_bites(tmp_path: Path) -> None:
    (tmp_path / "long_file.py").write_text("X = 1\n" * (MOST_LINES_OF_A_FILE + 1))
    body = "    x = 1\n" * MOST_LINES_OF_A_FUNCTION
    (tmp_path / "path_utils.py").write_text(
        f"class A:\n  def long(self):\n{body}\n\ndef short():\n    return 1\n"
    )
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").write_text("X = 1\n")
    assert long_files(tmp_path) == [f"long_file.py: {MOST_LINES_OF_A_FILE + 1}"]
    assert long_functions(tmp_path) == [f"path_utils.py:long: {MOST_LINES_OF_A_FUNCTION + 1}"]
    assert sorted(banned_names(tmp_path)) == ["core", "path_utils.py"]
    assert sorted(folders_without_answer(tmp_path)) == sorted(["core", tmp_path.name])
