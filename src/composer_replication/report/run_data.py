"""A run folder as frozen records, with what is missing left missing."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, read_json, read_jsonl

_FIGURES = ("in_loop_ema", "heldout_ema", "kl_ema", "proxy_real_gap", "decline_streak")
"""The numbers of a verdict that are shown."""

NUM_LAST_STEPS = 5
"""Steps whose rollouts are read: the same five that ``reward_last`` averages."""


@dataclass(frozen=True, slots=True)
class GuardUpdate:
    """One guard update; ``step`` is the step whose reward it judged."""

    step: int
    fire: bool
    reason: str
    figures: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything the report may speak of; None or empty where the folder has nothing.

    ``metrics`` are the numbers of each step by name, None for null and NaN; ``rollouts`` the graded attempts of the last
    steps; ``num_ungraded`` counts those that infrastructure kept from a reward; ``findings`` are what the trainer's checks
    said, the rows of ``checks.jsonl``; ``outer_steps`` the merges with other replicas.
    """

    root: Path
    recipe: Mapping[str, Any] | None
    metrics: Mapping[int, Mapping[str, float | None]]
    guard_updates: tuple[GuardUpdate, ...]
    kl_path: str
    environment: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] | None = None
    rollouts: tuple[Mapping[str, Any], ...] = ()
    num_ungraded: int = 0
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    findings: tuple[Mapping[str, Any], ...] = ()
    outer_steps: tuple[Mapping[str, Any], ...] = ()

    @property
    def guard_settings(self) -> Mapping[str, Any] | None:
        """The ``[guard]`` table; None where there is none, or no recipe."""
        table = (self.recipe or {}).get("guard")
        return table if isinstance(table, dict) else None

    @property
    def halt(self) -> GuardUpdate | None:
        """The first update that fired."""
        return next((update for update in self.guard_updates if update.fire), None)

    def column(self, key: str) -> list[tuple[int, float | None]]:
        """(step, value) of the steps that carry the key."""
        return [(step, row[key]) for step, row in self.metrics.items() if key in row]

    def known(self, key: str) -> list[float]:
        """The values of a column that are numbers."""
        return [value for _, value in self.column(key) if value is not None]


def read_run(path: Path) -> RunData:
    """Read a run folder, whole or interrupted: the folder that ``train`` or ``quickstart`` wrote.

    Raises:
        InputError: the path is not a run folder, has no metrics, or a file in it cannot be read (CR0630; CR0401
            from ``run_folder``).
    """
    folder = RunFolder(path)
    if not any(file.is_file() for file in (folder.recipe, folder.metrics, folder.summary)):
        problem = "this is not a run folder: it has none of run.toml, metrics.jsonl and summary.json."
        fix = "give the folder that --out named, for example composer-rl report runs/quickstart."
        raise InputError("CR0630", problem, where=str(folder.root), fix=fix)
    metrics = {
        int(row["step"]): {
            key: number(value)
            for key, value in row.items()
            if value is None or isinstance(value, (int, float))
        }
        for row in sorted(_rows(folder.metrics, "step"), key=itemgetter("step"))
    }
    if not metrics:
        problem = "the run has no metrics yet, so there is nothing to show."
        fix = "composer-rl train RECIPE.toml --out RUN --resume"
        raise InputError("CR0630", problem, where=str(folder.metrics), fix=fix)
    environment, summary = _json(folder.environment), _json(folder.summary)
    verdicts, last_rollouts = _rows(folder.verdicts, "round_idx"), _last_rollouts(folder.rollouts)
    graded = tuple(_attempt(row) for row in last_rollouts if number(row.get("reward")) is not None)
    return RunData(
        root=folder.root,
        recipe=_read_recipe(folder.recipe),
        environment=environment,
        summary=summary,
        metrics=metrics,
        guard_updates=_guard_updates(verdicts, metrics),
        rollouts=graded,
        num_ungraded=len(last_rollouts) - len(graded),
        before=(summary or {}).get("before") or _json(folder.root / "before.json"),
        after=(summary or {}).get("after") or _json(folder.root / "after.json"),
        kl_path=next((str(row["kl_path"]) for row in reversed(verdicts) if row.get("kl_path")), ""),
        findings=tuple(_rows(folder.checks)),
        outer_steps=tuple(_rows(folder.outer_steps)),
    )


def number(value: object) -> float | None:
    """A finite number as a float; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def table_of(value: object) -> Mapping[str, Any]:
    """A table of a recipe, a summary or a row; empty where it is something else."""
    return value if isinstance(value, dict) else {}


def _json(path: Path) -> Mapping[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _rows(path: Path, label: str = "") -> list[dict[str, Any]]:
    """The rows of a file, each with an integer under ``label``, where one is named."""
    try:
        rows: list[Any] = read_jsonl(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"the file cannot be read: {error}.") from error
    for line, row in enumerate(rows, start=1):
        value = number(row.get(label)) if isinstance(row, dict) else None
        if not isinstance(row, dict) or (label and (value is None or not value.is_integer())):
            problem = f"a line is no JSON object{f' with an integer {label}' if label else ''}."
            raise _unreadable(f"{path}:{line}", problem)
    return rows


def _unreadable(where: Path | str, message: str) -> InputError:
    fix = "restore the file, or take out that line, and try again."
    return InputError("CR0630", message, where=str(where), fix=fix)


def _read_recipe(path: Path) -> Mapping[str, Any] | None:
    """The raw table: a recipe of an older version must not keep its report from being read."""
    if not path.is_file():
        return None
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _unreadable(path, f"the recipe is not valid TOML: {error}.") from error


def _guard_updates(
    verdicts: list[dict[str, Any]], metrics: Mapping[int, Mapping[str, float | None]]
) -> tuple[GuardUpdate, ...]:
    """From ``verdicts.jsonl``.

    A verdict is labelled with the weights' age (``round_idx``); its metrics line tells
    at which step it was given. Without that line the last known distance is used.
    """
    labels = ((row.get("killswitch/round_idx"), step) for step, row in metrics.items())
    step_of = {int(label): step for label, step in labels if label is not None}
    updates, distance = [], 0
    for row in verdicts:
        label = int(row["round_idx"])
        distance = step_of.get(label, label + distance) - label
        reason = str(row.get("reason") or "").removeprefix("latched:").strip()
        figures = {name: number(row.get(name)) for name in _FIGURES}
        updates.append(GuardUpdate(label + distance, bool(row.get("fire")), reason, figures))
    return tuple(updates)


def _last_rollouts(folder: Path) -> list[dict[str, Any]]:
    """Of the last steps; where several processes trained, each has a file a step."""
    files = sorted(folder.glob("step-*.jsonl"))
    last = tuple(sorted({file.name[: len("step-000001")] for file in files})[-NUM_LAST_STEPS:])
    return [row for file in files if file.name.startswith(last) for row in _rows(file)]


def _attempt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A graded attempt, failing tests first; only the fields named here can ever reach the page."""
    outcomes = [(str(k), str(v)) for k, v in table_of(row.get("outcomes")).items()]
    return {
        "task_id": str(row.get("task_id") or "unknown task"),
        "step": int(number(row.get("step")) or 0),
        "text": str(row.get("text") or ""),
        "patch": str(row["patch"]) if "patch" in row else None,
        "reward": float(row["reward"]),
        "outcomes": dict(sorted(outcomes, key=lambda item: (item[1] == "passed", item[0]))),
        "num_failing": sum(outcome != "passed" for _, outcome in outcomes),
        "error": str(row.get("error") or ""),
        "stop_reason": str(row.get("stop_reason") or ""),
    }
