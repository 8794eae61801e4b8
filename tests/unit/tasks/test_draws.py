"""The gates look for a fair draw of hidden tests before they hide none."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from composer_replication.records import Edit
from composer_replication.tasks import gates
from composer_replication.tasks.part_subject import part_subject
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.views import Changes

if TYPE_CHECKING:
    import pytest

SOURCE = "def append(x): return 1\ndef yy(): return 1\ndef xx(): return 1\n"
# Two copies, of which none can be hidden alone, and two that ask for names that only the other says.
TESTS = """import m


def test_a():
    assert m.append(1) == 1


def test_a_again():
    assert m.append(1) == 1


def test_b():
    assert m.yy() == 1


def test_c():
    assert m.xx() == 1
"""
FILES = {"m.py": SOURCE.encode(), "tests/test_m.py": TESTS.encode()}
PLACES = {
    f"tests/test_m.py::{node.name}": ("tests/test_m.py", node.lineno, node.name)
    for node in ast.parse(TESTS).body
    if isinstance(node, ast.FunctionDef)
}
NO_RUN: Any = None  # nobody looks at it
UNSPLIT = Subject(Changes((Edit("m.py", 0, len(SOURCE), ""),), (), (), ()), (), True)


def test_a_draw_that_can_hide_nothing_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("refuse_stubs", "check_hidden_out", "refuse_apart", "_check_split"):
        monkeypatch.setattr(gates, name, lambda *_arguments, **_options: None)
    repository: Any = SimpleNamespace(places=PLACES, green=frozenset(PLACES))
    bench: Any = SimpleNamespace(original=FILES)
    options: Any = {"hidden_share": 0.5, "seed": 0}
    with_an_empty_first_draw = 0
    for pin in map(str, range(8)):
        first = part_subject(UNSPLIT, frozenset(PLACES), repository, FILES, **options, salt=f"{pin}/0")
        with_an_empty_first_draw += not first.hidden
        found = gates._split_and_check(
            UNSPLIT,
            frozenset(PLACES),
            {},
            repository,
            bench,
            suite=NO_RUN,
            **options,
            pin=pin,
            given=frozenset(),
        )
        assert found.hidden, pin
    assert 0 < with_an_empty_first_draw < 8
