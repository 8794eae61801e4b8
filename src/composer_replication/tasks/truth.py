"""A truth stronger than the reward for each task: recorded behaviour beside hidden tests, and how strong all of it is."""

from __future__ import annotations

import ast
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from composer_replication.tasks.candidate import Candidate
from composer_replication.tasks.gates import Subject, subject_of
from composer_replication.tasks.planning.body_cuts import BodyCut, Deletion
from composer_replication.tasks.planning.edits import Lines, view_files
from composer_replication.tasks.running.bench import Bench, noticing_seconds
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.syntax_trees import (
    Definition,
    Function,
    docstring_of,
    first_line,
    parse_syntax,
)
from composer_replication.tasks.test_functions import is_named, words_of
from composer_replication.tasks.test_run import Trial
from composer_replication.tasks.twin.twin_run import Twin, TwinSearch, build_twins, judge_twins, twin_bytes
from composer_replication.tasks.workers import Workers

# --- Recorded behaviour.

FUNCTIONS_A_PART = 40
"""Of one repository: so many at most are recorded in one run of its suite. The behaviour of some packages is that of a hundred
functions, which would keep one processor busy long after the others.
"""
SAME_BEFORE = "the code before the patch does the same"
NO_TRUTH = "no-truth"
"""Neither a hidden test nor recorded behaviour, and it was looked for both."""

Tasks = Mapping[str, Candidate]
"""By task id, what the tasks of a store were made of that passed the gates."""


class _Recording:
    """The tasks of one repository while what their functions do is recorded, part by part; the last part keeps the twins.

    Tasks whose functions were looked at by an earlier build are left as they are. So are tasks that have neither hidden
    tests nor a twin: they are about to be refused, with the reason that is given here. A task of a foreign set has code
    where ours have a hole, so it keeps only twins that its broken tree fails.
    """

    def __init__(self, store: TaskStore, tasks: Tasks) -> None:
        self.tasks, self._store = tasks, store
        self._fair = {task_id: _known_cuts(store, task_id, one) for task_id, one in tasks.items()}
        secrets = {task_id: store.secret(task_id) for task_id in tasks}
        self._waiting = [task_id for task_id in tasks if secrets[task_id].twins is None]
        cuts = {cut.pin: cut for task_id in self._waiting for cut in self._fair[task_id]}
        # Of all tasks, not of those that wait: a build that was killed here must go on to the same twins.
        self._eager = {cut.pin for one in tasks if not secrets[one].hidden for cut in self._fair[one]}
        pins, size = sorted(cuts), FUNCTIONS_A_PART
        self.parts = [[cuts[pin] for pin in pins[at : at + size]] for at in range(0, len(pins), size)] or [[]]
        self._num_left, self._lock = len(self.parts), threading.Lock()
        self.found = TwinSearch({}, {})

    def record(self, part: Sequence[BodyCut], seed: int, workers: Workers) -> None:
        bench = next(iter(self.tasks.values())).repository.bench
        found = workers.call(build_twins, bench, part, seed=seed, eager=self._eager)
        with self._lock:
            self.found.twins.update(found.twins)
            self.found.without.update(found.without)
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._attach(bench)

    def _attach(self, bench: Bench) -> None:
        store, found = self._store, self.found
        digests = {pin: store.put_blob(twin_bytes(one), is_packed=True) for pin, one in found.twins.items()}
        for task_id in self._waiting:
            own = {cut.pin: digests[cut.pin] for cut in self._fair[task_id] if cut.pin in digests}
            record, secret = store.record(task_id), store.secret(task_id)
            if own and record.instance_id:
                broken = view_files(bench.original, record.changes, "hidden")
                for pin in _passed_by(broken, [found.twins[pin] for pin in own], bench):
                    del own[pin]
                    found.without.setdefault(pin, SAME_BEFORE)
            if own or secret.hidden:
                # Figures that were measured without the twins are measured again.
                store.put_task(replace(record, strength=None), replace(secret, twins=own))


