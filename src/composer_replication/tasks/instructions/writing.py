"""What is to be done, in words: written from what stays in the tree, without a model.

Where bodies were taken out, a text lists the functions with signature and docstring, as the broken files have them.
Where code is gone altogether, it says what else the files define. Both name the tests that have to pass and show their
source, with their imports of what is gone. Neither golden code nor a hidden test is a source of a text, and the
finished text is searched for every deleted span before anybody sees it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from composer_replication.errors import InputError
from composer_replication.records import Hole, Task
from composer_replication.tasks.leaks.shown_code import golden_spans, shows_any
from composer_replication.tasks.planning.body_cuts import MARKER_STATEMENT
from composer_replication.tasks.planning.edits import Lines, View, shifted_line
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.syntax_trees import (
    Definition,
    Function,
    definitions_in,
    docstring_of,
    first_line,
    parsed,
)
from composer_replication.tasks.test_functions import function_texts

# --- What the broken files say around a hole.

_tree = lru_cache(maxsize=16)(parsed)
"""A file may have a hundred holes; nobody changes its tree."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the broken file says about a hole.

    ``line`` is the marker's line. ``header`` are the lines from the first one of the function around it (decorators
    included) to the docstring, ``docstring`` the docstring's own lines, both as they stand in the file. ``name`` is the
    qualified name of the function, empty where none was found. ``owner`` is the class around, ``siblings`` its other
    members, ``neighbours`` what else the file defines at the top.
    """

    line: int
    header: str
    docstring: str
    name: str
    owner: str
    siblings: tuple[str, ...]
    neighbours: tuple[str, ...]


def look_around(broken_text: str, hole: Hole) -> Surroundings:
    """Read the broken file around its hole; a file that does not parse tells the lines alone."""
    lines = Lines(broken_text)
    line = line_of(broken_text, hole)
    module = _tree(broken_text) or ast.Module([], [])
    around = [one for one in definitions_in(module.body) if one[1].lineno <= line <= (one[1].end_lineno or 0)]
    name, function = around[-1] if around and isinstance(around[-1][1], Function) else ("", None)
    chain = [node for _, node in around]
    owner = next((node for node in reversed(chain) if isinstance(node, ast.ClassDef)), None)
    begin = lines.starts[(line if function is None else first_line(function)) - 1]
    cut = end = max(hole.start, begin)
    if function is not None and (docstring := docstring_of(function.body)):
        above = lines.starts[docstring.lineno - 1]
        cut = above if above > begin else cut  # else all on one line: it stays together
    return Surroundings(
        line=line,
        header=broken_text[begin:cut].rstrip(),
        docstring=broken_text[cut:end].rstrip(),
        name=name,
        owner="" if owner is None else owner.name,
        siblings=() if owner is None else _names(owner.body, chain),
        neighbours=_names(module.body, chain),
    )


def _names(body: Sequence[ast.stmt], chain: Sequence[ast.AST]) -> tuple[str, ...]:
    """What a block defines beside the nodes of the chain, each name once, in its order."""
    others = (node.name for node in body if isinstance(node, Definition) and node not in chain)
    return tuple(dict.fromkeys(others))


# --- The broken places.


def line_of(broken_text: str, hole: Hole) -> int:
    """The line, counted from 1, of what stands in a hole."""
    marker = broken_text[hole.start : hole.end]
    start = hole.start + len(marker) - len(marker.lstrip())
    return sum(begin <= start for begin in Lines(broken_text).starts)


def first_broken_line(store: TaskStore, task: Task) -> int | None:
    """The line, counted from 1, of the first change in the task's own file; None when the file is gone or as it was."""
    holes = [hole for hole in task.holes if hole.path == task.path]
    return line_of(store.files(task, "rollout")[task.path].decode(), holes[0]) if holes else None


# --- The text itself.

MAX_FUNCTIONS = 20
MAX_DOCSTRING_LINES = 12
"""Of each docstring where there are several functions; the tree has them in full."""
MAX_NAMES = 20
"""Names of tests or neighbours in one list; a prompt is short and the tree has the rest."""
MAX_SOURCES = 6
MAX_SOURCE_LINES = 30
MAX_LINE_CHARS = 400
"""Of a line of code: a test may hold a whole file in one."""


