"""A run folder as frozen records, with what is missing left missing."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer_replication.errors import InputError
from composer_replication.records import Finding
from composer_replication.run_folder import RunFolder, read_json, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FIGURES = ("in_loop_ema", "heldout_ema", "kl_ema", "proxy_real_gap", "decline_streak")
"""What a verdict and a ``GuardUpdate`` have under the same name."""

NUM_LAST_STEPS = 5
"""Steps whose rollouts are read: the same five that ``reward_last`` averages."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of ``metrics.jsonl``: numbers by name; None stands for null and NaN."""

    step: int
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class GuardUpdate:
    """One guard update; ``step`` is the step whose reward it judged."""

    step: int
    round_idx: int
    fire: bool
    reason: str
    in_loop_ema: float | None
    heldout_ema: float | None
    kl_ema: float | None
    proxy_real_gap: float | None
    decline_streak: float | None


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One stored attempt, failing tests first; ``reward`` is None when infrastructure failed."""

    task_id: str
    step: int
    text: str
    reward: float | None
    outcomes: Mapping[str, str]
    error: str
    stop_reason: str

    @property
    def num_failing(self) -> int:
        return sum(outcome != "passed" for outcome in self.outcomes.values())

    @property
    def has_failed(self) -> bool:
        """A test of the reward failed, or the run of the tests itself did."""
        return bool(self.error) or self.num_failing > 0


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything the report may speak of; None or empty where the folder has nothing."""

    root: Path
    recipe: Mapping[str, Any] | None
    steps: tuple[StepMetrics, ...]
    guard_updates: tuple[GuardUpdate, ...]
    kl_path: str
    environment: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] | None = None
    rollouts: tuple[RolloutRow, ...] = ()
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    findings: tuple[Finding, ...] = ()

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
        return [(row.step, row.values[key]) for row in self.steps if key in row.values]


def read_run(path: Path) -> RunData:
    """Read a run folder, whole or interrupted.

    Args:
        path: the folder that ``train`` or ``quickstart`` wrote.

    Raises:
        InputError: the path is not a run folder, has no metrics, or a file in it cannot be read (CR0481; CR0401
            from ``run_folder``).
    """
    folder = RunFolder(path)
    if not any(file.is_file() for file in (folder.recipe, folder.metrics, folder.summary)):
        raise InputError(
            "CR0481",
            "this is not a run folder: it has none of run.toml, metrics.jsonl and summary.json.",
            where=str(folder.root),
            fix="give the folder that --out named, for example composer-rl report runs/quickstart.",
        )
    steps = _read_steps(folder.metrics)
    if not steps:
        raise InputError(
            "CR0481",
            "the run has no metrics yet, so there is nothing to show.",
            where=str(folder.metrics),
            fix="composer-rl train RECIPE.toml --out RUN --resume",
        )
    environment = read_json(folder.environment) if folder.environment.is_file() else None
    summary = read_json(folder.summary) if folder.summary.is_file() else None
    verdicts = _rows(folder.verdicts)
    return RunData(
        root=folder.root,
        recipe=_read_recipe(folder.recipe),
        environment=environment,
        summary=summary,
        steps=steps,
        guard_updates=_guard_updates(verdicts, steps),
        rollouts=_last_rollouts(folder.rollouts),
        before=_rates(folder.root, summary, "before"),
        after=_rates(folder.root, summary, "after"),
        kl_path=_kl_path(environment, verdicts),
        findings=read_findings(folder.checks),
    )


def read_findings(path: Path) -> tuple[Finding, ...]:
    """What the trainer's checks said, from ``checks.jsonl``; empty where the file is missing.

    Raises:
        InputError: a line is not a finding (CR0481; CR0401 from ``run_folder``).
    """
    return tuple(_finding(row, f"{path}:{line}") for line, row in enumerate(_rows(path), start=1))


