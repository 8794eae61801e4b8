"""The static graph of a repository: which names denote one symbol, where, and who uses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from composer_replication.tasks.intake.tree_rules import is_subject_path, recorded_folders
from composer_replication.tasks.planning.source_file import ImportedName, SourceFile, read_source

Name = tuple[str, str]
"""A dotted module and a name in it: of its top level, or ``Class.method``."""


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
        paths = (path for path in sorted(files) if path.endswith(".py"))
        read = (read_source(path, files[path], roots) for path in paths)
        self.files = {found.path: found for found in read if found is not None}
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
        aliases: set[ImportedName] = set()
        found: set[Name] = set()

        def arrive(arriving: Iterable[ImportedName]) -> None:
            for imported in arriving:
                aliases.add(imported)
                if imported.is_module_level and imported.name != "*" and not imported.is_plain:
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


@dataclass(frozen=True, slots=True)
class Selection:
    """What goes together: names (functions, classes, methods), or whole modules."""

    names: frozenset[Name] = frozenset()
    modules: frozenset[str] = frozenset()


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
            elsewhere = [file for module, _ in reach.names - {name} for file in graph.files_of(module)]
            is_re_exported = any(file.is_package and not file.is_test for file in elsewhere)
            if is_re_exported or not reach.names.isdisjoint(graph.exported):
                continue
            users = {user for _, bound in reach.names for user in graph.users.get(bound, ())}
            inner = (one for one in reach.aliases if not (one.is_module_level or one.file.is_test))
            users.update((one.file.module, "") for one in inner)
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
