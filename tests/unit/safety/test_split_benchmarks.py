"""The measurements behind the split's numbers measure what they say, on a few small packages."""

from __future__ import annotations

import ast
import importlib.util
import random
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
STDLIB = Path(sysconfig.get_path("stdlib"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def near() -> ModuleType:
    return load("near_duplicates")


@pytest.fixture(scope="module")
def everything(near: ModuleType) -> list[object]:
    return [
        *near.functions(STDLIB / "email"),
        *near.functions(STDLIB / "json"),
        *near.functions(STDLIB / "logging"),
    ]


def test_changed_copies_are_found_and_foreign_functions_rarely(
    near: ModuleType, everything: list[object]
) -> None:
    rows = list(near.near_duplicate_rows(everything, everything[:40], 0, 0))
    ours = next(row for row in rows if row.get("blind_to_names_and_constants") and row["shingle"] == 5)
    assert ours["found_percent"]["renamed, other constants"]["at 60"] >= 90
    assert ours["found_percent"]["both, one statement less"]["at 60"] >= 65
    naive = next(row for row in rows if row.get("blind_to_names_and_constants") is False)
    assert naive["found_percent"]["renamed"]["at 60"] <= 15
    foreign = next(row for row in rows if (row.get("threshold"), row["shingle"]) == (60, 5))
    assert foreign["functions"] >= 200
    assert foreign["taken_for_copies"] <= 10


def test_half_a_body_is_found_by_its_lines(
    near: ModuleType, everything: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(near.golden_line_rows(everything, everything[:80], 0, 2))
    assert rows[0]["tried"] >= 10
    assert rows[0]["found"] >= rows[0]["tried"] / 2
    counts = {row["least_words"]: row["taken_for_copies"] for row in rows[1:]}
    assert counts[4] >= counts[8] >= counts[12]
    assert capsys.readouterr().err.count("----") <= 4


def test_a_version_is_the_same_code_with_other_names(near: ModuleType) -> None:
    node = ast.parse("def f(a, *, b=1):\n    '''Doc.'''\n    c = a.a + g(b, key='k')\n    return c\n").body[0]
    assert isinstance(node, ast.FunctionDef)
    found = dict(near.versions(near.Function("p", "f", node, ""), random.Random(0)))
    assert found["renamed"] == "renamed_2 = renamed_0.a + g(renamed_1, key='k')\nreturn renamed_2"
    assert found["other constants"] == "c = a.a + g(b, key='kx')\nreturn c"
    assert "both, one statement less" not in found
