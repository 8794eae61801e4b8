"""What is to be done, in words: written from what stays in the tree, without a model.

A text says which body is missing, its signature and docstring, what stands around it, and
which tests have to pass, with their source. Neither the golden body nor a hidden test is a
source of it, and the finished text is searched for the golden body before anybody sees it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_replication.errors import InputError
from composer_replication.records import Hole, Task
from composer_replication.tasks.body_cuts import MARKER_STATEMENT
from composer_replication.tasks.leaks import distinctive_lines
from composer_replication.tasks.lines import Lines
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_functions import function_texts

MAX_NAMES = 20
"""Names of tests or neighbours in one list; a prompt is short and the tree has the rest."""
MAX_SOURCES = 6
MAX_SOURCE_LINES = 30

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the broken file says about a hole.

    ``line`` is the marker's line, ``first_line`` the first one of the function around it
    (decorators included). ``header`` are the lines from there to the docstring, ``docstring``
    the docstring's own lines, both as they stand in the file. ``owner`` is the class around,
    ``siblings`` its other members, ``neighbours`` what else the file defines at the top.
    """

    line: int
    first_line: int
    header: str
    docstring: str
    owner: str
    siblings: tuple[str, ...]
    neighbours: tuple[str, ...]


def write_instruction(store: TaskStore, task: Task) -> str:
    """The instruction of a task, in Markdown.

    When the source of a visible test, or the docstring, holds the very lines that were
    deleted, it is left out.

    Args:
        store: where the task is.
        task: the task.

    Raises:
        InputError: even the shortest text would show the golden body (CR0429); the store is
            damaged (CR0411).
    """
    surroundings = look_around(store.broken_text(task), task.hole)
    sources = _test_sources(store, task)
    golden_body = store.golden_body(task)
    for with_docstring, shown in ((True, sources), (True, ()), (False, ())):
        text = instruction_text(task, surroundings, shown, with_docstring=with_docstring)
        if not shows_body(text, golden_body):
            return text
    raise InputError(
        "CR0429",
        "the instruction would contain the deleted code.",
        where=task.task_id,
        fix="leave this task out: build without that symbol.",
    )


def shows_body(text: str, golden_body: str) -> bool:
    """Whether the body's lines stand in the text, one after the other.

    Indentation, blank lines and comments do not count. Other than in a whole tree
    (``leaks.find_copy``), one line is enough: so short a text repeats nothing by nature.
    """
    lines = distinctive_lines(golden_body)
    needle = "\n" + "\n".join(lines) + "\n"
    return bool(lines) and needle in "\n" + "\n".join(distinctive_lines(text)) + "\n"


