"""HeldoutSplit.split: deterministic, disjoint, grouped, and explained where it cannot be."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.safety import HeldoutSplit
from composer_replication.safety.split_tasks import SplitRequestError


def item(name: str, repository: str = "", symbol: str = "", golden: str = "", **more: Any) -> SimpleNamespace:
    """A task with its own content and origin unless told otherwise."""
    return SimpleNamespace(
        task_id=name,
        repository=repository or f"repo{name}==1",
        symbol=symbol or f"f{name}",
        golden=golden or f"return {name!r}",
        **more,
    )


IDS = [f"task-{number}" for number in range(40)]


def test_the_share_is_met_and_the_sides_are_disjoint_and_whole() -> None:
    split = HeldoutSplit.split(IDS, 0.25, 0)
    assert len(split.heldout_ids) == 10
    assert sorted((*split.train_ids, *split.heldout_ids)) == sorted(IDS)
    assert split.fingerprint == HeldoutSplit(split.train_ids, split.heldout_ids).fingerprint


def test_every_task_is_held_out_under_some_seed() -> None:
    assert {name for seed in range(40) for name in HeldoutSplit.split(IDS, 0.25, seed).heldout_ids} == set(
        IDS
    )


def test_the_choice_is_the_same_on_every_machine_and_version() -> None:
    assert HeldoutSplit.split([f"t{n}" for n in range(8)], 0.25, 0).heldout_ids == ("t3", "t4")


def test_by_repository_held_out_tasks_come_from_unseen_repositories() -> None:
    items = [item(str(number), f"Repo_{number % 6}=={number}", f"f{number}") for number in range(30)]
    by_id = {each.task_id: each.repository.partition("==")[0] for each in items}
    for seed in range(10):
        split = HeldoutSplit.split(random.Random(seed).sample(items, 30), 0.3, seed, by="repository")
        assert len(split.heldout_ids) == 10
        assert {by_id[name] for name in split.train_ids}.isdisjoint(
            {by_id[name] for name in split.heldout_ids}
        )
    origins = HeldoutSplit.split(items, 0.3, 0)
    assert not {by_id[n] for n in origins.train_ids}.isdisjoint({by_id[n] for n in origins.heldout_ids})


def test_a_task_without_hidden_tests_stays_in_train_and_is_counted() -> None:
    items = [item(str(number), has_hidden_tests=number % 2 == 0) for number in range(20)]
    for seed in range(10):
        split = HeldoutSplit.split(items, 0.4, seed)
        assert len(split.heldout_ids) == 8
        assert all(int(name) % 2 == 0 for name in split.heldout_ids)
        assert split.num_without_hidden_tests == 10
    assert HeldoutSplit.from_state_dict(split.state_dict()).num_without_hidden_tests == 10


def test_what_belongs_to_a_task_without_hidden_tests_stays_in_train_too() -> None:
    items = [item("a", "r", "f", has_hidden_tests=False), item("b", "r", "f"), item("c"), item("d")]
    assert all("b" in HeldoutSplit.split(items, 0.5, seed).train_ids for seed in range(10))


def test_at_least_one_task_is_held_out_and_one_trained_on() -> None:
    assert len(HeldoutSplit.split(IDS, 0.001, 0).heldout_ids) == 1
    assert len(HeldoutSplit.split(IDS, 0.999, 0).train_ids) == 1
    assert len(HeldoutSplit.split(["a", "b"], 0.5, 0).heldout_ids) == 1


def test_content_can_be_left_out() -> None:
    split = HeldoutSplit.split([item("a", golden="x"), item("b", golden="x")], 0.5, 0, check_content=False)
    assert split.checked == ("id", "origin")


@pytest.mark.parametrize("fraction", [0, 1, 0.0, 1.0, -0.1, 1.5, float("nan"), True, "0.2", None])
def test_a_share_that_is_none_is_refused(fraction: Any) -> None:
    with pytest.raises(ValueError, match=r"not above 0 and below 1.*such as 0\.2"):
        HeldoutSplit.split(IDS, fraction, 0)


@pytest.mark.parametrize("seed", [1.0, "1", None, True])
def test_a_seed_that_is_no_integer_is_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match="not an integer"):
        HeldoutSplit.split(IDS, 0.2, seed)


def test_an_unknown_grouping_is_refused() -> None:
    with pytest.raises(ValueError, match='choose "origin" or "repository"'):
        HeldoutSplit.split(IDS, 0.2, 0, by="author")  # type: ignore[arg-type]


def test_bare_ids_have_no_repository_to_group_by() -> None:
    with pytest.raises(ValueError, match="2 of 3 tasks name no repository, 'a' first"):
        HeldoutSplit.split(["a", item("x"), SimpleNamespace(task_id="b")], 0.4, 0, by="repository")


SAME = [item(str(number), "r==1", "f") for number in range(4)]
LARGE = [item(f"large {number}", "r==1", "f") for number in range(20)]


@pytest.mark.parametrize(
    ("tasks", "fraction", "words"),
    [
        ([], 0.5, r"0 task\(s\)"),
        (["a"], 0.5, r"1 task\(s\) that all belong together"),
        ("ab", 0.5, "not a list"),
        (SAME, 0.5, r"4 task\(s\) that all belong together.*another origin"),
        (
            [item("a", has_hidden_tests=False), item("b", has_hidden_tests=False)],
            0.5,
            "only 0 of 2.*2 have no hidden",
        ),
        ([*[item(str(n), has_hidden_tests=n < 2) for n in range(10)]], 0.5, "only 2 of 10.*leave out"),
        ([*LARGE, item("a"), item("b")], 0.5, r"allow 2 of 22 held out, not about 11.*0\.091"),
        ([*LARGE, item("a", has_hidden_tests=False)], 0.2, r"allow 20 of 21 held out.*0\.952"),
    ],
)
def test_an_impossible_request_is_explained(tasks: Any, fraction: float, words: str) -> None:
    with pytest.raises(SplitRequestError, match=words) as caught:
        HeldoutSplit.split(tasks, fraction, 0)
    assert caught.value.code == "CR0503"
    assert caught.value.fix


def test_groups_of_many_sizes_come_as_near_as_they_can() -> None:
    sizes = (1, 10, 10, 10)
    items = [item(f"{group}.{n}", f"r{group}", "f") for group, size in enumerate(sizes) for n in range(size)]
    for seed in range(10):
        assert len(HeldoutSplit.split(items, 0.2, seed).heldout_ids) == 10
        assert len(HeldoutSplit.split(items, 0.37, seed).heldout_ids) == 11
