"""Everything that can be deleted from a repository, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from operator import itemgetter

from composer_replication.tasks.intake.tree_rules import is_subject_path
from composer_replication.tasks.planning.body_cuts import (
    SIZES,
    BodyCut,
    Deletion,
    Granularity,
    Removal,
    body_deletion,
    find_body_cuts,
)
from composer_replication.tasks.planning.source_file import SourceFile
from composer_replication.tasks.planning.symbol_graph import Name, Needs, Selection, SymbolGraph
from composer_replication.tasks.planning.whole_removal import WholeRemoval, remove_whole
from composer_replication.tasks.syntax_trees import parse_syntax


def find_deletions(
    files: Mapping[str, bytes], sizes: Collection[tuple[str, str]] = SIZES
) -> tuple[Deletion, ...]:
    """All candidate deletions of a repository, of some (granularity, removal) pairs.

    Returns:
        The candidates by size, way, path and place, the same for the same files. Each applies
        and leaves files that parse; no two of them have the same edits. Files that cannot be
        read (another encoding, a byte order mark, a syntax of another version) give none.
    """
    plan = _Plan(files)
    found: dict[tuple[object, ...], Deletion] = {}
    for granularity, removal in SIZES:
        for deletion in plan.find(granularity, removal) if (granularity, removal) in sizes else ():
            found.setdefault((frozenset(deletion.edits), deletion.removed_files), deletion)
    return tuple(found.values())


_Choice = tuple[SourceFile, str, Selection]
"""What a candidate is about: the file and the name there, and all that goes with it."""


class _Plan:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._graph = SymbolGraph(files)
        self._cuts: dict[str, list[BodyCut]] = {}
        for path in filter(is_subject_path, sorted(files)):  # also of a file too deep for the graph
            with suppress(UnicodeDecodeError):
                self._cuts[path] = find_body_cuts(path, files[path].decode())

    def find(self, granularity: Granularity, removal: Removal) -> Iterator[Deletion]:
        if removal == "body" and granularity == "function":
            yield from (body_deletion(cut) for cuts in self._cuts.values() for cut in cuts)
            return
        for file, symbol, selection in self._choices(granularity):
            cuts = self._cuts_of(selection)
            own = tuple(cut for cut in cuts if cut.path == file.path)
            if granularity != "feature":
                cuts = own  # another file may have the same dotted name
            if len(own) < (2 if granularity == "module" else 1):
                continue
            changed = self._changed(granularity, removal, file, selection, cuts)
            if changed is not None:
                edits, removed_files, moved = changed
                yield Deletion(file.path, symbol, granularity, removal, edits, cuts, removed_files, moved)

    def _changed(
        self,
        granularity: Granularity,
        removal: Removal,
        file: SourceFile,
        selection: Selection,
        cuts: tuple[BodyCut, ...],
    ) -> WholeRemoval | None:
        if removal == "body":
            is_large = granularity != "feature" or self._num_cut_names(selection) > 1
            return (tuple(cut.edit for cut in cuts), (), ()) if is_large and len(cuts) > 1 else None
        if granularity == "module" and file.is_package:
            return None  # without its file a package would live on as a namespace
        return remove_whole(self._graph, selection)

    def _choices(self, granularity: Granularity) -> Iterator[_Choice]:
        if granularity == "feature":
            yield from self._features
            return
        for file in self._graph.subjects:
            if granularity == "module":
                yield file, file.module, Selection(modules=frozenset({file.module}))
                continue
            is_function = granularity == "function"
            found = [
                (nodes[0].lineno, name, Selection(names=frozenset({(file.module, name)})))
                for name, nodes in file.definitions.items()
                if all(isinstance(node, ast.ClassDef) != is_function for node in nodes)
            ]
            for (owner, method), methods in file.methods.items() if is_function else ():
                name = f"{owner}.{method}"
                found.append((methods[0].lineno, name, Selection(methods=frozenset({(file.module, name)}))))
            yield from ((file, name, selection) for _, name, selection in sorted(found, key=itemgetter(0)))

    @cached_property
    def _features(self) -> list[_Choice]:
        needs = Needs(self._graph)
        features: list[_Choice] = []
        for file in self._graph.subjects:
            own = [owner for owner in file.methods if is_public(owner[0]) and "." not in owner[0]]
            names = [*file.definitions, *map(".".join, own)]
            features += [(file, name, needs.of_name((file.module, name))) for name in names]
            if is_public(file.module) and not file.is_package:
                features.append((file, file.module, needs.of_module(file.module)))
        return [
            (file, name, needed)
            for file, name, needed in features
            if is_public(name) and len(needed.names) + len(needed.methods) + len(needed.modules) > 1
        ]

    def _cuts_of(self, selection: Selection) -> tuple[BodyCut, ...]:
        cuts = {cut for name in (*selection.names, *selection.methods) for cut in self._named(name)}
        for module in selection.modules:
            for file in self._graph.by_module[module]:
                cuts.update(self._cuts.get(file.path, []))
        return tuple(sorted(cuts, key=lambda cut: (cut.path, cut.start)))

    def _named(self, name: Name) -> list[BodyCut]:
        """The cuts of a function or method, or of everything in a class."""
        module, symbol = name
        return [
            cut
            for file in self._graph.by_module[module]
            for cut in self._cuts.get(file.path, [])
            if f"{cut.symbol.partition('#')[0]}.".startswith(f"{symbol}.")
        ]

    def _num_cut_names(self, selection: Selection) -> int:
        names = [*selection.names, *selection.methods]
        return len(selection.modules) + sum(bool(self._named(name)) for name in names)


def is_public(name: str) -> bool:
    """Whether no part of a dotted name starts with an underscore."""
    return not any(part.startswith("_") for part in name.split("."))


def nothing_found(files: Mapping[str, bytes], sizes: Iterable[tuple[str, str]]) -> str:
    """A sentence's part: what was looked for, in how many files, and which of them could not be cut."""
    subjects = [path for path in sorted(files) if is_subject_path(path)]
    unread: dict[str, str] = {}
    for path in subjects:
        try:
            parse_syntax(files[path].decode())
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            unread[path] = f"{type(error).__name__}: {error}"
    asked = ", ".join(f"{size}/{way}" for size, way in sizes)
    said = f"its {len(subjects)} source files hold nothing of the sizes {asked} that can be deleted"
    if not unread:
        return said
    first, why = next(iter(unread.items()))
    return f"{said}; {len(unread)} of them cannot be cut, the first is {first} ({why})"
