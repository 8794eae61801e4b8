"""The static graph of a repository: which names denote one symbol, where, and who uses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from composer_replication.tasks.intake.tree_rules import is_subject_path, recorded_folders
from composer_replication.tasks.planning.source_file import ImportedName, SourceFile, Use, read_source

Name = tuple[str, str]
"""A dotted module and a name in it: of its top level, or ``Class.method``."""
Alias = tuple[SourceFile, ImportedName]


@dataclass(frozen=True, slots=True)
class Reach:
    """Everything through which some symbols can be had: ``names`` are all (module, name) that denote one of them,
    ``aliases`` the imported names that bring them there, in every file, tests included.
    """

    names: frozenset[Name]
    aliases: tuple[Alias, ...]


class SymbolGraph:
    """All Python files that can be read, and how their names hang together.

    ``files`` are by path, ``sources`` those that are no tests, ``subjects`` those whose definitions may be taken out.
    ``importers`` has every
    ``from module import name``, and ``import module`` with the name None; ``uses`` each occurrence of an identifier in ``sources``.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        roots = recorded_folders(files)
        paths = (path for path in sorted(files) if path.endswith(".py"))
        read = (read_source(path, files[path], roots) for path in paths)
        self.files = {found.path: found for found in read if found is not None}
        self.sources = [file for file in self.files.values() if not file.is_test]
        self.subjects = [file for file in self.sources if is_subject_path(file.path)]
        self.by_module: dict[str, list[SourceFile]] = defaultdict(list)
        self.importers: dict[tuple[str, str | None], list[Alias]] = defaultdict(list)
        self._targets: dict[str, list[Alias]] = defaultdict(list)
        self.uses: dict[str, list[tuple[SourceFile, Use]]] = defaultdict(list)
        for file in self.files.values():
            self.by_module[file.module].append(file)
            for imported in file.imports:
                self.importers[imported.target, imported.name].append((file, imported))
                self._targets[imported.target].append((file, imported))
        for file in self.sources:
            for identifier, uses in file.uses.items():
                self.uses[identifier] += [(file, use) for use in uses]
        self._exported = {(file.module, name) for file in self.files.values() for name in file.exported}

    def files_of(self, module: str) -> list[SourceFile]:
        """The files with that module name; none of a module of others."""
        return self.by_module.get(module, [])

    def star_exports(self, module: str, name: str) -> bool:
        """Whether ``from module import *`` brings the name."""
        listed = [file.exported for file in self.files_of(module) if file.exported]
        return any(name in exported for exported in listed) if listed else not name.startswith("_")

    def reach(self, names: Iterable[Name], modules: Iterable[str] = ()) -> Reach:
        """Follow imports, re-exports and star imports from some names, and from modules that go altogether."""
        pending = list(names)
        aliases: set[Alias] = set()
        found: set[Name] = set()

        def arrive(arriving: Iterable[Alias]) -> None:
            for file, imported in arriving:
                aliases.add((file, imported))
                if imported.is_module_level and imported.name != "*" and not imported.is_plain:
                    pending.append((file.module, imported.bound))

        for module in modules:
            parent, _, last = module.rpartition(".")
            arrive(self._targets.get(module, ()))
            arrive(self.importers.get((parent, last), ()))
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                arrive(self.importers.get(name, ()))
                for file, imported in self.importers.get((name[0], "*"), ()):
                    if imported.is_module_level and self.star_exports(*name):
                        pending.append((file.module, name[1]))

        def place(alias: Alias) -> tuple[str, int, int, int]:
            file, imported = alias
            return file.path, imported.statement.lineno, imported.statement.col_offset, imported.index

        return Reach(frozenset(found), tuple(sorted(aliases, key=place)))

    def is_own_api(self, name: Name) -> bool:
        """Whether a name is offered by itself: in an ``__all__``, or re-exported by a package."""
        names = self.reach([name]).names
        elsewhere = [file for module, _ in names if module != name[0] for file in self.files_of(module)]
        is_re_exported = any(file.is_package and not file.is_test for file in elsewhere)
        return is_re_exported or not names.isdisjoint(self._exported)


# --- What only a public symbol needs: the helpers, transitively and across files, that nobody else names.


@dataclass(frozen=True, slots=True)
class Selection:
    """What goes together: names (functions, classes, constants, methods) and whole modules."""

    names: frozenset[Name] = frozenset()
    modules: frozenset[str] = frozenset()


class Needs:
    """Who names whom, by identifier and conservatively: a doubt counts as a use.

    A helper's users are the definitions that hold its identifier as a name or an attribute; module level is a user of its
    own. A plain name in a file that cannot see the helper is another thing of the same name and no
    use. Imports and ``__all__`` entries vanish with the helper and do not
    count; tests are no users. A helper that an ``__all__`` or a package offers is somebody's API and stays out; methods
    are no helpers.
    """

    def __init__(self, graph: SymbolGraph) -> None:
        self._graph = graph
        tops = {
            (file.module, name)
            for file in graph.subjects
            for name in (*file.definitions, *file.assignments)
            if "." not in name and (name in file.definitions or file.constant(name) is not None)
        }
        self._users = {name: self._users_of_name(name) for name in tops if not graph.is_own_api(name)}
        self._needs: dict[Name, set[Name]] = defaultdict(set)
        for name, own in self._users.items():
            for holder in {holder for user in own for holder in _holders(user)} - {name}:
                self._needs[holder].add(name)

    def of_name(self, root: Name) -> Selection:
        """The feature of a function, class or method."""
        return Selection(frozenset(self._closure(root)))

    def of_module(self, module: str) -> Selection:
        """A module, and what only it needs from other files."""
        names = frozenset(name for name in self._closure((module, "*")) if name[0] != module)
        return Selection(names, frozenset({module}))

    def _closure(self, root: Name) -> set[Name]:
        inside = self._reachable(root, self._users.keys())
        while outside := {
            name
            for name in inside - {root}
            if any(inside.isdisjoint(_holders(user)) for user in self._users[name])
        }:
            inside -= outside
        return self._reachable(root, inside)

    def _reachable(self, root: Name, among: AbstractSet[Name]) -> set[Name]:
        found, pending = {root}, [root]
        while pending:
            needed = (self._needs.get(pending.pop(), set()) & among) - found
            found |= needed
            pending += needed
        return found

    def _users_of_name(self, name: Name) -> set[Name]:
        reach = self._graph.reach([name])
        users = {
            (file.module, use.unit)
            for identifier in {bound for _, bound in reach.names}
            for file, use in self._graph.uses.get(identifier, ())
            if not use.is_name or (file.module, identifier) in reach.names
        }
        for file, imported in reach.aliases:
            if not (imported.is_module_level or file.is_test):
                users.add((file.module, ""))
        return users - {name}


def _holders(user: Name) -> set[Name]:
    """A definition, the class around it and its module."""
    module, unit = user
    return {user, (module, unit.partition(".")[0]), (module, "*")}
