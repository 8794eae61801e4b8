"""The static graph of a repository: which names denote one symbol, where, and who uses it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from composer_replication.tasks.intake.tree_rules import is_subject_path, recorded_folders
from composer_replication.tasks.planning.source_file import ImportedName, SourceFile, Use, read_source

Name = tuple[str, str]
"""A dotted module and a module-level name in it."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Everything through which some symbols can be had.

    ``names`` are all (module, name) that denote one of them; ``aliases`` the imported names
    that bring them there, in every file, tests included.
    """

    names: frozenset[Name]
    aliases: tuple[tuple[SourceFile, ImportedName], ...]


class SymbolGraph:
    """All Python files that can be read, and how their names hang together.

    ``files`` are by path. A stub file (``.pyi``) has the module name of its source. Tests are
    part of the graph but ``sources`` leaves them out.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files: dict[str, SourceFile] = {}
        roots = recorded_folders(files)
        for path in sorted(files):
            if path.endswith((".py", ".pyi")):
                found = read_source(path, files[path], roots)
                if found is not None:
                    self.files[path] = found
        self.by_module: dict[str, list[SourceFile]] = defaultdict(list)
        self.importers: dict[tuple[str, str | None], list[tuple[SourceFile, ImportedName]]] = defaultdict(
            list
        )
        """Every ``from module import name``, and ``import module`` with the name None."""
        self._targets: dict[str, list[tuple[SourceFile, ImportedName]]] = defaultdict(list)
        self._uses: dict[str, list[tuple[SourceFile, Use]]] = defaultdict(list)
        for file in self.files.values():
            self.by_module[file.module].append(file)
            for imported in file.imports:
                self.importers[imported.target, imported.name].append((file, imported))
                self._targets[imported.target].append((file, imported))
        for file in self.sources:
            for use in file.uses:
                self._uses[use.identifier].append((file, use))
        self._exported_anywhere = {
            (file.module, name) for file in self.files.values() for name in file.exported
        }

    @property
    def sources(self) -> list[SourceFile]:
        """Runnable source files, in order of path: no tests, no stubs."""
        return [file for file in self.files.values() if not file.is_test and not file.is_stub]

    @property
    def subjects(self) -> list[SourceFile]:
        """The source files whose definitions may be taken out."""
        return [file for file in self.sources if is_subject_path(file.path)]

    def uses_of(self, identifier: str) -> list[tuple[SourceFile, Use]]:
        """Every occurrence of an identifier in source files."""
        return self._uses.get(identifier, [])

    def star_exports(self, module: str, name: str) -> bool:
        """Whether ``from module import *`` brings the name."""
        listed = [file.exported for file in self.by_module.get(module, []) if file.exports]
        return any(name in exported for exported in listed) if listed else not name.startswith("_")

    def reach(self, names: Iterable[Name], modules: Iterable[str] = ()) -> Reach:
        """Follow imports, re-exports and star imports from some names, and from modules that go altogether."""
        pending = list(names)
        aliases: dict[tuple[str, int, int], tuple[SourceFile, ImportedName]] = {}
        found: set[Name] = set()

        def arrive(file: SourceFile, imported: ImportedName) -> None:
            aliases[file.path, id(imported.statement), imported.index] = (file, imported)
            if imported.is_module_level and imported.name != "*" and not imported.is_plain:
                pending.append((file.module, imported.bound))

        for module in modules:
            parent, _, last = module.rpartition(".")
            for file, imported in [*self._targets.get(module, []), *self.importers.get((parent, last), [])]:
                arrive(file, imported)
        while pending:
            name = pending.pop()
            if name in found:
                continue
            found.add(name)
            for file, imported in self.importers.get(name, []):
                arrive(file, imported)
            for file, imported in self.importers.get((name[0], "*"), []):
                if imported.is_module_level and self.star_exports(*name):
                    pending.append((file.module, name[1]))
        return Reach(frozenset(found), tuple(aliases[key] for key in sorted(aliases)))

    def is_own_api(self, name: Name) -> bool:
        """Whether a name is offered by itself: in an ``__all__``, or re-exported by a package."""
        reach = self.reach([name])
        if not reach.names.isdisjoint(self._exported_anywhere):
            return True
        packages = {module for module, _ in reach.names if module != name[0]}
        return any(
            file.is_package and not file.is_test for module in packages for file in self.by_module[module]
        )

    def resolve(self, file: SourceFile, chain: str) -> str:
        """The absolute dotted text of ``a.b`` as one file sees it; its own names get its module in front."""
        root, _, rest = chain.partition(".")
        found = self._step(file.module, root)
        if found == f"{file.module}.{root}" and any(
            imported.bound == root and imported.name is None for imported in file.imports
        ):
            found = root  # ``import root.other`` binds the root
        for part in filter(None, rest.split(".")):
            found = self._step(found, part)
        return found

    def _step(self, module: str, name: str, hops: int = 9) -> str:
        """What ``module.name`` is called at home: an import there is followed, a submodule is not."""
        here = f"{module}.{name}"
        if here in self.by_module or not hops:
            return here
        for file in self.by_module.get(module, []):
            for imported in file.imports:
                if imported.bound != name or imported.name == "*":
                    continue
                if imported.name is not None:
                    return self._step(imported.target, imported.name, hops - 1)
                if imported.statement.names[imported.index].asname:
                    return imported.target
        return here


