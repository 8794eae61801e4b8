"""``Curriculum``: draws tasks by what is known of their pass rates, learns, gives replacements; its state in a checkpoint."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError

from composer_replication.channel_tables import CurriculumSection, Section
from composer_replication.errors import InputError
from composer_replication.records import TaskOutcome
from composer_replication.tasks.difficulty import FOLDER, read_difficulty

PRIOR = 0.5
"""Below all evidence lies Jeffreys' prior Beta(1/2, 1/2): most tasks are solved nearly always or nearly never.

Reference: Jeffreys, An invariant form for the prior probability in estimation problems, 1946.
"""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Counts of attempts at one task, each at least 0 and faded by age.

    ``passed`` and ``failed`` are full passes and all other graded attempts, recorded ones included. Attempts that
    infrastructure took say nothing of the pass rate, and are not counted.
    """

    passed: float = 0.0
    failed: float = 0.0

    @property
    def weight(self) -> float:
        """E[p (1 - p)] = a b / ((a + b)(a + b + 1)) for p ~ Beta(a, b): how much a group of this task is expected to teach.

        a and b are ``PRIOR`` + ``passed`` and + ``failed``. p (1 - p) is the variance of one attempt, at most 1/4. With few
        counts it stays near the 1/8 of Beta(1/2, 1/2), so a task that was hardly tried keeps its chance.
        """
        a, b = PRIOR + self.passed, PRIOR + self.failed
        return a * b / ((a + b) * (a + b + 1.0))

    @property
    def pass_rate(self) -> float | None:
        """Full passes per graded attempt; None where there was none."""
        total = self.passed + self.failed
        return self.passed / total if total > 0.0 else None

    def certainty_above(self, rate: float) -> float:
        """P(p > rate) for p ~ Beta(a, b), by the normal distribution of the same mean and variance."""
        a, b = PRIOR + self.passed, PRIOR + self.failed
        mean = a / (a + b)
        return 1.0 - NormalDist(mean, math.sqrt(mean * (1.0 - mean) / (a + b + 1.0))).cdf(rate)

    def faded(self, keep: float) -> Evidence:
        """Every count times ``keep``, in [0, 1]."""
        return Evidence(self.passed * keep, self.failed * keep)

    def joined(self, outcomes: Sequence[TaskOutcome]) -> Evidence:
        """With further attempts."""
        graded = [outcome for outcome in outcomes if outcome.trouble != "infrastructure"]
        num_passed = sum(outcome.is_full_pass for outcome in graded)
        return Evidence(self.passed + num_passed, self.failed + (len(graded) - num_passed))


def has_recorded_evidence(store_root: Path, options: CurriculumSection) -> bool:
    """Whether there is anything to read, so that nobody hashes a model for nothing."""
    wants = options.recorded != "none" and options.recorded_weight > 0.0
    return wants and (Path(store_root) / FOLDER).is_dir()


def recorded_evidence(
    store_root: Path, options: CurriculumSection, *, parameter_sha256: str
) -> dict[str, Evidence]:
    """By task id, the recorded passes and failures, scaled down to ``options.recorded_weight`` attempts in all.

    Counts of the very weights (``parameter_sha256``) win; without any, those of all other policies are added up where
    ``options.recorded`` is ``any``. A task without a measurement is left out.
    """
    if not has_recorded_evidence(store_root, options):
        return {}
    found: dict[str, Evidence] = {}
    for task_id, rows in read_difficulty(store_root).items():
        same = [row for row in rows if row.policy.parameter_sha256 == parameter_sha256]
        used = same or (rows if options.recorded == "any" else ())
        num_samples = sum(row.num_samples for row in used)
        num_passed = sum(row.num_passed for row in used)
        if num_samples:
            scale = min(1.0, options.recorded_weight / num_samples)
            found[task_id] = Evidence(num_passed * scale, (num_samples - num_passed) * scale)
    return found


Status = Literal["active", "retired"]
REVIVAL_CERTAINTY = 0.5
"""A retired task comes back once it is less likely than this that it is still solved."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One task: what is known of it, and whether it is drawn from."""

    evidence: Evidence
    status: Status = "active"

    def judged(self, outcomes: Sequence[TaskOutcome], options: CurriculumSection) -> Standing:
        """After new attempts, which may change the status."""
        evidence, status = self.evidence.joined(outcomes), self.status
        certainty = evidence.certainty_above(options.retire_above)
        if certainty >= options.retire_certainty:
            status = "retired"
        elif evidence.failed > self.evidence.failed and certainty < REVIVAL_CERTAINTY:
            status = "active"
        return Standing(evidence, status)


