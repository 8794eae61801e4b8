"""By what a task is compared, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.safety import split_overlaps, split_tasks
from composer_replication.safety.split_tasks import Entry, ReadTask, SplitRequestError, TaskReader, shingles

LONG = "\n".join(f"name_{n} = called_{n}(argument_{n})" for n in range(6))
OTHER = LONG.replace("called", "asked")


def sketch(**parts: Any) -> ReadTask:
    return TaskReader(check_content=True).read([SimpleNamespace(task_id="a", **parts)], "tasks")[0]


def test_shingles_are_runs_of_tokens() -> None:
    words = "a b c d e f".split()
    assert len(shingles(words)) == 2
    assert len(shingles(words, 3)) == 4
    assert len(shingles("a b a b a b".split(), 2)) == 2
    assert shingles(words[:4]) == frozenset()
    assert shingles(["a b", "c"], 2) != shingles(["a", "b c"], 2)


def test_the_hash_is_the_same_in_every_process() -> None:
    # blake2b, 8 bytes, big-endian, of the five letters with the unit separator between them
    assert shingles("abcde") == {int.from_bytes(bytes.fromhex(BLAKE2B_OF_ABCDE), "big")}


BLAKE2B_OF_ABCDE = "b4a4bcc80e8d8412"


def test_lines_are_weighed_by_their_words() -> None:
    golden = "total = price * 2\nreturn self._x\nelse:\n    pass\nreturn total\nreturn total + price\n"
    assert sorted(sketch(golden=golden).golden_lines.values()) == [2, 3]


def test_a_line_that_stands_twice_counts_once() -> None:
    assert sum(sketch(golden="a = b\nif a:\n    a = b\n").golden_lines.values()) == 2


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
    listed = [
        SimpleNamespace(task_id=golden, golden=golden, tests={"a.py": LONG, **more})
        for golden, more in (("x", {"b.py": OTHER}), ("y", {"b.py": OTHER}), ("z", {"c.py": "x = 1"}))
    ]
    first, second, third = TaskReader(check_content=True).read(listed, "tasks")
    assert first.test_shapes is second.test_shapes
    assert third.test_shapes == sketch(own_tests=LONG).test_shapes < first.test_shapes


def test_nothing_gives_nothing_to_compare() -> None:
    assert sketch() == sketch(golden="", own_tests=None, tests={}) == ReadTask(Entry("a"))


def test_texts_of_every_form_are_the_same_code() -> None:
    code = sketch(golden="a\nb").golden_code
    assert code is not None
    for golden in (["a", "b"], ("a", "", "b"), {"b.pyi": "b", "a.py": "a", "c.txt": "c"}):
        assert sketch(golden=golden).golden_code == code


@pytest.mark.parametrize("part", [3, b"x", [b"x"], {"a.py": 3}])
def test_what_is_no_text_is_refused(part: Any) -> None:
    with pytest.raises(SplitRequestError, match="expected text"):
        sketch(own_tests=part)


def test_the_documented_numbers() -> None:
    both = vars(split_tasks) | vars(split_overlaps)
    numbers = {name: value for name, value in both.items() if type(value) is int and name[0] != "_"}
    assert numbers == {
        "SHINGLE_TOKENS": 5,
        "MIN_SHINGLES": 12,
        "NEAR_DUPLICATE_PERCENT": 60,
        "MIN_LINE_WORDS": 2,
        "MIN_SHARED_WORDS": 8,
        "SHARED_WORDS_PERCENT": 50,
        "MIN_SAME_CODE_WORDS": 5,
    }