def _passed_by(files: Mapping[str, bytes], twins: Sequence[Twin], bench: Bench) -> list[str]:
    """The pins of those twins that a tree passes."""
    scores = judge_twins(replace(bench, original=files), twins)
    return [twin.pin for twin, score in zip(twins, scores, strict=True) if score.passed]


def twin_cuts(deletion: Deletion) -> list[BodyCut]:
    """The functions whose twin is fair to every honest answer that knows their names.

    A method's recorded calls hold objects with the attributes that the original class gave them. An answer that writes the
    whole class may choose others, so methods take part only where one body alone is asked for.
    """
    is_one_body = deletion.granularity == "function" and deletion.removal == "body"
    return [cut for cut in deletion.bodies if is_one_body or "." not in cut.symbol]


def _known_cuts(store: TaskStore, task_id: str, candidate: Candidate) -> list[BodyCut]:
    """Those of ``twin_cuts`` whose names a rollout can know; with a body gone, its signature stays."""
    deletion, cuts = candidate.deletion, twin_cuts(candidate.deletion)
    if deletion.removal == "body" or not cuts:
        return cuts
    shown = view_files(candidate.repository.bench.original, store.record(task_id).changes, "rollout")
    given = words_of(f"{deletion.path} {deletion.symbol}")
    return [cut for cut in cuts if is_named(cut.path, cut.symbol, shown, given)]


# --- Small faults in a golden body, one at a time: another comparison, another arithmetic operator, ``and`` for ``or``, a
# constant one larger, another text, a ``not`` dropped or added, ``return None``, ``break`` for ``continue``, a statement
# deleted. Docstrings stay: deleting one changes nothing (DeMillo, Lipton, Sayward, Hints on test data selection, 1978).
# Some faults change nothing either, so no suite kills all.

_OPERATORS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_STATEMENTS: dict[type[ast.AST], str] = {
    ast.Break: "continue", ast.Continue: "break", ast.Assign: "pass", ast.AnnAssign: "pass", ast.AugAssign: "pass",
    ast.Raise: "pass", ast.Delete: "pass", ast.Assert: "pass",
}  # fmt: skip


def mutants_of(text: str, cut: BodyCut, *, max_mutants: int = 20) -> tuple[str, ...]:
    """Faulty bodies for the hole of a cut, in the order of the text; all differ from the golden one.

    Of more than ``max_mutants`` so many are drawn.
    """
    place = (cut.symbol.rpartition(".")[2].partition("#")[0], cut.first_line)
    (function,) = (one for one in _functions(text) if (one.name, first_line(one)) == place)
    lines = Lines(text)
    found: dict[str, None] = {}
    for node, new in _changes(function.body[1:] if docstring_of(function.body) else function.body):
        start, end = lines.span(node)
        if cut.start <= start <= end <= cut.end:
            found.setdefault(text[cut.start : start] + new + text[end : cut.end])
    found.pop(cut.golden_body, None)
    order = list(enumerate(found))
    random.Random(f"0/{cut.pin}").shuffle(order)  # noqa: S311  a sample, not a secret
    return tuple(body for _, body in sorted(order[:max_mutants]))


@lru_cache(maxsize=16)
def _functions(text: str) -> tuple[Function, ...]:
    """All functions of a file; nobody changes the nodes."""
    return tuple(node for node in ast.walk(parse_syntax(text)) if isinstance(node, Function))


def _changes(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """The nodes whose text is replaced, with the new text."""
    todo: list[ast.AST] = list(reversed(body))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt | ast.expr):
            yield from ((node, new) for new in _faults_of(node))
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        if isinstance(node, ast.JoinedStr):
            continue  # up to Python 3.11 the parts of an f-string have no place of their own
        docstring = docstring_of(node.body) if isinstance(node, Definition) else None
        todo += reversed([child for child in ast.iter_child_nodes(node) if child is not docstring])


