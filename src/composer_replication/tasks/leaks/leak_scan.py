"""Search everything that a sandbox of a task can see for its golden code.

A program inside a real sandbox around the rollout's tree (``leak_search``) walks the whole visible file system and asks
git; it is told the deleted lines, and must find none of them. That nothing is reached by a network is the self-test's to show.
``leaks_of`` searches the bytes of a tree and of installed sources, outside, as a gate of each candidate.
"""

from __future__ import annotations

import keyword
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

from composer_replication.errors import SandboxFailure
from composer_replication.records import Edit, Limits, Task
from composer_replication.sandbox import base_interpreter, choose_backend, require_selftest, system_folders
from composer_replication.sandbox.supervised_run import interruptible_pool
from composer_replication.tasks.fresh_git import with_git
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.leaks.leak_search import Leak, Search, Target
from composer_replication.tasks.leaks.shown_code import distinctive_lines
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_run import last_words
from composer_replication.tasks.twin.twin_run import run_program

Progress = Callable[[int, int, str], None]
_INSIDE_SECONDS = 1800.0  # the system folders alone take minutes on a busy machine
_INSIDE_LIMITS = Limits(memory_bytes=4 * 1024**3, output_bytes=64 * 1024**2)
_read_lock = Lock()


@dataclass(frozen=True)
class ScanSummary:
    """What was found.

    ``without_distinctive_lines`` are tasks whose body has no line that could be recognised. ``not_searched`` are files that could be read but not looked through, with the reason. ``failed_checks`` are
    questions of the search inside that got no answer: of those tasks it is not known that they are clean.
    """

    tasks: int
    leaks: tuple[Leak, ...]
    without_distinctive_lines: tuple[str, ...]
    files_searched: int
    not_searched: tuple[str, ...]
    failed_checks: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Nothing was found, and every question was answered."""
        return not self.leaks and not self.failed_checks


def scan_store(
    path: Path, *, jobs: int = 2, backend: str | None = None, progress: Progress | None = None
) -> ScanSummary:
    """Search for the golden code of every task of a store.

    What several tasks see is searched once for all of them: the folders of the system and the interpreter once, each
    environment once. Each task's own tree gets a sandbox of its own. ``jobs`` are sandboxes at a time, ``backend`` None is
    the best of this machine; ``progress`` is told at the start and after each task (done, total, task id).

    Raises:
        NothingToDoError: the store is empty (CR0604).
        SandboxFailure: the sandbox broke, or the search inside did not end (CR0302); nothing is said about any task.
    """
    tell = progress or (lambda *_: None)
    store = TaskStore.open(path, backend=backend)
    store.require_task_ids()
    require_selftest(choose_backend(backend), progress=progress)
    tasks = store.tasks()
    targets = {task.task_id: targets_of(store, task) for task in tasks}
    # What is to be walked for several tasks: each environment, and what is shown of each system.
    walks: dict[tuple[str, ...], tuple[list[Target], Environment]] = {}
    for task in tasks:
        environment = store.environment(task)
        for folders in _shown(environment):
            walks.setdefault(tuple(sorted(folders)), ([], environment))[0].extend(targets[task.task_id])

    def search_task(task: Task) -> dict[str, Any]:
        tree, own = with_git(store.files(task, "rollout")), targets[task.task_id]
        return search_inside(tree, own, store.environment(task), backend=store.backend)

    with interruptible_pool(jobs, "tasks-leakscan") as pool:
        tell(0, len(tasks), "what all tasks see")
        walk = partial(search_inside, {}, backend=store.backend)
        shared = [pool.submit(walk, *one, roots=folders) for folders, one in walks.items()]
        alone = [pool.submit(search_task, task) for task in tasks]
        for done, (task, future) in enumerate(zip(tasks, alone, strict=True), 1):
            future.result()
            tell(done, len(tasks), task.task_id)
        answers = [future.result() for future in (*alone, *shared)]

    def together(key: str) -> tuple[str, ...]:
        return tuple(sorted({str(one) for answer in answers for one in answer[key]}))

    return ScanSummary(
        tasks=len(tasks),
        leaks=tuple(sorted({Leak(*leak) for answer in answers for leak in answer["leaks"]})),
        without_distinctive_lines=tuple(name for name, own in targets.items() if not Search(own).lines),
        files_searched=sum(answer["num_files"] for answer in answers),
        not_searched=together("not_searched"),
        failed_checks=together("failed_checks"),
    )


def search_inside(
    tree_files: Mapping[str, bytes],
    targets: Sequence[Target],
    environment: Environment,
    *,
    roots: Sequence[str] = (),
    backend: str | None = None,
) -> dict[str, Any]:
    """Search from inside a fresh sandbox: the folders ``roots``; or, without any, the tree, its git and whatever is not
    mounted read-only.
    """
    options = {
        "targets": list(map(astuple, targets)),
        "roots": list(roots or [".", "/"]),  # the root is closed without namespaces
        "skip": [] if roots else sorted(set[str]().union(*_shown(environment))),
        "asks_git": not roots,
    }
    done, records = run_program(
        "leaks.leak_search", tree_files, environment, options,
        backend=backend, limits=_INSIDE_LIMITS, timeout_seconds=_INSIDE_SECONDS,
    )  # fmt: skip
    if records:
        return records[0]
    problem = f"the search inside the sandbox did not end{last_words(done)}."
    raise SandboxFailure("CR0302", problem, fix="composer-rl sandbox selftest, then the same command again")


def _shown(environment: Environment) -> tuple[set[str], set[str]]:
    """What a sandbox shows read-only: of system and interpreter, and the environment itself; by real names, too."""
    own = {str(environment.root), str(environment.root.resolve())}
    paths = (*environment.read_only, *system_folders().read_only, *base_interpreter().read_only)
    return {str(one) for path in paths for one in (path, path.resolve())} - own, own


# --- The gate of each candidate, outside a sandbox: nothing is run.


def leaks_of(store: TaskStore, task: Task) -> list[Leak]:
    """What tells the deleted code of a task: its tree, as a rollout sees it, or else installed Python files.

    Each folder of those is read once a process, and a file is searched if it has a distinctive line.
    """
    search = Search(targets_of(store, task))
    leaks: set[Leak] = set()
    for name, data in store.files(task, "rollout").items():
        leaks |= search.search_bytes(name, data, in_tree=True)
    checks = set(map(hash, search.lines))
    shown = base_interpreter()
    for folder in () if leaks else (store.environment(task).root, *shown.read_only):
        with _read_lock:  # threads that want the same folder wait for the one that reads it
            below = _below(str(folder), tuple(map(str, shown.masked)))
        for path, found in below.items():
            if not checks.isdisjoint(found):
                leaks |= search.search_bytes(path, Path(path).read_bytes(), in_tree=False)
    return sorted(leaks)


@cache
def _below(root: str, masked: tuple[str, ...]) -> dict[str, frozenset[int]]:
    """The Python files below a folder, which does not change while it is in use, with check sums of their lines."""
    checks = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if os.path.join(folder, name) not in masked)
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            with suppress(OSError):  # what cannot be read cannot leak
                lines = Path(path).read_bytes().decode("utf-8", "replace").splitlines()
                checks[path] = frozenset(hash(line.strip()) for line in lines)
    return checks


# --- What the search is told: lines of what was deleted.

NUM_LINES_AROUND = 6
MIN_RUN_CHARACTERS = 60


def targets_of(store: TaskStore, task: Task) -> list[Target]:
    """The targets of a task: one for each place where code was taken out.

    A line of the code is distinctive if it occurs once in the restored tree, not in the broken one, and has a name in it.
    Lines are compared without indentation.
    """
    files = store.files(task, "rollout")
    record = store.record(task.task_id)
    original = store.repository_files(record.repository_record)
    removed = {path: original[path] for path in task.removed_files}
    restored = {**files, **removed, **{hole.path: original[hole.path] for hole in task.holes}}
    before, after = (list(map(_counts_of, tree.values())) for tree in (restored, files))
    found = []
    for edit in (*record.edits, *(Edit(path, 0, len(data), "") for path, data in removed.items())):
        path, text = edit.path, original[edit.path].decode("utf-8", "replace")
        parts = (text[: edit.start], text[edit.start : edit.end], text[edit.end :])
        if not parts[1].strip() and path not in removed:
            continue
        distinctive = {
            line
            for line in distinctive_lines(parts[1])
            if sum(counts[line] for counts in before) == 1
            and not any(counts[line] for counts in after)
            and _has_a_name(line)
        }
        above, gone, below = (list(filter(None, map(str.strip, part.splitlines()))) for part in parts)
        window = [*above[-NUM_LINES_AROUND:], *gone, *below[:NUM_LINES_AROUND]]
        found.append(
            Target(task.task_id, tuple(sorted(distinctive)), tuple(_runs(window, distinctive)), path)
        )
    return found


def _runs(window: Sequence[str], distinctive: Collection[str]) -> Iterator[tuple[str, str]]:
    """From each line on the shortest stretch of enough characters with a distinctive line in it, behind that line."""
    for start in range(len(window)):
        num_characters, told = 0, ""
        for end, line in enumerate(window[start:], start + 1):
            num_characters += len(line)
            told = told or (line if line in distinctive else "")
            if told and num_characters >= MIN_RUN_CHARACTERS:
                yield told, "\n".join(window[start:end])
                break


@lru_cache(maxsize=1024)
def _counts_of(data: bytes) -> Counter[str]:
    """How often each line occurs; most files are those of the task before."""
    return Counter(map(str.strip, data.decode("utf-8", "replace").splitlines()))


def _has_a_name(line: str) -> bool:
    """Whether a line names something: ``else:`` and ``)`` stand everywhere."""
    return any(not keyword.iskeyword(word) for word in re.findall(r"[^\W\d]\w*", line))
