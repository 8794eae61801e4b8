"""The gate against the solver that has learned the visible tests by heart.

Functions that have a twin are safe from it: a twin that a table of all recorded calls passes is thrown away. Here
are the others, methods of deleted classes above all: their hidden tests must catch a table that was made
from the visible ones.
"""

from __future__ import annotations

import ast
import base64
import json
import textwrap
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from composer_replication.tasks.intake.source_folders import below_root, recorded_folders
from composer_replication.tasks.planning.body_cuts import MARKER_STATEMENT, BodyCut
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.syntax_trees import parsed
from composer_replication.tasks.test_run import Trial
from composer_replication.tasks.twin.twin_records import Twin
from composer_replication.tasks.twin.twin_run import (
    CALL_SECONDS,
    Job,
    RecordedCall,
    RecordedFunction,
    helper_source,
    play_apart,
    record_calls,
)

# --- The solver that cheats: it answers every call that a visible test makes from a table.

HELPER = "composer_lookup_table"
"""The module that holds the table; it lies where the tree's packages are imported from."""

_HELPER = """
import base64, gc, inspect, json, pickle, sys, types, zlib

_DATA = json.loads(zlib.decompress(base64.b64decode({data!r})))
for _name, _source in _DATA["sources"]:
    if _name not in sys.modules:
        sys.modules[_name] = types.ModuleType(_name)
        exec(compile(_source, _name, "exec"), sys.modules[_name].__dict__)
_encoding = sys.modules["canonical_encoding"]
sys.modules["call_pickle"].load_cloudpickle(_DATA["cloudpickle"])
_table = None


def _key(values):
    return _encoding.digest(_encoding.encode(values, is_result=False, with_code=True))


def _load(code):
    function = next(f for f in gc.get_referrers(code) if isinstance(f, types.FunctionType))
    signature = inspect.signature(function, follow_wrapped=False)
    table = {{}}
    for call, answer in _DATA["calls"]:
        try:
            args, kwargs = pickle.loads(base64.b64decode(call))
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            table[_key(dict(bound.arguments))] = base64.b64decode(answer)
        except Exception:
            continue
    return table


def answer(values):
    global _table
    if _table is None:
        _table = _load(sys._getframe(1).f_code)
    found = _table.get(_key(values))
    if found is None:
        return None
    how, value = pickle.loads(found)
    if how == "raise":
        raise value
    return iter(value) if how == "iterator" else value
"""


Table = Sequence[tuple[bytes, bytes]]
"""Of each call the pickled arguments, and the pickled answer of the golden code. Secret."""


def answered_calls(
    bench: Bench, functions: Sequence[tuple[BodyCut, Sequence[RecordedCall]]]
) -> tuple[dict[str, list[bytes | None]], dict[str, str]]:
    """The pickled answer of the golden code to each recorded call, by pin; None where there is none.

    Returns:
        The answers, and for each function whose replay took its sandbox down what went wrong: of its
        other calls nothing is known. One that cannot be imported alone answers nothing, and is not among these.
    """
    jobs = [
        Job(RecordedFunction(cut.path, cut.symbol, tuple(call.blob for call in calls)), "answers")
        for cut, calls in functions
    ]
    # A table that lacks slow calls refuses less.
    reports = play_apart(bench, jobs, call_seconds=2 * CALL_SECONDS)
    answers: dict[str, list[bytes | None]] = {}
    problems: dict[str, str] = {}
    for (cut, calls), report in zip(functions, reports, strict=True):
        answers[cut.pin] = [*map(report.answers.get, range(len(calls)))]
        if report.is_unknown:
            problems[cut.pin] = report.error
    return answers, problems


def helper_file(files: Mapping[str, bytes], path: str, name: str, calls: Table) -> tuple[str, bytes]:
    """The module that answers for one function: where the file at ``path`` can import it, and its text."""
    data = {
        "sources": [(module, helper_source(module)) for module in ("canonical_encoding", "call_pickle")],
        "cloudpickle": helper_source("cloudpickle"),
        "calls": [[base64.b64encode(part).decode() for part in call] for call in calls],
    }
    packed = base64.b64encode(zlib.compress(json.dumps(data).encode(), 6)).decode()
    root = path.removesuffix(below_root(path, recorded_folders(files)))
    return f"{root}{name}.py", _HELPER.format(data=packed).encode()


# --- The gate against the solver that has learned the visible tests by heart.

MIN_SHARE = 0.5
"""Of the deleted lines: where a table can stand for less, whoever uses one still has to write the rest."""


@dataclass(frozen=True, slots=True)
class TrueTask:
    """A task whose tests and twins are tried on other code; ``cuts`` are its deleted functions, ``twins`` are by pin."""

    task_id: str
    subject: Subject
    cuts: tuple[BodyCut, ...]
    twins: Mapping[str, Twin]

    def tests(self, view: str) -> tuple[str, ...]:
        return self.subject.hidden if view == "hidden" else self.subject.visible


