"""Properties of every split, against a comparison of all with all that knows nothing of indexes."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from composer_replication.safety import HeldoutSplit, SplitOverlapError
from composer_replication.safety.split_tasks import SplitRequestError

pytestmark = pytest.mark.no_cover  # other tests reach all that these do, and traced they take thrice as long

BODIES = [
    "total = {}\nfor order in orders:\n    total[order.name] = total.get(order.name, 0) + order.price\nreturn total",
    "while queue:\n    node = queue.popleft()\n    seen.add(node)\n    queue.extend(graph.near(node) - seen)",
    "with open(path) as file:\n    for line in file:\n        key, _, value = line.partition('=')\n        found[key.strip()] = value",
    "return self._x",
    "return len(self._data)",
]
TESTS = [
    "def test_sum():\n    assert total([Order('a', 1.0), Order('b', 2.0)]) == {'a': 1.0, 'b': 2.0}\n",
    "def test_walk():\n    graph = Graph([('a', 'b'), ('b', 'c')])\n    assert walk(graph, start='a') == {'a', 'b', 'c'}\n",
    "",
]


def renamed(body: str, number: int) -> str:
    return re.sub(r"\b(total|order|node|line|value|seen)\b", rf"\1_{number}", body)


def commented(body: str, number: int) -> str:
    return body.replace("\n", f"  # note {number}\n\n") + "\n"


@st.composite
def tasks(draw: st.DrawFn) -> SimpleNamespace:
    body, number = draw(st.sampled_from(BODIES)), draw(st.integers(0, 3))
    change = draw(st.sampled_from([lambda text, _: text, renamed, commented]))
    return SimpleNamespace(
        repository=draw(st.sampled_from(["one==1", "One==2", "two", "three", ""])),
        symbol=draw(st.sampled_from(["f", "g", "Class.f", "pkg/mod.py::Class.f", ""])),
        golden=change(body, number),
        own_tests=draw(st.sampled_from(TESTS)),
        broken_tree={"a.py": f"x = {draw(st.integers(0, 3))}"},
        has_hidden_tests=draw(st.integers(0, 9)) > 0,
    )


TASKS = st.lists(tasks(), min_size=3, max_size=9).map(
    lambda listed: [SimpleNamespace(task_id=f"t{number}", **vars(task)) for number, task in enumerate(listed)]
)


def overlap(one: Any, other: Any) -> bool:
    """Whether two tasks overlap, by the words of the contract and for these bodies only."""
    names = {"total", "order", "node", "line", "value", "seen"}

    def plain(task: Any) -> str:
        text = re.sub(r"#.*", "", task.golden)
        return " ".join(re.sub(rf"\b({'|'.join(names)})_\d\b", r"\1", text).split())

    def exact(task: Any) -> str:
        return " ".join(re.sub(r"#.*", "", task.golden).split())

    def home(task: Any) -> str:
        return str(task.repository.partition("==")[0].lower())

    def name(task: Any) -> list[str]:
        return str(task.symbol.rpartition("::")[2]).split(".")

    short, long = sorted((name(one), name(other)), key=len)
    same_symbol = bool(one.symbol and other.symbol) and long[-len(short) :] == short
    is_long = plain(one) == plain(other) and len(plain(one)) > 40
    same_tests = one.own_tests == other.own_tests != "" and (home(one) != home(other) or not home(one))
    same_origin = same_symbol and home(one) == home(other) != ""
    same_content = one.broken_tree == other.broken_tree and exact(one).replace(" ", "") == exact(
        other
    ).replace(" ", "")
    same_function = bool(one.symbol) and name(one) == name(other) and exact(one) == exact(other)
    return same_content or is_long or same_tests or same_origin or same_function


@settings(max_examples=40)
@given(listed=TASKS)
def test_exactly_the_overlapping_pairs_are_listed(listed: list[Any]) -> None:
    train, heldout = listed[: len(listed) // 2], listed[len(listed) // 2 :]
    expected = {
        (one.task_id, other.task_id)
        for one, other in itertools.product(train, heldout)
        if overlap(one, other)
    }
    found = set()
    try:
        HeldoutSplit(train, heldout)
    except SplitOverlapError as error:
        found = {pair[1:] for pair in error.pairs}
    assert found == expected


def drawn(listed: Sequence[Any], fraction: float, seed: int, **options: Any) -> HeldoutSplit | None:
    try:
        return HeldoutSplit.split(listed, fraction, seed, **options)
    except SplitRequestError:
        return None


@settings(max_examples=25)
@given(
    listed=TASKS,
    fraction=st.floats(0.1, 0.9),
    seed=st.integers(0, 99),
    by=st.sampled_from(["origin", "repository"]),
)
def test_every_drawn_split_is_whole_disjoint_and_within_its_rules(
    listed: list[Any], fraction: float, seed: int, by: str
) -> None:
    split = drawn([task for task in listed if task.repository or by == "origin"], fraction, seed, by=by)
    assume(split is not None)
    assert split is not None
    by_id = {task.task_id: task for task in listed if task.repository or by == "origin"}
    assert sorted((*split.train_ids, *split.heldout_ids)) == sorted(by_id)
    train, heldout = ([by_id[name] for name in side] for side in (split.train_ids, split.heldout_ids))
    assert not any(overlap(one, other) for one, other in itertools.product(train, heldout))
    assert all(task.has_hidden_tests for task in heldout)
    assert HeldoutSplit(train, heldout).fingerprint == split.fingerprint
    if by == "repository":
        homes = [{task.repository.partition("==")[0].lower() for task in side} for side in (train, heldout)]
        assert homes[0].isdisjoint(homes[1])


@settings(max_examples=25)
@given(listed=TASKS, seed=st.integers(0, 9), data=st.data())
def test_neither_order_nor_repetition_counts(listed: list[Any], seed: int, data: st.DataObject) -> None:
    split = drawn(listed, 0.4, seed)
    shuffled = data.draw(st.permutations([*listed, *listed[:2]]))
    again = drawn(shuffled, 0.4, seed)
    assert (split and split.state_dict()) == (again and again.state_dict())


@settings(max_examples=15)
@given(listed=TASKS, seed=st.integers(0, 9))
def test_a_split_comes_back_from_its_state(listed: list[Any], seed: int) -> None:
    split = drawn(listed, 0.4, seed)
    assume(split is not None)
    assert split is not None
    assert HeldoutSplit.from_state_dict(split.state_dict()).state_dict() == split.state_dict()


PROGRAM = """
import json
from types import SimpleNamespace
from composer_replication.safety import HeldoutSplit
tasks = [
    SimpleNamespace(
        task_id=f"t{n}", repository=f"r{n % 7}", symbol=f"f{n}", broken_tree={"a.py": f"x = {n}"},
        golden=f"total_{n} = begin_{n // 3}(start)\\nfor item_{n} in rows_{n // 3}():\\n"
        f"    total_{n} += call_{n // 3}(item_{n}.price_{n // 3}, key_{n // 3}={n})\\nreturn end_{n // 3}(total_{n})",
    )
    for n in range(60)
]
print(json.dumps(HeldoutSplit.split(tasks, 0.25, 7).state_dict()))
"""


def test_the_hash_seed_of_the_process_does_not_count_for_near_duplicates() -> None:
    """Twenty triples that differ in names and constants only."""
    found = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
    state = HeldoutSplit.from_state_dict(json.loads(found.pop()))
    numbers = sorted(int(name[1:]) for name in state.heldout_ids)
    assert len(numbers) == 15
    assert numbers == sorted(3 * (number // 3) + extra for number in numbers[::3] for extra in range(3))


def test_groups_join_through_a_near_duplicate() -> None:
    chain = [
        SimpleNamespace(task_id="a", golden=BODIES[0]),
        SimpleNamespace(task_id="b", golden=renamed(BODIES[0], 1), repository="r", symbol="f"),
        SimpleNamespace(task_id="c", golden="return 1", repository="r", symbol="pkg.f"),
        *[SimpleNamespace(task_id=f"o{n}", golden=f"return other_{n}") for n in range(6)],
    ]
    met = [{"a", "b", "c"} & set(HeldoutSplit.split(chain, 0.4, seed).heldout_ids) for seed in range(12)]
    assert {frozenset(each) for each in met} == {frozenset(), frozenset({"a", "b", "c"})}


@pytest.mark.parametrize("by", ["origin", "repository"])
def test_near_duplicates_that_leave_no_choice_are_explained(by: Any) -> None:
    copies = [
        SimpleNamespace(task_id=f"t{n}", repository=f"r{n}", golden=renamed(BODIES[0], n)) for n in range(4)
    ]
    with pytest.raises(SplitRequestError, match=r"4 task\(s\) that all belong together"):
        HeldoutSplit.split(copies, 0.5, 0, by=by)
