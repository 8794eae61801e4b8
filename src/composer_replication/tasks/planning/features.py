"""What only a public symbol needs: the helpers, transitively and across files, that nobody else names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from composer_replication.tasks.planning.source_file import SourceFile, Use
from composer_replication.tasks.planning.symbol_graph import Name, SymbolGraph


@dataclass(frozen=True, slots=True)
class Feature:
    """A symbol and its own helpers.

    ``names`` are top-level definitions and constants, ``methods`` dotted in their module
    (``Class._part``), ``module`` is set when the symbol is a whole module.
    """

    names: frozenset[Name]
    methods: frozenset[Name] = frozenset()
    module: str | None = None

    @property
    def num_definitions(self) -> int:
        """Names and methods, and one for the module."""
        return len(self.names) + len(self.methods) + (self.module is not None)


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
            for module, unit in users:
                for holder in {(module, unit), (module, unit.partition(".")[0]), (module, "*")}:
                    if holder != name:
                        self._needs[holder].add(name)

    def of_name(self, root: Name) -> Feature:
        """The feature of a top-level function or class."""
        inside = self._closure(root)
        return Feature(frozenset(inside))

    def of_method(self, root: Name) -> Feature:
        """The feature of a method, ``(module, "Class.method")``; its helpers may be methods of its class."""
        inside = self._closure(root)
        methods = {name for name in inside if name == root or name in self._methods}
        return Feature(frozenset(inside - methods), frozenset(methods))

    def of_module(self, module: str) -> Feature:
        """A module, and what only it needs from other files."""
        inside = self._closure((module, "*"))
        return Feature(frozenset(name for name in inside if name[0] != module), module=module)

    def _closure(self, root: Name) -> set[Name]:
        inside = self._reachable(root, None)
        while True:
            outside = {name for name in inside - {root} if not self._is_inside(self._helpers[name], inside)}
            if not outside:
                return self._reachable(root, inside)
            inside -= outside

    def _reachable(self, root: Name, among: set[Name] | None) -> set[Name]:
        owner = root[1].rpartition(".")[0]
        found, pending = {root}, [root]
        while pending:
            for needed in self._needs.get(pending.pop(), ()):
                is_fit = needed not in self._methods or needed[1].rpartition(".")[0] == owner
                if is_fit and needed not in found and (among is None or needed in among):
                    found.add(needed)
                    pending.append(needed)
        return found

    @staticmethod
    def _is_inside(users: Iterable[Name], inside: set[Name]) -> bool:
        return all(
            not inside.isdisjoint({(module, unit), (module, unit.partition(".")[0]), (module, "*")})
            for module, unit in users
        )

    def _users_of_name(self, name: Name) -> set[Name]:
        reach = self._graph.reach([name])
        users: set[Name] = set()
        for identifier in sorted({bound for _, bound in reach.names}):
            for file, use in self._graph.uses_of(identifier):
                if _is_about(file, use, reach.names):
                    users.add((file.module, use.unit or ""))
        for file, imported in reach.aliases:
            if not (imported.is_module_level or file.is_test or file.is_stub):
                users.add(self._unit_at(file, imported.statement.lineno))
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

    @staticmethod
    def _unit_at(file: SourceFile, line: int) -> Name:
        """The definition around a line; ``(module, "")`` is module level."""
        for (owner, name), methods in file.methods.items():
            if any(first <= line <= last for first, last in map(file.span, methods)):
                return (file.module, f"{owner}.{name}")
        for unit, nodes in file.definitions.items():
            if any(first <= line <= last for first, last in map(file.span, nodes)):
                return (file.module, unit)
        return (file.module, "")


def _is_about(file: SourceFile, use: Use, names: frozenset[Name]) -> bool:
    if use.kind in ("name", "doctest"):
        return (file.module, use.identifier) in names
    return use.kind == "string" or use.chain not in ("self", "cls")
