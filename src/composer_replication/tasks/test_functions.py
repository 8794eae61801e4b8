"""Test functions in their source: take some out of a file, part them into visible and hidden, and know which must be shown.

A name that only the deleted code gave, and that nothing in the tree of a rollout says, is known to nobody who has to write
that code again. A hidden test that uses one, or recorded behaviour of a function that is called so, fails for honest
answers; so does one that wants the very words of a deleted message (``deleted_texts``). And a test is not hidden while a
copy of it stays in the tree.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePosixPath

from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.planning.edits import Changes, Lines, edited_text
from composer_replication.tasks.planning.whole_removal import FileCut
from composer_replication.tasks.syntax_trees import Function, docstring_of, first_line, parsed, parsed_part

Place = tuple[str, int, str]
"""File, first line (of the first decorator) and name of a test function."""
_Key = tuple[int, str]

# --- One file of tests.


class _TestFile:
    """A parsed test file: which of its functions can go, and which tables with them."""

    def __init__(self, text: str, module: ast.Module) -> None:
        self.module, self.lines = module, Lines(text)
        # A wrapper may report the line of ``def`` instead of its decorator's.
        self.functions: dict[_Key, Function] = {
            (line, node.name): node for node in _functions(module) for line in (first_line(node), node.lineno)
        }
        self.tables = _tables(module)
        self.uses = {part: _uses(part) for part in (module, *self.functions.values(), *self.tables.values())}
        """How often names are used in the file, and in each function and table."""

    def source(self, node: Function) -> str:
        """All lines of a function."""
        first = first_line(node)
        return "".join(map(self.lines.line, range(first, (node.end_lineno or first) + 1)))

    def can_go(self, target: _Key, others: Iterable[_Key]) -> bool:
        """Whether a function can be taken out cleanly, together with others that can."""
        node = self.functions.get(target)
        if node is None:
            return False
        return self._is_used_only_in({self.functions[key] for key in (target, *others)}, node.name)

    def with_orphans(self, gone: set[ast.stmt]) -> set[ast.stmt]:
        """Functions that are ``gone``, and the tables that only they and such tables use."""
        for name, node in self.tables.items():
            is_used = self.uses[self.module][name] > 1  # the first is its own
            if node not in gone and is_used and self._is_used_only_in({*gone, node}, name):
                return self.with_orphans({*gone, node})
        return gone

    def _is_used_only_in(self, gone: set[ast.stmt], name: str) -> bool:
        return self.uses[self.module][name] == sum(self.uses[node][name] for node in gone)


@lru_cache(maxsize=64)
def _test_file(text: str) -> _TestFile | None:
    module = parsed(text)
    return None if module is None else _TestFile(text, module)


def _functions(parent: ast.AST | None) -> Iterator[Function]:
    """Where a test may stand."""
    for part in ("body", "orelse", "finalbody"):
        for node in getattr(parent, part, []):
            if isinstance(node, Function):
                yield node
            elif isinstance(node, ast.ClassDef | ast.If | ast.Try | ast.With):
                yield from _functions(node)


def _uses(part: ast.AST) -> Counter[str]:
    names = (node for node in ast.walk(part) if isinstance(node, ast.Name | ast.Attribute))
    return Counter(node.id if isinstance(node, ast.Name) else node.attr for node in names)


def _tables(module: ast.Module) -> dict[str, ast.stmt]:
    """The lists, tuples, sets and dictionaries that a file gives a name at its top."""
    found: dict[str, ast.stmt] = {}
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if isinstance(node.value, ast.List | ast.Tuple | ast.Set | ast.Dict):
                    found[name] = node
    return found


def remove_functions(text: str, targets: Iterable[_Key]) -> str | None:
    """The file without some functions, their decorators and the comments right above them.

    Tables at the top of the file that nothing else uses go too: they are the cases of these functions. ``targets`` are first
    line and name of each function. None when one of them cannot be taken out cleanly: not found at the level of a module or
    class, named elsewhere in the file, or on a shared line.
    """
    file, keys = _test_file(text), set(targets)
    if file is None or not all(file.can_go(key, keys & file.functions.keys()) for key in keys):
        return None
    cut = FileCut("", file.lines, file.module)
    for node in file.with_orphans({file.functions[key] for key in keys}):
        cut.take_statement(node)
    edits = cut.edits()
    return None if edits is None else edited_text(text, edits)


@lru_cache(maxsize=32)
def function_texts(text: str) -> Mapping[_Key, str]:
    """The source of each test function of a file, decorators included, by first line and name; none where it does not parse.

    A decorated function is found by the line of its ``def`` too.
    """
    file = _test_file(text)
    return {} if file is None else {key: file.source(node) for key, node in file.functions.items()}


@lru_cache(maxsize=4096)
def function_shapes(text: str) -> frozenset[str]:
    """What each function of a text does, whatever its name, place, layout and docstring: equal for copies.

    ``text`` may be a file, or one function with the margin that it has in its class.
    """
    return frozenset(map(_shape, _functions(parsed_part(text))))


def _shape(node: Function) -> str:
    body = node.body[1 if docstring_of(node.body) else 0 :]
    # A store of an earlier version may have imports moved into its functions.
    own = (part for part in body if not isinstance(part, ast.Import | ast.ImportFrom))
    parts = [*node.decorator_list, node.args, *own]
    return hashlib.sha256("\n".join(map(ast.dump, parts)).encode()).hexdigest()


def hold_back(
    places: Sequence[Place],
    texts: Mapping[str, str],
    at_most: int,
    *,
    gone: Collection[Place] = (),
) -> tuple[frozenset[Place], dict[str, str]]:
    """Take the first test functions that can go cleanly out of their files: they, and the files without them, by path.

    ``texts`` are the repository's files. Those of ``gone`` are none of ``places`` and are taken out, too.
    """
    out: list[Place] = [*gone]
    for place in places:
        path, line, name = place
        if len(out) == at_most + len(gone):
            break
        if path not in texts or not is_test_path(path):
            continue
        file, others = _test_file(texts[path]), [one[1:] for one in out if one[0] == path]
        if file is not None and file.can_go((line, name), others):
            out.append(place)
    own = {path: [place[1:] for place in out if place[0] == path] for path in sorted({one[0] for one in out})}
    shorter = {path: remove_functions(texts[path], keys) for path, keys in own.items()}
    # A file that does not parse without its functions keeps them all.
    files = {path: text for path, text in shorter.items() if text is not None}
    return frozenset(place for place in out if place[0] in files and place not in gone), files


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
    return frozenset() if len(data) > _MOST_BYTES else words_of(_text(data))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def known_words(tree: Mapping[str, bytes], given: Collection[str] = ()) -> frozenset[str]:
    """Everything that could be a name in the files of a tree and their paths, and what is ``given`` besides."""
    return _COMMON.union(given, words_of(" ".join(tree)), *map(_words_in, tree.values()))


def deleted_words(changes: Changes, original: Mapping[str, bytes]) -> frozenset[str]:
    """Everything that could be a name in what a deletion takes out."""
    return words_of("\n".join(_deleted(changes, original)))


def _deleted(changes: Changes, original: Mapping[str, bytes]) -> list[str]:
    """What a deletion takes out: spans of whole lines as a rule, and files."""
    spans = [original[edit.path].decode()[edit.start : edit.end] for edit in changes.edits]
    return [*spans, *(_text(original[path]) for path in changes.removed_files)]


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
    sources = {
        place: function_texts(_text(original[place[0]])).get(place[1:], "") for place in sorted(places)
    }
    if not sources:
        return frozenset()
    may_hold = [_text(data) for path, data in shown.items() if _may_hold_tests(path, data)]
    shapes = frozenset[str]().union(*map(function_shapes, may_hold))
    found = {place for place, text in sources.items() if not shapes.isdisjoint(function_shapes(text))}
    known = known_words(shown, given).union(*(words_of(sources[place]) for place in found))
    # As few as need be shown, so that the others use no deleted name that is not known.
    while unknown := {
        place: names
        for place, text in sources.items()
        if place not in found and (names := _names_used(text) & deleted - known)
    }:
        most = max(unknown, key=lambda place: len(unknown[place]))
        found.add(most)
        known |= words_of(sources[most])
    left = {place: text for place, text in sources.items() if place not in found}
    return frozenset(found | _texts_asked_for(left, texts, shown))


def is_named(path: str, symbol: str, shown: Mapping[str, bytes], given: Collection[str] = ()) -> bool:
    """Whether somebody who sees a tree can know that a function of this name belongs into that file.

    The file may be gone from the tree that is ``shown``; ``given`` are names that are told besides.
    """
    name, pure = symbol.rpartition(".")[2].partition("#")[0], PurePosixPath(path)
    module = pure.parent.name if pure.stem == "__init__" else pure.stem
    files = ((other, _words_in(data)) for other, data in shown.items() if other.endswith(".py"))
    return name in given or any(name in said and (other == path or module in said) for other, said in files)


def _may_hold_tests(path: str, data: bytes) -> bool:
    return path.endswith(".py") and (is_test_path(path) or b"def test" in data)


@lru_cache(maxsize=4096)
def _names_used(source: str) -> frozenset[str]:
    """The names of others that a function uses: global ones, attributes, keywords, imported ones."""
    used, bound = set[str](), set[str]()
    asked = set[str]()  # of something else, whatever is bound here
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
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _BY_TEXT:
                texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
                used |= words_of(" ".join(text for text in texts if isinstance(text, str)))
    return frozenset(used - bound | asked)


def _nodes(source: str) -> Iterable[ast.AST]:
    """All of a file, or of a function cut out of a class; nothing where it does not parse."""
    return ast.walk(parsed_part(source) or ast.Module([], []))


# --- Tests that want the very words of a deleted message, which nobody can know.

_LETTERS = re.compile(r"[^\W\d_]+")
_RUN, _LONG_WORD = 3, 6
Texts = frozenset[tuple[str, ...]]
"""What string constants say: their long words alone, and their words in runs; lower case."""


def deleted_texts(changes: Changes, original: Mapping[str, bytes]) -> Texts:
    """The texts of what a deletion takes out, docstrings aside."""
    return frozenset().union(*(_runs(part.lstrip("\r\n")) for part in _deleted(changes, original)))


def _texts_asked_for(
    sources: Mapping[Place, str], texts: Texts, shown: Mapping[str, bytes]
) -> frozenset[Place]:
    """Those test functions that hold a text of the deleted code which no file of a rollout's tree shows."""
    asked = {place: _runs(source) & texts for place, source in sources.items()}
    runs = frozenset().union(*asked.values())
    unknown = {run: re.compile(r"[\W\d_]+".join(map(re.escape, run)), re.IGNORECASE) for run in runs}
    for data in shown.values() if unknown else ():
        text = _text(data)
        unknown = {run: pattern for run, pattern in unknown.items() if not pattern.search(text)}
    return frozenset(place for place, own in asked.items() if own & unknown.keys())


@lru_cache(maxsize=4096)
def _runs(source: str) -> Texts:
    """Of all strings of a file, or of a function cut out of a class, that are no docstrings."""
    nodes = list(_nodes(source))
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = (node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in alone)
    said = [_LETTERS.findall(text.lower()) for text in strings if isinstance(text, str)]
    runs = {tuple(words[at : at + _RUN]) for words in said for at in range(len(words) - _RUN + 1)}
    return frozenset(runs.union((word,) for words in said for word in words if len(word) >= _LONG_WORD))
