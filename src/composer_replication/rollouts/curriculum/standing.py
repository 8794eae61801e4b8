"""What is known of one task, whether it is drawn from (active) or not (retired), and the state of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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

    Raises:
        InputError: a file of measurements cannot be read (CR0411).
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


# ---- the state in a checkpoint --------------------------------------------------------------------------


class SavedTask(Section):
    """One task of a saved state."""

    passed: NonNegativeFloat
    failed: NonNegativeFloat
    status: Status


class SavedCurriculum(Section):
    """Everything that the next draws depend on but for seed and options, floats exact.

    ``in_batch`` are the tasks drawn in the generation under way, ``pending`` its outcomes so far (task, full pass, credit,
    trouble), sorted: the order in which they came is not in it.
    """

    version: Literal[4] = 4
    tasks_fingerprint: str
    generation: NonNegativeInt
    num_draws: NonNegativeInt
    in_batch: list[str]
    pending: list[Annotated[list[Any], Field(min_length=4, max_length=4)]]
    tasks: dict[str, SavedTask]

    @property
    def outcomes(self) -> list[TaskOutcome]:
        return [TaskOutcome(*row) for row in self.pending]


def read_state(state: Mapping[str, Any], *, fingerprint: str, task_ids: Collection[str]) -> SavedCurriculum:
    """A saved state, checked.

    Raises:
        InputError: not a curriculum's state, of another version, of another task store or of other tasks (CR0884).
    """
    try:
        saved = SavedCurriculum.model_validate(state)
    except (ValidationError, TypeError) as error:
        raise _unfit(f"it cannot be read: {str(error).splitlines()[-1].strip()[:200]}") from error
    if saved.tasks_fingerprint != fingerprint:
        raise _unfit(
            f"it was saved over the task store {saved.tasks_fingerprint!r}, and this one is {fingerprint!r}"
        )
    named = {*saved.in_batch, *(outcome.task_id for outcome in saved.outcomes)}
    foreign = sorted((set(saved.tasks) ^ set(task_ids)) | (named - set(task_ids)))
    if foreign:
        raise _unfit(
            f"it was saved over other training tasks; {len(foreign)} differ, the first is {foreign[0]!r}"
        )
    return saved


def _unfit(problem: str) -> InputError:
    return InputError(
        "CR0884",
        f"the saved curriculum does not fit: {problem}.",
        where="prompt_source",
        fix="resume with the recipe, the task store and the version of this program that the run began with.",
    )
