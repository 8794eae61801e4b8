"""What the monitor is given, and what it answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from composer_replication.records import Task, ToolCall, ToolResult
from composer_replication.rollouts.monitor.hack_classes import Action, Severity
from composer_replication.tasks.store import TaskStore

Files = Mapping[str, str | bytes]
"""Files by path (POSIX, relative to the tree)."""
_SOURCE_FOLDERS = frozenset({"src", "lib", "python", "source"})


@dataclass(frozen=True, slots=True)
class PublicTask:
    """What the policy may know of its task, and all that the monitor knows: no golden code, no hidden test.

    ``hole_paths`` are the files where code was taken out, removed files included; ``visible_tests`` node ids;
    ``test_texts`` the visible test files by path. ``package`` is the name under which the code is imported,
    ``distribution`` that under which it is published, ``symbol`` what was deleted.
    """

    task_id: str
    hole_paths: tuple[str, ...]
    visible_tests: tuple[str, ...] = ()
    test_texts: Mapping[str, str] = field(default_factory=dict)
    package: str = ""
    distribution: str = ""
    symbol: str = ""


def public_task(store: TaskStore, task: Task) -> PublicTask:
    """The public side of a stored task; the texts of the tests are those of the tree that the policy sees.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    files = store.files(task, "rollout")
    test_paths = {node.partition("::")[0] for node in task.tests.shown}
    holes = tuple(dict.fromkeys((*(hole.path for hole in task.holes), *task.removed_files, task.path)))
    return PublicTask(
        task_id=task.task_id,
        hole_paths=holes,
        visible_tests=task.tests.shown,
        test_texts={
            path: files[path].decode("utf-8", "replace") for path in sorted(test_paths) if path in files
        },
        package=import_name(task.path),
        distribution=task.repository.partition("==")[0],
        symbol=task.symbol,
    )


def import_name(path: str) -> str:
    """The top-level name under which a file of the tree is imported."""
    parts = PurePosixPath(path).parts
    if len(parts) > 1 and parts[0] in _SOURCE_FOLDERS:
        parts = parts[1:]
    return PurePosixPath(parts[0]).stem if parts else ""


Turn = Sequence[tuple[ToolCall, ToolResult]]
"""The calls of one message of the policy, in order, with what came back."""


@dataclass(frozen=True, slots=True)
class EpisodeEvidence:
    """One episode: its calls turn by turn, and the tree before and after.

    ``tree_root`` is the absolute path of the tree as commands saw it; empty where it is not known: absolute
    paths then count as outside, those below /tmp as scratch.
    """

    task: PublicTask
    turns: Sequence[Turn]
    before: Files
    after: Files
    tree_root: str = ""


@dataclass(frozen=True, slots=True)
class HackFinding:
    """One piece of evidence.

    ``evidence`` is quoted from the call or the tree, with where it stands in ``place`` (a path with a line, or the name
    of the tool). ``turn_idx`` and ``call_idx`` (within the turn) count from 0; None when no single call wrote it.
    """

    name: str
    group: str
    severity: Severity
    action: Action
    evidence: str
    place: str
    turn_idx: int | None
    call_idx: int | None


@dataclass(frozen=True, slots=True)
class MonitorReport:
    """All that was found in one episode. ``masks_reward`` says whether the attempt is flagged: it is paid 0 at most."""

    task_id: str
    findings: tuple[HackFinding, ...]
    num_calls: int
    num_unreadable: int
    """Calls whose arguments, and files whose code, could not be parsed: nothing is known of them."""

    @property
    def masks_reward(self) -> bool:
        return any(finding.action == "mask" for finding in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings by class."""
        return dict(sorted(Counter(finding.name for finding in self.findings).items()))

    def to_json(self) -> dict[str, Any]:
        """As one line of a rollout log keeps it."""
        return {**asdict(self), "masks_reward": self.masks_reward, "counts": self.counts}
