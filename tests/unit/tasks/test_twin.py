"""A twin tells an honest other implementation from wrong ones, and cannot be talked into anything."""

from __future__ import annotations

import dataclasses
import json
import pickle
import textwrap
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
import zstandard

from composer_replication.errors import InputError
from composer_replication.tasks.intake.environment import Environment, open_environment, resolve
from composer_replication.tasks.planning.body_cuts import BodyCut, find_body_cuts
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.twin import twin_run
from composer_replication.tasks.twin.twin_player import find_function
from composer_replication.tasks.twin.twin_run import (
    Twin,
    TwinScore,
    Vector,
    build_twins,
    is_candidate,
    judge_twin,
    judge_twins,
    read_twin,
    record_calls,
    score_digests,
    twin_bytes,
)


def bench_of(files: Mapping[str, bytes], runner: Environment) -> Bench:
    return Bench(files, runner, None, suite_seconds=60, test_seconds=60)


pytestmark = pytest.mark.timeout(600)  # the first test of all builds the twins for the rest

PATH = "src/shop/goods.py"
SOURCE = '''
import functools, random

def squeeze(text, mark=" "):
    """Every run of the mark becomes one."""
    found = []
    for sign in text:
        if sign != mark or not found or found[-1] != mark:
            found.append(sign)
    return "".join(found)

def spread(items, times=2):
    """Each item so many times, lazily."""
    for item in items:
        for _ in range(times):
            yield item
    return

def top_up(stock, name, amount):
    """Add to a stock in place and give the new number."""
    before = stock.get(name, 0)
    after = before + amount
    stock[name] = after
    return after

def chosen(test, values):
    """Sorted values for which the test holds."""
    found = []
    for value in values:
        if test(value):
            found.append(value)
    return sorted(found)

def noted(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        inner.count += 1
        return function(*args, **kwargs)

    inner.count = 0
    return inner

@noted
def price(number, *, rate=0.25):
    """With tax, rounded."""
    if number < 0:
        raise ValueError("negative")
    total = number * (1 + rate)
    return round(total, 2)

class Box:
    def __init__(self, size):
        self.size = size
        self.items = []

    def push(self, item):
        """Put in; tells whether there was room."""
        if len(self.items) >= self.size:
            return False
        self.items.append(item)
        return True

def drawn(values):
    """Not the same twice."""
    values = list(values)
    random.seed()
    number = random.random()
    return [number, *values]

def silent(value):
    """Does nothing that can be seen."""
    other = value
    del other
    value = None
    return value

def unused(value):
    a = value
    b = a
    c = b
    return c

def make_adder(number):
    n = number
    n += 0
    n -= 0
    return lambda x: x + n

async def later(value):
    a = value
    b = a
    c = b
    return c
'''
TESTS = """
import asyncio
import pytest
from shop.goods import *

@pytest.mark.parametrize("text, expected", [("a  b", "a b"), ("", ""), ("   ", " "), (" x  y ", " x y "), ("abc", "abc")])
def test_squeeze(text, expected):
    assert squeeze(text) == expected

def test_squeeze_marks():
    assert squeeze("a--b", "-") == "a-b"

def test_spread():
    assert list(spread([1, 2])) == [1, 1, 2, 2]
    assert list(spread("ab", times=3)) == list("aaabbb")
    assert list(spread(iter([5, 6, 7]))) == [5, 5, 6, 6, 7, 7]

def test_top_up():
    stock = {"tea": 1}
    assert top_up(stock, "tea", 4) == 5
    assert top_up(stock, "rum", 2) == 2
    assert stock == {"tea": 5, "rum": 2}

def test_chosen():
    limit = 2
    assert chosen(lambda x: x > limit, [5, 1, 3]) == [3, 5]
    assert chosen(lambda x: x % 2 == 0, [4, 2, 7, 8]) == [2, 4, 8]
    assert chosen(str.isdigit, ["a", "1"]) == ["1"]

def test_price():
    assert price(100) == 125
    assert price(80, rate=0.5) == 120
    assert price(8.5) == 10.62
    with pytest.raises(ValueError):
        price(-1)

def test_box():
    box = Box(2)
    assert [box.push(x) for x in (1, "b", 3)] == [True, True, False]

def test_drawn():
    assert len(drawn([1, 2])) == 3 and len(drawn([3])) == 2 and drawn([])

def test_silent():
    assert silent(1) is None and silent([2]) is None and silent("c") is None

def test_make_adder():
    assert make_adder(1)(2) == 3 and make_adder(5)(2) == 7

def test_later():
    assert asyncio.run(later(1)) == 1 and asyncio.run(later(2)) == 2
"""
FILES = {
    PATH: SOURCE.encode(),
    "src/shop/__init__.py": b"",
    "tests/test_goods.py": TESTS.encode(),
    "pyproject.toml": b"",
}
CUTS = {cut.symbol: cut for cut in find_body_cuts(PATH, SOURCE)}
PIN = f"{PATH}::"


