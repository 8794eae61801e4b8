"""Whether a task is drawn from: active, retired because it is solved, or quarantined because the sandbox fails on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from composer_replication.channel_tables import CurriculumSection
from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum.evidence import Evidence

Status = Literal["active", "retired", "quarantined"]
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
