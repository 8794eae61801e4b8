"""Which task should the policy try next?

Those on which it sometimes passes and sometimes fails: a group whose answers all pass or all fail teaches nothing.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError

from composer_replication.config import Section
from composer_replication.errors import InputError
from composer_replication.records import TaskOutcome
from composer_replication.tasks.difficulty import FOLDER, read_difficulty

PRIOR = 0.5
"""Below all evidence lies Jeffreys' prior Beta(1/2, 1/2): most tasks are solved nearly always or nearly never.

Reference: Jeffreys, An invariant form for the prior probability in estimation problems, 1946.
"""
RETIRE_ABOVE, RETIRE_CERTAINTY = 0.9, 0.9
"""A task is retired once it is that certain that its pass rate is above the first."""
REVIVAL_CERTAINTY = 0.5
"""A retired task comes back once it is less likely than this that it is still solved."""
RECORDED_WEIGHT = 8.0
"""Attempts, at most, that a recorded pass rate counts as."""


class Standing(Section):
    """One task: counts of its attempts, faded by age, and whether it is drawn from.

    ``passed`` and ``failed`` are full passes and all other graded attempts, recorded ones included. Attempts that
    infrastructure took say nothing of the pass rate, and are not counted.
    """

    passed: NonNegativeFloat
    failed: NonNegativeFloat
    status: Literal["active", "retired"]

    @property
    def weight(self) -> float:
        """E[p (1 - p)] = a b / ((a + b)(a + b + 1)) for p ~ Beta(a, b): how much a group of this task is expected to teach.

        a and b are ``PRIOR`` + ``passed`` and + ``failed``. p (1 - p) is the variance of one attempt, at most 1/4. With few
        counts it stays near the 1/8 of Beta(1/2, 1/2), so a task that was hardly tried keeps its chance.
        """
        a, b = PRIOR + self.passed, PRIOR + self.failed
        return a * b / ((a + b) * (a + b + 1.0))

    def certainty_above(self, rate: float) -> float:
        """P(p > rate) for p ~ Beta(a, b), by the normal distribution of the same mean and variance."""
        a, b = PRIOR + self.passed, PRIOR + self.failed
        mean = a / (a + b)
        return 1.0 - NormalDist(mean, math.sqrt(mean * (1.0 - mean) / (a + b + 1.0))).cdf(rate)

    def faded(self, keep: float) -> Standing:
        """Every count times ``keep``, in [0, 1]."""
        return Standing(passed=self.passed * keep, failed=self.failed * keep, status=self.status)

    def judged(self, outcomes: Sequence[TaskOutcome]) -> Standing:
        """After new attempts, which may change the status."""
        graded = [outcome for outcome in outcomes if outcome.trouble != "infrastructure"]
        num_passed = sum(outcome.is_full_pass for outcome in graded)
        num_failed = len(graded) - num_passed
        after = Standing(passed=self.passed + num_passed, failed=self.failed + num_failed, status=self.status)
        certainty = after.certainty_above(RETIRE_ABOVE)
        if certainty >= RETIRE_CERTAINTY:
            return after.model_copy(update={"status": "retired"})
        if num_failed and certainty < REVIVAL_CERTAINTY:
            return after.model_copy(update={"status": "active"})
        return after


def recorded_standings(store_root: Path, *, parameter_sha256: Callable[[], str]) -> dict[str, Standing]:
    """By task id, the recorded passes and failures, scaled down to ``RECORDED_WEIGHT`` attempts in all.

    Counts of the very weights win; without any, those of all other policies are added up. A task without a measurement
    is left out. The weights are hashed (``parameter_sha256``) only where there is anything to read.
    """
    if not (Path(store_root) / FOLDER).is_dir():
        return {}
    own = parameter_sha256()
    found: dict[str, Standing] = {}
    for task_id, rows in read_difficulty(store_root).items():
        same = [row for row in rows if row.policy.parameter_sha256 == own]
        used = same or rows
        num_samples = sum(row.num_samples for row in used)
        num_passed = sum(row.num_passed for row in used)
        if num_samples:
            scale = min(1.0, RECORDED_WEIGHT / num_samples)
            num_failed = num_samples - num_passed
            found[task_id] = Standing(passed=num_passed * scale, failed=num_failed * scale, status="active")
    return found


class SavedCurriculum(Section):
    """Everything that the next draws depend on but for the seed, floats exact.

    ``in_batch`` are the tasks drawn in the generation under way, ``pending`` its outcomes so far (task, full pass,
    trouble), sorted: the order in which they came is not in it.
    """

    version: Literal[4] = 4
    tasks_fingerprint: str
    generation: NonNegativeInt
    num_draws: NonNegativeInt
    in_batch: list[str]
    pending: list[Annotated[list[Any], Field(min_length=3, max_length=3)]]
    tasks: dict[str, Standing]


class Curriculum:
    """A ``PromptSource`` that chooses: it draws each active task i by its expected p (1 - p).

    chance_i = (1 - floor_share) w_i / sum_j w_j + floor_share / num_active, w_i = E[p_i (1 - p_i)]

    under Beta(1/2 + passes, 1/2 + failures), the counts halved every ``half_life`` generations. Retired tasks share
    ``revival_share`` of the draws evenly. Inside a generation no task comes twice, replacements included. What a generation
    brings is counted when the next one begins, so the order in which its outcomes come changes nothing, bit for bit. A draw
    depends on seed, state and its number alone.

    Args:
        rows: of the training data, each with a ``task_id`` of its own; others are refused (CR0722).
        fingerprint: of the task store; a state of another one is refused.
        recorded: first evidence by task id; other ids are ignored.
    """

    half_life, floor_share, revival_share = 100.0, 0.1, 0.02

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        seed: int,
        fingerprint: str = "",
        recorded: Mapping[str, Standing] | None = None,
    ) -> None:
        by_task = {row["task_id"]: row for row in rows if isinstance(row.get("task_id"), str)}
        if not by_task or len(by_task) < len(rows):
            problem = (
                f"a curriculum cannot be made of these rows: {len(rows)} rows name {len(by_task)} tasks."
            )
            fix = "give one row a task, with its id in the column task_id."
            raise InputError("CR0722", problem, where="Curriculum(rows)", fix=fix)
        self._rows = dict(sorted(by_task.items()))  # the order of the data does not matter to a draw
        self._seed, self._fingerprint = seed, fingerprint
        self._keep = 0.5 ** (1.0 / self.half_life)
        self._noted: list[TaskOutcome] = []
        self._pending: list[TaskOutcome] = []
        self._in_batch: set[str] = set()
        self._generation = self._num_draws = 0
        untried, known = Standing(passed=0.0, failed=0.0, status="active"), recorded or {}
        self.standings = {task_id: known.get(task_id, untried) for task_id in self._rows}
        """By task id, as the newest draw knew them."""

    def probabilities(self) -> dict[str, float]:
        """By task id, the chance to be drawn first; the sum is 1."""
        weights = {i: s.weight for i, s in self.standings.items() if s.status == "active"}
        num_retired = len(self.standings) - len(weights)
        retired_share = 0.0 if not num_retired else self.revival_share if weights else 1.0
        chances = dict.fromkeys(self.standings, retired_share / max(num_retired, 1))
        total, floor = sum(weights.values()), self.floor_share
        for task_id, weight in weights.items():
            chance = (1.0 - floor) * weight / total + floor / len(weights)
            chances[task_id] = (1.0 - retired_share) * chance
        return chances

    def chosen_rows(self, num_rows: int) -> list[Mapping[str, Any]]:
        """Begin a generation; see ``PromptSource``. Where too few tasks have a chance, others fill it.

        What the generation before has brought is counted first, and everything fades.
        """
        if num_rows > len(self._rows):
            problem = f"a generation takes {num_rows} tasks, and there are {len(self._rows)}."
            fix = "begin a new run with more tasks or a smaller generation."
            raise InputError("CR0760", problem, where="[curriculum]", fix=fix)
        self._generation += 1
        by_task: defaultdict[str, list[TaskOutcome]] = defaultdict(list)
        for outcome in self._pending:
            by_task[outcome.task_id].append(outcome)
        self._pending = []
        for task_id, standing in self.standings.items():
            judged = standing.judged(by_task[task_id]) if task_id in by_task else standing
            self.standings[task_id] = judged.faded(self._keep)
        drawn = self._drawn(num_rows, without=())
        drawn += [task_id for task_id in self._rows if task_id not in drawn][: num_rows - len(drawn)]
        self._in_batch = set(drawn)
        return [self._rows[task_id] for task_id in drawn]

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """See ``PromptSource``; never a task that was in this generation already."""
        dull = {str(row.get("task_id")) for row in without_signal}
        drawn = self._drawn(num_rows, without=self._in_batch | dull)
        self._in_batch.update(drawn)
        return [self._rows[task_id] for task_id in drawn]

    def note(self, outcomes: Sequence[TaskOutcome]) -> None:
        """Keep what was graded in this process until ``take_outcomes``; safe to call from threads."""
        self._noted.extend(outcomes)

    def take_outcomes(self) -> list[TaskOutcome]:
        """What was noted since the last call, which is forgotten here."""
        noted, self._noted = self._noted, []
        return noted

    def learn(self, outcomes: Sequence[TaskOutcome]) -> None:
        """Count these from the next generation on; they are of tasks that are drawn here."""
        self._pending.extend(outcomes)

    def figures(self) -> dict[str, float]:
        """For the log, as of the newest draw; ``effective_tasks`` is ``1 / sum_i p_i^2`` of the chances p_i.

        ``mean_pass_rate`` is the mean over the tasks of which anything is known, and missing where nothing is.
        """
        statuses = [standing.status for standing in self.standings.values()]
        squares = sum(chance * chance for chance in self.probabilities().values())
        figures = {
            "curriculum/num_active": float(statuses.count("active")),
            "curriculum/num_retired": float(statuses.count("retired")),
            "curriculum/effective_tasks": 1.0 / squares if squares else 0.0,
        }
        rates = [s.passed / total for s in self.standings.values() if (total := s.passed + s.failed) > 0.0]
        return figures | ({"curriculum/mean_pass_rate": statistics.fmean(rates)} if rates else {})

    def state_dict(self) -> dict[str, Any]:
        """All that the next draws depend on but the seed; what was noted and not yet learnt is not in it."""
        saved = SavedCurriculum(
            tasks_fingerprint=self._fingerprint,
            generation=self._generation,
            num_draws=self._num_draws,
            in_batch=sorted(self._in_batch),
            pending=sorted([*astuple(outcome)] for outcome in self._pending),
            tasks=self.standings,
        )
        return saved.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; what was noted is dropped. One that is damaged, or of other tasks, is refused (CR0884)."""
        try:
            saved = SavedCurriculum.model_validate(state)
        except (ValidationError, TypeError) as error:
            raise _unfit(f"it cannot be read: {str(error).splitlines()[-1].strip()[:200]}") from error
        if saved.tasks_fingerprint != self._fingerprint:
            stores = f"{saved.tasks_fingerprint!r}, and this one is {self._fingerprint!r}"
            raise _unfit(f"it was saved over the task store {stores}")
        named = {*saved.in_batch, *(row[0] for row in saved.pending)}
        foreign = sorted((set(saved.tasks) ^ set(self._rows)) | (named - set(self._rows)))
        if foreign:
            raise _unfit(f"it was saved over other training tasks; {len(foreign)} differ: {foreign[0]}")
        self._generation, self._num_draws = saved.generation, saved.num_draws
        self._in_batch, self._pending = set(saved.in_batch), [TaskOutcome(*row) for row in saved.pending]
        self.standings = {task_id: saved.tasks[task_id] for task_id in self._rows}
        self._noted = []

    def _drawn(self, num: int, *, without: Collection[str]) -> list[str]:
        """``num`` different tasks one after the other, each by its chance among those that are left; fewer where
        fewer have a chance. ``choices`` uses sums, products and ``random()`` alone, so that the same
        state gives the same names on every machine.
        """
        self._num_draws += 1
        dice = random.Random(f"{self._seed}/{self._num_draws}")  # noqa: S311 - a draw, no secret
        left = {i: chance for i, chance in self.probabilities().items() if chance > 0.0 and i not in without}
        drawn: list[str] = []
        while left and len(drawn) < num:
            drawn += dice.choices([*left], weights=[*left.values()])
            del left[drawn[-1]]
        return drawn


def _unfit(problem: str) -> InputError:
    problem = f"the saved curriculum does not fit: {problem}."
    fix = "resume with the recipe, the task store and the version of this program that the run began with."
    return InputError("CR0884", problem, where="prompt_source", fix=fix)
