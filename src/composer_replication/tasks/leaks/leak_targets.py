"""What the search for golden code is told: lines and code objects of what was deleted."""

from __future__ import annotations

import io
import keyword
import posixpath
import tokenize
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from composer_replication.records import Edit, Task
from composer_replication.tasks.intake.source_folders import below_root, recorded_folders
from composer_replication.tasks.leaks.leak_search import Target, all_codes, code_digest
from composer_replication.tasks.leaks.shown_code import distinctive_lines
from composer_replication.tasks.store import TaskStore

NUM_LINES_AROUND = 6


def targets_of(store: TaskStore, task: Task) -> list[Target]:
    """The targets of a task: one for each place where code was taken out.

    A line of the code is distinctive if it occurs once in the restored tree, not in the broken
    one, and has a name in it. Lines are compared without indentation.
    """
    files = store.files(task, "rollout")
    record = store.record(task.task_id)
    original = store.repository_files(record.repository_record)
    touched = {hole.path for hole in task.holes} | set(task.removed_files)
    broken = list(map(_counts_of, files.values()))
    restored = [_counts_of(original[path] if path in touched else files[path]) for path in {*files, *touched}]
    tests = _unseen_tests(task, files)
    found = []
    whole = [Edit(path, 0, len(original[path]), "") for path in record.removed_files]
    for edit in (*record.edits, *whole):
        path, text = edit.path, original[edit.path].decode("utf-8", "replace")
        golden = text[edit.start : edit.end]
        if not golden.strip() and edit not in whole:
            continue
        distinctive = {
            line
            for line in distinctive_lines(golden)
            if sum(counts[line] for counts in restored) == 1
            and not any(counts[line] for counts in broken)
            and _has_a_name(line)
        }
        above, gone, below = (
            [line for line in map(str.strip, part.splitlines()) if line]
            for part in (text[: edit.start], golden, text[edit.end :])
        )
        window = [*above[-NUM_LINES_AROUND:], *gone, *below[:NUM_LINES_AROUND]]
        target = Target(
            task_id=task.task_id,
            window=tuple((line, line in distinctive) for line in window),
            codes=_codes_of(original[path], files.get(path, b""), path, task),
            tests=tests,
            module=posixpath.normpath(below_root(path, recorded_folders({**files, path: b""}))),
        )
        found.append(target)
    return found


def _unseen_tests(task: Task, files: Mapping[str, bytes]) -> frozenset[str]:
    """``file name::test`` of each hidden or paid test that nothing visible calls so."""
    hidden = {
        (posixpath.basename(test.partition("::")[0]), test.partition("[")[0].rpartition("::")[2])
        for test in task.tests.unseen
    }
    calls = {test: f"{test}(".encode() for _, test in hidden}
    shown = {test for test, call in calls.items() if any(call in data for data in files.values())}
    return frozenset(f"{leaf}::{test}" for leaf, test in hidden if test not in shown)


@lru_cache(maxsize=1024)
def _counts_of(data: bytes) -> Counter[str]:
    """How often each line occurs; most files are those of the task before."""
    return Counter(map(str.strip, data.decode("utf-8", "replace").splitlines()))


def _has_a_name(line: str) -> bool:
    """Whether a line names something: ``else:`` and ``)`` stand everywhere."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line).readline))
    except (tokenize.TokenError, IndentationError):
        return len(line) >= 8  # the line of a longer statement
    names = [token.string for token in tokens if token.type == tokenize.NAME]
    has_text = any(token.type == tokenize.STRING and len(token.string) > 4 for token in tokens)
    return has_text or any(not keyword.iskeyword(name) for name in names)


def _codes_of(restored: bytes, broken: bytes, path: str, task: Task) -> frozenset[str]:
    """Digests of the code objects that only the restored file compiles to, at each level of optimisation."""
    symbol = task.symbol.partition("#")[0]
    return frozenset(
        digest
        for new, old in zip(_codes_in(restored, path), _codes_in(broken, path), strict=False)
        for digest, name in new.items()
        if digest not in old
        and (not task.is_one_hole or name == symbol or name.startswith(f"{symbol}.<locals>."))
    )


@lru_cache(maxsize=64)
def _codes_in(data: bytes, path: str) -> tuple[dict[str, str], ...]:
    """Digest and qualified name of each code object of a file, at each level of optimisation; it is never run."""
    text = data.decode("utf-8", "replace")
    try:
        modules = [compile(text, path, "exec", dont_inherit=True, optimize=level) for level in (0, 1, 2)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple({code_digest(code): code.co_qualname for code in all_codes(module)} for module in modules)