def number(value: object) -> float | None:
    """A finite number as a float; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = read_jsonl(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"the file cannot be read: {error}.") from error
    for line, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise _unreadable(f"{path}:{line}", "a line is not a JSON object.")
    return rows


def _unreadable(where: Path | str, message: str) -> InputError:
    return InputError(
        "CR0481", message, where=str(where), fix="restore the file, or take out that line, and try again."
    )


def _read_recipe(path: Path) -> Mapping[str, Any] | None:
    """The raw table: a recipe of an older version must not keep its report from being read."""
    if not path.is_file():
        return None
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _unreadable(path, f"the recipe is not valid TOML: {error}.") from error


def _integer(row: Mapping[str, Any], key: str, where: str) -> int:
    value = number(row.get(key))
    if value is None or value != int(value):
        raise _unreadable(where, f"a line has no integer {key}.")
    return int(value)


def _read_steps(path: Path) -> tuple[StepMetrics, ...]:
    by_step: dict[int, StepMetrics] = {}
    for line, row in enumerate(_rows(path), start=1):
        step = _integer(row, "step", f"{path}:{line}")
        values = {
            key: number(value)
            for key, value in row.items()
            if key != "step" and (value is None or isinstance(value, (int, float)))
        }
        by_step[step] = StepMetrics(step, values)
    return tuple(by_step[step] for step in sorted(by_step))


def _guard_updates(verdicts: list[dict[str, Any]], steps: tuple[StepMetrics, ...]) -> tuple[GuardUpdate, ...]:
    """From ``verdicts.jsonl``.

    A verdict is labelled with the weights' age (``round_idx``); its metrics line tells
    at which step it was given. Without that line the last known distance is used.
    """
    step_of = {
        int(label): row.step for row in steps if (label := row.values.get("killswitch/round_idx")) is not None
    }
    updates, distance = [], 0
    for line, row in enumerate(verdicts, start=1):
        label = _integer(row, "round_idx", f"verdicts.jsonl:{line}")
        distance = step_of.get(label, label + distance) - label
        reason = str(row.get("reason") or "").removeprefix("latched:").strip()
        figures = (number(row.get(name)) for name in _FIGURES)
        updates.append(GuardUpdate(label + distance, label, bool(row.get("fire")), reason, *figures))
    return tuple(updates)


def _last_rollouts(folder: Path) -> tuple[RolloutRow, ...]:
    files = sorted(folder.glob("step-*.jsonl"))[-NUM_LAST_STEPS:]
    return tuple(_rollout(row) for file in files for row in _rows(file))


def _rollout(row: Mapping[str, Any]) -> RolloutRow:
    """Only the fields named here can ever reach the page."""
    stored = row.get("outcomes")
    outcomes = [(str(k), str(v)) for k, v in stored.items()] if isinstance(stored, dict) else []
    step = number(row.get("step"))
    return RolloutRow(
        task_id=str(row.get("task_id") or "unknown task"),
        step=0 if step is None else int(step),
        text=str(row.get("text") or ""),
        reward=number(row.get("reward")),
        outcomes=dict(sorted(outcomes, key=lambda item: (item[1] == "passed", item[0]))),
        error=str(row.get("error") or ""),
        stop_reason=str(row.get("stop_reason") or ""),
    )


def _finding(row: Mapping[str, Any], where: str) -> Finding:
    texts = {key: row.get(key) for key in ("code", "name", "level", "sentence", "fix")}
    figures = row.get("figures")
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(figures, dict):
        raise _unreadable(where, "a line is not a finding of a check.")
    numbers = {
        str(name): math.nan if number(value) is None else float(value) for name, value in figures.items()
    }
    return Finding(step=_integer(row, "step", where), figures=numbers, **texts)  # type: ignore[arg-type]


def _rates(root: Path, summary: Mapping[str, Any] | None, when: str) -> Mapping[str, Any] | None:
    """Pass rates from the summary; of an interrupted run, from the file they are kept in meanwhile."""
    stored = (summary or {}).get(when)
    if isinstance(stored, dict):
        return stored
    path = root / f"{when}.json"
    return read_json(path) if path.is_file() else None


def _kl_path(environment: Mapping[str, Any] | None, verdicts: list[dict[str, Any]]) -> str:
    """The note on how the KL was measured, or why it was not; the newest one."""
    notes = [(environment or {}).get("kl_path"), *(row.get("kl_path") for row in verdicts)]
    texts = [note for note in notes if isinstance(note, str) and note]
    return texts[-1] if texts else ""
