"""Whether a task is drawn from: active, or retired because it is solved. And all of them as the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError

from composer_replication.channel_tables import CurriculumSection, Section
from composer_replication.errors import InputError
from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum.evidence import Evidence

Status = Literal["active", "retired"]
REVIVAL_CERTAINTY = 0.5
"""A retired task comes back once it is less likely than this that it is still solved."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One task: what is known of it, its status, since which generation, and a sentence why."""

    evidence: Evidence
    status: Status = "active"
    since: int = 0
    reason: str = ""

    def judged(
        self, outcomes: Sequence[TaskOutcome], options: CurriculumSection, generation: int
    ) -> Standing:
        """After new attempts, which may change the status."""
        evidence = self.evidence.joined(outcomes)
        certainty = evidence.certainty_above(options.retire_above)
        if self.status == "active" and certainty >= options.retire_certainty:
            reason = (
                f"it passes more than {options.retire_above:g} of the time, with certainty {certainty:.3f}"
            )
            return Standing(evidence, "retired", generation, reason)
        has_failed = evidence.failed > self.evidence.failed
        if self.status == "retired" and has_failed and certainty < REVIVAL_CERTAINTY:
            return Standing(evidence, "active", generation, "it was retired and fails again")
        return replace(self, evidence=evidence)


# ---- the state in a checkpoint --------------------------------------------------------------------------


class SavedTask(Section):
    """One task of a saved state."""

    evidence: list[NonNegativeFloat] = Field(min_length=4, max_length=4)
    status: Status
    since: NonNegativeInt
    reason: str

    @property
    def standing(self) -> Standing:
        return Standing(Evidence(*self.evidence), self.status, self.since, self.reason)


class SavedCurriculum(Section):
    """Everything that the next draws depend on but for seed and options, floats exact.

    ``in_batch`` are the tasks drawn in the generation under way, ``pending`` its outcomes so far (task, full pass, credit,
    trouble), sorted: the order in which they came is not in it.
    """

    version: Literal[3] = 3
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
        InputError: not a curriculum's state, of another version, of another task store or of other tasks (CR0840).
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
        "CR0840",
        f"the saved curriculum does not fit: {problem}.",
        where="prompt_source",
        fix="resume with the recipe, the task store and the version of this program that the run began with.",
    )