# --- What only a public symbol needs: the helpers, transitively and across files, that nobody else names.


@dataclass(frozen=True, slots=True)
class Selection:
    """What goes together: top-level names (constants too), methods (``Class.method``), whole modules (dotted)."""

    names: frozenset[Name] = frozenset()
    methods: frozenset[Name] = frozenset()
    modules: frozenset[str] = frozenset()


class Needs:
    """Who names whom, by identifier and conservatively: a doubt counts as a use.

    A helper's users are the definitions that hold its identifier as a name, an attribute, a
    string or in a doctest; module level is a user of its own. A plain name in a file that
    cannot see the helper is another thing of the same name and no use, nor is an attribute
    of ``self`` one of a module. Imports and ``__all__`` entries vanish with the helper and
    do not count; tests are no users. A helper that an ``__all__`` or a package offers is
    somebody's API and stays out, and so is a method that is public or has a namesake.
    """

    def __init__(self, graph: SymbolGraph) -> None:
        self._graph = graph
        top = {(file.module, name) for file in graph.subjects for name in file.definitions}
        constants = {
            (file.module, name)
            for file in graph.subjects
            for name in file.assignments
            if file.constant(name) is not None
        }
        self._helpers: dict[Name, set[Name]] = {}
        for name in sorted(top | constants):
            if not graph.is_own_api(name):
                self._helpers[name] = self._users_of_name(name)
        self._methods = self._private_methods()
        for method in sorted(self._methods):
            self._helpers[method] = self._users_of_method(method)
        self._needs: dict[Name, set[Name]] = defaultdict(set)
        for name, users in sorted(self._helpers.items()):
            for holder in {holder for user in users for holder in _holders(user)} - {name}:
                self._needs[holder].add(name)

    def of_name(self, root: Name) -> Selection:
        """The feature of a top-level function or class, or of a method: its helpers may be methods of its class."""
        inside = self._closure(root)
        methods = {name for name in inside if "." in name[1]}
        return Selection(frozenset(inside - methods), frozenset(methods))

    def of_module(self, module: str) -> Selection:
        """A module, and what only it needs from other files."""
        inside = self._closure((module, "*"))
        return Selection(frozenset(name for name in inside if name[0] != module), modules=frozenset({module}))

    def _closure(self, root: Name) -> set[Name]:
        inside = self._reachable(root)
        while True:
            outside = {
                name
                for name in inside - {root}
                if any(inside.isdisjoint(_holders(user)) for user in self._helpers[name])
            }
            if not outside:
                return self._reachable(root, inside)
            inside -= outside

    def _reachable(self, root: Name, among: set[Name] | None = None) -> set[Name]:
        owner = root[1].rpartition(".")[0]
        found, pending = {root}, [root]
        while pending:
            for needed in self._needs.get(pending.pop(), ()):
                is_fit = needed not in self._methods or needed[1].rpartition(".")[0] == owner
                if is_fit and needed not in found and (among is None or needed in among):
                    found.add(needed)
                    pending.append(needed)
        return found

    def _users_of_name(self, name: Name) -> set[Name]:
        reach = self._graph.reach([name])
        users: set[Name] = set()
        for identifier in sorted({bound for _, bound in reach.names}):
            for file, use in self._graph.uses_of(identifier):
                if _is_about(file, use, reach.names):
                    users.add((file.module, use.unit or ""))
        for file, imported in reach.aliases:
            if not (imported.is_module_level or file.is_test or file.is_stub):
                users.add((file.module, ""))
        return users - {name}

    def _users_of_method(self, method: Name) -> set[Name]:
        owner, _, name = method[1].rpartition(".")
        users = {
            (file.module, use.unit or "")
            for file, use in self._graph.uses_of(name)
            if use.kind != "name" or (file.module == method[0] and use.in_class == owner)
        }
        return users - {method}

    def _private_methods(self) -> set[Name]:
        """Private methods whose name only one class has."""
        homes: dict[str, set[Name]] = defaultdict(set)
        for file in self._graph.sources:
            for owner, name in file.methods:
                homes[name].add((file.module, f"{owner}.{name}"))
        subjects = {file.module for file in self._graph.subjects}
        return {
            method
            for name, found in homes.items()
            for method in found
            if len(found) == 1 and name.startswith("_") and not name.endswith("__") and method[0] in subjects
        }


def _holders(user: Name) -> set[Name]:
    """A definition, the class around it and its module."""
    module, unit = user
    return {user, (module, unit.partition(".")[0]), (module, "*")}


def _is_about(file: SourceFile, use: Use, names: frozenset[Name]) -> bool:
    if use.kind in ("name", "doctest"):
        return (file.module, use.identifier) in names
    return use.kind == "string" or use.chain not in ("self", "cls")
