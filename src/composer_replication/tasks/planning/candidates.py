"""Everything that can be deleted from a repository, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from operator import itemgetter

from composer_replication.records import Edit
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
from composer_replication.tasks.planning.source_file import Function, SourceFile
from composer_replication.tasks.planning.symbol_graph import Name, Needs, Selection, SymbolGraph
from composer_replication.tasks.planning.text_cuts import parses_after
from composer_replication.tasks.planning.whole_removal import remove_whole
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
        choices: dict[str, Callable[[], Iterable[_Choice]]] = {
            "function": self._functions,
            "class": self._classes,
            "module": self._modules,
            "feature": lambda: self._features,
        }
        for file, symbol, selection in choices[granularity]():
            cuts = self._cuts_of(selection)
            own = tuple(cut for cut in cuts if cut.path == file.path)
            if granularity != "feature":
                cuts = own  # another file may have the same dotted name
            if len(own) < (2 if granularity == "module" else 1):
                continue
            if removal == "whole":
                deletion = self._whole(file, symbol, granularity, selection, cuts)
            elif granularity == "feature" and self._num_cut_names(selection) < 2:
                continue
            else:
                deletion = self._body(file, symbol, granularity, cuts)
            if deletion is not None:
                yield deletion

    def _functions(self) -> Iterator[_Choice]:
        for file in self._graph.subjects:
            found = [
                (nodes[0].lineno, name, Selection(names=frozenset({(file.module, name)})))
                for name, nodes in file.definitions.items()
                if all(isinstance(node, Function) for node in nodes)
            ]
            for (owner, method), methods in file.methods.items():
                name = f"{owner}.{method}"
                found.append((methods[0].lineno, name, Selection(methods=frozenset({(file.module, name)}))))
            yield from ((file, name, selection) for _, name, selection in sorted(found, key=itemgetter(0)))

    def _classes(self) -> Iterator[_Choice]:
        for file in self._graph.subjects:
            for name, nodes in file.definitions.items():
                if all(isinstance(node, ast.ClassDef) for node in nodes):
                    yield file, name, Selection(names=frozenset({(file.module, name)}))

    def _modules(self) -> Iterator[_Choice]:
        for file in self._graph.subjects:
            yield file, file.module, Selection(modules=frozenset({file.module}))

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
        return [feature for feature in features if is_public(feature[1]) and feature[2].num_definitions > 1]

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

    def _body(
        self, file: SourceFile, symbol: str, granularity: Granularity, cuts: tuple[BodyCut, ...]
    ) -> Deletion | None:
        by_path: dict[str, list[Edit]] = {}
        for cut in cuts:
            by_path.setdefault(cut.path, []).append(cut.edit)
        files = self._graph.files
        if len(cuts) < 2 or not all(parses_after(files[path].text, own) for path, own in by_path.items()):
            return None
        return Deletion(file.path, symbol, granularity, "body", tuple(cut.edit for cut in cuts), cuts)

    def _whole(
        self,
        file: SourceFile,
        symbol: str,
        granularity: Granularity,
        selection: Selection,
        cuts: tuple[BodyCut, ...],
    ) -> Deletion | None:
        if granularity == "module" and file.is_package:
            return None  # without its file a package would live on as a namespace
        found = remove_whole(self._graph, selection)
        if found is None:
            return None
        edits, removed_files, moved = found
        return Deletion(file.path, symbol, granularity, "whole", edits, cuts, removed_files, moved)


def is_public(name: str) -> bool:
    """Whether no part of a dotted name starts with an underscore."""
    return not any(part.startswith("_") for part in name.split("."))


def nothing_found(files: Mapping[str, bytes], sizes: Iterable[tuple[str, str]]) -> str:
    """A sentence's part: what was looked for, in how many files, and which of them could not be cut."""
    subjects = [path for path in sorted(files) if is_subject_path(path)]
    unread = {path: why for path in subjects if (why := _why_unread(files[path]))}
    asked = ", ".join(f"{size}/{way}" for size, way in sizes)
    said = f"its {len(subjects)} source files hold nothing of the sizes {asked} that can be deleted"
    if not unread:
        return said
    first, why = next(iter(unread.items()))
    return f"{said}; {len(unread)} of them cannot be cut, the first is {first}, which {why}"


def _why_unread(content: bytes) -> str:
    if content.startswith(b"\xef\xbb\xbf"):
        return "starts with a byte order mark"
    try:
        parse_syntax(content.decode())
    except UnicodeDecodeError:
        return "is not UTF-8"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"does not parse ({type(error).__name__})"
    return ""
