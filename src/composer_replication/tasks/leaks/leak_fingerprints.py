"""What the search for golden code is told: salted hashes of lines and code objects, never the code."""

from __future__ import annotations

import ast
import io
import keyword
import posixpath
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from composer_replication.records import Task
from composer_replication.tasks.leaks.copies import distinctive_lines
from composer_replication.tasks.leaks.leak_search import Target, all_codes, code_hash, hashed
from composer_replication.tasks.store import TaskStore

NUM_LINES_AROUND = 6


@dataclass(frozen=True)
class Fingerprint:
    """A target, and how many of its lines are distinctive."""

    target: Target
    num_distinctive_lines: int


def fingerprints(store: TaskStore, task: Task, salt: str) -> list[Fingerprint]:
    """The targets of a task: one for each place where code was taken out.

    A line of the code is distinctive if it occurs once in the restored tree, not in the broken
    one, and has a name in it. Lines are compared without indentation.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    files = store.files(task, "rollout")
    original = store.repository_files(store.record(task.task_id).repository_record)
    touched = {hole.path for hole in task.holes} | set(task.removed_files)
    broken, restored = _line_counts(files), _line_counts({**files, **{p: original[p] for p in touched}})
    names = _hidden_names(task, files, salt)
    found = []
    for place in _places(store, task):
        golden_lines = [line for line in map(str.strip, place.golden.splitlines()) if line]
        distinctive = {
            line
            for line in distinctive_lines(place.golden)
            if restored[line] == 1 and not broken[line] and _has_a_name(line)
        }
        before = [line for line in map(str.strip, place.before.splitlines()) if line]
        after = [line for line in map(str.strip, place.after.splitlines()) if line]
        window = [*before[-NUM_LINES_AROUND:], *golden_lines, *after[:NUM_LINES_AROUND]]
        codes, functions = _codes_of(
            original[place.path].decode("utf-8", "replace"),
            files.get(place.path, b"").decode("utf-8", "replace"),
            place.path, task, salt,
        )  # fmt: skip
        target = Target(
            task_id=task.task_id,
            window=tuple((hashed(salt, line), len(line), line in distinctive) for line in window),
            codes=codes,
            name=task.symbol.partition("#")[0].rpartition(".")[2],
            names=names,
            module=_module_path(place.path, {**files, place.path: b""}),
            functions=functions,
            symbols=place.symbols,
        )
        found.append(Fingerprint(target, len(distinctive)))
    return found


@dataclass(frozen=True)
class _Place:
    path: str
    golden: str
    before: str
    after: str
    symbols: tuple[str, ...]


def _places(store: TaskStore, task: Task) -> list[_Place]:
    """Where code was taken out, and what stands around it in the broken file."""
    record = store.record(task.task_id)
    original = store.repository_files(record.repository_record)
    places = []
    for edit in record.edits:
        text = original[edit.path].decode()
        golden = text[edit.start : edit.end]
        if golden.strip():
            first = text.count("\n", 0, edit.start) + 1
            symbols = symbols_between(text, first, first + golden.rstrip().count("\n"))
            places.append(_Place(edit.path, golden, text[: edit.start], text[edit.end :], symbols))
    for path in record.removed_files:
        text = original[path].decode("utf-8", "replace")
        places.append(_Place(path, text, "", "", symbols_between(text, 1, len(text))))
    return places


def symbols_between(text: str, first: int, last: int) -> tuple[str, ...]:
    """Qualified names of the functions and classes that have a line in ``first`` to ``last`` (from 1).

    Functions inside functions cannot be asked for by name and are left out; so is everything
    of a file that does not parse.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(dict.fromkeys(_definitions(tree, "", first, last)))


def _definitions(node: ast.AST, owner: str, first: int, last: int) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _definitions(child, owner, first, last)
        elif child.lineno <= last and (child.end_lineno or child.lineno) >= first:
            yield owner + child.name
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, f"{owner}{child.name}.", first, last)


def _hidden_names(task: Task, files: Mapping[str, bytes], salt: str) -> frozenset[str]:
    """Salted names of hidden tests that nothing visible calls so."""
    visible_words = " ".join(data.decode("utf-8", "replace") for data in files.values())
    hidden = {
        (posixpath.basename(test.partition("::")[0]), test.partition("[")[0].rpartition("::")[2])
        for test in task.tests.hidden
    }
    return frozenset(
        hashed(salt, text)
        for leaf, test in hidden
        if f"{test}(" not in visible_words
        for text in (test, f"{leaf}::{test}")
    )


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


def _codes_of(
    restored: str, broken: str, path: str, task: Task, salt: str
) -> tuple[frozenset[str], frozenset[str]]:
    """Code objects that only the restored file compiles to, at each level of optimisation, and their names."""
    found: set[str] = set()
    functions: set[str] = set()
    for new, old in zip(_compiled(restored, path), _compiled(broken, path), strict=False):
        before = {code_hash(salt, code) for code in all_codes(old)}
        symbol = task.symbol.partition("#")[0]
        for code in all_codes(new):
            is_of_symbol = code.co_qualname == symbol or code.co_qualname.startswith(f"{symbol}.<locals>")
            if is_of_symbol or not task.is_one_hole:
                new_hash = code_hash(salt, code)
                if new_hash not in before:
                    found.add(new_hash)
                    functions.add(code.co_name)
    return frozenset(found), frozenset(name for name in functions if name.isidentifier())


@lru_cache(maxsize=64)
def _compiled(text: str, path: str) -> tuple[CodeType, ...]:
    """A file compiled, never run, at each level of optimisation; empty if it cannot be."""
    try:
        return tuple(compile(text, path, "exec", dont_inherit=True, optimize=level) for level in (0, 1, 2))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _module_path(path: str, files: Mapping[str, bytes]) -> str:
    """The path below the folder that it is imported from: without ``src/`` or ``lib/``."""
    top, _, rest = path.partition("/")
    is_root = top in ("src", "lib") and f"{top}/__init__.py" not in files
    return posixpath.normpath(rest if is_root else path)
