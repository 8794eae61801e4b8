"""Threads that parse at the same time do not disturb each other."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from composer_replication.tasks.syntax_trees import parse_syntax


class Garbage:
    """A cycle whose end takes a while, so that another thread gets its turn in the middle of a parse."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(200):
            pass


@pytest.fixture
def busy_collector() -> Iterator[None]:
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


@pytest.mark.long
@pytest.mark.usefixtures("busy_collector")
def test_threads_parse_at_the_same_time() -> None:
    text = ("x = (" + "1 + " * 30 + "1)\n") * 60
    problems: list[BaseException] = []
    trees: list[str] = []

    def work(depth: int) -> None:
        try:
            for _ in range(30):
                Garbage()
                trees.append(ast.dump(parse_syntax(text + "-" * depth + "1\n").body[-1]))
        except BaseException as error:  # noqa: BLE001  whatever it is, the test has failed
            problems.append(error)

    threads = [threading.Thread(target=work, args=(10 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(trees) == 120


def test_an_expression() -> None:
    assert ast.dump(parse_syntax("1", mode="eval")) == "Expression(body=Constant(value=1))"
    with pytest.raises(SyntaxError):
        parse_syntax("x =")