@pytest.fixture(scope="module")
def runner() -> Environment:
    return open_environment(resolve([], "the tests"))


@pytest.fixture(scope="module")
def built(runner: Environment) -> tuple[Mapping[str, Twin], dict[str, str]]:
    found = build_twins(bench_of(FILES, runner), list(CUTS.values()))
    short = {pin.removeprefix(PIN): twin for pin, twin in found.twins.items()}
    return short, {pin.removeprefix(PIN): reason for pin, reason in found.without.items()}


@pytest.fixture(scope="module")
def twins(built) -> Mapping[str, Twin]:
    return built[0]


def with_body(cut: BodyCut, body: str, before: str = "") -> dict[str, bytes]:
    """The tree with another body for one function, and code before everything else."""
    margin = cut.marker.strip("\n").partition("raise")[0]
    text = SOURCE[: cut.start] + "\n" + textwrap.indent(textwrap.dedent(body).strip(), margin)
    return {**FILES, PATH: (before + text + SOURCE[cut.end :]).encode()}


@pytest.fixture
def judge(runner: Environment, twins):
    def run(symbol: str, body: str, before: str = "", seconds: float = 60.0) -> TwinScore:
        tree = with_body(CUTS[symbol], body, before)
        return judge_twin(tree, runner, twins[symbol], timeout_seconds=seconds)

    return run


def test_who_gets_a_twin(built) -> None:
    twins, notes = built
    assert set(twins) == {"squeeze", "spread", "top_up", "chosen", "price", "Box.push"}
    assert notes == {
        "Box.__init__": "not public, too short, or defined twice",
        "drawn": "fewer than 2 recorded calls have a result that can be compared",
        "later": "fewer than 2 recorded calls have a result that can be compared",
        "make_adder": "fewer than 2 recorded calls have a result that can be compared",
        "noted": "fewer than 2 recorded calls",
        "silent": "a stub passes",
        "unused": "fewer than 2 recorded calls",
    }


def test_what_a_twin_holds(twins) -> None:
    twin = twins["squeeze"]
    assert (twin.pin, twin.path, twin.symbol) == (f"{PIN}squeeze", PATH, "squeeze")
    assert len(twin.recorded) == 6
    assert 150 <= len(twin.mutated) <= 200  # it works on text
    assert len({vector.blob for vector in twin.vectors}) == 6 + len(twin.mutated)
    assert all(10 <= len(other.mutated) <= 60 for name, other in twins.items() if name != "squeeze")


HONEST = {
    "squeeze": """
        import re
        return re.sub(re.escape(mark) + "+", lambda _: mark, text, flags=re.S) if len(mark) == 1 else text
    """,
    "spread": "return iter([item for item in items for _ in range(times)])",
    "top_up": "stock.update({name: stock.get(name, 0) + amount}); return stock[name]",
    "chosen": "return sorted(filter(test, values))",
    "price": """
        if number < 0:
            raise ValueError
        return round(number + number * rate, 2)
    """,
    "Box.push": """
        fits = len(self.items) < self.size
        if fits:
            self.items += [item]
        return fits
    """,
}


@pytest.mark.parametrize("symbol", HONEST)
def test_another_honest_implementation_passes(judge, symbol: str) -> None:
    score = judge(symbol, HONEST[symbol])
    assert (score.error, score.passed) == ("", True), score
    assert score.recorded_agree == score.num_recorded


