"""Everything that can be deleted from a repository, found without running it."""

from __future__ import annotations

from collections import defaultdict
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
from composer_replication.tasks.planning.symbol_graph import Name, Needs, SourceFile, SymbolGraph
from composer_replication.tasks.planning.whole_removal import remove_whole
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


class _Plan:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._graph = SymbolGraph(files)
        self._cuts: dict[str, list[BodyCut]] = defaultdict(list)  # by module
        for file in self._graph.subjects:
            self._cuts[file.module] += find_body_cuts(file.path, file.text)

    def find(self, granularity: Granularity, removal: Removal) -> Iterator[Deletion]:
        if granularity == "function" and removal == "body":
            for cut in chain.from_iterable(self._cuts.values()):
                yield Deletion(cut.path, cut.symbol, granularity, removal, (cut.edit,), (cut,))
            return
        for file, symbol, selection in self._choices(granularity):
            cuts = self._cuts_of(selection)
            is_here = any(cut.path == file.path for cut in cuts)
            if not is_here or len(cuts) < (2 if granularity == "module" or removal == "body" else 1):
                continue
            if removal == "body":
                yield Deletion(file.path, symbol, granularity, removal, tuple(cut.edit for cut in cuts), cuts)
            elif granularity == "module" and file.is_package:
                continue  # it would live on as a namespace
            elif gone := remove_whole(self._graph, selection):
                made = gone.edits, cuts, gone.removed_files, gone.test_edits
                yield Deletion(file.path, symbol, granularity, removal, *made)

    def _choices(self, granularity: Granularity) -> Iterator[tuple[SourceFile, str, frozenset[Name]]]:
        """What each candidate is about: the file, the name there, all that goes with it. Features begin at public names."""
        for file in self._graph.subjects:
            if granularity == "module":
                yield file, file.module, frozenset({(file.module, "*")})
            elif granularity == "feature":
                names = [name for name in file.definitions if name.count(".") < 2 and "._" not in f".{name}"]
                for name in sorted(names, key=lambda name: "." in name):
                    if len(found := self._needs.of_name((file.module, name))) > 1:
                        yield file, name, found
            else:
                is_function = granularity == "function"
                for name, nodes in sorted(file.definitions.items(), key=lambda item: item[1][0].lineno):
                    if all(isinstance(node, Function) is is_function for node in nodes):
                        yield file, name, frozenset({(file.module, name)})

    @cached_property
    def _needs(self) -> Needs:
        return Needs(self._graph)

    def _cuts_of(self, selection: frozenset[Name]) -> tuple[BodyCut, ...]:
        cuts: set[BodyCut] = set()
        for module, name in selection:  # all, a function or method, or everything in a class
            own = self._cuts.get(module, ())
            inside = (cut for cut in own if f"{cut.symbol.partition('#')[0]}.".startswith(f"{name}."))
            cuts.update(own if name == "*" else inside)
        return tuple(sorted(cuts, key=lambda cut: (cut.path, cut.start)))
