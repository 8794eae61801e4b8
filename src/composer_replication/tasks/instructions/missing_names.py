"""Which names a tree lacks, as an import in one of its files would find: read, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from composer_replication.tasks.instructions.surroundings import parsed
from composer_replication.tasks.intake.source_folders import below_root, recorded_folders

_DYNAMIC = "*"
"""Stands among a module's names when it may have others: a star import from elsewhere, ``__getattr__``."""


class ModuleNames:
    """The modules of a tree and what each binds at its top.

    Args:
        files: the tree by path; only Python files are looked at.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._paths: dict[str, str] = {}
        roots = recorded_folders(files)
        for path in sorted(files):
            if path.endswith(".py"):
                for name in _module_names(path, files, roots):
                    self._paths.setdefault(name, path)
        self._packages = {name.partition(".")[0] for name in self._paths}
        self._names: dict[str, frozenset[str]] = {}

    def lacks_module(self, module: str) -> bool:
        """Whether a module of one of the tree's packages is not there."""
        return module.partition(".")[0] in self._packages and not self._is_module(module)

    def lacks_name(self, module: str, name: str) -> bool:
        """Whether ``from module import name`` would find a module of this tree without that name."""
        if module not in self._paths or f"{module}.{name}" in self._paths:
            return False
        names = self._names_of(module)
        return name not in names and _DYNAMIC not in names

    def _is_module(self, module: str) -> bool:
        return module in self._paths or any(name.startswith(f"{module}.") for name in self._paths)

    def _names_of(self, module: str) -> frozenset[str]:
        if module not in self._names:
            self._names[module] = frozenset()  # what a circle of star imports finds
            tree = parsed(self._files[self._paths[module]].decode("utf-8", "replace"))
            self._names[module] = (
                frozenset({_DYNAMIC}) if tree is None else frozenset(self._bound(tree, module))
            )
        return self._names[module]

    def _bound(self, tree: ast.Module, module: str) -> Iterator[str]:
        """What the statements of a module bind, wherever they stand but inside functions and classes."""
        for node in _statements(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield _DYNAMIC if node.name == "__getattr__" else node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Import):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = absolute_module(node, self._paths[module], module)
                for alias in node.names:
                    if alias.name != "*":
                        yield alias.asname or alias.name
                    elif source in self._paths:
                        yield from self._names_of(source)
                    else:
                        yield _DYNAMIC


def absolute_module(node: ast.ImportFrom, path: str, module: str) -> str:
    """The module of a ``from`` import in the file ``path``, whose own dotted name is ``module``."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    up = node.level - PurePosixPath(path).name.startswith("__init__.")
    base = parts[: len(parts) - up] if up else parts
    return ".".join([*base, *([node.module] if node.module else [])])


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _statements(child)


def _module_names(path: str, files: Mapping[str, bytes], roots: Sequence[str]) -> list[str]:
    """The dotted names by which a file may be imported: from its outermost package, and from the top."""
    pure = PurePosixPath(path)
    parts = (*pure.parent.parts, *(() if pure.stem == "__init__" else (pure.stem,)))
    first = len(pure.parent.parts)
    while first > 0 and f"{'/'.join(pure.parent.parts[:first])}/__init__.py" in files:
        first -= 1
    names = [".".join(parts[first:]), ".".join(parts)]
    below = below_root(path, roots)  # a namespace package has no __init__.py
    names.append(below.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return [name for name in dict.fromkeys(names) if name]
