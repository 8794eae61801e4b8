"""Test functions in their source: take some out of a file, and part them into visible and hidden."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.planning.edits import Lines, edited_text
from composer_replication.tasks.planning.text_cuts import FileCut
from composer_replication.tasks.syntax_trees import first_line, parsed, parsed_part

Place = tuple[str, int, str]
"""File, first line (of the first decorator) and name of a test function."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Table = ast.Assign | ast.AnnAssign


def remove_functions(
    text: str, targets: Iterable[tuple[int, str]], *, needed: Collection[str] = ()
) -> str | None:
    """The file without some functions, their decorators and the comments right above them.

    Tables at the top of the file that nothing else uses go too: they are the cases of these functions.

    ``targets`` are first line and name of each function, ``needed`` names in the file that other files use. None when
    one of them cannot be taken out cleanly: not found at the level of a module or class, named elsewhere in the
    file, or on a shared line.
    """
    file, keys = _test_file(text), set(targets)
    if file is None or not all(file.can_go(key, keys & file.functions.keys()) for key in keys):
        return None
    chosen = {id(file.functions[key]): file.functions[key] for key in keys}
    cut = FileCut("", file.lines, file.module)
    for node in [*chosen.values(), *file.orphaned(set(chosen), needed)]:
        cut.take_statement(node)
    edits = cut.edits()
    return None if edits is None else edited_text(text, edits)


class _TestFile:
    """A parsed test file: which of its functions can go, and which tables with them."""

    def __init__(self, text: str, module: ast.Module) -> None:
        self.module = module
        self.lines = Lines(text)
        self.functions: dict[tuple[int, str], _Function] = {}
        for node in _functions(module):
            # A wrapper may report the line of ``def`` instead of its decorator's.
            for line in {first_line(node), node.lineno}:
                self.functions[line, node.name] = node
        self.tables = _tables(module)
        self.said: set[str] = set()  # by a text, as for ``getattr``
        self.uses: dict[str, list[frozenset[int]]] = {}
        self._note_uses(set(map(id, (*self.functions.values(), *self.tables.values()))))

    def _note_uses(self, functions: set[int]) -> None:
        """For each name, the functions and tables around each place where it is used."""
        pending: list[tuple[ast.AST, frozenset[int]]] = [(self.module, frozenset())]
        while pending:
            node, around = pending.pop()
            if id(node) in functions:
                around |= {id(node)}
            if isinstance(node, ast.Name):
                self.uses.setdefault(node.id, []).append(around)
            elif isinstance(node, ast.Attribute):
                self.uses.setdefault(node.attr, []).append(around)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.said.add(node.value.rpartition(".")[2])
            pending += [(child, around) for child in ast.iter_child_nodes(node)]

    def source(self, node: _Function) -> str:
        """All lines of a function."""
        first = first_line(node)
        return "".join(map(self.lines.line, range(first, (node.end_lineno or first) + 1)))

    def can_go(self, target: tuple[int, str], others: Iterable[tuple[int, str]]) -> bool:
        """Whether a function can be taken out cleanly, together with others that can."""
        node = self.functions.get(target)
        if node is None:
            return False
        gone = {id(self.functions[key]) for key in (target, *others)}
        if any(gone.isdisjoint(around) for around in self.uses.get(node.name, ())):
            return False
        return _stands_alone(self.lines, node)

    def orphaned(self, gone: set[int], needed: Collection[str]) -> list[_Table]:
        """The tables that only functions that are ``gone`` use, and such tables; those that can be taken out cleanly."""
        left = {
            name: node for name, node in self.tables.items() if name not in needed and name not in self.said
        }
        found: list[_Table] = []
        while unused := [
            name
            for name, node in left.items()
            if len(self.uses[name]) > 1  # the first is its own
            and all(not around.isdisjoint(gone | {id(node)}) for around in self.uses[name])
        ]:
            found += [left.pop(name) for name in unused]
            gone = gone.union(map(id, found))
        return [node for node in found if _stands_alone(self.lines, node)]


@lru_cache(maxsize=64)
def _test_file(text: str) -> _TestFile | None:
    module = parsed(text)
    return None if module is None else _TestFile(text, module)


@lru_cache(maxsize=32)
def function_texts(text: str) -> Mapping[tuple[int, str], str]:
    """The source of each test function of a file, decorators included, by first line and name.

    A decorated function is found by the line of its ``def`` too. A file that does not parse
    has none.
    """
    file = _test_file(text)
    return {} if file is None else {key: file.source(node) for key, node in file.functions.items()}


