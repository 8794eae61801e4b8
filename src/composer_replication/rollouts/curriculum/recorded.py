"""The pass rates that ``composer-rl eval --update-difficulty`` keeps beside the tasks, as the first evidence."""

from __future__ import annotations

from pathlib import Path

from composer_replication.channel_tables import CurriculumSection
from composer_replication.rollouts.curriculum.evidence import Evidence
from composer_replication.tasks.difficulty import FOLDER, read_difficulty


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
