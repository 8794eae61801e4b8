"""Each way in which a held-out task can be a training task in disguise, planted and found."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.records import TaskContent
from composer_replication.safety import HeldoutSplit, SplitOverlapError

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart" / "run.toml"

GOLDEN = """
    totals = {}
    for order in orders:
        if order.customer is None:
            continue
        price = order.quantity * order.unit_price
        totals[order.customer] = totals.get(order.customer, 0) + round(price, 2)
    return sorted(totals.items(), key=lambda pair: pair[1], reverse=True)
"""
REFORMATTED = '''
    """Turnover by customer."""
    totals = dict()  # was: {}
    totals = {}
    for order in (orders):  # every one

        if (order.customer is None):
            continue
        price = (
            order.quantity
            * order.unit_price
        )
        totals[order.customer] = totals.get(
            order.customer,
            0,
        ) + round(price, 2)
    return sorted(
        totals.items(), key=lambda pair: pair[1], reverse=True
    )
'''
RENAMED = """
    by_client = {}
    for o in rows:
        if o.customer is None:
            continue
        amount = o.quantity * o.unit_price
        by_client[o.customer] = by_client.get(o.customer, 0) + round(amount, 2)
    return sorted(by_client.items(), key=lambda p: p[1], reverse=True)
"""
OTHER_CONSTANTS = GOLDEN.replace(", 0)", ", 100)").replace("[1]", "[-7]").replace(", 2)", ", 4)")
FOREIGN = """
    seen = set()
    while queue:
        node = queue.popleft()
        if node in seen:
            continue
        seen.add(node)
        queue.extend(graph.neighbours(node) - seen)
    return seen
"""
TESTS = """
def test_turnover_is_summed_by_customer():
    orders = [Order("ann", 2, 1.5), Order("bob", 1, 4.0), Order("ann", 1, 2.0)]
    assert turnover(orders) == [("ann", 5.0), ("bob", 4.0)]


def test_orders_without_a_customer_are_left_out():
    assert turnover([Order(None, 1, 1.0)]) == []
"""
OTHER_TESTS = """
def test_everything_that_can_be_reached_is_found():
    graph = Graph.from_edges([("a", "b"), ("b", "c"), ("d", "e")])
    assert reachable(graph, start="a") == {"a", "b", "c"}
    assert reachable(graph, start="d") == {"d", "e"}