class SavedTask(Section):
    """One task of a saved state."""

    passed: NonNegativeFloat
    failed: NonNegativeFloat
    status: Status


class SavedCurriculum(Section):
    """Everything that the next draws depend on but for seed and options, floats exact.

    ``in_batch`` are the tasks drawn in the generation under way, ``pending`` its outcomes so far (task, full pass,
    trouble), sorted: the order in which they came is not in it.
    """

    version: Literal[4] = 4
    tasks_fingerprint: str
    generation: NonNegativeInt
    num_draws: NonNegativeInt
    in_batch: list[str]
    pending: list[Annotated[list[Any], Field(min_length=3, max_length=3)]]
    tasks: dict[str, SavedTask]

    @property
    def outcomes(self) -> list[TaskOutcome]:
        return [TaskOutcome(*row) for row in self.pending]


def read_state(state: Mapping[str, Any], *, fingerprint: str, task_ids: Collection[str]) -> SavedCurriculum:
    """A saved state, checked."""
    try:
        saved = SavedCurriculum.model_validate(state)
    except (ValidationError, TypeError) as error:
        problem = f"it cannot be read: {str(error).splitlines()[-1].strip()[:200]}"
    else:
        named = {*saved.in_batch, *(outcome.task_id for outcome in saved.outcomes)}
        foreign = sorted((set(saved.tasks) ^ set(task_ids)) | (named - set(task_ids)))
        if saved.tasks_fingerprint == fingerprint and not foreign:
            return saved
        problem = f"it was saved over other training tasks; {len(foreign)} differ: {', '.join(foreign[:1])}"
        if saved.tasks_fingerprint != fingerprint:
            problem = f"it was saved over the task store {saved.tasks_fingerprint!r}, and this one is {fingerprint!r}"
    raise InputError(
        "CR0884",
        f"the saved curriculum does not fit: {problem}.",
        where="prompt_source",
        fix="resume with the recipe, the task store and the version of this program that the run began with.",
    )


