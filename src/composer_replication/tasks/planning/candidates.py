"""Everything that can be deleted from a repository, found without running it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import chain

from composer_replication.tasks.planning.body_cuts import (
    SIZES,
    BodyCut,
    Deletion,
    Granularity,
    Removal,
    find_body_cuts,
)
from composer_replication.tasks.planning.source_file import SourceFile
from composer_replication.tasks.planning.symbol_graph import Name, Needs, Selection, SymbolGraph
from composer_replication.tasks.planning.whole_removal import WholeRemoval, remove_whole
from composer_replication.tasks.syntax_trees import Function


def find_deletions(
    files: Mapping[str, bytes], sizes: Collection[tuple[str, str]] = SIZES
) -> tuple[Deletion, ...]:
    """All candidate deletions of a repository, of some (granularity, removal) pairs, by size, way, path and place.

    They are the same for the same files. Each applies and leaves files that parse; no two have the same edits. Files
    that cannot be read (another encoding, a byte order mark, a syntax of another version) give none.
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
        self._cuts = {file.path: find_body_cuts(file.path, file.text) for file in self._graph.subjects}

    def find(self, granularity: Granularity, removal: Removal) -> Iterator[Deletion]:
        if granularity == "function" and removal == "body":
            for cut in chain.from_iterable(self._cuts.values()):
                yield Deletion(cut.path, cut.symbol, granularity, removal, (cut.edit,), (cut,))
            return
        for file, symbol, selection in self._choices(granularity):
            cuts = self._cuts_of(selection)
            own = tuple(cut for cut in cuts if cut.path == file.path)
            if granularity != "feature":
                cuts = own  # another file may have the same dotted name
            if len(own) < (2 if granularity == "module" else 1):
                continue
            changed: WholeRemoval | None = None
            if removal == "body":
                parts = [*selection.modules, *filter(self._named, selection.names)]
                if len(cuts) > 1 and (granularity != "feature" or len(parts) > 1):
                    changed = tuple(cut.edit for cut in cuts), (), ()
            elif granularity != "module" or not file.is_package:  # a package would live on as a namespace
                changed = remove_whole(self._graph, selection)
            if changed is not None:
                edits, removed_files, moved = changed
                yield Deletion(file.path, symbol, granularity, removal, edits, cuts, removed_files, moved)

    def _choices(self, granularity: Granularity) -> Iterator[_Choice]:
        if granularity == "feature":
            yield from self._features
            return
        for file in self._graph.subjects:
            if granularity == "module":
                yield file, file.module, Selection(modules=frozenset({file.module}))
                continue
            is_function = granularity == "function"
            for name, nodes in sorted(file.definitions.items(), key=lambda item: item[1][0].lineno):
                if all(isinstance(node, Function) is is_function for node in nodes):
                    yield file, name, Selection(names=frozenset({(file.module, name)}))

    @cached_property
    def _features(self) -> list[_Choice]:
        """Public functions, classes and methods, then the module, with all that only they need; in order of path."""
        needs = Needs(self._graph)
        features: list[_Choice] = []
        for file in self._graph.subjects:
            names = [name for name in file.definitions if name.count(".") < 2 and is_public(name)]
            names.sort(key=lambda name: "." in name)
            features += [(file, name, needs.of_name((file.module, name))) for name in names]
            if is_public(file.module) and not file.is_package:
                features.append((file, file.module, needs.of_module(file.module)))
        return [one for one in features if len(one[2].names) + len(one[2].modules) > 1]

    def _cuts_of(self, selection: Selection) -> tuple[BodyCut, ...]:
        cuts = {cut for name in selection.names for cut in self._named(name)}
        cuts.update(*map(self._cuts_in, selection.modules))
        return tuple(sorted(cuts, key=lambda cut: (cut.path, cut.start)))

    def _cuts_in(self, module: str) -> list[BodyCut]:
        return [cut for file in self._graph.files_of(module) for cut in self._cuts.get(file.path, ())]

    def _named(self, name: Name) -> list[BodyCut]:
        """The cuts of a function or method, or of everything in a class."""
        start, cuts = f"{name[1]}.", self._cuts_in(name[0])
        return [cut for cut in cuts if f"{cut.symbol.partition('#')[0]}.".startswith(start)]


def is_public(name: str) -> bool:
    """Whether no part of a dotted name starts with an underscore."""
    return not any(part.startswith("_") for part in name.split("."))
