"""What a sketch is made of, counted by hand."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.safety import task_sketch
from composer_replication.safety.task_sketch import Sketch, SketchReader, python_texts, shingles

LONG = "\n".join(f"name_{n} = called_{n}(argument_{n})" for n in range(6))
OTHER = LONG.replace("called", "asked")


def sketch(**parts: Any) -> Sketch:
    return SketchReader().of_task(SimpleNamespace(**parts))


def test_shingles_are_runs_of_tokens() -> None:
    words = "a b c d e f".split()
    assert len(shingles(words)) == 2
    assert len(shingles(words, 3)) == 4
    assert len(shingles("a b a b a b".split(), 2)) == 2
    assert shingles(words[:4]) == frozenset()
    assert shingles(["a b", "c"], 2) != shingles(["a", "b c"], 2)


def test_the_hash_is_the_same_in_every_process() -> None:
    program = (
        "from composer_replication.safety.task_sketch import shingles; print(sorted(shingles('abcdef')))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {str(sorted(shingles("abcdef")))}
    # blake2b, 8 bytes, big-endian, of the five letters with the unit separator between them
    assert shingles("abcde") == {int.from_bytes(bytes.fromhex(BLAKE2B_OF_ABCDE), "big")}


BLAKE2B_OF_ABCDE = "b4a4bcc80e8d8412"


def test_lines_are_weighed_by_their_words() -> None:
    golden = "total = price * 2\nreturn self._x\nelse:\n    pass\nreturn total\nreturn total + price\n"
    assert sorted(sketch(golden=golden).golden_lines.values()) == [2, 3]
    assert sketch(golden=golden).num_golden_words == 5


def test_a_line_that_stands_twice_counts_once() -> None:
    assert sketch(golden="a = b\nif a:\n    a = b\n").num_golden_words == 2


def test_eleven_shingles_are_too_few() -> None:
    text = " + ".join(f"f{number}()" for number in range(8))  # 8 names, 7 operators: 11 shingles
    assert sketch(golden=text).golden_shapes == frozenset()
    assert sketch(golden=text).golden_code is not None
    assert len(sketch(golden=f"{text}\nreturn g").golden_shapes) == 13


def test_the_own_tests_stand_before_all_tests() -> None:
    own = sketch(golden="x", own_tests=LONG, tests={"test_a.py": OTHER})
    assert own.test_shapes == sketch(own_tests=LONG).test_shapes != frozenset()
    everything = sketch(golden="x", own_tests=" \n", tests={"test_a.py": OTHER, "data.txt": LONG})
    assert everything.test_shapes == sketch(own_tests=OTHER).test_shapes
    assert sketch(golden="x", broken_tree={"a.py": LONG}).test_shapes == frozenset()


def test_a_tree_stands_in_for_a_missing_golden() -> None:
    without = sketch(broken_tree={"a.py": LONG}, own_tests=OTHER)
    assert without.test_shapes > sketch(own_tests=OTHER).test_shapes
    assert without.golden_code is None
    assert sketch(broken_tree={"a.py": LONG}, golden="# nothing\n").golden_code is None


def test_texts_that_many_tasks_share_are_kept_once() -> None:
    reader = SketchReader()
    first, second = (
        reader.of_task(SimpleNamespace(golden=golden, tests={"a.py": LONG, "b.py": OTHER}))
        for golden in ("x", "y")
    )
    assert first.test_shapes is second.test_shapes
    third = reader.of_task(SimpleNamespace(golden="z", tests={"a.py": LONG, "c.py": "x = 1"}))
    assert third.test_shapes == sketch(own_tests=LONG).test_shapes < first.test_shapes


def test_nothing_gives_an_empty_sketch() -> None:
    assert sketch() == Sketch()
    assert sketch(golden="", own_tests=None, tests={}) == Sketch()


def test_python_texts_of_every_form() -> None:
    assert python_texts(None) == python_texts("  \n") == python_texts({}) == []
    assert python_texts("a") == python_texts(["a"]) == python_texts(("a", "")) == ["a"]
    assert python_texts({"b.pyi": "b", "a.py": "a", "c.txt": "c"}) == ["a", "b"]


@pytest.mark.parametrize("part", [3, b"x", [b"x"], {"a.py": 3}])
def test_what_is_no_text_is_refused(part: Any) -> None:
    with pytest.raises(TypeError, match="expected text"):
        python_texts(part)


def test_the_documented_numbers() -> None:
    numbers = {name: value for name, value in vars(task_sketch).items() if name.isupper()}
    assert numbers == {
        "SHINGLE_TOKENS": 5,
        "MIN_SHINGLES": 12,
        "NEAR_DUPLICATE_PERCENT": 60,
        "MIN_LINE_WORDS": 2,
        "MIN_SHARED_WORDS": 8,
        "SHARED_WORDS_PERCENT": 50,
        "MIN_SAME_CODE_WORDS": 5,
    }
