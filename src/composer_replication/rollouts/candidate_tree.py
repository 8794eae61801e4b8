"""What of a policy's tree is graded: its own files; tests, their data and their configuration are the store's.

    the store's, whatever the policy did     Python files of tests, everything in folders of tests, conftest.py, the
                                             files that configure the test runner
    left out where the policy made them      sitecustomize.py and usercustomize.py, .pth files, compiled code, version
                                             control, caches, installed metadata; a module at the top that has the name
                                             of one of the standard library or of the environment; links
    the policy's                             every other file: changed, made or deleted

What a task took code out of is the policy's, wherever it stands. So a candidate can do to a grading what an answer
in a single hole can, and no more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from composer_replication.errors import SandboxFileError
from composer_replication.records import Task
from composer_replication.rollouts.forgery_checks import START_NAMES
from composer_replication.sandbox import LocalSandbox
from composer_replication.tasks.intake import tree_rules
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.tree_rules import in_test_folder, is_test_path, skips_folder
from composer_replication.tasks.store import TaskStore

MAX_TREE_BYTES = 64 * 1024**2
MAX_TREE_FILES = 20_000
_MAX_PATH_BYTES = 1000
"""Below the longest that the kernel takes, with room for the folder in which a grading puts its tree."""
_MAX_NAME_BYTES = 255
_COMPILED = frozenset({".pyc", ".pyo", ".pyd", ".so", ".pth"})


class TreeTooLargeError(Exception):
    """A tree that is not graded, by its size; the text says which limit."""


@dataclass(frozen=True, slots=True)
class TreeRule:
    """Which files of a candidate are its own.

    ``touched`` are the files that the task took code out of, ``names`` those of modules and packages at the top of the
    repository, ``taken`` names that no module at the top may have unless the repository itself has it, ``folders_of_tests``
    folders of tests whatever they are called, ``roots`` the places of import.
    """

    touched: frozenset[str]
    names: frozenset[str]
    taken: frozenset[str]
    folders_of_tests: frozenset[str] = frozenset()
    roots: tuple[str, ...] = tree_rules.USUAL_FOLDERS

    def takes(self, path: str) -> bool:
        """Whether the candidate's version of this file counts, and its absence too."""
        if path in self.touched:
            return True
        pure = PurePosixPath(path)
        if not _is_plain(path) or pure.name in START_NAMES or pure.suffix.lower() in _COMPILED:
            return False
        if is_test_path(path) or in_test_folder(pure) or any(map(skips_folder, pure.parts[:-1])):
            return False
        if not self.folders_of_tests.isdisjoint(map(str, pure.parents)):
            return False
        return pure.suffix != ".py" or self.taken.isdisjoint(top_names(path, self.roots) - self.names)


def top_names(path: str, roots: Iterable[str] = tree_rules.USUAL_FOLDERS) -> frozenset[str]:
    """The names by which a file's module or package may be imported from the top or another place of import."""
    below = [path.removeprefix(f"{root}/") for root in roots if path.startswith(f"{root}/")]
    return frozenset(one.partition("/")[0].partition(".")[0] for one in (path, *below))


def _is_plain(path: str) -> bool:
    """Whether a path can be written in another tree as it is; no name that is not UTF-8 can be under sandlock."""
    pure = PurePosixPath(path)
    try:
        data = path.encode()
    except UnicodeEncodeError:
        return False
    is_short = len(data) < _MAX_PATH_BYTES and all(len(name) <= _MAX_NAME_BYTES for name in data.split(b"/"))
    is_inside = bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts
    return is_short and is_inside and str(pure) == path and "\0" not in path


def rule_of(store: TaskStore, task: Task) -> TreeRule:
    """The rule for the candidates of one task."""
    record = store.record(task.task_id)
    repository = store.repository(record.repository_record)
    paths = repository.files
    listed = tree_rules.folders_file(paths)
    roots = (*tree_rules.USUAL_FOLDERS, *(store.blob(paths[listed]).decode().splitlines() if listed else ()))
    own = frozenset().union(*(top_names(path, roots) for path in paths if path.endswith(".py")))
    touched = record.changes.source_files
    taken = _taken_names(store.environment(task).root)
    return TreeRule(frozenset(touched), own, taken, repository.folders_of_tests, roots)


@lru_cache(maxsize=64)
def _taken_names(environment: Path) -> frozenset[str]:
    """Modules of the standard library and of an environment."""
    installed = {entry.name.partition(".")[0] for entry in environment.glob("lib/python*/site-packages/*")}
    return sys.stdlib_module_names | installed


def candidate_files(sandbox: LocalSandbox, takes: Callable[[str], bool]) -> dict[str, bytes]:
    """The files of a sandbox's tree that ``takes`` takes, by path; nothing may run in it meanwhile.

    Raises:
        TreeTooLargeError: more bytes or files than are graded, or more than can be listed.
        SandboxFailure: the sandbox broke.
    """
    try:
        listed = sandbox.list_files(".")
    except SandboxFileError as error:  # the attempt's own doing, never the machine's
        raise TreeTooLargeError(f"the tree cannot be listed: {error.message}") from error
    entries = [entry for entry in listed if entry.kind == "file" and takes(entry.path)]
    if len(entries) > MAX_TREE_FILES:
        raise TreeTooLargeError(f"the tree has {len(entries)} files, more than {MAX_TREE_FILES}")
    num_bytes = sum(entry.num_bytes for entry in entries)
    if num_bytes > MAX_TREE_BYTES:
        raise TreeTooLargeError(f"the tree has {num_bytes} bytes, more than {MAX_TREE_BYTES}")
    found: dict[str, bytes] = {}
    for entry in entries:
        with suppress(SandboxFileError):  # closed to its own user: as good as not there
            found[entry.path] = sandbox.read_file(entry.path, max_bytes=entry.num_bytes + 1)
    return found


def graded_tree(
    base: Mapping[str, bytes], candidate: Mapping[str, bytes], rule: TreeRule
) -> dict[str, bytes]:
    """The tree in which a candidate is judged: its own files by the task's rule, the others of ``base``, whose tests are run.

    Where a file of the candidate stands in the way of one of the store, or of another one of its own, it is left out.
    """
    kept = {path: data for path, data in base.items() if not rule.takes(path)}
    own = {path: data for path, data in candidate.items() if rule.takes(path)}
    folders = {parent for path in kept for parent in _parents(path)}
    files = {*kept, *(path for path in own if path not in folders)}
    return kept | {
        path: data for path, data in own.items() if path in files and files.isdisjoint(_parents(path))
    }


def tree_sha256(tree: Mapping[str, bytes]) -> str:
    """One hash of all paths and contents; a path may hold bytes that are no text."""
    told = "".join(f"\0{path}\0{sha256_of(data)}" for path, data in sorted(tree.items()))
    return sha256_of(told.encode("utf-8", "surrogatepass"))


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(path).parents][:-1]
