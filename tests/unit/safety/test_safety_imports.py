"""The folder can be embedded anywhere: it loads nothing beside the standard library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import composer_replication.safety

ROOT = Path(composer_replication.safety.__file__).parents[2]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import composer_replication.safety as safety
missing = [name for name in safety.__all__ if not hasattr(safety, name)]
tops = {name.partition(".")[0] for name in sys.modules}
print(sorted(tops - set(sys.stdlib_module_names) - {"__main__", "composer_replication"}), missing)
print(sorted(name for name in sys.modules if name.startswith("composer_replication.")))
"""


def test_only_the_standard_library_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", PROGRAM, str(ROOT)], capture_output=True, text=True, check=True
    )
    strangers, ours = done.stdout.splitlines()
    assert strangers == "[] []"
    assert "composer_replication.config" not in ours
    assert "composer_replication.safety.heldout_guard" in ours


def test_the_public_names_are_these() -> None:
    assert set(composer_replication.safety.__all__) == {
        "HeldOutGuard",
        "TripwireStatus",
        "CollapseStopError",
        "HeldoutSplit",
        "SplitOverlapError",
        "kl_token_trust_filter",
        "CombinedGuard",
        "CombinedStatus",
        "EvaluationJournal",
        "EvidenceGuard",
        "EvidenceStatus",
        "INSUFFICIENT_DATA",
        "upper_confidence_gap",
    }
