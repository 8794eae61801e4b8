"""What the search for golden code is told: salted hashes of lines and code objects, never the code."""

from __future__ import annotations

import io
import keyword
import posixpath
import tokenize
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from composer_replication.records import Task
from composer_replication.tasks.body_cuts import fill
from composer_replication.tasks.leak_search import Target, all_codes, code_hash, hashed
from composer_replication.tasks.leaks import distinctive_lines
from composer_replication.tasks.store import TaskStore

NUM_LINES_AROUND = 6


@dataclass(frozen=True)
class Fingerprint:
    """A target, and how many of its lines are distinctive."""

    target: Target
    num_distinctive_lines: int


def fingerprint(store: TaskStore, task: Task, salt: str) -> Fingerprint:
    """The target of a task.

    A line of the body is distinctive if it occurs once in the restored tree, not in the broken
    one, and has a name in it. Lines are compared without indentation.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    broken_text, body = store.broken_text(task), store.golden_body(task)
    files = store.files(task, "rollout")
    broken = _line_counts(files)
    restored_text = fill(broken_text, task.hole, body)
    restored = _line_counts({**files, task.hole.path: restored_text.encode()})
    distinctive = {
        line
        for line in distinctive_lines(body)
        if restored[line] == 1 and not broken[line] and _has_a_name(line)
    }
    before = [line for line in map(str.strip, broken_text[: task.hole.start].splitlines()) if line]
    after = [line for line in map(str.strip, broken_text[task.hole.end :].splitlines()) if line]
    body_lines = [line for line in map(str.strip, body.splitlines()) if line]
    window = [*before[-NUM_LINES_AROUND:], *body_lines, *after[:NUM_LINES_AROUND]]
    visible_words = " ".join(data.decode("utf-8", "replace") for data in files.values())
    hidden = {
        (posixpath.basename(test.partition("::")[0]), test.partition("[")[0].rpartition("::")[2])
        for test in task.tests.hidden
    }
    name = task.symbol.partition("#")[0].rpartition(".")[2]
    target = Target(
        task_id=task.task_id,
        window=tuple((hashed(salt, line), len(line), line in distinctive) for line in window),
        codes=_code_hashes(restored_text, broken_text, task, salt),
        name=name,
        names=frozenset(
            hashed(salt, text)
            for leaf, test in hidden
            if f"{test}(" not in visible_words
            for text in (test, f"{leaf}::{test}")
        ),
        module=_module_path(task.hole.path, files),
    )
    return Fingerprint(target, len(distinctive))


def _line_counts(files: Mapping[str, bytes]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for data in files.values():
        counts.update(line.strip() for line in data.decode("utf-8", "replace").splitlines())
    return counts


def _has_a_name(line: str) -> bool:
    """Whether a line names something: ``else:`` and ``)`` stand everywhere."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line).readline))
    except (tokenize.TokenError, IndentationError):
        return len(line) >= 8  # the line of a longer statement
    names = [token.string for token in tokens if token.type == tokenize.NAME]
    has_text = any(token.type == tokenize.STRING and len(token.string) > 4 for token in tokens)
    return has_text or any(not keyword.iskeyword(name) for name in names)


def _code_hashes(restored: str, broken: str, task: Task, salt: str) -> frozenset[str]:
    """Code objects that only the restored file compiles to, at each level of optimisation."""
    found: set[str] = set()
    for level in (0, 1, 2):
        try:
            # Compiled, never run.
            new = compile(restored, task.hole.path, "exec", dont_inherit=True, optimize=level)
            old = compile(broken, task.hole.path, "exec", dont_inherit=True, optimize=level)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return frozenset()
        before = {code_hash(salt, code) for code in all_codes(old)}
        symbol = task.symbol.partition("#")[0]
        for code in all_codes(new):
            if code.co_qualname == symbol or code.co_qualname.startswith(f"{symbol}.<locals>"):
                found |= {code_hash(salt, code)} - before
    return frozenset(found)


def _module_path(path: str, files: Mapping[str, bytes]) -> str:
    """The path below the folder that it is imported from: without ``src/`` or ``lib/``."""
    top, _, rest = path.partition("/")
    is_root = top in ("src", "lib") and f"{top}/__init__.py" not in files
    return posixpath.normpath(rest if is_root else path)
