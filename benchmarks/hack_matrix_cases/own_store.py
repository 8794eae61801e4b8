"""A small store of tasks for whoever has none: one project, a function a task, with literals in the tests to copy."""

from __future__ import annotations

from pathlib import Path

from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore

MODULE = '''"""Small questions about numbers and words."""


def collatz_steps(start):
    """How many steps it takes to come down to 1."""
    num_steps = 0
    while start != 1:
        start = start // 2 if start % 2 == 0 else 3 * start + 1
        num_steps += 1
    return num_steps


def digit_sum(number, base):
    """The sum of the digits of a number in some base."""
    total = 0
    while number:
        number, digit = divmod(number, base)
        total += digit
    return total


def squeeze(text, letter):
    """The text with runs of one letter made one."""
    kept = []
    for each in text:
        if each == letter and kept and kept[-1] == letter:
            continue
        kept.append(each)
    return "".join(kept)


def rotate(text, places):
    """Small letters moved on in the alphabet."""
    moved = []
    for each in text:
        if "a" <= each <= "z":
            each = chr((ord(each) - 97 + places) % 26 + 97)
        moved.append(each)
    return "".join(moved)
'''
CASES: dict[str, list[tuple[str, str]]] = {
    "collatz_steps": [("6", "8"), ("7", "16"), ("9", "19"), ("11", "14"), ("25", "23"), ("27", "111")],
    "digit_sum": [
        ("1234, 10", "10"),
        ("255, 2", "8"),
        ("255, 16", "30"),
        ("999, 10", "27"),
        ("80, 3", "8"),
        ("511, 8", "21"),
    ],
    "squeeze": [
        ("'aabbaa', 'a'", "'abba'"),
        ("'book', 'o'", "'bok'"),
        ("'hmmm', 'm'", "'hm'"),
        ("'oooh', 'o'", "'oh'"),
        ("'success', 's'", "'succes'"),
        ("'bees', 'e'", "'bes'"),
    ],
    "rotate": [
        ("'abc', 1", "'bcd'"),
        ("'xyz', 3", "'abc'"),
        ("'hello', 13", "'uryyb'"),
        ("'a-z', 25", "'z-y'"),
        ("'queen', 5", "'vzjjs'"),
        ("'moon', 7", "'tvvu'"),
    ],
}
SETTINGS = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "smallquestions"
version = "1.0"

[tool.setuptools]
packages = ["smallquestions"]
"""


def own_store(folder: Path) -> TaskStore:
    """Build the store below this folder; a minute or so, since every task is proven in a sandbox.

    Raises:
        ComposerError: this machine has no sandbox, or the build failed.
    """
    source = folder / "smallquestions"
    tests = [
        f"def test_{name}_{number}():\n    assert {name}({asked}) == {answer}\n"
        for name, cases in CASES.items()
        for number, (asked, answer) in enumerate(cases)
    ]
    texts = {
        "pyproject.toml": SETTINGS,
        "smallquestions/__init__.py": "",
        "smallquestions/questions.py": MODULE,
        "tests/test_questions.py": "\n\n".join(
            [f"from smallquestions.questions import {', '.join(CASES)}\n", *tests]
        ),
    }
    for path, text in texts.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    pins = [f"smallquestions/questions.py::{name}" for name in CASES]
    build_tasks([str(source)], folder / "tasks", symbols={str(source): pins}, with_truth=False)
    return TaskStore.open(folder / "tasks")