Places = Sequence[tuple[str, Surroundings]]
"""The surroundings of each hole with its path; none where code is gone altogether."""
Sources = Sequence[tuple[str, str]]
"""Path and source of each visible test function."""


def write_instruction(store: TaskStore, task: Task) -> str:
    """``plain_instruction``; an InputError where even the shortest text would show golden code (CR0429)."""
    text = plain_instruction(store, task)
    if text is None:
        detail, fix = "the instruction would contain the deleted code.", "build without that symbol."
        raise InputError("CR0429", detail, where=task.task_id, fix=f"leave this task out: {fix}")
    return text


def plain_instruction(store: TaskStore, task: Task) -> str | None:
    """The instruction of a task, in Markdown; None where even the shortest text would show golden code.

    The source of a visible test, or a docstring, that holds the very lines that were deleted is left out. What a foreign
    task set says in its own words stands in the place of ours.
    """
    spans, statement = golden_spans(store, task), store.record(task.task_id).statement.strip()
    tree = store.files(task, "rollout")
    places = []
    for hole in () if task.removal == "whole" else task.holes:
        place = look_around(tree[hole.path].decode("utf-8", "replace"), hole)
        place = replace(place, docstring="") if shows_any(place.docstring, spans) else place
        places.append((hole.path, place))
    sources = [source for source in shown_sources(store, task) if not shows_any(source[1], spans)]
    changed = sorted({*(hole.path for hole in task.holes), *task.removed_files})
    text = instruction_text(task, places, sources, changed, statement)
    return None if shows_any(text, spans) else text


def shown_sources(store: TaskStore, task: Task) -> Sources:
    """The visible test functions that are found in the tree of a rollout; the first of each file with the imports that fail
    without the code.
    """
    imports: dict[str, str] = defaultdict(str)
    for edit in store.record(task.task_id).test_edits:
        imports[edit.path] += f"{edit.text}\n\n\n" if edit.text.startswith("try:") else ""
    found = sources_of_tests(store, task, task.tests.shown, "rollout")
    return [(path, imports.pop(path, "") + source) for path, source in found if source]


def sources_of_tests(
    store: TaskStore, task: Task, tests: Iterable[str], view: View
) -> Iterator[tuple[str, str]]:
    """Path and source of each test function of some tests, as a view of the task has it; empty where it is not found.

    A file may have lost other tests above it.
    """
    record, tree = store.record(task.task_id), store.files(task, view)
    repository = store.repository(record.repository_record)
    edits = () if view == "golden" else record.changes.edits_of_tests(view)
    for path, first, name in sorted({repository.places[test] for test in tests if test in repository.places}):
        own = [edit for edit in edits if edit.path == path]
        original = store.blob(repository.files[path]).decode("utf-8", "replace") if own else ""
        line = shifted_line(original, own, first) if own else first
        texts = function_texts(tree.get(path, b"").decode("utf-8", "replace"))
        yield path, texts.get((line, name), "")


def instruction_text(
    task: Task, places: Places, sources: Sources, changed: Sequence[str] = (), statement: str = ""
) -> str:
    """Put the instruction together; lists and sources that are too long are clipped and say so.

    ``changed`` are the files that lost code.
    """
    if statement:
        parts: Iterable[str] = [statement]
    elif task.removal == "whole":
        parts = _whole_parts(task, changed)
    elif len(places) == 1:
        parts = _one_body_parts(task, places[0])
    else:
        parts = _bodies_parts(task, places)
    return "\n\n".join([*parts, *_tests_parts(task.tests.shown, sources)]) + "\n"


