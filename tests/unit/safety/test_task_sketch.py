"""By what a task is compared, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.safety import split_overlaps, split_tasks
from composer_replication.safety.split_tasks import ReadTask, SplitRequestError, TaskReader


def sketch(**parts: Any) -> ReadTask:
    return TaskReader(check_content=True).read([SimpleNamespace(task_id="a", **parts)], "tasks")[0]


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