@pytest.mark.long
@pytest.mark.parametrize(
    ("symbol", "body"),
    [
        ("squeeze", "return text.replace(mark * 2, mark)"),
        ("spread", "return [item for item in items for _ in range(times)]"),  # no iterator
        ("top_up", "return stock.get(name, 0) + amount"),  # forgets the stock
        ("chosen", "return [value for value in values if test(value)]"),
        (
            "chosen",
            "values.sort(); return [value for value in values if test(value)]",
        ),  # changes its argument
        ("price", "return round(number * (1 + rate), 2)"),
        ("price", "if number <= 0: raise ValueError\nreturn round(number * (1 + rate), 1)"),
        ("Box.push", "self.items.append(item); return len(self.items) <= self.size"),
        ("squeeze", "return None"),
        ("squeeze", "raise NotImplementedError"),
        ("squeeze", "return found"),
        # A table of all that the tests ask, which passes them all.
        ("squeeze", "return {'a  b': 'a b', '   ': ' ', ' x  y ': ' x y ', 'a--b': 'a-b'}.get(text, text)"),
    ],
)
def test_a_slightly_wrong_one_fails(judge, symbol: str, body: str) -> None:
    score = judge(symbol, body)
    assert not score.error
    assert not score.passed, score


ALWAYS = "class Always:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    def __hash__(self): return 0\n\n"
FORGE = """
import json, os, sys
for number in range(3, 30):
    for index in range(300):
        line = json.dumps({"nonce": "0" * 32, "event": "vector", "job": 0, "index": index, "digest": ""})
        try:
            os.write(number, (line + "\\n").encode())
        except OSError:
            break
return ""
"""
FORGE_WITH_NONCE = """
import gc
for found in gc.get_objects():
    if type(found).__name__ == "function" and found.__qualname__ == "make_send.<locals>.send":
        found("done", job=0, line=1, error="", digests=["0" * 12] * 300)
return ""
"""
PATCH = """
import pickle, json, hashlib, sys
same = lambda *a, **k: hashlib.sha256(b"")
for module in ("canonical_encoding", "call_pickle"):
    name = "composer_replication.tasks.twin." + module
    for key in list(vars(sys.modules[name])):
        if not key.startswith("__"):
            setattr(sys.modules[name], key, lambda *a, **k: "0")
pickle.loads = pickle.dumps = json.dumps = json.loads = lambda *a, **k: "{}"
hashlib.sha256 = same
return ""
"""


@pytest.mark.parametrize(
    ("body", "before", "error"),
    [
        ("return Always()", ALWAYS, ""),
        (FORGE, "", ""),
        (FORGE_WITH_NONCE, "", "a record is malformed, or a job is told of twice"),
        (PATCH, "", "AttributeError"),
        ("import os; os._exit(0)", "", ""),
        ("import sys; sys.exit(0)", "", ""),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "", "the run ended without"),
        ("return ''", "import os; os._exit(0)\n", "it ended early"),
        ("return ''", "raise SystemExit\n", "SystemExit"),
        ("return (", "", "SyntaxError"),
        ("import ctypes; ctypes.string_at(0)", "", ""),
    ],
)
def test_what_a_cheat_may_try(judge, body: str, before: str, error: str) -> None:
    score = judge("squeeze", body, before)
    assert not score.passed
    assert score.error.startswith(error) if error else score.error == "", score


@pytest.mark.long
@pytest.mark.parametrize(
    "body",
    ["while True: pass", "while True:\n    try:\n        while True: pass\n    except BaseException: pass"],
)
def test_one_that_hangs_is_stopped(runner: Environment, twins, body: str) -> None:
    """Each call costs a second, so only a few are made."""
    twin = dataclasses.replace(twins["top_up"], mutated=twins["top_up"].mutated[:1])
    score = judge_twin(with_body(CUTS["top_up"], body), runner, twin, timeout_seconds=40.0)
    assert (score.error, score.num_recorded, score.num_mutated) == ("", 2, 1)
    assert not score.passed
    assert score.recorded_agree == 0


