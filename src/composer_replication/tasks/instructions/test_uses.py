"""How visible tests import and use what a tree lacks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from composer_replication.tasks.instructions.missing_names import ModuleNames, absolute_module
from composer_replication.tasks.instructions.surroundings import parsed

MAX_USES = 8
"""Uses of one name; the tests themselves are shown too."""
MAX_USE_CHARS = 100

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True, slots=True)
class MissingUses:
    """``imports`` are statements that do not work now, with the missing names only; ``names`` are those names as
    the tests write them; ``uses`` are calls and attributes of them, each once, in the order of the tests.
    """

    imports: tuple[str, ...]
    names: tuple[str, ...]
    uses: tuple[str, ...]


def missing_uses(
    files: Mapping[str, bytes], tests: Iterable[tuple[str, int, str]], symbol: str
) -> MissingUses:
    """What some test functions of a tree need that is not in it.

    Args:
        files: the broken tree by path.
        tests: path, line and name of each test function, as they stand in it.
        symbol: the qualified name that is gone: its last part counts as missing wherever it is an
            attribute, because nothing tells the class of an object. Empty for a module.
    """
    modules = ModuleNames(files)
    last = symbol.rpartition(".")[2].partition("#")[0]
    trees: dict[str, ast.Module | None] = {}
    imports: dict[str, None] = {}
    names: dict[str, None] = {}
    uses: dict[str, None] = {}
    for path, line, name in tests:
        if path not in trees:
            trees[path] = parsed(files[path].decode("utf-8", "replace")) if path in files else None
        tree = trees[path]
        function = None if tree is None else _function_at(tree, line, name)
        if tree is None or function is None:
            continue
        finder = _Finder(modules, path, last if "." in symbol else "")
        finder.read(tree, function)
        imports.update(dict.fromkeys(finder.imports))
        uses.update(dict.fromkeys(finder.uses(function)))
        names.update(dict.fromkeys(finder.names))  # those of attributes are known now
    return MissingUses(tuple(imports), tuple(names), tuple(list(uses)[:MAX_USES]))


def _function_at(tree: ast.Module, line: int, name: str) -> _Function | None:
    """The function of that name whose ``def`` or first decorator is on that line; else the only one of that name."""
    named = [node for node in ast.walk(tree) if isinstance(node, _Function) and node.name == name]
    exact = [node for node in named if line in (node.lineno, *(d.lineno for d in node.decorator_list))]
    return (exact or named)[0] if exact or len(named) == 1 else None


class _Finder:
    """What one test function needs, by the imports of its file and its own."""

    def __init__(self, modules: ModuleNames, path: str, attribute: str) -> None:
        self.modules = modules
        self.path = path
        self.module = ".".join(PurePosixPath(path).with_suffix("").parts)
        self.attribute = attribute
        self.imports: list[str] = []
        self.names: list[str] = []
        self._bound: dict[str, str] = {}
        self._missing: set[str] = set()

    def read(self, tree: ast.Module, function: _Function) -> None:
        """Take in the imports at the top that the function uses, and those inside it."""
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        for statement in _imports(tree.body):
            self._take(statement, used)
        for node in ast.walk(function):
            if isinstance(node, _Import):
                self._take(node, None)

    def _take(self, statement: _Import, used: set[str] | None) -> None:
        for alias in statement.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if used is not None and bound not in used:
                continue
            if isinstance(statement, ast.Import):
                is_missing = self.modules.lacks_module(alias.name)
                self._bound[bound] = alias.name if alias.asname else bound
            else:
                source = absolute_module(statement, self.path, self.module)
                is_missing = self.modules.lacks_module(source) or self.modules.lacks_name(source, alias.name)
                self._bound[bound] = f"{source}.{alias.name}"
            if is_missing:
                self._missing.add(bound)
                self.imports.append(_import_of(statement, alias))
                self.names.append(alias.name)

    def uses(self, function: _Function) -> Iterator[str]:
        """Expressions that begin with what is missing: calls, attributes, items."""
        for node in _outermost(function, self._is_use):
            text = _unparsed(node)
            if text and len(text) <= MAX_USE_CHARS:
                yield text

    def _is_use(self, node: ast.AST) -> bool:
        """Whether a chain of calls, attributes and items begins with something that is missing."""
        while True:
            if self._is_missing(node):
                return True
            if isinstance(node, ast.Call):
                node = node.func
            elif isinstance(node, ast.Attribute | ast.Subscript):
                node = node.value
            else:
                return False

    def _is_missing(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._missing
        if not isinstance(node, ast.Attribute):
            return False
        if node.attr == self.attribute:
            return True
        module = self._module_of(node.value)
        if module and self.modules.lacks_name(module, node.attr):
            self.names.append(node.attr)
            return True
        return False

    def _module_of(self, node: ast.expr) -> str:
        """The module that a chain of names stands for; empty when it is none."""
        if isinstance(node, ast.Name):
            return self._bound.get(node.id, "")
        if isinstance(node, ast.Attribute):
            outer = self._module_of(node.value)
            return f"{outer}.{node.attr}" if outer else ""
        return ""


def _imports(body: Sequence[ast.AST]) -> Iterator[_Import]:
    """The imports of a file outside functions and classes."""
    for node in body:
        if isinstance(node, _Import):
            yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _imports(getattr(node, part, []))


def _import_of(statement: _Import, alias: ast.alias) -> str:
    if isinstance(statement, ast.Import):
        return ast.unparse(ast.Import([alias]))
    return ast.unparse(ast.ImportFrom(statement.module, [alias], statement.level))


def _outermost(node: ast.AST, is_wanted: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
    """The wanted nodes that stand inside no other wanted one."""
    for child in ast.iter_child_nodes(node):
        if is_wanted(child):
            yield child
        else:
            yield from _outermost(child, is_wanted)


def _unparsed(node: ast.AST) -> str:
    try:
        return ast.unparse(node).partition("\n")[0]
    except (RecursionError, ValueError):
        return ""
