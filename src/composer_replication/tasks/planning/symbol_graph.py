"""The Python files of a repository, read without running them, and how their names hang together."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from composer_replication.tasks.intake.tree_rules import (
    below_root,
    is_subject_path,
    is_test_path,
    recorded_folders,
)
from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import Definition, definitions_in, first_line, parsed

# --- One file: what it defines, imports, exports and uses.

ImportStatement = ast.Import | ast.ImportFrom
Items = ast.List | ast.Tuple | ast.Set


@dataclass(frozen=True, slots=True)
class ImportedName:
    """One name of one import statement of a file.

    ``target`` is the absolute dotted module; ``name`` is what is taken from it (``*`` for a star, None for ``import
    target``); ``bound`` is the name that it gets here.
    """

    file: SourceFile
    target: str
    name: str | None
    bound: str
    statement: ImportStatement
    index: int
    is_module_level: bool


class SourceFile:
    """What a parsed file says.

    ``definitions`` are functions, classes at the top and, as ``Class.method``, methods; each maps to all its parts:
    overloads, both arms of a condition, setters. ``uses`` are by identifier the definitions (``function``, ``Class``,
    ``Class.method``) where it occurs as a name or attribute, "" for the module itself. ``bound`` are all names that the
    module gives a meaning, methods too. ``exports`` are the literal lists that make up ``__all__``, ``exported`` all
    strings in it.
    """

    def __init__(self, path: str, text: str, tree: ast.Module, module: str) -> None:
        self.path, self.text, self.tree, self.module = path, text, tree, module
        self.lines = Lines(text)
        self.is_package = PurePosixPath(path).stem == "__init__"
        self.is_test = is_test_path(path)
        self.definitions: dict[str, list[Definition]] = defaultdict(list)
        self.imports: list[ImportedName] = []
        self.uses: dict[str, set[str]] = defaultdict(set)
        self.exports: list[Items] = []
        self.exported = set[str]()
        holders = [""] * (len(self.lines.starts) + 1)  # by line
        for name, node in definitions_in(tree.body):
            if "." not in name or not isinstance(node, ast.ClassDef):
                self.definitions[name].append(node)
                first, last = first_line(node), node.end_lineno or node.lineno
                holders[first : last + 1] = [name] * (last + 1 - first)
        self.bound = set(self.definitions)
        for part in ast.walk(tree):
            self._note(part, holders[getattr(part, "lineno", 0)])

    def _note(self, node: ast.AST, holder: str) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                found = list(self._imported(node, is_module_level=not holder))
                self.imports += found
                self.bound.update(one.bound for one in found if not holder)
            case ast.Name(id=name, ctx=ast.Store()):
                self.bound.update(() if holder else (name,))
            case ast.Name(id=name) | ast.Attribute(attr=name):
                self.uses[name].add(holder)
            case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.AugAssign(value=value) if value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if not holder and any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
                    self.exports += [value] if isinstance(value, Items) else []
                    values = (getattr(each, "value", None) for each in ast.walk(value))
                    self.exported.update(each for each in values if isinstance(each, str))

    def _imported(self, node: ImportStatement, *, is_module_level: bool) -> Iterator[ImportedName]:
        origin: str | None = None  # with its dots resolved
        if isinstance(node, ast.ImportFrom):
            parts = self.module.split(".")
            parts = parts[: len(parts) - node.level + self.is_package] if node.level else []
            origin = ".".join(filter(None, [*parts, node.module]))
        for index, alias in enumerate(node.names):
            target, name = (alias.name, None) if origin is None else (origin, alias.name)
            bound = alias.asname or name or alias.name.partition(".")[0]
            yield ImportedName(self, target, name, bound, node, index, is_module_level)


def module_name(path: str, roots: Iterable[str]) -> str:
    """The dotted name of a file, of which ``roots`` are the places of import."""
    parts = PurePosixPath(below_root(path, roots)).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


# --- All files: which names denote one symbol, where, and who uses it.

Name = tuple[str, str]
"""A dotted module and a name in it: of its top level, ``Class.method``, or ``*`` for all."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Everything through which some symbols can be had: ``names`` are all (module, name) that denote one of them,
    ``aliases`` the imported names that bring them there, in every file, tests included.
    """

    names: frozenset[Name]
    aliases: tuple[ImportedName, ...]


class SymbolGraph:
    """All Python files that can be read, and how their names hang together.

    ``files`` are by path, ``sources`` those that are no tests, ``subjects`` those whose definitions may be taken out.
    ``importers`` has every ``from module import name``, and ``import module`` with the name None; ``users`` has for each
    identifier the definitions in ``sources`` where it occurs.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        roots = recorded_folders(files)
        self.files: dict[str, SourceFile] = {}
        for path in sorted(path for path in files if path.endswith(".py")):
            with suppress(UnicodeDecodeError, RecursionError):  # of another encoding, or too deep
                text = files[path].decode()
                if tree := parsed(text):
                    self.files[path] = SourceFile(path, text, tree, module_name(path, roots))
        self.sources = [file for file in self.files.values() if not file.is_test]
        self.subjects = [file for file in self.sources if is_subject_path(file.path)]
        self.by_module: dict[str, list[SourceFile]] = defaultdict(list)
        self.importers: dict[tuple[str, str | None], list[ImportedName]] = defaultdict(list)
        self._targets: dict[str, list[ImportedName]] = defaultdict(list)
        self.users: dict[str, set[Name]] = defaultdict(set)
        for file in self.files.values():
            self.by_module[file.module].append(file)
            for imported in file.imports:
                self.importers[imported.target, imported.name].append(imported)
                self._targets[imported.target].append(imported)
        for file in self.sources:
            for identifier, holders in file.uses.items():
                self.users[identifier] |= {(file.module, holder) for holder in holders}
        self.exported = {(file.module, name) for file in self.files.values() for name in file.exported}

    def star_exports(self, module: str, name: str) -> bool:
        """Whether ``from module import *`` brings the name."""
        listed = [file.exported for file in self.by_module[module] if file.exported]
        return any(name in exported for exported in listed) if listed else not name.startswith("_")

    def reach(self, names: Iterable[Name], modules: Iterable[str] = ()) -> Reach:
        """Follow imports, re-exports and star imports from some names, and from modules that go altogether."""
        pending = list(names)
        aliases: set[ImportedName] = set()
        found: set[Name] = set()

        def arrive(arriving: Iterable[ImportedName]) -> None:
            for imported in arriving:
                aliases.add(imported)
                is_plain = imported.name is None and imported.statement.names[imported.index].asname is None
                if imported.is_module_level and imported.name != "*" and not is_plain:
                    pending.append((imported.file.module, imported.bound))

        for module in modules:
            parent, _, last = module.rpartition(".")
            arrive(self._targets.get(module, ()))
            arrive(self.importers.get((parent, last), ()))
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                arrive(self.importers.get(name, ()))
                stars = self.importers.get((name[0], "*"), ()) if self.star_exports(*name) else ()
                pending += [(star.file.module, name[1]) for star in stars if star.is_module_level]

        def place(imported: ImportedName) -> tuple[str, int, int, int]:
            statement = imported.statement
            return imported.file.path, statement.lineno, statement.col_offset, imported.index

        return Reach(frozenset(found), tuple(sorted(aliases, key=place)))