def _one_body_parts(task: Task, place: tuple[str, Surroundings]) -> Iterator[str]:
    path, surroundings = place
    name = task.symbol if task.granularity == "function" else surroundings.name or task.symbol
    yield f"Write the body of `{name}` in `{path}`."
    yield f"The body was removed; at line {surroundings.line} stands `{MARKER_STATEMENT}` in its place."
    shown = "\n".join(part for part in (surroundings.header, surroundings.docstring) if part)
    if shown:
        yield from ("Everything else stays as it is, this too:", fenced(shown))
    if surroundings.owner:
        beside = f", beside {listed(surroundings.siblings)}" if surroundings.siblings else ""
        yield f"It belongs to the class `{surroundings.owner}`{beside}."
    if surroundings.neighbours:
        yield f"The file also defines {listed(surroundings.neighbours)}."


def _bodies_parts(task: Task, places: Places) -> Iterator[str]:
    """Each function with its line, signature and docstring, file after file."""
    what = {"class": "the class ", "module": "the module "}.get(task.granularity, "")
    ending = ", here and in the functions that only it needs" if task.granularity == "feature" else ""
    yield f"Write the {len(places)} missing bodies of {what}`{task.symbol}` in `{task.path}`{ending}."
    yield f"In the place of each stands `{MARKER_STATEMENT}`. Everything else stays as it is, this too:"
    for path, own in groupby(places[:MAX_FUNCTIONS], key=itemgetter(0)):
        yield f"In `{path}`:"
        for _, around in own:
            yield f"`{around.name}`, line {around.line}:" if around.name else f"Line {around.line}:"
            docstring = [clipped(around.docstring, MAX_DOCSTRING_LINES)] if around.docstring else []
            if around.header or docstring:
                yield fenced("\n".join([around.header, *docstring]))
    yield from and_more(len(places) - MAX_FUNCTIONS, "And {} more functions with that statement in them.")


def _whole_parts(task: Task, changed: Sequence[str]) -> Iterator[str]:
    """What is gone, and which files lost lines."""
    is_gone = task.path in task.removed_files
    if task.granularity == "module":
        yield f"Write the module `{task.symbol}` again: the file `{task.path}` is gone."
    else:
        kind = "method" if task.granularity == "function" and "." in task.symbol else task.granularity
        file = f"the file `{task.path}`, which is gone too" if is_gone else f"`{task.path}`"
        ending = ", with everything that only it needs" if task.granularity == "feature" else ""
        yield f"Write the {kind} `{task.symbol}` again: it was removed from {file}{ending}."
    if others := [path for path in changed if path != task.path]:
        yield f"Lines are missing in other files too: {listed(others)}."


def _tests_parts(tests: Sequence[str], sources: Sources) -> Iterator[str]:
    """The tests that have to pass: their names, and the source of the first ones."""
    failing = "This test fails now and has" if len(tests) == 1 else "These tests fail now and have"
    yield f"{failing} to pass:"
    names = [f"- {_short(test)}" for test in tests[:MAX_NAMES]]
    yield "\n".join([*names, *and_more(len(tests) - MAX_NAMES, "- and {} more")])
    for path, source in sources[:MAX_SOURCES]:
        yield from (f"From `{path}`:", fenced(clipped(source)))
    yield from and_more(len(sources) - MAX_SOURCES, "The tests have {} more functions.")


def listed(names: Sequence[str]) -> str:
    """Names in one line."""
    shown = [f"`{name}`" for name in names[:MAX_NAMES]]
    return ", ".join([*shown, *and_more(len(names) - MAX_NAMES, "{} more")])


def and_more(num_left: int, text: str) -> list[str]:
    """One sentence about what was left out; none when nothing was."""
    return [text.format(num_left)] if num_left > 0 else []


def clipped(source: str, max_lines: int = MAX_SOURCE_LINES) -> str:
    """The first lines of some code; the number of the others is said in a comment."""
    lines = [_short(line) for line in source.rstrip().splitlines()]
    left = len(lines) - max_lines
    return "\n".join([*lines[:max_lines], *and_more(left, "# {} more lines")])


def _short(line: str) -> str:
    return "".join([line[:MAX_LINE_CHARS], *and_more(len(line) - MAX_LINE_CHARS, " … {} more characters")])


def fenced(code: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}python\n{code}\n{fence}"
