"""What a build made, and why it made nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from composer_replication.errors import InputError, NothingToDoError
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.unused_tests import UnusedTests


@dataclass(frozen=True, slots=True)
class BuildSummary:
    """What a build made.

    ``candidates`` were looked at, ``valid`` became ``tasks``; ``rejected`` counts the others
    (and whole repositories) by reason, ``examples`` has one detail for each reason. ``flaky``
    are the tests by repository that were left out because they were green in some runs only.
    ``unusable`` has a sentence for each source that gave no repository.
    ``unrecorded`` has, by repository and function, why a run that records behaviour failed: nothing
    is known of these, and the same build looks again.
    ``licences`` has the licence of each repository of the store, ``unused_tests`` what became of its tests.
    """

    folder: Path
    tasks: int
    candidates: int
    valid: int
    rejected: Mapping[str, int]
    seconds: float
    bytes: int
    fingerprint: str
    examples: Mapping[str, str] = field(default_factory=dict)
    flaky: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    unrecorded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    licences: Mapping[str, Licence] = field(default_factory=dict)
    unused_tests: Mapping[str, UnusedTests] = field(default_factory=dict)

    def require_tasks(self) -> None:
        """Raise when there is nothing to train on.

        Raises:
            InputError: no repository could be used (CR0419).
            NothingToDoError: no candidate passed the gates (CR0418).
        """
        if self.tasks:
            return
        counts = "; ".join(
            f"{reason} {count}" + (f" ({self.examples[reason]})" if reason in self.examples else "")
            for reason, count in self.rejected.items()
        )
        if self.candidates == 0:
            raise InputError(
                "CR0419",
                f"no repository can be used: {counts}.",
                where=str(self.folder),
                fix="add --granularity all --removal all, or give another repository."
                if set(self.rejected) == {"nothing-to-delete"}
                else "give a repository whose own tests pass here: a folder, an archive or sdist:NAME==VERSION.",
            )
        raise NothingToDoError(
            "CR0418",
            f"none of {self.candidates} candidates is a task: {counts}.",
            where=str(self.folder),
            fix="give more repositories, or pin other functions.",
        )


def restricted_licences(licences: Mapping[str, Licence]) -> dict[str, str]:
    """Repositories whose licence is not known or none of the permissive ones, with the reason: what must be looked
    at before their tasks are passed on.
    """
    return {name: licence.restriction for name, licence in sorted(licences.items()) if licence.restriction}
