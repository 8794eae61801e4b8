"""What a broken file says about a place in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from composer_replication.records import Hole
from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import first_line, parsed

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_tree = lru_cache(maxsize=16)(parsed)
"""A file may have a hundred holes; nobody changes its tree."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the broken file says about a hole.

    ``line`` is the marker's line. ``header`` are the lines from the first one of the function around it
    (decorators included) to the docstring, ``docstring`` the docstring's own lines, both as they stand in the file. ``name`` is the qualified name of
    the function, empty where none was found. ``owner`` is the class around,
    ``siblings`` its other members, ``neighbours`` what else the file defines at the top.
    """

    line: int
    header: str
    docstring: str
    name: str
    owner: str
    siblings: tuple[str, ...]
    neighbours: tuple[str, ...]


def look_around(broken_text: str, hole: Hole) -> Surroundings:
    """Read the broken file around its hole; a file that does not parse tells the lines alone."""
    lines = Lines(broken_text)
    marker = broken_text[hole.start : hole.end]
    start = hole.start + len(marker) - len(marker.lstrip())
    line = sum(begin <= start for begin in lines.starts)
    module = _tree(broken_text) or ast.Module([], [])
    chain = list(_chain(module, line))
    function = next((node for node in reversed(chain) if isinstance(node, _Function)), None)
    owner = next((node for node in reversed(chain) if isinstance(node, ast.ClassDef)), None)
    first = line if function is None else first_line(function)
    head = broken_text[lines.starts[first - 1] : max(hole.start, lines.starts[first - 1])]
    cut = len(head)
    if function is not None and ast.get_docstring(function, clean=False) is not None:
        begin = lines.starts[function.body[0].lineno - 1] - lines.starts[first - 1]
        cut = begin if begin > 0 else cut  # else all on one line: it stays together
    return Surroundings(
        line=line,
        header=head[:cut].rstrip(),
        docstring=head[cut:].rstrip(),
        name="" if function is None else ".".join(getattr(node, "name", "") for node in chain),
        owner="" if owner is None else owner.name,
        siblings=() if owner is None else _names(owner.body, chain),
        neighbours=_names(module.body, chain),
    )


def _chain(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """The definitions around a line, from the outside in."""
    for child in ast.iter_child_nodes(node):
        if getattr(child, "lineno", 0) <= line <= (getattr(child, "end_lineno", None) or 0):
            if isinstance(child, _Definition):
                yield child
            yield from _chain(child, line)


def _names(body: Sequence[ast.stmt], chain: Sequence[ast.AST]) -> tuple[str, ...]:
    """What a block defines beside the nodes of the chain, each name once, in its order."""
    return tuple(
        dict.fromkeys(node.name for node in body if isinstance(node, _Definition) and node not in chain)
    )


def public_names(text: str) -> tuple[str, ...]:
    """The functions and classes that a file defines at the top, without those that begin with an underscore."""
    module = _tree(text)
    body = [] if module is None else module.body
    return tuple(name for name in _names(body, ()) if not name.startswith("_"))


def class_members(text: str, symbol: str) -> tuple[str, ...] | None:
    """The methods of the class with that qualified name; None when the file has no such class."""
    node: ast.AST | None = _tree(text)
    for name in symbol.split("."):
        node = next(
            (
                child
                for child in (ast.iter_child_nodes(node) if node is not None else ())
                if isinstance(child, ast.ClassDef) and child.name == name
            ),
            None,
        )
    return _names(node.body, ()) if isinstance(node, ast.ClassDef) else None
