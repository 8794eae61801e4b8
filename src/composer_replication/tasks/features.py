"""What only a public symbol needs: the helpers, transitively and across files, that nobody else names."""

from __future__ import annotations

from collections import defaultdict

from composer_replication.tasks.source_file import SourceFile, Use
from composer_replication.tasks.symbol_graph import Name, SymbolGraph


class Needs:
    """Who names whom, by identifier and conservatively: a doubt counts as a use.

    A helper's users are the top-level definitions that hold its identifier as a name, an
    attribute, a string or in a doctest, plus ``None`` for module level. A plain name in a
    file that cannot see the helper is another thing of the same name and no use.
    Imports and ``__all__`` entries vanish with it and do not count; tests are no users.
    """

    def __init__(self, graph: SymbolGraph) -> None:
        self._graph = graph
        self._definitions: dict[Name, SourceFile] = {
            (file.module, name): file for file in graph.subjects for name in file.definitions
        }
        self._users = {name: self._find_users(name) for name in self._definitions}
        self._needs: dict[Name, set[Name]] = defaultdict(set)
        for name, users in self._users.items():
            for user in users:
                if user is not None and user != name:
                    self._needs[user].add(name)
        self._own_api = {name for name in self._definitions if graph.is_own_api(name)}

    def definitions_of(self, root: Name) -> tuple[Name, ...]:
        """The root and every helper that only this closure needs, the root first, the others sorted."""
        inside = {root}
        pending = [root]
        while pending:
            for needed in self._needs.get(pending.pop(), ()):
                if needed not in inside and needed not in self._own_api:
                    inside.add(needed)
                    pending.append(needed)
        while True:
            named_outside = {name for name in inside - {root} if not self._users[name] <= inside}
            if not named_outside:
                break
            inside -= named_outside
        reached = self._reachable(root, inside)
        return (root, *sorted(reached - {root}))

    def _reachable(self, root: Name, inside: set[Name]) -> set[Name]:
        found, pending = {root}, [root]
        while pending:
            for needed in self._needs.get(pending.pop(), ()):
                if needed in inside and needed not in found:
                    found.add(needed)
                    pending.append(needed)
        return found

    def _find_users(self, name: Name) -> set[Name | None]:
        reach = self._graph.reach([name])
        users: set[Name | None] = set()
        for _, identifier in sorted({(module, bound) for module, bound in reach.names}):
            for file, use in self._graph.uses_of(identifier):
                if self._is_about(file, use, reach.names):
                    unit = (file.module, use.unit) if use.unit else None
                    users.add(unit if unit in self._definitions else None)
        for file, imported in reach.aliases:
            if not (imported.is_module_level or file.is_test or file.is_stub):
                users.add(self._unit_at(file, imported.statement.lineno))
        users.discard(name)
        return users

    def _unit_at(self, file: SourceFile, line: int) -> Name | None:
        for unit, nodes in file.definitions.items():
            if any(first <= line <= last for first, last in map(file.span, nodes)):
                return (file.module, unit)
        return None

    def _is_about(self, file: SourceFile, use: Use, names: frozenset[Name]) -> bool:
        if use.kind in ("name", "doctest"):
            return (file.module, use.identifier) in names
        if use.kind == "attribute":
            return use.chain not in ("self", "cls")
        return True