def _faults_of(node: ast.AST) -> Iterator[str]:
    """What may stand in the place of a statement or expression."""
    if type(node) in _STATEMENTS:
        yield _STATEMENTS[type(node)]
    match node:
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return None"
        case ast.Expr(value=value) if not isinstance(value, ast.Constant):
            yield "pass"
        case ast.AugAssign(op=one) | ast.BinOp(op=one) | ast.BoolOp(op=one) if type(one) in _OPERATORS:
            text = _with(node, op=_OPERATORS[type(one)]())
            yield text if isinstance(node, ast.AugAssign) else f"({text})"
        case ast.Compare(ops=operators):
            for place, compared in enumerate(operators):
                others = [*operators[:place], _OPERATORS[type(compared)](), *operators[place + 1 :]]
                yield f"({_with(node, ops=others)})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() | int() | float() | str() as value):
            other = f"XX{value}" if isinstance(value, str) else value + 1
            yield repr(not value if isinstance(value, bool) else other)


def _with(node: ast.AST, **changed: object) -> str:
    """The text of a node with other fields."""
    return ast.unparse(type(node)(**{**vars(node), **changed}))


# --- Measure how strong the tests of tasks are, and keep the figures with them.

MAX_MUTANTS = 6
"""Of one task: enough to tell strong tests from weak ones, few enough for thousands of tasks."""
MAX_LOOKED_AT = 6 * MAX_MUTANTS
"""Among so many faults they are drawn; a module has thousands."""


@dataclass(frozen=True, eq=False, slots=True)
class _Fault:
    """One faulty body of one function of a task; ``file`` is the text of its file with it, ``twin`` knows the right one."""

    task_id: str
    subject: Subject
    twin: Twin | None
    path: str
    file: str


def _attach_strength(store: TaskStore, tasks: Tasks, seed: int, workers: Workers) -> None:
    """Keep with some tasks of one repository how strong their tests are."""
    faults = [fault for task_id, one in tasks.items() for fault in _draw(store, task_id, one, seed)]
    counts = workers.call(count_noticed, faults, next(iter(tasks.values())).repository.bench)
    for task_id in tasks:
        figures = {name: count[task_id] for name, count in counts.items()}
        store.put_task(replace(store.record(task_id), strength=figures), store.secret(task_id))


def _draw(store: TaskStore, task_id: str, candidate: Candidate, seed: int) -> list[_Fault]:
    """Faults of a task's functions, as many as are tried; of very many functions some are looked at."""
    original, cuts, task = candidate.repository.bench.original, candidate.deletion.bodies, store.get(task_id)
    subject, twins = subject_of(store, task), store.twins(task)
    draw = random.Random(f"{seed}/{task_id}")  # noqa: S311  a sample, not a secret
    found: dict[int, list[_Fault]] = {}
    for number in draw.sample(range(len(cuts)), len(cuts)):
        cut = cuts[number]
        text = original[cut.path].decode()
        files = [
            f"{text[: cut.start]}{body}{text[cut.end :]}"
            for body in mutants_of(text, cut, max_mutants=MAX_MUTANTS)
        ]
        found[number] = [_Fault(task_id, subject, twins.get(cut.pin), cut.path, file) for file in files]
        if sum(map(len, found.values())) >= MAX_LOOKED_AT:
            break
    faults = [fault for number in sorted(found) for fault in found[number]]
    chosen = draw.sample(range(len(faults)), min(len(faults), MAX_MUTANTS))
    return [faults[number] for number in sorted(chosen)]


def count_noticed(faults: Sequence[_Fault], bench: Bench) -> dict[str, Counter[str]]:
    """How many faults, put into the golden code one at a time, are noticed, by task.

    ``mutants`` were tried; visible tests alone notice ``killed_visible`` of them, with hidden tests and recorded behaviour
    ``killed_all`` are noticed. Hidden tests are asked only about faults that no visible test notices, and recorded
    behaviour only about those that are left then.
    """
    seen = _noticed_by_tests(faults, "visible", bench)
    killed = seen | _noticed_by_tests([fault for fault in faults if fault not in seen], "hidden", bench)
    killed |= _noticed_by_twins([fault for fault in faults if fault not in killed], bench)
    named = {"mutants": faults, "killed_visible": seen, "killed_all": killed}
    return {name: Counter(fault.task_id for fault in some) for name, some in named.items()}


