"""A candidate that a foreign task set brings along, with what the set says of it."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass

from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.subject import GateFailed, Subject


@dataclass(frozen=True, slots=True)
class Proposal:
    """One instance of a task set.

    ``source`` names its repository among the opened ones. The tests that it says fail must all
    fail, those that it says pass must not; ``statement`` is what it asks for in its own words.
    """

    instance_id: str
    source: str
    deletion: Deletion
    fail_to_pass: frozenset[str]
    pass_to_pass: frozenset[str]
    statement: str

    def check(self, subject: Subject) -> None:
        """Compare what it says with what was found.

        Raises:
            GateFailed: other-tests-fail.
        """
        failing = {*subject.visible, *subject.hidden}
        passing = sorted(self.fail_to_pass - failing)
        if passing:
            detail = f"{len(passing)} tests should fail without the patch and do not ({passing[0]})"
            raise GateFailed("other-tests-fail", detail)
        broken = self.pass_to_pass & failing
        if broken:  # which ones stays unsaid: they may be hidden
            raise GateFailed(
                "other-tests-fail", f"{len(broken)} tests should pass without the patch and fail"
            )

    @property
    def digest(self) -> str:
        """A hash of everything in it that a decision depends on."""
        edits = [astuple(edit) for edit in self.deletion.edits]
        stated = [sorted(self.fail_to_pass), sorted(self.pass_to_pass), self.statement, self.instance_id]
        return sha256_of(json.dumps([edits, self.deletion.removed_files, stated]).encode())
