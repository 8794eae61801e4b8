"""How a job stands, and what its exit code says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from composer_replication.errors import HALTED_EXIT_CODE, INTERRUPTED_EXIT_CODE

_HALTED = re.compile(rf"exit codes?\D{{0,20}}\b(\d+, )*{HALTED_EXIT_CODE}\b", re.IGNORECASE)


class JobState(StrEnum):
    """How a job stands, in the words of no scheduler; what counts most of several replicas first."""

    HALTED = "halted"
    FAILED = "failed"
    RUNNING = "running"
    WAITING = "waiting"
    UNKNOWN = "unknown"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a target says of a job; ``detail`` in its own words."""

    state: JobState
    exit_code: int | None = None
    detail: str = ""


def ended(exit_code: int, detail: str = "") -> JobStatus:
    """The status of a job that ended by itself."""
    names = {0: "SUCCEEDED", HALTED_EXIT_CODE: "HALTED", INTERRUPTED_EXIT_CODE: "STOPPED"}
    return JobStatus(JobState[names.get(exit_code, "FAILED")], exit_code, detail)


def told(state: JobState, said: str) -> JobStatus:
    """The status of a job whose exit code the target gives in a sentence alone, if at all."""
    if state is JobState.FAILED and _HALTED.search(said):
        return JobStatus(JobState.HALTED, HALTED_EXIT_CODE, said)
    return JobStatus(state, 0 if state is JobState.SUCCEEDED else None, said)


def joined(statuses: Sequence[JobStatus]) -> JobStatus:
    """One status of several replicas: a halt counts most, then what failed, then what still goes on."""
    if not statuses:
        return JobStatus(JobState.UNKNOWN)
    worst = min(statuses, key=lambda status: list(JobState).index(status.state))
    details = "; ".join(dict.fromkeys(status.detail for status in statuses if status.detail))
    return JobStatus(worst.state, worst.exit_code, details)
