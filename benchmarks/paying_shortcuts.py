"""How often are shortcuts paid in full, by the tests that a policy sees and by these with the paid ones?

For each task that is the body of one function, answers are made of what the tests that are shown say, and of nothing else:
a table of their literal calls, which gives None for any other, and the value that belongs to the test that runs, by its
name. Each is graded once as in training. An answer that fails a shown test is no shortcut for its task, and is not counted
as paid. Tasks whose tests say no literal call have no such answer (all 15 of the quickstart: properties and methods).

    python benchmarks/paying_shortcuts.py [--tasks DIR]

Of a store without paid tests (one of an earlier version) they are drawn for the benchmark alone, as a build draws them.
"""

from __future__ import annotations

import argparse
import ast
import json
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.fair_split import words_of
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import Parting, subject_of
from composer_replication.tasks.test_functions import function_texts

TINY = Path(__file__).parents[1] / "recipes" / "tiny-cpu" / "project"
_TABLE = """\
_given = {name: value for name, value in locals().items() if name not in ("self", "cls")}
for _args, _named, _value in KNOWN:
    if list(_given.values())[:len(_args)] == _args and all(_given.get(name) == _named[name] for name in _named):
        return _value
"""
_BY_NAME = """\
import os
_test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0].rpartition("::")[2].partition("[")[0]
return KNOWN.get(_test)
"""
Call = tuple[list[Any], dict[str, Any], Any]


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=Path, metavar="DIR", help="a store; else the tiny project is built")
    folder = parser.parse_args().tasks
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            folder = Path(made) / "tasks"
            build_tasks([str(TINY)], folder)
        print(json.dumps(measure(TaskStore.open(folder)), indent=1))


def measure(store: TaskStore) -> dict[str, Any]:
    """Counts by kind of answer."""
    tasks = [_with_paid(store, task) for task in store.tasks() if task.is_one_hole]
    paying = [task for task in tasks if task.tests.paid]
    requests: list[tuple[str, GradeRequest]] = []
    for task in paying:
        requests += [(kind, GradeRequest(task, body)) for kind, body in written_answers(store, task).items()]
    with closing(Grader(store)) as grader:
        scores = grader.grade_many([request for _, request in requests])
    found: dict[str, Any] = {
        "tasks": len(tasks),
        "with_paid_tests": len(paying),
        "infrastructure_failures": scores.count(None),
    }
    for kind in dict.fromkeys(kind for kind, _ in requests):
        own = [score for (each, _), score in zip(requests, scores, strict=True) if each == kind and score]
        paid_by_shown = [score for score in own if score.passed_all(paid=False)]
        found[kind] = {
            "answers": len(own),
            "paid_in_full_by_shown_tests": len(paid_by_shown),
            "paid_in_full_with_paid_tests": sum(score.all_passed for score in paid_by_shown),
        }
    return found


def _with_paid(store: TaskStore, task: Task) -> Task:
    """The task, with paid tests drawn where its store knows none."""
    record = store.record(task.task_id)
    if record.paid_tests:
        return task
    repository = store.repository(record.repository_record)
    subject, original = subject_of(store, task), store.repository_files(record.repository_record)
    parting = Parting(subject, repository, original, seed=0, given=words_of(f"{task.path} {task.symbol}"))
    drawn = parting.pay(subject, salt=f"{task.task_id}/paid/0")
    return replace(task, tests=replace(task.tests, paid=drawn.tests.paid))


def written_answers(store: TaskStore, task: Task) -> dict[str, str]:
    """Answers by kind; none where the shown tests have no literal call of the function."""
    known = dict(_known_calls(store, task))
    calls = [call for own in known.values() for call in own]
    if not calls:
        return {}
    by_name = {name: own[0][2] for name, own in known.items() if own}
    bodies = {
        "table of literal calls": _TABLE.replace("KNOWN", repr(calls)),
        "value of the test that runs": _BY_NAME.replace("KNOWN", repr(by_name)),
    }
    hole, broken = task.hole, store.broken_text(task)
    marker = broken[hole.start : hole.end].lstrip("\r\n")
    margin = marker[: len(marker) - len(marker.lstrip())] or "    "
    return {kind: f"\n{textwrap.indent(body, margin)}" for kind, body in bodies.items()}


def _known_calls(store: TaskStore, task: Task) -> Iterator[tuple[str, list[Call]]]:
    """The literal calls of each test function that is shown, by its name."""
    record = store.record(task.task_id)
    repository = store.repository(record.repository_record)
    name = task.symbol.rpartition(".")[2]
    for path, line, test in sorted({repository.places[node_id] for node_id in task.tests.shown}):
        text = function_texts(store.original(record, path).decode("utf-8", "replace")).get((line, test), "")
        body = ast.parse(textwrap.dedent(text)).body
        if body and isinstance(body[0], ast.FunctionDef):
            function = body[0]
            yield test, [call for row in _rows(function) for call in _calls_in(function, name, row)]


def _rows(function: ast.FunctionDef) -> list[dict[str, ast.expr]]:
    """The values of the arguments of each case; one row without any where it is not parametrised by literals."""
    for decorator in function.decorator_list:
        match decorator:
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[names, ast.List(elts=cases), *_]):
                told = ast.literal_eval(names)
                wanted = told.replace(",", " ").split() if isinstance(told, str) else list(told)
                rows = [getattr(case, "elts", [case]) if len(wanted) > 1 else [case] for case in cases]
                return [dict(zip(wanted, row, strict=False)) for row in rows]
    return [{}]


def _calls_in(function: ast.FunctionDef, name: str, row: dict[str, ast.expr]) -> Iterator[Call]:
    """Calls with literal arguments and the value that an assertion wants of them."""
    for node in ast.walk(function):
        match node:
            case ast.Assert(
                test=ast.Compare(left=ast.Call() as call, ops=[ast.Eq() | ast.Is()], comparators=[value])
            ):
                pass
            case ast.Assert(test=ast.Call() as call):
                value = ast.Constant(value=True)
            case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call)):
                value = ast.Constant(value=False)
            case _:
                continue
        if getattr(call.func, "attr", getattr(call.func, "id", "")) == name:
            try:
                args = [_value(one, row) for one in call.args]
                yield (
                    args,
                    {one.arg or "": _value(one.value, row) for one in call.keywords},
                    _value(value, row),
                )
            except ValueError:
                continue


def _value(node: ast.expr, row: dict[str, ast.expr]) -> Any:
    return ast.literal_eval(row.get(node.id, node) if isinstance(node, ast.Name) else node)


if __name__ == "__main__":
    main()
