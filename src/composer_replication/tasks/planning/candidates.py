"""Everything that can be deleted from a repository, found without running it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from composer_replication.tasks.intake.tree_rules import is_subject_path
from composer_replication.tasks.planning.body_cuts import BodyCut, find_body_cuts
from composer_replication.tasks.planning.deletion import SIZES, Deletion, body_deletion
from composer_replication.tasks.planning.source_file import SourceFile
from composer_replication.tasks.planning.symbol_graph import Name, Needs, Selection, SymbolGraph
from composer_replication.tasks.planning.text_cuts import parses_after
from composer_replication.tasks.planning.whole_removal import moved_import_edits, remove_whole
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


@dataclass(frozen=True, slots=True)
class _Part:
    """What a candidate is about: its name, the names that go whole, and the cuts inside."""

    path: str
    symbol: str
    cuts: tuple[BodyCut, ...]
    selection: Selection


class _Plan:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._graph = SymbolGraph(files)
        self._cuts: dict[str, list[BodyCut]] = {}
        for path in filter(is_subject_path, sorted(files)):  # also of a file too deep for the graph
            with suppress(UnicodeDecodeError):
                self._cuts[path] = find_body_cuts(path, files[path].decode())

    @cached_property
    def _features(self) -> list[_Part]:
        return list(self._all_features())

    def find(self, granularity: str, removal: str) -> Iterator[Deletion]:
        if removal == "body" and granularity == "function":
            yield from (body_deletion(cut) for cuts in self._cuts.values() for cut in cuts)
            return
        parts: dict[str, Callable[[], Iterable[_Part]]] = {
            "function": self._functions,
            "class": self._classes,
            "module": self._modules,
            "feature": lambda: self._features,
        }
        for part in parts[granularity]():
            deletion = self._body(part, granularity) if removal == "body" else self._whole(part, granularity)
            if deletion is not None:
                yield deletion

    def _functions(self) -> Iterator[_Part]:
        for file in self._graph.subjects:
            places: list[tuple[int, _Part]] = []
            for name, nodes in file.definitions.items():
                if all(hasattr(node, "args") for node in nodes):
                    chosen = Selection(names=frozenset({(file.module, name)}))
                    part = _Part(file.path, name, self._inside(file, nodes), chosen)
                    places.append((nodes[0].lineno, part))
            for (owner, method), methods in file.methods.items():
                name = f"{owner}.{method}"
                chosen = Selection(methods=frozenset({(file.module, name)}))
                part = _Part(file.path, name, self._inside(file, methods), chosen)
                places.append((methods[0].lineno, part))
            yield from (part for _, part in sorted(places, key=lambda place: place[0]) if part.cuts)

    def _classes(self) -> Iterator[_Part]:
        for file in self._graph.subjects:
            for name, nodes in file.definitions.items():
                cuts = self._inside(file, nodes)
                if cuts and not any(hasattr(node, "args") for node in nodes):
                    yield _Part(file.path, name, cuts, Selection(names=frozenset({(file.module, name)})))

    def _modules(self) -> Iterator[_Part]:
        for file in self._graph.subjects:
            cuts = tuple(self._cuts[file.path])
            if len(cuts) >= 2:
                yield _Part(file.path, file.module, cuts, Selection(modules=frozenset({file.module})))

    def _all_features(self) -> Iterator[_Part]:
        needs = Needs(self._graph)
        for file in self._graph.subjects:
            found = [(name, needs.of_name((file.module, name))) for name in file.definitions]
            for owner, method in file.methods:
                name = f"{owner}.{method}"
                if is_public(owner) and "." not in owner:
                    found.append((name, needs.of_method((file.module, name))))
            if is_public(file.module) and not file.is_package:
                found.append((file.module, needs.of_module(file.module)))
            for name, feature in found:
                if is_public(name) and feature.num_definitions > 1:
                    cuts = self._cuts_of(feature)
                    own = [cut for cut in cuts if cut.path == file.path]
                    if own:
                        yield _Part(file.path, name, cuts, feature)

    def _cuts_of(self, feature: Selection) -> tuple[BodyCut, ...]:
        cuts = {cut for place in (*feature.names, *feature.methods) for cut in self._named(place)}
        for module in feature.modules:
            for file in self._graph.by_module[module]:
                cuts.update(self._cuts.get(file.path, []))
        return tuple(sorted(cuts, key=lambda cut: (cut.path, cut.start)))

    def _named(self, name: Name) -> tuple[BodyCut, ...]:
        owner, _, last = name[1].rpartition(".")
        return tuple(
            cut
            for file in self._graph.by_module[name[0]]
            for cut in self._inside(
                file, file.methods.get((owner, last), []) if owner else file.definitions.get(name[1], [])
            )
        )

    def _inside(self, file: SourceFile, nodes: Iterable[object]) -> tuple[BodyCut, ...]:
        spans = [file.span(node) for node in nodes]  # type: ignore[arg-type]
        return tuple(
            cut
            for cut in self._cuts.get(file.path, [])
            if any(first <= cut.first_line <= last for first, last in spans)
        )

    def _body(self, part: _Part, granularity: str) -> Deletion | None:
        edits = tuple(cut.edit for cut in part.cuts)
        by_path: dict[str, list[BodyCut]] = {}
        for cut in part.cuts:
            by_path.setdefault(cut.path, []).append(cut)
        is_small = len(part.cuts) < 2 or (granularity == "feature" and self._num_cut_names(part) < 2)
        if is_small or not all(
            parses_after(self._graph.files[path].text, [cut.edit for cut in cuts])
            for path, cuts in by_path.items()
        ):
            return None
        return Deletion(part.path, part.symbol, granularity, "body", edits, part.cuts)  # type: ignore[arg-type]

    def _num_cut_names(self, part: _Part) -> int:
        places = [*part.selection.names, *part.selection.methods]
        return len(part.selection.modules) + sum(bool(self._named(place)) for place in places)

    def _whole(self, part: _Part, granularity: str) -> Deletion | None:
        if granularity == "module" and self._graph.files[part.path].is_package:
            return None  # without its file a package would live on as a namespace
        removal = remove_whole(self._graph, part.selection)
        if removal is None:
            return None
        return Deletion(
            part.path,
            part.symbol,
            granularity,  # type: ignore[arg-type]
            "whole",
            removal.edits,
            part.cuts,
            removal.removed_files,
            moved_import_edits(self._graph, removal.reach),
        )


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
