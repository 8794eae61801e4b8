"""Whether a task is drawn from: active, retired because it is solved, or quarantined because the sandbox fails on it.

And all of them as the state of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError, model_validator

from composer_replication.channel_tables import CurriculumSection, Section
from composer_replication.errors import InputError
from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum.evidence import Evidence

Status = Literal["active", "retired", "quarantined"]
STATE_VERSION = 2
TROUBLES = ("", "infrastructure")
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
        self, outcomes: Sequence[TaskOutcome], options: CurriculumSection, generation: int, *, is_outage: bool
    ) -> Standing:
        """After new attempts, which may change the status; in quarantine nothing does but time."""
        evidence = self.evidence.joined(outcomes, forgives_lost=is_outage)
        now = replace(self, evidence=evidence)
        if self.status == "quarantined":
            return now
        reason = _distrust(evidence, options)
        if reason:
            return Standing(evidence, "quarantined", generation, reason)
        certainty = evidence.certainty_above(options.retire_above)
        if self.status == "active" and certainty >= options.retire_certainty:
            reason = (
                f"it passes more than {options.retire_above:g} of the time, with certainty {certainty:.3f}"
            )
            return Standing(evidence, "retired", generation, reason)
        has_failed = evidence.failed > self.evidence.failed
        if self.status == "retired" and has_failed and certainty < REVIVAL_CERTAINTY:
            return Standing(evidence, "active", generation, "it was retired and fails again")
        return now

    def released(self, generation: int) -> Standing:
        """Out of quarantine, with its troubles forgotten and its pass rate kept."""
        evidence = replace(self.evidence, lost=0.0)
        return Standing(evidence, "active", generation, "it came back from quarantine")


def _distrust(evidence: Evidence, options: CurriculumSection) -> str:
    """Why the task should be left alone for a while; empty when it should not."""
    lost, total = evidence.lost, evidence.graded + evidence.lost
    if lost < options.quarantine_after or lost < options.quarantine_share * total:
        return ""
    return f"of {total:.3g} attempts (older ones count less) {lost:.3g} were lost to the sandbox"


# ---- the state in a checkpoint --------------------------------------------------------------------------


class SavedTask(Section):
    """One task of a saved state."""

    evidence: list[NonNegativeFloat] = Field(min_length=5, max_length=5)
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

    version: int = STATE_VERSION
    tasks_fingerprint: str
    generation: NonNegativeInt
    num_draws: NonNegativeInt
    in_batch: list[str]
    pending: list[Annotated[list[Any], Field(min_length=4, max_length=4)]]
    tasks: dict[str, SavedTask]

    @property
    def outcomes(self) -> list[TaskOutcome]:
        return [TaskOutcome(*row) for row in self.pending]

    @model_validator(mode="after")
    def _is_of_its_tasks(self) -> SavedCurriculum:
        strange = [name for name in self.in_batch if name not in self.tasks]
        problems = [problem_of(outcome) for outcome in self.outcomes]
        strange += [outcome.task_id for outcome in self.outcomes if outcome.task_id not in self.tasks]
        if strange or any(problems):
            raise ValueError(f"{strange[0]!r} is no task" if strange else max(problems))
        return self


def read_state(state: Mapping[str, Any], *, fingerprint: str, task_ids: Collection[str]) -> SavedCurriculum:
    """A saved state, checked.

    Raises:
        InputError: not a curriculum's state, or of another version (CR0884); of another task store (CR0884); of
            other tasks (CR0884); a value cannot be (CR0884).
    """
    if state.get("version") != STATE_VERSION or not isinstance(state.get("tasks"), Mapping):
        raise InputError(
            "CR0884",
            f"this is no state of a curriculum of version {STATE_VERSION}.",
            where="prompt_source",
            fix="resume with the recipe, and the version of this program, that the run began with.",
        )
    found = state.get("tasks_fingerprint")
    if found != fingerprint:
        raise InputError(
            "CR0884",
            f"the curriculum was saved over the task store {found!r}, and this one is {fingerprint!r}.",
            where="prompt_source.tasks_fingerprint",
            fix="resume with the task store that the run began with, or begin a new run.",
        )
    foreign = sorted(set(state["tasks"]) ^ set(task_ids))
    if foreign:
        raise InputError(
            "CR0884",
            f"the curriculum was saved over other training tasks; {len(foreign)} differ, the first is {foreign[0]!r}.",
            where="prompt_source.tasks",
            fix="resume with the split and the settings that the run began with, or begin a new run.",
        )
    try:
        return SavedCurriculum.model_validate(state)
    except (ValidationError, TypeError) as error:
        raise InputError(
            "CR0884",
            f"the saved curriculum cannot be read: {str(error).splitlines()[-1].strip()[:200]}.",
            where="prompt_source",
            fix="delete that checkpoint and resume; the run goes on from the one before.",
        ) from error


def problem_of(outcome: TaskOutcome) -> str:
    """Why an outcome cannot be counted; empty when it can."""
    is_full_pass: object = outcome.is_full_pass  # a reward of the user's own may give anything
    credit: object = outcome.credit
    if not isinstance(is_full_pass, bool):
        return f"is_full_pass is {is_full_pass!r}"
    if not isinstance(credit, int | float) or not 0.0 <= credit <= 1.0:  # NaN is not either
        return f"credit {credit!r} is not in [0, 1]"
    return "" if outcome.trouble in TROUBLES else f"no trouble is called {outcome.trouble!r}"
