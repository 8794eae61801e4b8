"""A build names the repositories whose licence must be looked at, and no others."""

from __future__ import annotations

from pathlib import Path

from composer_replication.tasks.build_summary import BuildSummary
from composer_replication.tasks.intake.licences import Licence


def test_what_is_not_permissive_is_named() -> None:
    licences = {
        "free==1": Licence("MIT", "LICENSE", "file", False),
        "bought==1": Licence("LicenseRef-Proprietary", "", "metadata", False, "no licence file"),
        "either==1": Licence("MIT OR GPL-3.0-only", "LICENSE", "file and metadata", False),
        "unsold==1": Licence("CC-BY-NC-4.0", "LICENSE", "file and metadata", False),
        "left==1": Licence("GPL-3.0-only", "COPYING", "file", True),
        "odd==1": Licence(None, "LICENSE", "", None, "LICENSE is odd"),
        "bare==1": Licence(None, "", "", None),
    }
    summary = BuildSummary(Path("x"), 1, 1, 1, {}, 1.0, 1, "f", licences=licences)
    assert summary.restricted() == {
        "bare==1": "licence not known",
        "bought==1": "LicenseRef-Proprietary, not among the permissive licences",
        "left==1": "GPL-3.0-only, not among the permissive licences",
        "odd==1": "LICENSE is odd",
        "unsold==1": "CC-BY-NC-4.0, not among the permissive licences",
    }
