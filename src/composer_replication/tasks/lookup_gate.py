"""The gate against the solver that has learned the visible tests by heart.

Functions that have a twin are safe from it: a twin that a table of all recorded calls passes is thrown away. Here
are the others, methods of deleted classes above all: their hidden tests must catch a table that was made
from the visible ones.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_replication.tasks.planning.body_cuts import MARKER_STATEMENT, BodyCut
from composer_replication.tasks.running.bench import Bench, Trial
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.twin.lookup_solver import HELPER, AnsweredCall, answered_calls, helper_file
from composer_replication.tasks.twin.twin_run import RecordedCall, record_calls

MIN_SHARE = 0.5
"""Of the deleted lines: where a table can stand for less, whoever uses one still has to write the rest."""
_RECORD_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class LookupTrial:
    """A task whose hidden tests are to be tried: what it is, and the functions that are gone in it."""

    task_id: str
    subject: Subject
    cuts: tuple[BodyCut, ...]


def passed_by_lookup(bench: Bench, trials: Sequence[LookupTrial]) -> dict[str, str]:
    """Tasks whose visible and hidden tests all pass with tables in the place of functions.

    A table knows the calls that visible tests make of a function, and what the golden code answered; for
    any other call it gives None. It takes the place of each function that gives a value back; those that
    only change something stay golden. Where the tables stand for less than ``MIN_SHARE`` of the
    deleted lines, or the recording fails, a task is not tried.

    Returns:
        The reason, by task id.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    cuts = {cut.pin: cut for trial in trials for cut in _replaceable(trial.cuts)}
    if not cuts:
        return {}
    calls, problem = record_calls(
        bench.original,
        bench.environment,
        list(cuts.values()),
        backend=bench.backend,
        timeout_seconds=_RECORD_SECONDS,
    )
    if problem:
        return {}
    answers = answered_calls(
        bench.original,
        bench.environment,
        [(cut, calls.get(cut.pin, ())) for cut in cuts.values()],
        bench.backend,
    )
    known = {pin: list(zip(calls.get(pin, ()), answers[pin], strict=True)) for pin in cuts}
    runs: list[Trial] = []
    tried: list[str] = []
    for trial in trials:
        tables = _tables(trial, known)
        lines = sum(cut.num_body_lines for cut in trial.cuts if cut.pin in tables)
        if tables and lines >= MIN_SHARE * sum(cut.num_body_lines for cut in trial.cuts):
            tried.append(trial.task_id)
            for view, tests in (("rollout", trial.subject.visible), ("hidden", trial.subject.hidden)):
                golden = trial.subject.golden(bench.original, view)
                tree = with_tables(golden, trial.cuts, tables)
                runs.append(Trial(tree, tests, stop_at_first_failure=True))
    reports = iter(bench.run_all(runs))
    found = {}
    for task_id, visible, hidden in zip(tried, reports, reports, strict=False):
        if not (visible.error or hidden.error) and _all(visible.outcomes) and _all(hidden.outcomes):
            found[task_id] = "a table of what the visible tests ask passes the hidden ones too"
    return found


def _all(outcomes: Mapping[str, str]) -> bool:
    return bool(outcomes) and all(outcome == "passed" for outcome in outcomes.values())


def _replaceable(cuts: Sequence[BodyCut]) -> list[BodyCut]:
    """The functions that give a value back."""
    return [cut for cut in cuts if _gives_a_value(cut.golden_body)]


def _gives_a_value(body: str) -> bool:
    try:
        module = ast.parse("def _():\n" + textwrap.indent(textwrap.dedent(body), " "))
    except (SyntaxError, ValueError, RecursionError):
        return "return" in body or "yield" in body
    return any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        or (isinstance(node, ast.Return) and node.value is not None)
        for node in ast.walk(module)
    )


def _tables(
    trial: LookupTrial, known: Mapping[str, Sequence[tuple[RecordedCall, bytes | None]]]
) -> dict[str, list[AnsweredCall]]:
    """What the visible tests of a task tell of each function, by pin; one that they never call has no table."""
    visible = set(trial.subject.visible)
    tables = {}
    for cut in _replaceable(trial.cuts):
        own = [
            AnsweredCall(call.blob, answer)
            for call, answer in known.get(cut.pin, ())
            if answer is not None and not visible.isdisjoint(call.tests)
        ]
        if own:
            tables[cut.pin] = own
    return tables


def with_tables(
    files: Mapping[str, bytes], cuts: Sequence[BodyCut], tables: Mapping[str, Sequence[AnsweredCall]]
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