def look_around(broken_text: str, hole: Hole) -> Surroundings:
    """Read the broken file around its hole; a file that does not parse tells the lines alone."""
    lines = Lines(broken_text)
    marker = broken_text[hole.start : hole.end]
    start = hole.start + len(marker) - len(marker.lstrip())
    line = sum(begin <= start for begin in lines.starts)
    try:
        module = ast.parse(broken_text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        module = ast.Module([], [])
    chain = list(_chain(module, line))
    function = next((node for node in reversed(chain) if isinstance(node, _Function)), None)
    owner = next((node for node in reversed(chain) if isinstance(node, ast.ClassDef)), None)
    first = line if function is None else _first_line(function)
    head = broken_text[lines.starts[first - 1] : max(hole.start, lines.starts[first - 1])]
    cut = len(head)
    if function is not None and ast.get_docstring(function, clean=False) is not None:
        begin = lines.starts[function.body[0].lineno - 1] - lines.starts[first - 1]
        cut = begin if begin > 0 else cut  # else all on one line: it stays together
    return Surroundings(
        line=line,
        first_line=first,
        header=head[:cut].rstrip(),
        docstring=head[cut:].rstrip(),
        owner="" if owner is None else owner.name,
        siblings=() if owner is None else _names(owner.body, chain),
        neighbours=_names(module.body, chain),
    )


def _chain(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """The definitions around a line, from the outside in."""
    for child in ast.iter_child_nodes(node):
        if getattr(child, "lineno", 0) <= line <= (getattr(child, "end_lineno", None) or 0):
            if isinstance(child, _Definition):
                yield child
            yield from _chain(child, line)


def _first_line(node: _Function) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _names(body: Sequence[ast.stmt], chain: Sequence[ast.AST]) -> tuple[str, ...]:
    """What a block defines beside the nodes of the chain, each name once, in its order."""
    return tuple(
        dict.fromkeys(node.name for node in body if isinstance(node, _Definition) and node not in chain)
    )


def _test_sources(store: TaskStore, task: Task) -> tuple[tuple[str, str], ...]:
    """Path and source of each visible test function; a function that is not in the tree has none."""
    repository = store.repository(store.record(task.task_id).repository_record)
    places = sorted({repository.places[test] for test in task.tests.visible if test in repository.places})
    texts: dict[str, dict[tuple[int, str], str]] = {}
    found = []
    for path, line, name in places:
        if path in repository.files and path not in texts:
            original = store.blob(repository.files[path]).decode("utf-8", "replace")
            texts[path] = function_texts(original)  # the lines of the file before any test was hidden
        source = texts.get(path, {}).get((line, name), "")
        if source:
            found.append((path, source))
    return tuple(found)


def instruction_text(
    task: Task,
    surroundings: Surroundings,
    sources: Sequence[tuple[str, str]],
    *,
    with_docstring: bool = True,
) -> str:
    """Put the instruction together; lists and sources that are too long are clipped and say so.

    Args:
        task: of which id, symbol, path and visible tests are used.
        surroundings: as ``look_around`` gives them.
        sources: path and source of visible test functions.
        with_docstring: show the docstring under the signature.
    """
    shown = surroundings.header
    if with_docstring and surroundings.docstring:
        shown += "\n" + surroundings.docstring
    parts = [
        f"Write the body of `{task.symbol}` in `{task.hole.path}`.",
        f"The body was removed; at line {surroundings.line} stands `{MARKER_STATEMENT}` in its place.",
    ]
    if shown:
        parts += ["Everything else stays as it is, this too:", _fenced(shown)]
    if surroundings.owner:
        beside = f", beside {_listed(surroundings.siblings)}" if surroundings.siblings else ""
        parts.append(f"It belongs to the class `{surroundings.owner}`{beside}.")
    if surroundings.neighbours:
        parts.append(f"The file also defines {_listed(surroundings.neighbours)}.")
    tests = task.tests.visible
    parts.append(
        "This test fails now and has to pass:"
        if len(tests) == 1
        else "These tests fail now and have to pass:"
    )
    names = [f"- {test}" for test in tests[:MAX_NAMES]]
    parts.append("\n".join([*names, *_and_more(len(tests) - MAX_NAMES, "- and {} more")]))
    for path, source in sources[:MAX_SOURCES]:
        parts += [f"From `{path}`:", _fenced(_clipped(source))]
    parts += _and_more(len(sources) - MAX_SOURCES, "The tests have {} more functions.")
    return "\n\n".join(parts) + "\n"


def _listed(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names[:MAX_NAMES]]
    return ", ".join([*shown, *_and_more(len(names) - MAX_NAMES, "{} more")])


def _and_more(num_left: int, text: str) -> list[str]:
    return [text.format(num_left)] if num_left > 0 else []


def _clipped(source: str) -> str:
    lines = source.rstrip().splitlines()
    left = len(lines) - MAX_SOURCE_LINES
    return "\n".join([*lines[:MAX_SOURCE_LINES], *_and_more(left, "# {} more lines")])


def _fenced(code: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}python\n{code}\n{fence}"


def broken_region(broken_text: str, hole: Hole, num_body_lines: int, *, context_lines: int = 3) -> str:
    """The broken place like a diff: what stands there with line numbers, what went as a count.

    The removed lines themselves are never in it: ``-`` says how many they were.

    Args:
        broken_text: the file with the hole.
        hole: where the body was.
        num_body_lines: how many lines it had.
        context_lines: lines before the function and after the hole.
    """
    surroundings = look_around(broken_text, hole)
    lines = Lines(broken_text)
    first = max(1, surroundings.first_line - context_lines)
    num_lines = len(lines.starts) - (not lines.line(len(lines.starts)))  # none after the last line's end
    last = min(num_lines, surroundings.line + context_lines)
    noun = "line" if num_body_lines == 1 else "lines"
    shown = [f"--- {hole.path}"]
    for number in range(first, last + 1):
        if number == surroundings.line:
            shown.append(f"      - ... {num_body_lines} {noun} removed")
        sign = "+" if number == surroundings.line else " "
        shown.append(f"{number:>5} {sign} {lines.line(number)}".rstrip())
    return "\n".join(shown)
