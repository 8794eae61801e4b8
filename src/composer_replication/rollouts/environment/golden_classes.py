"""Which of the monitor's classes the deleted code itself shows: of its own task they are never more than reported.

Golden code may end processes, read frames or hold tables of literals, and then so does every right answer. The monitor
knows no golden code; this looks at it beforehand, and what it tells is names of classes alone.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace

from composer_replication.records import Task, ToolCall, ToolResult
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.monitor import (
    EpisodeEvidence,
    HackMonitor,
    MonitorReport,
    PublicTask,
    public_task,
)


def without_golden_classes(report: MonitorReport, grader: Grader, task: Task) -> MonitorReport:
    """The report, in which a finding of a class that the task's golden code shows too flags nothing.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    return only_reporting(report, golden_classes(grader, task)) if report.masks_reward else report


def only_reporting(report: MonitorReport, names: Collection[str]) -> MonitorReport:
    """The report, in which findings of these classes flag nothing."""
    findings = (replace(each, action="report") if each.name in names else each for each in report.findings)
    return replace(report, findings=tuple(findings))


def golden_classes(grader: Grader, task: Task) -> frozenset[str]:
    """What the monitor finds where the golden code is put back; looked at once a grader."""

    def look() -> frozenset[str]:
        before = grader.store.files(task, "rollout")
        return shown_classes(public_task(grader.store, task), before, grader.golden_files(task))

    return grader.golden_runs.look_up(task.task_id, "monitor", look)


def shown_classes(
    task: PublicTask, before: Mapping[str, bytes], golden: Mapping[str, bytes]
) -> frozenset[str]:
    """The classes of which the monitor finds anything in an episode that only writes these files, by commands."""
    commands = [
        f"cat > {shlex.quote(path)} <<'GOLDEN'\n{data.decode('utf-8', 'replace')}\nGOLDEN"
        for path, data in golden.items()
    ]
    turns = [[(ToolCall("bash", json.dumps({"command": each})), ToolResult(""))] for each in commands]
    return frozenset(HackMonitor().inspect(EpisodeEvidence(task, turns, before, {**before, **golden})).counts)