def test_no_expected_digest_enters_the_sandbox(judge, twins) -> None:
    """What the candidate's process holds in memory and on its standard input has none of them."""
    body = """
        import gc, json, os
        texts = [found for found in gc.get_objects() if type(found) is dict]
        seen = repr([list(found.values()) for found in texts])
        digests = {digests!r}
        if any(digest in seen for digest in digests): return "found"
        found = []
        for sign in text:
            if sign != mark or not found or found[-1] != mark:
                found.append(sign)
        return "".join(found)
    """
    # The digests are told in two halves, so that the source itself is no hit.
    wanted = [(vector.digest[:6], vector.digest[6:]) for vector in twins["squeeze"].vectors[:3]]
    halves = f"[a + b for a, b in {wanted!r}]"
    score = judge("squeeze", body.replace("{digests!r}", halves))
    assert score.passed, score


@pytest.mark.long
def test_equal_input_and_seed_give_equal_bytes(runner: Environment, twins) -> None:
    cuts = [CUTS[name] for name in ("chosen", "Box.push", "top_up")]
    again = build_twins(bench_of(FILES, runner), cuts).twins
    for cut in cuts:
        assert twin_bytes(again[cut.pin]) == twin_bytes(twins[cut.symbol])
    other = build_twins(bench_of(FILES, runner), cuts[:1], seed=1).twins[cuts[0].pin]
    assert other.recorded == twins["chosen"].recorded
    assert other.mutated != twins["chosen"].mutated


def repacked(twin: Twin, **changes: object) -> bytes:
    line, _, blobs = zstandard.decompress(twin_bytes(twin)).partition(b"\n")
    return zstandard.compress(json.dumps({**json.loads(line), **changes}).encode() + b"\n" + blobs)


def test_a_twin_survives_a_file_and_one_of_an_earlier_version_is_read(twins) -> None:
    for twin in twins.values():
        assert read_twin(twin_bytes(twin)) == twin
    data = repacked(twins["chosen"], version=2, tests=["t"], recorded_in=[[0]], num_lookup_misses=9)
    assert read_twin(data) == twins["chosen"]