@dataclass(frozen=True, slots=True)
class LookupFindings:
    """``passed`` has the reason for each task that tables solve. ``untried`` has, for each task of which that is
    not known, why by pin of the function: the run that records its calls failed, or the one that replays them.
    """

    passed: Mapping[str, str] = field(default_factory=dict)
    untried: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def passed_by_lookup(bench: Bench, trials: Sequence[TrueTask]) -> LookupFindings:
    """Tasks whose visible and hidden tests all pass with tables in the place of functions.

    A table knows the calls that visible tests make of a function, and what the golden code answered; for
    any other call it gives None. It takes the place of each function that gives a value back; those that
    only change something stay golden. Where the tables stand for less than ``MIN_SHARE`` of the
    deleted lines, a task is not tried: that is an answer, unlike a run that failed twice.
    """
    cuts = {cut.pin: cut for trial in trials for cut in _replaceable(trial.cuts)}
    if not cuts:
        return LookupFindings()
    calls, problem = record_calls(bench, list(cuts.values()))
    if problem:
        return LookupFindings(untried=_untried(trials, None, dict.fromkeys(cuts, problem)))
    answers, unanswered = answered_calls(bench, [(cut, calls.get(cut.pin, ())) for cut in cuts.values()])
    known = {pin: list(zip(calls.get(pin, ()), answers[pin], strict=True)) for pin in cuts}
    passed = _passed(bench, [(trial, _tables(trial, known)) for trial in trials])
    untried = _untried([trial for trial in trials if trial.task_id not in passed], calls, unanswered)
    return LookupFindings(passed, untried)


def _untried(
    trials: Sequence[TrueTask],
    calls: Mapping[str, Sequence[RecordedCall]] | None,
    problems: Mapping[str, str],
) -> dict[str, dict[str, str]]:
    """Why tasks are not known to withstand a table, by task and pin, where one could be large enough.

    ``calls`` is None where none could be recorded: then visible tests may call every function.
    """
    found = {}
    for trial in trials:
        visible = set(trial.subject.visible)
        asked = [
            cut.pin
            for cut in _replaceable(trial.cuts)
            if calls is None or any(not visible.isdisjoint(call.tests) for call in calls.get(cut.pin, ()))
        ]
        own = {pin: problems[pin] for pin in asked if pin in problems}
        if own and _is_large(trial, asked):
            found[trial.task_id] = own
    return found


def _is_large(trial: TrueTask, pins: Collection[str]) -> bool:
    """Whether tables of these functions would stand for enough of what was deleted."""
    lines = sum(cut.num_body_lines for cut in trial.cuts if cut.pin in pins)
    return lines >= MIN_SHARE * sum(cut.num_body_lines for cut in trial.cuts)


def _passed(bench: Bench, trials: Sequence[tuple[TrueTask, Mapping[str, Table]]]) -> dict[str, str]:
    """The reason, by task id, where all tests pass with the tables; a small one is not tried."""
    runs: list[Trial] = []
    tried: list[TrueTask] = []
    for trial, tables in trials:
        if tables and _is_large(trial, tables):
            tried.append(trial)
            for view in ("visible", "hidden"):
                tree = with_tables(trial.subject.golden(bench.original, view), trial.cuts, tables)
                runs.append(Trial(tree, trial.tests(view), stop_at_first_failure=True))
    reports = iter(bench.run_all(runs))
    found = {}
    for trial, visible, hidden in zip(tried, reports, reports, strict=False):
        if visible.all_passed(trial.tests("visible")) and hidden.all_passed(trial.tests("hidden")):
            found[trial.task_id] = "a table of what the visible tests ask passes the hidden ones too"
    return found


def _replaceable(cuts: Sequence[BodyCut]) -> list[BodyCut]:
    """The functions that give a value back."""
    return [cut for cut in cuts if _gives_a_value(cut.golden_body)]


def _gives_a_value(body: str) -> bool:
    module = parsed("def _():\n" + textwrap.indent(textwrap.dedent(body), " "))
    if module is None:
        return "return" in body or "yield" in body
    return any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        or (isinstance(node, ast.Return) and node.value is not None)
        for node in ast.walk(module)
    )


def _tables(
    trial: TrueTask, known: Mapping[str, Sequence[tuple[RecordedCall, bytes | None]]]
) -> dict[str, Table]:
    """What the visible tests of a task tell of each function, by pin; one that they never call has no table."""
    visible = set(trial.subject.visible)
    tables: dict[str, Table] = {}
    for cut in _replaceable(trial.cuts):
        own = [
            (call.blob, answer)
            for call, answer in known.get(cut.pin, ())
            if answer is not None and not visible.isdisjoint(call.tests)
        ]
        if own:
            tables[cut.pin] = own
    return tables


def with_tables(
    files: Mapping[str, bytes], cuts: Sequence[BodyCut], tables: Mapping[str, Table]
) -> dict[str, bytes]:
    """The original tree with a table in the place of some functions."""
    changed = dict(files)
    chosen = sorted((cut for cut in cuts if cut.pin in tables), key=lambda cut: -cut.start)
    for number, cut in enumerate(chosen):
        name = f"{HELPER}_{number}"
        body = cut.marker.replace(MARKER_STATEMENT, f"return __import__({name!r}).answer(locals())")
        text = changed[cut.path].decode()
        changed[cut.path] = (text[: cut.start] + body + text[cut.end :]).encode()
        path, data = helper_file(files, cut.path, name, tables[cut.pin])
        changed[path] = data
    return changed
