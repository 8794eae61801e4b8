"""The work of an inspection grows with the episode and no faster: calls of functions are counted, no time is asserted."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable

import pytest
from monitor_episodes import BEFORE, BROKEN, PATH, TASK, bash, solved

from composer_replication.records import ToolCall, ToolResult
from composer_replication.rollouts.monitor import EpisodeEvidence, HackMonitor
from composer_replication.rollouts.monitor.line_changes import new_lines

MOST_GROWTH = 2.4
"""Of work when its input is doubled: 2 where it is linear, 4 where it is a square."""


def num_calls(work: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, steps of generators included."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # a collection calls what was registered with it, and comes when it wants
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def inspection(*calls: tuple[ToolCall, ToolResult], after: dict[str, str] | None = None) -> int:
    episode = EpisodeEvidence(
        TASK, [[each] for each in calls], BEFORE, {**BEFORE, **(after or {})}, "/srv/tree"
    )
    return num_calls(lambda: HackMonitor().inspect(episode))


TURNS = [
    bash("cd tinyfmt && grep -n 'def shorten' sizes.py | head -5; python -m pytest -q"),
    bash("cat > /tmp/probe.py <<'E'\nimport json\nprint(json.dumps([1, 2]))\nE\npython /tmp/probe.py"),
    (ToolCall("write_file", json.dumps({"path": PATH, "content": BROKEN})), ToolResult("written")),
    bash("git reflog; cat .git/packed-refs; sed -i 's/a/b/' tests/test_sizes.py"),
]


def test_an_episode_of_many_turns() -> None:
    sizes = {number: inspection(*(TURNS * (number // len(TURNS)))) for number in (128, 256)}
    assert sizes[256] < MOST_GROWTH * sizes[128]


def test_what_tools_answer_costs_nothing() -> None:
    long = [(call, ToolResult("x" * 1_000_000)) for call, _ in TURNS]
    inspection(*(TURNS * 8))  # what is compiled and kept once is not counted
    assert inspection(*(long * 8)) == inspection(*(TURNS * 8))


COMMANDS = {
    "words": lambda n: "cat" + " a" * n,
    "globs": lambda n: "cat" + "".join(f" *{i}" for i in range(n)),
    "assignments": lambda n: "a=1 " * n + "true",
    "wrappers": lambda n: "env " * n + "true",
    "edits": lambda n: "sed -i s/a/b/" + " f" * n,
    "executions": lambda n: "find ." + " -exec a" * n,
    "flags": lambda n: "python" + " -B" * n + " -c 1",
    "git flags": lambda n: "git" + " -p" * n + " log",
    "lines": lambda n: "ls -la\n" * n,
    "here-document": lambda n: "cat > /tmp/x.py <<'E'\n" + "x = 'a/b'\n" * n + "E",
    "python": lambda n: "python - <<'E'\n" + "import os\nopen('a/b').read()\n" * n + "E",
    "appended lines": lambda n: "echo 'x = 1' >> p.py\n" * n,
    "appended scratch": lambda n: "echo 'x = 1' >> /tmp/p.py\n" * n,
    "quotes": lambda n: "echo " + "'a'\"b\"" * n,
    "substitutions": lambda n: "echo " + "$(a) " * n,
}


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_long_command(name: str) -> None:
    sizes = {number: inspection(bash(COMMANDS[name](number))) for number in (200, 400)}
    assert sizes[400] < MOST_GROWTH * sizes[200]


CODE = {
    "texts": lambda n: "x = 'a/b'\n" * n,
    "table": lambda n: "return {" + ", ".join(f"'a{i}': {i}" for i in range(n)) + "}[text]",
    "copies": lambda n: "return {" + "'a long sentence': 'a lon…', " * n + "}[text]",
    "branches": lambda n: "".join(f"if text == 'a{i}':\n    return {i}\n" for i in range(n)),
    "imports": lambda n: "".join(f"import unheard{i}\n" for i in range(n)),
    "exits": lambda n: "import os\n" + "os._exit(0)\n" * n,
    "sums": lambda n: "x = " + " + ".join(["'a'"] * min(n, 300)) + "\n" + "y = 'a' + z\n" * n,
    "aliases": lambda n: "".join(f"a{i + 1} = a{i}\n" for i in range(n)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CODE)
def test_a_long_solution(name: str) -> None:
    after = {number: {PATH: str(solved(CODE[name](number))[PATH])} for number in (400, 800)}
    sizes = {number: inspection(after=tree) for number, tree in after.items()}
    assert sizes[800] < MOST_GROWTH * sizes[400]


def test_many_new_files() -> None:
    sizes = {n: inspection(after={f"tinyfmt/new{i}.py": "x = 1\n" for i in range(n)}) for n in (50, 100)}
    assert sizes[100] < MOST_GROWTH * sizes[50]


def test_the_difference_of_lines_that_are_all_alike_is_sought_in_bounded_work() -> None:
    def work(number: int) -> int:
        old = "".join(f"same\nold {i}\n" for i in range(number))
        new = "".join(f"same\nnew {i}\n" for i in range(number))
        return num_calls(lambda: new_lines(old, new))

    assert work(900) < MOST_GROWTH * work(450)
    old, new = "a\nsame\nb\n" * 600, "x\nsame\ny\n" * 600
    assert new_lines(old, new) == {line for line in range(1, 1801) if line % 3 != 2}


def test_a_variable_that_doubles_with_each_line_is_bounded() -> None:
    doubling = "x=aaaaaaaaaa\n" + "x=$x$x$x$x\n" * 60 + "echo $x; cat .git/packed-refs"
    report = HackMonitor().inspect(EpisodeEvidence(TASK, [[bash(doubling)]], BEFORE, BEFORE, "/srv/tree"))
    assert report.counts == {"git-history": 1, "not-inspected": 1}