def _noticed_by_tests(faults: Sequence[_Fault], view: str, bench: Bench) -> set[_Fault]:
    """The faults with which one of the task's tests of that view fails.

    How long the tests may take with a fault follows from what they take without one: so they are run first.
    """
    subjects = dict.fromkeys(fault.subject for fault in faults)
    golden = {
        one: Trial(one.golden(bench.original, view), one.sides[view]) for one in subjects if view in one.sides
    }
    alone = zip(golden, bench.run_all(list(golden.values())), strict=True)
    seconds = {one: noticing_seconds(report.cpu_seconds, bench.test_seconds) for one, report in alone}
    runs = {}
    for fault in faults:
        if trial := golden.get(one := fault.subject):
            files = {**trial.files, fault.path: fault.file.encode()}
            runs[fault] = replace(trial, files=files, seconds=seconds[one], stop_at_first_failure=True)
    reports = zip(runs.items(), bench.run_all(list(runs.values())), strict=True)
    return {fault for (fault, run), report in reports if not report.all_passed(run.node_ids or ())}


def _noticed_by_twins(faults: Sequence[_Fault], bench: Bench) -> set[_Fault]:
    """The faults that do something else than the golden code did, among those of functions whose behaviour is recorded."""
    asked = {fault: fault.twin for fault in faults if fault.twin}
    # All jobs work in one tree, so each writes the files anew in which another has its fault.
    whole = {fault.path: bench.original[fault.path].decode() for fault in asked}
    overlays = [{**whole, fault.path: fault.file} for fault in asked]
    scores = zip(asked, judge_twins(bench, list(asked.values()), overlays), strict=True)
    return {fault for fault, score in scores if not score.passed}


# --- All of it, for the tasks of a build.

TASKS_A_PART = 4
"""So many tasks are measured in the same sandboxes; a build that is cut off measures these again."""

Each = Callable[[Callable[[Any], Any], Collection[Any], str], Iterator[Any]]
"""Runs a function over items, several at a time, in their order, and says what is being done."""


def add_truth(
    store: TaskStore,
    tasks: Tasks,
    seed: int,
    *,
    each: Each,
    workers: Workers,
) -> Iterator[tuple[str, str, str]]:
    """Record what deleted functions do, and measure how strong the tests of each task are.

    Yields the tasks that have neither hidden tests nor recorded behaviour, each with the reason and a detail, as soon as
    that is known. The caller takes them out of the store before it goes on: a build that is cut off later does not ask
    again.
    """
    refused: set[str] = set()
    rows = [_Recording(store, own) for own in _by_repository(tasks)]
    parts = [(row, part) for row in rows for part in row.parts]
    recorded = each(lambda one: one[0].record(one[1], seed, workers), parts, "recorded functions")
    for row in rows:
        list(islice(recorded, len(row.parts)))
        for task_id, one in row.tasks.items():
            if not store.get(task_id).has_hidden_tests:
                refused.add(task_id)
                yield task_id, NO_TRUTH, _why_refused(one.deletion, row.found)
    new = {one: tasks[one] for one in tasks if one not in refused and store.record(one).strength is None}
    groups = [
        dict(islice(own.items(), first, first + TASKS_A_PART))
        for own in _by_repository(new)
        for first in range(0, len(own), TASKS_A_PART)
    ]
    list(each(lambda own: _attach_strength(store, own, seed, workers), groups, "strength of tasks"))


def _by_repository(tasks: Tasks) -> list[Tasks]:
    rows: dict[str, dict[str, Candidate]] = {}
    for task_id, one in tasks.items():
        rows.setdefault(one.repository.slug, {})[task_id] = one
    return list(rows.values())


def _why_refused(deletion: Deletion, search: TwinSearch) -> str:
    reasons = sorted({search.without[cut.pin] for cut in twin_cuts(deletion) if cut.pin in search.without})
    why = "; ".join(reasons) or "no function of it can be recorded alone under a name that stays in the tree"
    return f"no test function can be hidden, and the behaviour cannot be recorded: {why}"