# --- What only a public symbol needs: the helpers, transitively and across files, that nobody else names.


class Needs:
    """Who names whom, by identifier and conservatively: a doubt counts as a use.

    A helper's users are the definitions that hold its identifier as a name or an attribute, in whatever file; module level
    is a user of its own. Imports and ``__all__`` entries vanish with the helper and do not count; tests are no users. A
    helper that an ``__all__`` or a package offers is somebody's API and stays out; methods are no helpers.
    """

    def __init__(self, graph: SymbolGraph) -> None:
        self._users: dict[Name, set[Name]] = {}
        self._needs: dict[Name, set[Name]] = defaultdict(set)
        tops = {
            (file.module, name) for file in graph.subjects for name in file.definitions if "." not in name
        }
        for name in tops:
            reach = graph.reach([name])
            elsewhere = [file for module, _ in reach.names - {name} for file in graph.by_module[module]]
            is_re_exported = any(file.is_package and not file.is_test for file in elsewhere)
            if is_re_exported or not reach.names.isdisjoint(graph.exported):
                continue
            users = {user for _, bound in reach.names for user in graph.users.get(bound, ())}
            self._users[name] = users - {name}
            for holder in {holder for user in self._users[name] for holder in _holders(user)} - {name}:
                self._needs[holder].add(name)

    def of_name(self, root: Name) -> frozenset[Name]:
        """The feature of a function, class or method."""
        inside, pending = {root}, [root]
        while pending:
            for helper in self._needs.get(pending.pop(), set()) - inside:
                if not any(inside.isdisjoint(_holders(user)) for user in self._users[helper]):
                    inside.add(helper)
                    pending.append(helper)
        return frozenset(inside)


def _holders(user: Name) -> set[Name]:
    """A definition, the class around it and its module."""
    module, holder = user
    return {user, (module, holder.partition(".")[0]), (module, "*")}
