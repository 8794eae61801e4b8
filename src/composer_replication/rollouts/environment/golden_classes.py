"""Which of the monitor's classes the deleted code itself shows: of its own task they are never more than reported.

Golden code may open sockets, end processes, read frames or hold tables of literals, and then so does every right answer.
The monitor knows no golden code; this looks at it beforehand, and what it tells is names of classes alone.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from threading import Lock
from weakref import WeakKeyDictionary

from composer_replication.records import Task, ToolCall, ToolResult
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.monitor import (
    EpisodeEvidence,
    HackMonitor,
    MonitorReport,
    PublicTask,
    public_task,
)

_ROOT = "/srv/tree"
_known: WeakKeyDictionary[Grader, dict[str, frozenset[str]]] = WeakKeyDictionary()
_lock = Lock()


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
    """What the monitor finds where the golden code is put back, in any of the ways in which a policy writes a file."""
    with _lock:
        known = _known.setdefault(grader, {})
        if task.task_id in known:
            return known[task.task_id]
    before = grader.store.files(task, "rollout")
    found = shown_classes(public_task(grader.store, task), before, grader.golden_files(task))
    with _lock:
        known[task.task_id] = found
    return found


def shown_classes(
    task: PublicTask, before: Mapping[str, bytes], golden: Mapping[str, bytes]
) -> frozenset[str]:
    """The classes of which the monitor finds anything in an episode that only writes these files."""
    turns = [
        [(call, ToolResult(""))]
        for path, data in golden.items()
        for call in _spellings(path, _text(before.get(path, b"")), _text(data))
    ]
    return frozenset(
        HackMonitor().inspect(EpisodeEvidence(task, turns, before, {**before, **golden}, _ROOT)).counts
    )


def _spellings(path: str, old: str, new: str) -> Iterator[ToolCall]:
    """The calls by which a file gets its golden text; each is the whole of it."""
    yield _call("write_file", path=path, content=new)
    yield from _replacements(path, old, new)
    quoted = shlex.quote(path)
    for command in (
        f"cat > {quoted} <<'GOLDEN'\n{new}\nGOLDEN",
        f"python3 - <<'GOLDEN'\nfrom pathlib import Path\nPath({path!r}).write_text({new!r})\nGOLDEN",
        f"patch -p1 <<'GOLDEN'\n{_patch(path, old, new)}\nGOLDEN",
    ):
        yield _call("bash", command=command)


def _replacements(path: str, old: str, new: str) -> Iterator[ToolCall]:
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            start = max(0, i1 - 1)  # an insertion has to name the line before it
            texts: Mapping[str, str] = {
                "old_str": "".join(before[start:i2]),
                "new_str": "".join([*before[start:i1], *after[j1:j2]]),
            }
            yield _call("str_replace", path=path, **texts)


def _patch(path: str, old: str, new: str) -> str:
    return "\n".join(
        difflib.unified_diff(old.splitlines(), new.splitlines(), f"a/{path}", f"b/{path}", lineterm="")
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))
