"""Which tests must not be held back: nobody could meet what they ask, or everybody can read it.

A name that only the deleted code gave, and that nothing in the tree of a rollout says, is known to nobody who
has to write that code again. A hidden test that uses one, or recorded behaviour of a function that is called so,
fails for honest answers; so does one that wants the very words of a deleted message (``deleted_texts``). And a test
is not hidden while a copy of it stays in the tree.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import PurePosixPath

from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.planning.edits import Changes
from composer_replication.tasks.syntax_trees import parsed_part
from composer_replication.tasks.test_functions import Place, function_shapes, function_texts

# --- Tests that want the very words of a deleted message, which nobody can know.

_LETTERS = re.compile(r"[^\W\d_]+")
_RUN = 3
_LONG_WORD = 6


Texts = frozenset[tuple[str, ...]]
"""What string constants say: their long words alone, and their words in runs; lower case."""


def deleted_texts(changes: Changes, original: Mapping[str, bytes]) -> Texts:
    """The texts of what a deletion takes out, docstrings aside."""
    lines: dict[str, set[int]] = {}
    for edit in changes.edits:
        text = original[edit.path].decode()
        first, last = (text.count("\n", 0, place) + 1 for place in (edit.start, edit.end))
        lines.setdefault(edit.path, set()).update(range(first, last + 1))
    return frozenset().union(
        *(
            _runs_in(value)
            for path in {*lines, *changes.removed_files}
            for line, value in _constants(original[path].decode("utf-8", "replace"))
            if path in changes.removed_files or line in lines[path]
        )
    )


def texts_asked_for(
    sources: Mapping[Place, str], texts: Texts, shown: Mapping[str, bytes]
) -> frozenset[Place]:
    """Those test functions that hold a text of the deleted code which no file of a rollout's tree shows."""
    asked = {place: _runs(source) & texts for place, source in sources.items()}
    runs = frozenset().union(*asked.values())
    unknown = {run: re.compile(r"[\W\d_]+".join(map(re.escape, run)), re.IGNORECASE) for run in runs}
    for data in shown.values():
        if not unknown:
            break
        text = data.decode("utf-8", "replace")
        unknown = {run: pattern for run, pattern in unknown.items() if not pattern.search(text)}
    return frozenset(place for place, own in asked.items() if own & unknown.keys())


@lru_cache(maxsize=4096)
def _runs(source: str) -> Texts:
    """Of all string constants of a function."""
    return frozenset().union(*(_runs_in(value) for _, value in _constants(source)))


def _runs_in(text: str) -> Texts:
    words = [word.lower() for word in _LETTERS.findall(text)]
    runs = {tuple(words[at : at + _RUN]) for at in range(len(words) - _RUN + 1)}
    return frozenset(runs.union((word,) for word in words if len(word) >= _LONG_WORD))


@lru_cache(maxsize=1024)
def _constants(source: str) -> tuple[tuple[int, str], ...]:
    """The line and the value of each string of a file, or of a function cut out of a class, that is no docstring."""
    nodes = list(_nodes(source))
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return tuple(
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    )


# --- Which tests must not be held back: nobody could meet what they ask, or everybody can read it.

_WORD = re.compile(r"[^\W\d]\w*")
_COMMON = frozenset(dir(builtins)).union(*map(dir, (str, bytes, int, float, list, dict, set, tuple, object)))
"""What Python itself calls so, everybody knows."""
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr", "patch", "object"})
"""Calls that name an attribute by a text: of Python, ``monkeypatch`` and ``unittest.mock``."""
_MOST_BYTES = 1 << 20
"""Of a file where somebody would find a name; larger ones hold data."""


def words_of(text: str) -> frozenset[str]:
    """Everything in a text that could be a name."""
    return frozenset(map(sys.intern, _WORD.findall(text)))


@lru_cache(maxsize=4096)  # all files of a tree, or none of them is found again
def _words_in(data: bytes) -> frozenset[str]:
    return frozenset() if len(data) > _MOST_BYTES else words_of(data.decode("utf-8", "replace"))


def known_words(tree: Mapping[str, bytes], given: Collection[str] = ()) -> frozenset[str]:
    """Everything that could be a name in the files of a tree and their paths, and what is ``given`` besides."""
    return _COMMON.union(given, words_of(" ".join(tree)), *map(_words_in, tree.values()))


def deleted_words(changes: Changes, original: Mapping[str, bytes]) -> frozenset[str]:
    """Everything that could be a name in what a deletion takes out."""
    spans = [original[edit.path].decode()[edit.start : edit.end] for edit in changes.edits]
    return words_of("\n".join(spans)).union(*(_words_in(original[path]) for path in changes.removed_files))


