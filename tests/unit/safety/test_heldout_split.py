"""Train and held-out tasks are disjoint, or nothing starts."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.errors import ComposerError, InputError, UsageError
from composer_replication.records import TaskContent
from composer_replication.safety import HeldoutSplit, SplitOverlapError
from composer_replication.safety.split_tasks import SplitRequestError, TaskReader

SECRET = "return the_golden_secret"


def task(name: str, **changes: Any) -> TaskContent:
    """A task with its own content, repository and symbol, all made from its name."""
    content = TaskContent(
        task_id=name,
        repository=f"repo-{name}==1.0",
        symbol=f"Thing.{name}",
        broken_tree={"a.py": f"class Thing:\n    def {name}(self): ...\n"},
        tests={"test_a.py": f"def test_{name}():\n    assert Thing().{name}()\n"},
        golden=f"{SECRET} + {name!r}\n",
    )
    return replace(content, **changes)


def overlap(train: list[Any], heldout: list[Any], **options: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(SplitOverlapError) as caught:
        HeldoutSplit(train, heldout, **options)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "CR0501"
    assert all(name in str(caught.value) for name in caught.value.pairs[0])
    return caught.value.pairs


def test_disjoint_sides_make_a_split() -> None:
    split = HeldoutSplit([task("b"), task("a")], iter([task("c")]))
    assert split.train_ids == ("a", "b")
    assert split.heldout_ids == ("c",)
    assert split.checked == ("id", "content", "near-duplicate", "origin")
    assert split.num_without_hidden_tests == 0
    assert len(split.fingerprint) == 64
    assert int(split.fingerprint, 16) >= 0


def test_the_same_id_is_an_overlap() -> None:
    assert overlap(["a", "b"], ["c", "b"]) == [("id", "b", "b")]
    assert overlap(["a"], [task("a")]) == [("id", "a", "a")]
    assert overlap([task("a")], [task("a", golden="other", symbol="g")]) == [("id", "a", "a")]


def test_the_same_content_under_another_name_is_an_overlap() -> None:
    source = task("a")
    hidden_copy = task(
        "z",
        broken_tree={"b.py": "# moved\nclass Thing:\n\n  def a(self): ...  # same\n"},
        tests=source.tests,
        golden=source.golden.replace(" ", "   "),
    )
    assert overlap([source], [hidden_copy]) == [("content", "a", "z")]
    HeldoutSplit([source], [hidden_copy], check_content=False)


def test_every_pair_is_listed_once_under_its_strongest_kind() -> None:
    train = [task("a"), task("b"), task("c"), task("d")]
    heldout = [
        task("d"),
        replace(task("a"), task_id="copy of a"),
        replace(task("a"), task_id="second copy of a"),
        replace(task("b"), task_id="near b", golden="other"),
    ]
    assert overlap(train, heldout) == [
        ("id", "d", "d"),
        ("content", "a", "copy of a"),
        ("content", "a", "second copy of a"),
        ("origin", "b", "near b"),
    ]


def test_the_overlap_survives_pickling_with_its_pairs() -> None:
    with pytest.raises(SplitOverlapError) as caught:
        HeldoutSplit(["a"], ["a"])
    assert pickle.loads(pickle.dumps(caught.value)).pairs == [("id", "a", "a")]


def test_only_what_was_looked_for_on_every_task_counts_as_checked() -> None:
    assert HeldoutSplit(["a"], ["b"]).checked == ("id",)
    assert HeldoutSplit([task("a")], [task("b")], check_content=False).checked == ("id", "origin")
    assert HeldoutSplit([task("a"), "x"], [task("b")]).checked == ("id",)
    assert HeldoutSplit([task("a", symbol="")], [task("b")]).checked == ("id", "content", "near-duplicate")
    assert HeldoutSplit([task("a", golden="")], [task("b")]).checked == ("id", "content", "origin")
    assert HeldoutSplit([SimpleNamespace(task_id="a")], [task("b")]).checked == ("id",)


def test_what_can_be_compared_is_compared_even_beside_a_bare_id() -> None:
    assert overlap([task("a"), "x"], [replace(task("a"), task_id="z"), "y"]) == [("content", "a", "z")]


def test_the_fingerprint_names_sides_and_contents_but_no_order() -> None:
    one = HeldoutSplit([task("a"), task("b")], [task("c"), task("d")])
    assert one.fingerprint == HeldoutSplit([task("b"), task("a")], [task("d"), task("c")]).fingerprint
    others = [
        HeldoutSplit([task("c"), task("d")], [task("a"), task("b")]),
        HeldoutSplit([task("a"), task("b")], [task("c")]),
        HeldoutSplit([task("a", golden="other"), task("b")], [task("c"), task("d")]),
        HeldoutSplit([task("a"), task("b")], [task("c"), task("d", golden="other")]),
        HeldoutSplit([task("a"), task("b")], [task("c"), task("d")], check_content=False),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_an_item_listed_twice_counts_once_and_two_tasks_need_two_ids() -> None:
    assert HeldoutSplit(["a", "a"], ["b"]).train_ids == ("a",)
    with pytest.raises(SplitRequestError, match="two different tasks"):
        HeldoutSplit([task("a"), task("a", golden="other")], ["b"])


@pytest.mark.parametrize(
    ("train", "heldout", "words"),
    [
        ("ab", ["c"], "not a list"),
        (["a"], "bc", "not a list"),
        ([""], ["c"], "not a task"),
        ([3], ["c"], r"int is not a task.*train\[0\]"),
        (["a"], ["b", SimpleNamespace(task_id=7)], r"not a task.*heldout\[1\]"),
        ([SimpleNamespace(task_id="a", golden=3)], ["c"], "content of 'a'"),
        (["a"], [], "no task is held out"),
    ],
)
def test_what_is_no_list_of_tasks_is_refused(train: Any, heldout: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        HeldoutSplit(train, heldout)
    assert isinstance(caught.value, UsageError)
    assert caught.value.code == "CR0503"


def test_nothing_to_train_on_is_no_overlap() -> None:
    assert HeldoutSplit([], ["a"]).train_ids == ()


def test_the_state_is_json_safe_complete_and_without_secrets() -> None:
    split = HeldoutSplit([task("a"), task("b")], [task("c")])
    text = json.dumps(split.state_dict(), allow_nan=False)
    assert SECRET not in text
    assert "assert" not in text
    restored = HeldoutSplit.from_state_dict(json.loads(text))
    assert restored.state_dict() == split.state_dict()
    assert (restored.train_ids, restored.heldout_ids, restored.checked, restored.fingerprint) == (
        split.train_ids,
        split.heldout_ids,
        split.checked,
        split.fingerprint,
    )


def set_key(key: str, value: Any) -> Any:
    return lambda state: {**state, key: value}


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: None,
        lambda _: {},
        lambda state: {key: value for key, value in state.items() if key != "train"},
        set_key("version", 9),
        set_key("kind", "HeldOutGuard"),
        set_key("fingerprint", "0" * 64),
        set_key("checked", ["id", "content", "near-duplicate", "origin", "author"]),
        set_key("checked", ["id"]),
        set_key("train", 3),
        set_key("train", [{"task_id": "a", "golden": "x"}]),
        set_key("train", [{"task_id": 3}]),
        set_key("train", [{"task_id": ""}]),
        set_key("train", [{"task_id": "a", "content_sha256": 3}]),
        set_key("train", []),
    ],
)
def test_a_damaged_state_is_refused(damage: Any) -> None:
    state = HeldoutSplit([task("a")], [task("c")]).state_dict()
    with pytest.raises(InputError, match=r"split\.json") as caught:
        HeldoutSplit.from_state_dict(damage(copy.deepcopy(state)), where="split.json")
    assert caught.value.code == "CR0504"


def test_the_fingerprint_is_that_of_the_first_version() -> None:
    """Ids and content hashes as JSON, sorted keys, sha256: runs begun earlier can be resumed."""
    sides = '{"heldout": [["b", null]], "train": [["a", null]], "version": 1}'
    assert HeldoutSplit(["a"], ["b"]).fingerprint == hashlib.sha256(sides.encode()).hexdigest()


def test_contents_are_told_by_id() -> None:
    split = HeldoutSplit([task("a")], [task("c")])
    assert split.contents == {
        each.entry.task_id: each.entry.content_sha256
        for each in TaskReader(check_content=True).read([task("a"), task("c")], "tasks")
    }
    assert HeldoutSplit(["a"], ["b"]).contents == {"a": None, "b": None}


def test_a_part_of_a_split_is_the_split_of_those_tasks() -> None:
    split = HeldoutSplit([task("a"), task("b")], [task("c"), task("d")])
    part = split.restricted_to({"a", "d", "elsewhere"})
    assert part.state_dict() == HeldoutSplit([task("a")], [task("d")]).state_dict()
    assert split.restricted_to({"a", "b", "c", "d"}).fingerprint == split.fingerprint
    with pytest.raises(SplitRequestError, match="no task is held out"):
        split.restricted_to({"a"})


def test_a_stored_overlap_is_found_again() -> None:
    state = HeldoutSplit([task("a")], [task("c")]).state_dict()
    state["heldout"].append({**state["train"][0], "task_id": "z"})
    with pytest.raises(SplitOverlapError) as caught:
        HeldoutSplit.from_state_dict(state)
    assert caught.value.pairs == [("content", "a", "z")]


def test_every_refusal_is_an_error_with_a_code() -> None:
    error = SplitRequestError("no.", where="here", fix="do.")
    assert isinstance(error, ComposerError)
    assert str(pickle.loads(pickle.dumps(error))) == "CR0503: no. [here] Next: do."
