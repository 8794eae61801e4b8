"""The state of a curriculum as JSON, floats exact, and back with checks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, get_args

from composer_replication.errors import InputError
from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum.evidence import Evidence
from composer_replication.rollouts.curriculum.standing import Standing, Status

STATE_VERSION = 2
TROUBLES = ("", "infrastructure")


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that the next draws depend on, but for seed and options.

    ``in_batch`` are the tasks drawn in the generation under way, ``pending`` its outcomes so far.
    """

    generation: int
    num_draws: int
    in_batch: frozenset[str]
    pending: tuple[TaskOutcome, ...]
    standings: Mapping[str, Standing]


def to_state(memory: Memory, fingerprint: str) -> dict[str, Any]:
    """JSON-safe and versioned; the order in which outcomes came is not in it."""
    return {
        "version": STATE_VERSION,
        "tasks_fingerprint": fingerprint,
        "generation": memory.generation,
        "num_draws": memory.num_draws,
        "in_batch": sorted(memory.in_batch),
        "pending": sorted([*astuple(outcome)] for outcome in memory.pending),
        "tasks": {
            task_id: {
                "evidence": list(astuple(standing.evidence)),
                "status": standing.status,
                "since": standing.since,
                "reason": standing.reason,
            }
            for task_id, standing in sorted(memory.standings.items())
        },
    }


def from_state(state: Mapping[str, Any], *, fingerprint: str, task_ids: Collection[str]) -> Memory:
    """What ``to_state`` wrote.

    Raises:
        InputError: not a curriculum's state, or of another version (CR0840); of another task store (CR0841); of
            other tasks (CR0842); a value cannot be (CR0843).
    """
    if state.get("version") != STATE_VERSION or not isinstance(state.get("tasks"), Mapping):
        raise InputError(
            "CR0840",
            f"this is no state of a curriculum of version {STATE_VERSION}.",
            where="prompt_source",
            fix="resume with the recipe, and the version of this program, that the run began with.",
        )
    found = state.get("tasks_fingerprint")
    if found != fingerprint:
        raise InputError(
            "CR0841",
            f"the curriculum was saved over the task store {found!r}, and this one is {fingerprint!r}.",
            where="prompt_source.tasks_fingerprint",
            fix="resume with the task store that the run began with, or begin a new run.",
        )
    foreign = sorted(set(state["tasks"]) ^ set(task_ids))
    if foreign:
        raise InputError(
            "CR0842",
            f"the curriculum was saved over other training tasks; {len(foreign)} differ, the first is {foreign[0]!r}.",
            where="prompt_source.tasks",
            fix="resume with the split and the settings that the run began with, or begin a new run.",
        )
    try:
        return Memory(
            generation=_count(state["generation"]),
            num_draws=_count(state["num_draws"]),
            in_batch=frozenset(_known(task_id, task_ids) for task_id in state["in_batch"]),
            pending=tuple(_outcome(row, task_ids) for row in state["pending"]),
            standings={task_id: _standing(row) for task_id, row in state["tasks"].items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            "CR0843",
            f"the saved curriculum cannot be read: {type(error).__name__}: {error}.",
            where="prompt_source",
            fix="delete that checkpoint and resume; the run goes on from the one before.",
        ) from error


def _standing(row: Mapping[str, Any]) -> Standing:
    status, since, reason = row["status"], row["since"], row["reason"]
    if status not in get_args(Status):
        raise ValueError(f"no status is called {status!r}")
    if not isinstance(reason, str):
        raise TypeError(f"{reason!r} is no reason")
    amounts = [_amount(value) for value in row["evidence"]]
    if len(amounts) != len(fields(Evidence)):
        raise ValueError(f"{len(amounts)} amounts are no evidence")
    return Standing(Evidence(*amounts), status, _count(since), reason)


def _outcome(row: Any, task_ids: Collection[str]) -> TaskOutcome:
    task_id, is_full_pass, credit, trouble = row
    outcome = TaskOutcome(_known(task_id, task_ids), is_full_pass, credit, trouble)
    problem = problem_of(outcome)
    if problem:
        raise ValueError(problem)
    return outcome


def problem_of(outcome: TaskOutcome) -> str:
    """Why an outcome cannot be counted; empty when it can."""
    is_full_pass: object = outcome.is_full_pass  # a reward of the user's own may give anything
    credit: object = outcome.credit
    if not isinstance(is_full_pass, bool):
        return f"is_full_pass is {is_full_pass!r}"
    if not isinstance(credit, int | float) or not 0.0 <= credit <= 1.0:  # NaN is not either
        return f"credit {credit!r} is not in [0, 1]"
    return "" if outcome.trouble in TROUBLES else f"no trouble is called {outcome.trouble!r}"


def _known(task_id: str, task_ids: Collection[str]) -> str:
    if task_id not in task_ids:
        raise ValueError(f"there is no task {task_id!r}")
    return task_id


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{value!r} is no amount")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
