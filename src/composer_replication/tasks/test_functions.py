"""Test functions in their source: take some out of a file, and part them into visible and hidden."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from composer_replication.tasks.lines import Lines
from composer_replication.tasks.tree_rules import is_test_path

Place = tuple[str, int, str]
"""File, first line (of the first decorator) and name of a test function."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BODIES = ("body", "orelse", "finalbody")


@dataclass(frozen=True, slots=True)
class _Found:
    node: _Function
    parents: tuple[ast.AST, ...]


def remove_functions(text: str, targets: Iterable[tuple[int, str]]) -> str | None:
    """The file without some functions, their decorators and the comments right above them.

    Args:
        text: a Python file.
        targets: first line and name of each function.

    Returns:
        The shorter file, or None when one of them cannot be taken out cleanly: not found
        at the level of a module or class, named elsewhere in the file, or on a shared line.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    lines = Lines(text)
    wanted = set(targets)
    functions = [found for found in _functions(module, (module,)) if _key(found.node, wanted) in wanted]
    if len(functions) != len(wanted):
        return None
    doomed = {id(found.node) for found in functions}
    if any(_is_named_elsewhere(module, found.node, doomed) for found in functions):
        return None
    kept: list[str | None] = [lines.line(number) for number in range(1, len(lines.starts) + 1)]
    for found in functions:
        first, last = _first_line(found.node), found.node.end_lineno or found.node.lineno
        if not _stands_alone(lines, found.node, first, last):
            return None
        _blank_out(kept, first, last)
    for found in functions:
        _keep_suite(kept, found, doomed, lines)
    shorter = "".join(line for line in kept if line is not None)
    return shorter if _parses(shorter) else None


def function_texts(text: str) -> dict[tuple[int, str], str]:
    """The source of each test function of a file, decorators included, by first line and name.

    A decorated function is found by the line of its ``def`` too. A file that does not parse
    has none.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    lines = Lines(text)
    found: dict[tuple[int, str], str] = {}
    for function in _functions(module, (module,)):
        node, first = function.node, _first_line(function.node)
        source = "".join(lines.line(number) for number in range(first, (node.end_lineno or first) + 1))
        found[first, node.name] = found[node.lineno, node.name] = source
    return found


def count_functions(text: str) -> Counter[str]:
    """How often each name is given to a function where a test may stand; none in a file that does not parse."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return Counter()
    return Counter(found.node.name for found in _functions(module, (module,)))


def _functions(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterable[_Found]:
    for part in _BODIES:
        for child in getattr(node, part, []):
            if isinstance(child, _Function):
                yield _Found(child, parents)
            elif isinstance(child, ast.ClassDef | ast.If | ast.Try | ast.With):
                yield from _functions(child, (*parents, child))


def _first_line(node: _Function) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _key(node: _Function, wanted: set[tuple[int, str]]) -> tuple[int, str]:
    # A wrapper may report the line of ``def`` instead of its decorator's.
    return (node.lineno, node.name) if (node.lineno, node.name) in wanted else (_first_line(node), node.name)


def _is_named_elsewhere(module: ast.Module, function: _Function, doomed: set[int]) -> bool:
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        if id(node) in doomed:
            continue
        if isinstance(node, ast.Name) and node.id == function.name:
            return True
        if isinstance(node, ast.Attribute) and node.attr == function.name:
            return True
        pending.extend(ast.iter_child_nodes(node))
    return False


def _stands_alone(lines: Lines, node: _Function, first: int, last: int) -> bool:
    before = (
        lines.line(first)[: lines.offset(first, node.col_offset) - lines.starts[first - 1]]
        .rstrip()
        .rstrip("@")
    )
    after = lines.text[lines.offset(last, node.end_col_offset or 0) : lines.end_of_line(last)].strip()
    return (
        not before.strip()
        and (not after or after.startswith("#"))
        and not lines.line(last).rstrip().endswith("\\")
    )


def _blank_out(kept: list[str | None], first: int, last: int) -> None:
    """Drop lines ``first`` to ``last`` (from 1), comments right above, and one run of blank lines below."""
    while first > 1 and (kept[first - 2] or "").lstrip().startswith("#"):
        first -= 1
    while last < len(kept) and kept[last] is not None and not (kept[last] or "").strip():
        last += 1
    for number in range(first, last + 1):
        kept[number - 1] = None


def _keep_suite(kept: list[str | None], found: _Found, doomed: set[int], lines: Lines) -> None:
    """Put ``pass`` where a block lost all its statements."""
    parent = found.parents[-1]
    if isinstance(parent, ast.Module):
        return
    for part in _BODIES:
        block = getattr(parent, part, [])
        if found.node is (block[0] if block else None) and all(id(child) in doomed for child in block):
            first = _first_line(found.node)
            margin = lines.line(first)[: len(lines.line(first)) - len(lines.line(first).lstrip())]
            kept[first - 1] = f"{margin}pass\n"


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class HiddenSplit:
    """``hidden`` test functions are held back; ``files`` are the test files without them, by path."""

    hidden: tuple[Place, ...]
    files: Mapping[str, str]


def part_tests(
    groups: Sequence[Place], texts: Mapping[str, str], *, hidden_share: float, seed: int, salt: str
) -> HiddenSplit:
    """Choose which test functions of a task are held back.

    All parametrisations of a function stay on one side. With N functions about
    ``hidden_share`` of them are hidden, at least one and never all, if they can be taken
    out of their file cleanly; a single function stays visible.

    Args:
        groups: the functions that fail without the deleted body.
        texts: the repository's files by path.
        hidden_share: in [0, 1).
        seed: another seed chooses other functions.
        salt: what makes the choice differ between tasks.
    """
    if len(groups) < 2 or hidden_share <= 0:
        return HiddenSplit((), {})
    wanted = max(1, min(len(groups) - 1, round(len(groups) * hidden_share)))

    def rank(place: Place) -> str:
        return hashlib.sha256(f"{seed}/{salt}/{place[0]}/{place[2]}/{place[1]}".encode()).hexdigest()

    hidden: list[Place] = []
    files: dict[str, str] = {}
    for place in sorted(groups, key=rank):
        path = place[0]
        if len(hidden) == wanted:
            break
        if path not in texts or not is_test_path(path):
            continue
        targets = [(line, name) for other, line, name in (*hidden, place) if other == path]
        shorter = remove_functions(texts[path], targets)
        if shorter is not None:
            hidden.append(place)
            files[path] = shorter
    return HiddenSplit(tuple(sorted(hidden)), files)