@lru_cache(maxsize=4096)
def function_shapes(text: str) -> frozenset[str]:
    """What each function of a text does, whatever its name, place, layout and docstring: equal for copies.

    ``text`` may be a file, or one function with the margin that it has in its class.
    """
    module = parsed_part(text)
    if module is None:
        return frozenset()
    return frozenset(map(_shape, _functions(module)))


def _shape(node: _Function) -> str:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    # A broken tree has imports moved into its functions.
    own = (part for part in body if not isinstance(part, ast.Import | ast.ImportFrom))
    parts = [*node.decorator_list, node.args, *own]
    return hashlib.sha256("\n".join(map(ast.dump, parts)).encode()).hexdigest()


@lru_cache(maxsize=64)
def count_functions(text: str) -> Counter[str]:
    """How often each name is given to a function where a test may stand; none in a file that does not parse."""
    module = parsed(text)
    if module is None:
        return Counter()
    return Counter(node.name for node in _functions(module))


def _functions(parent: ast.AST) -> Iterator[_Function]:
    """Where a test may stand."""
    for part in ("body", "orelse", "finalbody"):
        for node in getattr(parent, part, []):
            if isinstance(node, _Function):
                yield node
            elif isinstance(node, ast.ClassDef | ast.If | ast.Try | ast.With):
                yield from _functions(node)


def _tables(module: ast.Module) -> dict[str, _Table]:
    """The lists, tuples, sets and dictionaries that a file gives a name at its top, once each."""
    found: dict[str, _Table] = {}
    for node in module.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if isinstance(value, ast.List | ast.Tuple | ast.Set | ast.Dict):
                found[name] = node
    given = Counter(
        node.id
        for node in ast.walk(module)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )
    return {name: node for name, node in found.items() if given[name] == 1}


def _stands_alone(lines: Lines, node: _Function | _Table) -> bool:
    first, last = first_line(node), node.end_lineno or node.lineno
    before = lines.text[lines.starts[first - 1] : lines.offset(first, node.col_offset)]
    is_continued = lines.line(last).rstrip().endswith("\\")
    return not before.rstrip().rstrip("@").strip() and lines.ends_line(node) and not is_continued


def part_tests(
    groups: Sequence[Place],
    texts: Mapping[str, str],
    *,
    hidden_share: float,
    seed: int,
    salt: str,
    shown: Collection[Place] = (),
    gone: Collection[Place] = (),
    needed: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[tuple[Place, ...], dict[str, str]]:
    """Choose which test functions of a task are held back, and give the test files without them, by path.

    All parametrisations of a function stay on one side. With N functions about
    ``hidden_share`` of them are hidden, at least one and never all, if they can be taken
    out of their file cleanly; a single function stays visible.

    ``groups`` are the functions that fail without the deleted body, ``texts`` the repository's files. Another ``seed``
    chooses other functions, ``salt`` makes the choice differ between tasks. ``shown`` stay visible; ``gone`` are held back
    already, are none of ``groups``, and the files are without them, too. ``needed`` has, by path, names that other
    files use: such functions and tables stay.
    """
    if len(groups) < 2 or hidden_share <= 0:
        return (), {}
    wanted = max(1, min(len(groups) - 1, round(len(groups) * hidden_share)))

    def rank(place: Place) -> str:
        return hashlib.sha256(f"{seed}/{salt}/{place[0]}/{place[2]}/{place[1]}".encode()).hexdigest()

    hidden: list[Place] = [*gone]
    for place in sorted(groups, key=rank):
        if len(hidden) == wanted + len(gone):
            break
        path = place[0]
        if place in shown or place[2] in needed.get(path, ()):
            continue
        file = _test_file(texts[path]) if path in texts and is_test_path(path) else None
        others = [(line, name) for other, line, name in hidden if other == path]
        if file is not None and file.can_go((place[1], place[2]), others):
            hidden.append(place)
    files: dict[str, str] = {}
    held_back: list[Place] = []
    for path in sorted({place[0] for place in hidden}):
        own = [place for place in hidden if place[0] == path]
        shorter = remove_functions(
            texts[path], [(line, name) for _, line, name in own], needed=needed.get(path, ())
        )
        if shorter is not None:  # a file that does not parse without its functions keeps them all
            files[path] = shorter
            held_back += own
    return tuple(sorted(place for place in held_back if place not in gone)), files
