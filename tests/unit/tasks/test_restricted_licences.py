"""A build names the repositories whose licence must be looked at, and no others."""

from __future__ import annotations

from pathlib import Path

from composer_replication.tasks.build_summary import BuildSummary
from composer_replication.tasks.intake.licences import Licence


def test_copyleft_and_unknown_are_named() -> None:
    licences = {
        "free==1": Licence("MIT", "LICENSE", "file", False),
        "left==1": Licence("GPL-3.0-only", "COPYING", "file", True),
        "odd==1": Licence(None, "LICENSE", "", None, "LICENSE is not the text of a known licence"),
        "bare==1": Licence(None, "", "", None),
    }
    summary = BuildSummary(Path("x"), 1, 1, 1, {}, 1.0, 1, "f", licences=licences)
    assert summary.restricted() == {
        "bare==1": "licence not known",
        "left==1": "GPL-3.0-only, copyleft",
        "odd==1": "LICENSE is not the text of a known licence",
    }