class Curriculum:
    """A ``PromptChooser`` that draws each active task i by its expected p (1 - p).

    chance_i = (1 - floor_share) w_i / sum_j w_j + floor_share / num_active, w_i = E[p_i (1 - p_i)]

    under Beta(1/2 + passes, 1/2 + failures), the counts faded by age. Retired tasks share ``revival_share`` of the draws
    evenly. Only full passes count as passes. Inside a
    generation no task comes twice, replacements included. What a generation brings is counted when the next one
    begins, so the order in which its outcomes come changes nothing, bit for bit.

    A draw depends on seed, state and its number alone. Where too few tasks are left for a generation, retired ones
    fill it.

    Args:
        rows: of the training data, each with a ``task_id`` of its own.
        seed: of the draws.
        options: the ``[curriculum]`` table.
        fingerprint: of the task store; a state of another one is refused.
        recorded: first evidence by task id; other ids are ignored.

    A row without a task of its own is refused (CR0722).
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        seed: int,
        options: CurriculumSection = CurriculumSection(),  # noqa: B008 - frozen
        fingerprint: str = "",
        recorded: Mapping[str, Evidence] | None = None,
    ) -> None:
        self._rows = _by_task(rows)
        self._seed = seed
        self._options = options
        self._fingerprint = fingerprint
        self._keep = 0.5 ** (1.0 / options.half_life)
        self._noted: list[TaskOutcome] = []
        self._pending: list[TaskOutcome] = []
        self._in_batch: set[str] = set()
        self._generation = self._num_draws = 0
        first = recorded or {}
        self._standings = {task_id: Standing(first.get(task_id, Evidence())) for task_id in self._rows}

    @property
    def standings(self) -> dict[str, Standing]:
        """By task id, as the newest draw knew them."""
        return dict(self._standings)

    def probabilities(self) -> dict[str, float]:
        """By task id, the chance to be drawn first; the sum is 1."""
        weights = {i: s.evidence.weight for i, s in self._standings.items() if s.status == "active"}
        retired = [i for i, s in self._standings.items() if s.status == "retired"]
        chances = dict.fromkeys(self._standings, 0.0)
        retired_share = 0.0 if not retired else self._options.revival_share if weights else 1.0
        chances |= dict.fromkeys(retired, retired_share / max(len(retired), 1))
        total, floor = sum(weights.values()), self._options.floor_share
        for task_id, weight in weights.items():
            chance = (1.0 - floor) * weight / total + floor / len(weights)
            chances[task_id] = (1.0 - retired_share) * chance
        return chances

    def chosen_rows(self, num_rows: int) -> list[Mapping[str, Any]]:
        """Begin a generation; see ``PromptChooser``."""
        self._begin_generation()
        drawn = self._drawn(num_rows, without=())
        drawn += self._fill(num_rows - len(drawn), without=drawn)
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
        standings = self._standings.values()
        statuses = [standing.status for standing in standings]
        squares = sum(chance * chance for chance in self.probabilities().values())
        figures = {
            "curriculum/num_active": float(statuses.count("active")),
            "curriculum/num_retired": float(statuses.count("retired")),
            "curriculum/effective_tasks": 1.0 / squares if squares else 0.0,
        }
        rates = [rate for s in standings if (rate := s.evidence.pass_rate) is not None]
        return figures | ({"curriculum/mean_pass_rate": statistics.fmean(rates)} if rates else {})

    def state_dict(self) -> dict[str, Any]:
        """All that the next draws depend on but seed and options; what was noted and not yet learnt is not in it."""
        saved = SavedCurriculum(
            tasks_fingerprint=self._fingerprint,
            generation=self._generation,
            num_draws=self._num_draws,
            in_batch=sorted(self._in_batch),
            pending=sorted([*astuple(outcome)] for outcome in self._pending),
            tasks={
                name: SavedTask(passed=each.evidence.passed, failed=each.evidence.failed, status=each.status)
                for name, each in sorted(self._standings.items())
            },
        )
        return saved.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; what was noted is dropped."""
        saved = read_state(state, fingerprint=self._fingerprint, task_ids=self._rows.keys())
        self._generation, self._num_draws = saved.generation, saved.num_draws
        self._in_batch, self._pending = set(saved.in_batch), saved.outcomes
        of = saved.tasks
        self._standings = {
            i: Standing(Evidence(of[i].passed, of[i].failed), of[i].status) for i in self._rows
        }
        self._noted = []

    def _begin_generation(self) -> None:
        """Count what the generation before has brought, and let everything fade."""
        self._generation += 1
        self._in_batch = set()
        by_task: defaultdict[str, list[TaskOutcome]] = defaultdict(list)
        for outcome in self._pending:
            by_task[outcome.task_id].append(outcome)
        self._pending = []
        for task_id, standing in self._standings.items():
            judged = standing.judged(by_task[task_id], self._options) if task_id in by_task else standing
            self._standings[task_id] = replace(judged, evidence=judged.evidence.faded(self._keep))

    def _drawn(self, num: int, *, without: Collection[str]) -> list[str]:
        self._num_draws += 1
        chance = random.Random(f"{self._seed}/{self._num_draws}")  # noqa: S311 - a draw, no secret
        chances = self.probabilities()
        return draw_without_repeats({i: chances[i] for i in chances if i not in without}, num, chance)

    def _fill(self, num: int, *, without: Collection[str]) -> list[str]:
        """Tasks that have no chance, where a generation would be too small without them."""
        chosen = [task_id for task_id in self._standings if task_id not in without][: max(num, 0)]
        if len(chosen) < num:
            raise InputError(
                "CR0760",
                f"a generation takes {num + len(without)} tasks, and there are {len(self._rows)}.",
                where="[curriculum]",
                fix="begin a new run with more tasks or a smaller generation.",
            )
        return chosen


def _by_task(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """In the order of the ids, so that the order of the data does not matter to a draw."""
    by_task = {row["task_id"]: row for row in rows if isinstance(row.get("task_id"), str)}
    if not by_task or len(by_task) < len(rows):
        raise InputError(
            "CR0722",
            f"a curriculum cannot be made of these rows: {len(rows)} rows name {len(by_task)} tasks.",
            where="Curriculum(rows)",
            fix="give one row a task, with its id in the column task_id.",
        )
    return dict(sorted(by_task.items()))


def draw_without_repeats(weights: Mapping[str, float], num: int, chance: random.Random) -> list[str]:
    """``num`` different names one after the other, each by its weight among those that are left.

    Fewer where fewer have a weight above 0. Uses sums, products and ``chance.random()`` alone, so that the same
    state gives the same names on every machine.
    """
    left = {name: weight for name, weight in weights.items() if weight > 0.0}
    drawn: list[str] = []
    while left and len(drawn) < num:
        names, sums = list(left), list(accumulate(left.values()))
        place = bisect_right(sums, chance.random() * sums[-1])
        name = names[min(place, len(names) - 1)]  # the product may round up to the whole sum
        del left[name]
        drawn.append(name)
    return drawn
