"""When two outcomes are the same: encodings worked out by hand."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import threading
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.tasks.twin.canonical_encoding import OpaqueValue, Work, digest, encode

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False).map(str)
)


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class Colour(Enum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ("NoneType", "None")),
        (True, ("bool", "True")),
        (1, ("int", "1")),
        (-0.0, ("float", "0")),
        (0.1 + 0.2, ("float", "0.3")),
        (1 / 3, ("float", "0.333333333333")),
        (math.nan, ("float", "nan")),
        (2j, ("complex", "0", "2")),
        ("a'b", ("str", '"a\'b"')),
        ([1, "1"], ("list", ("int", "1"), ("str", "'1'"))),
        ({2, 1}, ("set", ("int", "1"), ("int", "2"))),
        ({"b": 1, "a": 2}, ("dict", (("str", "'a'"), ("int", "2")), (("str", "'b'"), ("int", "1")))),
        (
            OrderedDict(b=1, a=2),
            ("collections.OrderedDict", (("str", "'b'"), ("int", "1")), (("str", "'a'"), ("int", "2"))),
        ),
        (iter([1]), ("iterator", ("int", "1"))),
        ((x for x in "a"), ("iterator", ("str", "'a'"))),
        (range(3), ("range", "range(0, 3)")),
        (ValueError("secret text"), ("exception", "ValueError")),
        (int, ("class", "int")),
        (OrderedDict, ("class", "collections.OrderedDict")),
        (math, ("module", "math")),
    ],
)
def test_by_hand(value: object, expected: tuple[object, ...]) -> None:
    assert encode(value) == repr(expected)


def test_an_endless_iterator_is_cut_at_300_and_one_that_raises_raises() -> None:
    assert encode(itertools.count()).endswith("('int', '298'), ('int', '299'), '...')")
    assert encode(iter(range(300))).endswith("('int', '299'), '...')")
    assert encode(iter(range(299))).endswith("('int', '298'))")
    with pytest.raises(ZeroDivisionError):
        encode(1 // (x - 2) for x in range(5))


def test_objects_by_type_and_state() -> None:
    assert encode(Point(1)) == encode(Point(1))
    assert encode(Point(1)) != encode(Point(2))
    assert "Point" in encode(Point(1)).partition(",")[0]
    assert encode(Pair(1, 2)) != encode((1, 2))
    assert encode(Colour.RED) != encode(1)
    assert encode(collections.defaultdict(list, a=[1])) != encode({"a": [1]})
    assert encode(re.compile("a")) == encode(re.compile("a"))
    assert encode(re.compile("a")) != encode(re.compile("a", re.IGNORECASE))


def test_equality_of_the_value_is_never_asked_and_exact_types_count() -> None:
    assert AlwaysEqual() == 42
    assert encode(AlwaysEqual()) != encode(42)
    assert encode([AlwaysEqual()]) != encode([42])

    class Text(str):
        __slots__ = ()

    assert encode(Text("a")) != encode("a")
    assert encode(True) != encode(1)
    assert encode((1,)) != encode([1])
    assert encode(frozenset()) != encode(set())


@pytest.mark.parametrize(
    "value", [len, lambda: 1, [lambda: 1], {"a": print}, threading.Lock(), functools.partial(int), [].append]
)
def test_what_is_opaque_as_a_result(value: object) -> None:
    with pytest.raises(OpaqueValue):
        encode(value)


def test_functions_as_arguments_have_names_and_code() -> None:
    one, two = (lambda x: x + 1), (lambda x: x - 1)
    assert encode(one, is_result=False) == encode(two, is_result=False)
    assert encode(one, is_result=False, pickled=cloudpickle.dumps) != encode(
        two, is_result=False, pickled=cloudpickle.dumps
    )

    def add(n: int):
        return lambda x: x + n

    assert encode(add(1), is_result=False, pickled=cloudpickle.dumps) != encode(
        add(2), is_result=False, pickled=cloudpickle.dumps
    )
    assert encode(add(1), is_result=False, pickled=cloudpickle.dumps) == encode(
        add(1), is_result=False, pickled=cloudpickle.dumps
    )


def test_cycles_end_and_size_has_a_bound() -> None:
    endless: list[object] = [1]
    endless.append(endless)
    assert encode(endless) == repr(("list", ("int", "1"), ("cycle", "1")))
    with pytest.raises(OpaqueValue):
        encode(list(range(60_000)))
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(OpaqueValue):
        encode(deep)


def test_a_digest_is_the_start_of_sha256_of_the_text() -> None:
    # printf "%s" "('int', '1')" | sha256sum
    assert digest(encode(1)) == "2dd6c364aacb"


@settings(max_examples=40)
@given(st.lists(st.one_of(st.integers(), st.text(), st.none()), unique_by=repr))
def test_the_order_of_a_set_does_not_count(items: list[object]) -> None:
    other: set[object] = set()
    for item in reversed(items):
        other.add(item)  # colliding items then lie in another order
    assert encode(other) == encode(set(items))


@given(scalars, scalars)
def test_scalars_that_differ_have_encodings_that_differ(a: object, b: object) -> None:
    same = type(a) is type(b) and a == b
    assert (encode(a) == encode(b)) == same
    assert (digest(encode(a)) == digest(encode(b))) == same


def test_the_work_of_all_encodings_is_counted() -> None:
    before = Work.num_nodes
    encode([1, {"a": 2}])
    assert Work.num_nodes - before == 5  # the list, 1, the dictionary, its key and its value
    with pytest.raises(OpaqueValue):
        encode([1, print, 2])
    assert Work.num_nodes - before == 5 + 3  # what was seen until then counts