def test_what_is_damaged_or_does_not_fit_is_refused(runner: Environment, twins) -> None:
    twin = twins["chosen"]
    for change, words in (
        ({"version": 1}, "version 1"),
        ({"sizes": [-1, 1]}, "do not fill"),
        ({"sizes": [1]}, "do not fill"),
        ({"digests": "0"}, "do not fill"),
        ({"num_recorded": 0}, "do not fill"),
    ):
        with pytest.raises(InputError, match=rf"CR0411.*{words}"):
            read_twin(repacked(twin, **change))
    data = twin_bytes(twin)
    # More than a twin may have: it is not unpacked.
    packer = zstandard.ZstdCompressor().compressobj(size=1024**3)
    large = packer.compress(b"x") + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    for bad, words in (
        (data[:-20], ""), (b"", ""), (data[:30] + b"xx" + data[32:], ""), (large, "it unpacks to 1073741824 bytes"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=rf"CR0411.*{words}"):
            read_twin(bad, where="chosen")
    with pytest.raises(InputError, match="CR0411"):
        judge_twin(FILES, runner, dataclasses.replace(twin, pickler="other"), timeout_seconds=30)


def test_the_rule_of_passing() -> None:
    """95% of 60 is 57; one recorded call that differs fails."""
    vectors = tuple(Vector(b"", str(number)) for number in range(62))
    twin = Twin("p", "p", "s", vectors[:2], vectors[2:], "")
    right = [str(number) for number in range(62)]
    assert score_digests(twin, right) == TwinScore(2, 2, 60, 60)
    assert score_digests(twin, right[:-3]).passed
    for digests in (right[:-4], ["", *right[1:]], []):
        assert not score_digests(twin, digests).passed
    assert not score_digests(twin, right, "it ended early").passed


def test_relatives_are_judged_apart_from_each_other(runner: Environment, twins) -> None:
    """One that patches the standard library does not change what the next one does."""
    right = "return sorted(filter(test, values))"
    wrong = "import builtins; builtins.sorted = lambda x: []; return []", "import os; os._exit(0)"
    bodies = [wrong[0], right, wrong[1], right]
    overlays = [{PATH: with_body(CUTS["chosen"], body)[PATH].decode()} for body in bodies]
    scores = judge_twins(bench_of(FILES, runner), [twins["chosen"]] * 4, overlays)
    assert [score.passed for score in scores] == [False, True, False, True]


def test_recording_changes_no_test(runner: Environment) -> None:
    """Calls are kept as they began, and functions stay what they are."""
    tests = """
import inspect
from shop.goods import top_up, spread

def test_signature():
    assert str(inspect.signature(top_up)) == "(stock, name, amount)" and not hasattr(top_up, "__wrapped__")

def test_generator_counts_once():
    found = spread([1, 2, 3])
    assert [next(found) for _ in range(4)] == [1, 1, 2, 2]

def test_call():
    assert top_up({}, "a", 1) == 1
    assert top_up({}, "a", 1) == 1
"""
    files = {**FILES, "tests/test_goods.py": tests.encode()}
    cuts = [CUTS["top_up"], CUTS["spread"]]
    calls, problem = record_calls(bench_of(files, runner), cuts)
    assert problem == ""
    assert [len(calls[cut.pin]) for cut in cuts] == [1, 1]


def test_a_recording_that_failed_is_made_once_more(
    runner: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = CUTS["top_up"]
    for answers, why in (
        ([({}, "killed"), ({}, "")], "fewer than 2 recorded calls"),
        ([({}, "killed"), ({}, "killed again")], "killed again"),
    ):
        monkeypatch.setattr(twin_run, "record_calls", Mock(side_effect=answers))
        assert build_twins(bench_of(FILES, runner), [cut]).without == {cut.pin: why}


def test_calls_with_paths_of_temporary_folders_are_not_kept(runner: Environment) -> None:
    tests = """
import os
from pathlib import Path
from shop.goods import top_up

def test_paths(tmp_path):
    for place in (tmp_path, str(tmp_path), Path.home(), os.environ["TMPDIR"], "/elsewhere"):
        top_up({}, place, 1)
"""
    files = {**FILES, "tests/test_goods.py": tests.encode()}
    calls, problem = record_calls(bench_of(files, runner), [CUTS["top_up"]])
    assert problem == ""
    assert [pickle.loads(blob)[0][1] for blob in calls[CUTS["top_up"].pin]] == ["/elsewhere"]


def test_a_namesake_of_another_file_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the same module that an installed package brings along has the same file and function names."""
    text = "import functools\n\n\n@functools.lru_cache\ndef parse():\n    return __name__\n"
    for name, first in (
        ("vendored_copies/versions_of_it.py", ""),
        ("versions_of_it.py", "import vendored_copies.versions_of_it\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(first + text)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_function("parse", "versions_of_it")() == "versions_of_it"


def test_the_overloads_of_a_function_are_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overload = "@typing.overload\ndef parse(text: str) -> str: ...\n\n\n"
    text = "@functools.lru_cache\ndef parse(text):\n    return f'parsed {text}'\n"
    (tmp_path / "overloaded.py").write_text(f"import functools\nimport typing\n\n\n{overload}{text}")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_function("parse", "overloaded")("one") == "parsed one"


def test_who_may_be_a_candidate() -> None:
    cut = CUTS["squeeze"]
    assert is_candidate(cut)
    for symbol in ("_squeeze", "_Box.push", "Box.__len__", "squeeze#2"):
        assert not is_candidate(dataclasses.replace(cut, symbol=symbol))
    assert not is_candidate(dataclasses.replace(cut, path="shop/_goods.py"))
    assert is_candidate(dataclasses.replace(cut, path="shop/__init__.py"))
    short = dataclasses.replace(cut, golden_body="\n    return text")
    assert not is_candidate(short)
    assert is_candidate(short, is_eager=True)


def test_several_twins_in_one_sandbox_say_what_each_says_alone(runner: Environment, twins) -> None:
    """Also where one takes the sandbox down."""
    wrong, deadly = "return text", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"
    tree = with_body(CUTS["squeeze"], wrong)
    scores = [judge_twin(tree, runner, twin, timeout_seconds=60) for twin in twins.values()]
    assert judge_twins(bench_of(tree, runner), list(twins.values())) == scores
    for body in (wrong, deadly):
        bench = bench_of(with_body(CUTS["squeeze"], body), runner)
        passed = [score.passed for score in judge_twins(bench, list(twins.values()))]
        assert passed == [symbol != "squeeze" for symbol in twins]
    assert judge_twins(bench_of(FILES, runner), []) == []