def places_to_show(
    places: Iterable[Place],
    original: Mapping[str, bytes],
    shown: Mapping[str, bytes],
    deleted: frozenset[str],
    given: Collection[str] = (),
    *,
    texts: Texts = frozenset(),
) -> frozenset[Place]:
    """Those of some hidden test functions that must be visible instead.

    ``shown`` is the tree of a rollout without these functions; ``deleted`` and ``texts`` are names and texts of the
    deleted code, ``given`` are names that a rollout is told besides its tree.
    """
    sources = {place: _source(original, place) for place in sorted(places)}
    if not sources:
        return frozenset()
    shapes: set[str] = set()
    for path, data in shown.items():
        if _may_hold_tests(path, data):
            shapes |= function_shapes(data.decode("utf-8", "replace"))
    found = {place for place, text in sources.items() if not shapes.isdisjoint(function_shapes(text))}
    known = known_words(shown, given).union(*(words_of(sources[place]) for place in found))
    found |= _that_name(sources, deleted, known)
    left = {place: text for place, text in sources.items() if place not in found}
    return frozenset(found | texts_asked_for(left, texts, shown))


def _that_name(
    sources: Mapping[Place, str], deleted: frozenset[str], known: frozenset[str]
) -> frozenset[Place]:
    """As few of some functions as need be shown, so that the others use no deleted name that is not known."""
    found: set[Place] = set()
    while True:
        unknown = {
            place: names
            for place, text in sources.items()
            if place not in found and (names := _names_used(text) & deleted - known)
        }
        if not unknown:
            return frozenset(found)
        most = max(unknown, key=lambda place: len(unknown[place]))
        found.add(most)
        known |= words_of(sources[most])


def _source(original: Mapping[str, bytes], place: Place) -> str:
    path, line, name = place
    return function_texts(original[path].decode("utf-8", "replace")).get((line, name), "")


def is_named(path: str, symbol: str, shown: Mapping[str, bytes], given: Collection[str] = ()) -> bool:
    """Whether somebody who sees a tree can know that a function of this name belongs into that file.

    The file may be gone from the tree that is ``shown``; ``given`` are names that are told besides.
    """
    name = symbol.rpartition(".")[2].partition("#")[0]
    if name in given:
        return True
    pure = PurePosixPath(path)
    module = pure.parent.name if pure.stem == "__init__" else pure.stem
    return any(
        name in _words_in(data) and (other == path or module in _words_in(data))
        for other, data in shown.items()
        if other.endswith(".py")
    )


def names_elsewhere(original: Mapping[str, bytes], path: str) -> frozenset[str]:
    """What other test files take from a test file, as far as can be told: imported names, attributes, and texts.

    A file whose names are imported with a star gives everything.
    """
    stem = PurePosixPath(path).stem
    found: set[str] = set()
    for other, data in original.items():
        if other != path and _may_hold_tests(other, data):
            names, stars = _taken(data)
            found |= names
            if stem in stars:
                return _words_in(original[path])
    return frozenset(found)


def _may_hold_tests(path: str, data: bytes) -> bool:
    return path.endswith(".py") and (is_test_path(path) or b"def test" in data)


@lru_cache(maxsize=1024)
def _taken(data: bytes) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a file imports, asks of something or says alone; and last names of modules imported with a star."""
    names: set[str] = set()
    stars: set[str] = set()
    for node in _nodes(data.decode("utf-8", "replace")):
        if isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names)
            if any(alias.name == "*" for alias in node.names):
                stars.add((node.module or "").rpartition(".")[2])
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.rpartition(".")[2])
    return frozenset(names), frozenset(stars)


@lru_cache(maxsize=4096)
def _names_used(source: str) -> frozenset[str]:
    """The names of others that a function uses: global ones, attributes, keywords, imported ones."""
    used: set[str] = set()
    bound: set[str] = set()
    asked: set[str] = set()  # of something else, whatever is bound here
    for node in _nodes(source):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                asked.add(name)
            case ast.alias(name=name):
                used |= words_of(name)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if (
                name in _BY_TEXT
            ):
                texts = [one.value for one in arguments if isinstance(one, ast.Constant)]
                used |= words_of(" ".join(text for text in texts if isinstance(text, str)))
    return frozenset(used - bound | asked)


def _nodes(source: str) -> Iterable[ast.AST]:
    """All of a file, or of a function cut out of a class; nothing where it does not parse."""
    module = parsed_part(source)
    return () if module is None else ast.walk(module)