"""
TREE = {
    f"shop/part_{number}.py": f"VALUE = {number}\n\ndef part_{number}(x):\n    return x + {number}\n"
    for number in range(20)
}

TRAIN = TaskContent(
    "train-task",
    "shop==1.0",
    "turnover",
    {**TREE, "shop/orders.py": "def turnover(orders):\n    raise NotImplementedError\n"},
    {"tests/test_orders.py": TESTS},
    GOLDEN,
    TESTS,
)
HELD = TaskContent(
    "held-task",
    "maze==3.1",
    "reachable",
    {"maze/graph.py": "def reachable(graph, start):\n    raise NotImplementedError\n"},
    {"tests/test_graph.py": OTHER_TESTS},
    FOREIGN,
    OTHER_TESTS,
)


def kinds_one_way(train: Any, heldout: Any) -> list[str]:
    try:
        split = HeldoutSplit([train], [heldout])
    except SplitOverlapError as error:
        found = error.pairs
    else:
        assert "near-duplicate" in split.checked
        return []
    assert {pair[1:] for pair in found} == {(train.task_id, heldout.task_id)}
    return [pair[0] for pair in found]


def kinds(train: Any, heldout: Any) -> list[str]:
    """Kinds of overlap of one pair, the same both ways; none when the split is made."""
    found = kinds_one_way(train, heldout)
    assert kinds_one_way(heldout, train) == found
    return found


def test_two_foreign_tasks_do_not_overlap() -> None:
    assert kinds(TRAIN, HELD) == []


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        pytest.param(replace(TRAIN, task_id="renamed"), ["content"], id="the same task under another id"),
        pytest.param(
            replace(
                TRAIN, task_id="z", repository="market==1", symbol="sums", broken_tree={"m.py": "x = 1\n"}
            ),
            ["near-duplicate", "origin"],
            id="copied golden and tests in another tree",
        ),
        pytest.param(replace(HELD, golden=REFORMATTED), ["near-duplicate", "origin"], id="reformatted code"),
        pytest.param(replace(HELD, golden=RENAMED), ["near-duplicate"], id="renamed variables"),
        pytest.param(replace(HELD, golden=OTHER_CONSTANTS), ["near-duplicate"], id="other constants"),
        pytest.param(
            replace(
                HELD,
                golden=RENAMED.replace(", 0)", ", 1)").replace(
                    "            continue\n", "            pass\n"
                ),
            ),
            ["near-duplicate"],
            id="renamed variables, another constant and another statement",
        ),
        pytest.param(replace(HELD, own_tests=TESTS), ["near-duplicate"], id="copied tests"),
        pytest.param(
            replace(
                HELD, own_tests=TESTS.replace("ann", "zoe").replace("orders", "rows").replace("5.0", "6.0")
            ),
            ["near-duplicate"],
            id="copied tests with other data",
        ),
        pytest.param(
            replace(HELD, tests={"t/test_x.py": TESTS}, own_tests=""),
            ["near-duplicate"],
            id="copied test files",
        ),
        pytest.param(
            replace(HELD, golden="\n".join([*FOREIGN.splitlines()[:6], GOLDEN.splitlines()[6]])),
            ["origin"],
            id="overlapping golden lines",
        ),
        pytest.param(
            replace(HELD, repository="Shop==2.7", symbol="turnover"), ["origin"], id="another version"
        ),
        pytest.param(
            replace(HELD, repository="shop", symbol="src/shop/_impl.py::turnover"),
            ["origin"],
            id="behind a re-export",
        ),
    ],
)
def test_a_planted_overlap_is_found(planted: TaskContent, expected: list[str]) -> None:
    assert kinds(TRAIN, planted) == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        ("pkg/api.py::f", "pkg/_impl.py::f", True),
        ("src/pkg/api.py::Class.f", "pkg/api.py::Class.f", True),
        ("pkg/api.py::Class.f", "Class.f", True),
        ("pkg.api.f", "pkg._impl.f", True),
        ("pkg.api:Class.f", "Class.f", True),
        ("pkg.api.Class.f", "other.place.Class.f", True),
        ("f", "pkg.api.f", True),
        ("Thing.f", "Thing:f", True),
        ("pkg/api.py::f", "pkg/api.py::g", False),
        ("pkg/api.py::Class.f", "pkg/api.py::Other.f", False),
        ("deque.append", "list_.append", False),
        ("Class.f", "Class", False),
        ("Thing.f", "ing.f", False),
    ],
)
def test_the_path_to_a_symbol_does_not_hide_its_origin(ours: str, theirs: str, is_same: bool) -> None:
    symbols = {"a": ours, "b": theirs}
    sides = [SimpleNamespace(task_id=name, repository="r==1", symbol=one) for name, one in symbols.items()]
    overlaps: list[tuple[str, str, str]] = []
    try:
        HeldoutSplit(sides[:1], sides[1:], check_content=False)
    except SplitOverlapError as error:
        overlaps = error.pairs
    assert overlaps == [("origin", "a", "b")] * is_same


@pytest.mark.parametrize(
    "other", ["foo-bar", "Foo_Bar==9", "foo.bar==", "https://host/org/Foo-Bar.git", "org/foo_bar@v2"]
)
def test_spelling_and_version_do_not_hide_a_repository(other: str) -> None:
    assert kinds(
        replace(TRAIN, repository="foo_bar==1.0"), replace(HELD, repository=other, symbol="turnover")
    ) == ["origin"]


def test_a_vendored_copy_is_found_however_short_it_is() -> None:
    short = "\n    return len(self._data)\n"
    ours = replace(TRAIN, symbol="Cache.__len__", golden=short)
    vendored = replace(
        HELD, symbol="vendor/cache.py::Cache.__len__", golden="return len(self._data)  # copied"
    )
    assert kinds(ours, vendored) == ["origin"]
    assert kinds(ours, replace(vendored, symbol="Table.__len__")) == []
    assert kinds(ours, replace(vendored, golden="return len(self._rows)")) == []


@pytest.mark.parametrize(
    ("golden", "expected"),
    [
        ("return self._x", []),  # 1 word
        ("return self._parse_bool(BoolType.FALSE)", []),  # 3 words
        ("return compare(first, second, third)", []),  # 4 words
        ("return compare(first, second, third, fourth)", ["origin"]),  # 5 words
        ("if not self._x:\n    return None\nreturn self._x", []),  # 1 word a line
    ],
)
def test_the_same_golden_elsewhere_needs_five_words(golden: str, expected: list[str]) -> None:
    assert kinds(replace(TRAIN, golden=golden), replace(HELD, golden=golden)) == expected


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        ("low = min(values)\nhigh = max(values)", []),  # 3 + 3 words
        ("low = min(values)\nhigh = max(values)\nwidth = high - low", ["origin"]),  # 9 words
        ("low = min(values)\nreturn self._x\nelse:\n    pass", []),
    ],
)
def test_common_lines_need_eight_words(shared: str, expected: list[str]) -> None:
    assert (
        kinds(
            replace(TRAIN, golden=f"{shared}\nreturn low"),
            replace(HELD, golden=f"{shared}\nyield from reversed(high)"),
        )
        == expected
    )


@pytest.mark.parametrize(("num_own", "expected"), [(3, ["origin"]), (4, [])])
def test_common_lines_are_half_of_the_shorter_golden(num_own: int, expected: list[str]) -> None:
    shared = "\n".join(f"first_{n} = second_{n} + third_{n}" for n in range(3))  # 9 words

    def golden(name: str, num: int) -> str:
        return "\n".join(
            [shared, *(f"{name}_{n} = {name}_b{n}[{name}_c{n}]" for n in range(num))]
        )  # 3 words a line

    ours, theirs = (
        replace(TRAIN, golden=golden("one", num_own)),
        replace(HELD, golden=golden("other", num_own + 30)),
    )
    assert [kind for kind in kinds(ours, theirs) if kind == "origin"] == expected


def test_a_short_body_is_no_near_duplicate() -> None:
    """16 tokens give 12 shingles, the least that is compared; 15 are an idiom."""
    text = "a = f(b, c)\nd = g(e, h)\n"  # 6 + 6 tokens and one comma each: 2 * 6
    longer = text + "return k(a)"
    assert (
        kinds(replace(TRAIN, golden=text + "i = j"), replace(HELD, golden=text.replace("a", "x") + "y = z"))
        == []
    )
    ours, theirs = longer + " + d", longer.replace("a", "x") + " + y"
    assert kinds(replace(TRAIN, golden=ours), replace(HELD, golden=theirs)) == ["near-duplicate"]


def test_two_functions_of_one_repository_may_share_their_tests() -> None:
    sibling = replace(TRAIN, task_id="sibling", symbol="reachable", golden=FOREIGN)
    assert kinds(TRAIN, sibling) == []
    assert kinds(TRAIN, replace(sibling, repository="fork")) == ["near-duplicate"]
    assert kinds(replace(TRAIN, repository=""), replace(sibling, repository="")) == ["near-duplicate"]


def test_two_functions_of_one_repository_that_are_near_copies_overlap() -> None:
    assert kinds(TRAIN, replace(TRAIN, task_id="sibling", symbol="costs", golden=OTHER_CONSTANTS)) == [
        "near-duplicate"
    ]


def test_without_a_golden_the_trees_of_two_repositories_are_compared() -> None:
    module = {"shop/orders.py": f"def turnover(orders):\n{GOLDEN}"}
    renamed = {"other/name.py": f"def revenue(rows):\n{RENAMED}"}
    ours = SimpleNamespace(task_id="a", broken_tree=module)
    theirs = SimpleNamespace(task_id="b", broken_tree=renamed)
    with pytest.raises(SplitOverlapError) as caught:
        HeldoutSplit([ours], [theirs])
    assert caught.value.pairs == [("near-duplicate", "a", "b")]
    other = SimpleNamespace(task_id="b", broken_tree={"x.py": FOREIGN})
    assert HeldoutSplit([ours], [other]).checked == ("id", "content")


def test_many_overlaps_are_one_readable_message() -> None:
    train = [replace(TRAIN, task_id=f"train-{n}") for n in range(2)]
    heldout = [replace(HELD, task_id=f"held-{n}", golden=RENAMED, symbol=f"s{n}") for n in range(4)]
    heldout.append(replace(HELD, task_id="held-4", repository="shop", symbol="turnover", golden=REFORMATTED))
    with pytest.raises(SplitOverlapError) as caught:
        HeldoutSplit(train, heldout)
    assert len(caught.value.pairs) == 12
    assert caught.value.message == (
        "train and held-out tasks overlap in 10 pair(s), 10 by near-duplicate, 2 by origin: "
        "near-duplicate: train-0 and held-0; near-duplicate: train-0 and held-1; "
        "near-duplicate: train-0 and held-2; near-duplicate: train-0 and held-3; "
        "near-duplicate and origin: train-0 and held-4; and 5 more."
    )
    assert "totals" not in str(caught.value)


QUICKSTART_GOLDEN = {
    "Cache.__iter__": "return iter(self.__data)",
    "Cache.__len__": "return len(self.__data)",
    "Cache.currsize": "return self.__currsize",
    "URL.host": "return self._host",
    "URL.uses_netloc": "return self._uses_netloc",
    "Version.__le__": "return self.compare(other) <= 0",
    "Version.major": "return self._major",
    "concatv": "return concat(seqs)",
    "Literal.description": "return self._description",
    "Literal.schema": "return self._schema",
    "Literal.title": "return self._title",
    "Schema.name": "return self._name",
    "ParseError.col": "return self._col",
    "ParseError.line": "return self._line",
    "Whitespace.s": "return self._s",
    "Parser._parse_false": "return self._parse_bool(BoolType.FALSE)",
}


def test_the_one_line_tasks_of_the_shipped_recipe_are_a_valid_split() -> None:
    recipe = tomllib.loads(RECIPE.read_text())
    tasks = [
        SimpleNamespace(
            task_id=pin,
            repository=source.removeprefix("sdist:"),
            symbol=pin,
            golden=f"\n        {QUICKSTART_GOLDEN[pin.partition('::')[2]]}",
            broken_tree={pin.partition("::")[0]: f"class A:\n    def {pin[-5:]}(self): ...\n"},
        )
        for source, pins in recipe["tasks"]["symbols"].items()
        for pin in pins
    ]
    named = recipe["heldout"]["repositories"]
    heldout = [task for task in tasks if task.repository.partition("==")[0] in named]
    split = HeldoutSplit([task for task in tasks if task not in heldout], heldout)
    assert (len(split.train_ids), len(split.heldout_ids)) == (8, 8)
    assert split.checked == ("id", "content", "near-duplicate", "origin")
