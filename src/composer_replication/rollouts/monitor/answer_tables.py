"""The tables that code takes its answers from: dictionaries, pairs, two lists side by side, chains of ``if``, ``match``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from composer_replication.rollouts.monitor.python_code import PythonCode
from composer_replication.rollouts.monitor.visible_literals import canonical
from composer_replication.tasks.syntax_trees import parse_syntax

_SAYS_NOTHING = re.compile(r"None|True|False|Ellipsis|b?''|[(){},:]")
_Names = Mapping[str, ast.expr]
_CONVERTERS = ("str", "int", "float", "list", "tuple", "set", "dict", "frozenset")


@dataclass(frozen=True, slots=True)
class Entry:
    """One question with its answer, both in canonical text; ``width`` is how many values the question has."""

    key: str
    answer: str
    width: int
    node: ast.AST


@dataclass(frozen=True, slots=True)
class Table:
    """Entries that one piece of code chooses from; ``num_beside`` are other choices of the same function."""

    entries: tuple[Entry, ...]
    node: ast.AST
    answers_directly: bool
    num_beside: int = 0


def asks_something(key: str) -> bool:
    """Whether a question holds a value at all: None, truth values and empty things are kinds, and no test's input."""
    return bool(_SAYS_NOTHING.sub("", key))


def answer_tables(code: PythonCode) -> Iterator[Table]:
    """The tables in the new code."""
    direct = _direct_lookups(code)
    for node in code.nodes:
        if isinstance(node, ast.Dict) and node.keys:
            for entries in (_of_dictionary(node, code), _of_nested(node, code)):
                if entries is not None:
                    yield Table(tuple(entries), node, answers_directly=node in direct)
        elif isinstance(node, ast.List | ast.Tuple | ast.Set) and len(node.elts) >= 2:
            yield from _list_of_pairs(node, direct, code)
        elif isinstance(node, ast.Match):
            yield Table(tuple(_cases(node, code)), node, answers_directly=True)
        elif isinstance(node, ast.Call | ast.Subscript):
            yield from _side_by_side(node, code)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _branches(node, code)
    for function in ast.walk(code.tree):  # its header is old, its body new
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not code.is_new(function):
            yield from _branches(function, code)


def parts_of(key: str) -> list[str]:
    """The values of a question of several: those of a tuple, of its text, or of the text of a call."""
    text = key
    if key[:1] in "'\"":
        try:
            text = str(ast.literal_eval(key))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return []
    try:
        tree = parse_syntax(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if isinstance(tree, ast.Tuple | ast.List):
        # repr(args) + repr(kwargs), or nested arguments: look one level down as well
        direct = [canonical(each) for each in tree.elts if not (isinstance(each, ast.Dict) and not each.keys)]
        parts = [part for part in direct if part is not None and part not in ("()", "{}")]
        return parts if len(parts) == len([part for part in direct if part not in ("()", "{}")]) else []
    single = canonical(tree)
    return [single] if single is not None and single != key else []


def _resolved(node: ast.expr, code: PythonCode) -> ast.expr:
    """What a name stands for throughout; anything else is itself."""
    if not isinstance(node, ast.Name) or node.id in code.names.parameters:
        return node
    return code.names.constants.get(node.id, node)


def _literal(node: ast.expr | None, code: PythonCode) -> str | None:
    """The canonical text of a literal, or of a name that stands for one."""
    return canonical(_resolved(node, code)) if node is not None else None


def _answer(node: ast.expr | None, code: PythonCode) -> str | None:
    """What is answered: ``lambda: 5`` answers 5; ``str('x')`` and ``tuple([..])`` are their argument."""
    if isinstance(node, ast.Lambda):
        return _answer(node.body, code)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1 and node.func.id in _CONVERTERS:  # fmt: skip
        return _literal(node.args[0], code)
    return _literal(node, code)


def _values(node: ast.AST | None) -> Sequence[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple | ast.List) else ()


def _width(node: ast.AST | None, key: str) -> int:
    """How many of the values of a question ask something; those of a call's text count as well."""
    told = [canonical(each) for each in _values(node)] or parts_of(key)
    return max(1, sum(text is not None and asks_something(text) for text in told))


def _entry(key_node: ast.expr | None, answer: str | None, node: ast.AST, code: PythonCode) -> Entry | None:
    key = _literal(key_node, code)
    return Entry(key, answer, _width(key_node, key), node) if key is not None and answer is not None else None


def _of_dictionary(node: ast.Dict, code: PythonCode) -> list[Entry] | None:
    """Its entries; None where one is no literal."""
    entries = [
        _entry(key, _answer(value, code), node, code)
        for key, value in zip(node.keys, node.values, strict=True)
    ]
    return [each for each in entries if each is not None] if None not in entries else None


def _of_nested(node: ast.Dict, code: PythonCode) -> list[Entry] | None:
    """Entries of dictionaries in a dictionary, each asked for by two keys; None where it holds anything else."""
    entries: list[Entry | None] = []
    for key, inner in zip(node.keys, node.values, strict=True):
        if key is None or not isinstance(inner, ast.Dict) or None in inner.keys:
            return None
        for second, value in zip(inner.keys, inner.values, strict=True):
            whole = ast.Tuple([key, second], ast.Load())  # type: ignore[list-item]
            entries.append(_entry(whole, _answer(value, code), node, code))
    return [each for each in entries if each is not None] if entries and None not in entries else None


def _list_of_pairs(
    node: ast.List | ast.Tuple | ast.Set, direct: set[ast.AST], code: PythonCode
) -> Iterator[Table]:
    entries: list[Entry] = []
    for pair in node.elts:
        parts = _values(pair)
        if len(parts) < 2:
            return
        key = parts[0] if len(parts) == 2 else ast.Tuple(list(parts[:-1]), ast.Load())
        made = _entry(key, _answer(parts[-1], code), pair, code)
        if made is None:
            return
        entries.append(made)
    yield Table(tuple(entries), node, answers_directly=node in direct)


def _side_by_side(node: ast.Call | ast.Subscript, code: PythonCode) -> Iterator[Table]:
    """``zip(KEYS, ANSWERS)`` and ``ANSWERS[KEYS.index(x)]``: two lists of literals read as one table."""
    if isinstance(node, ast.Call):
        is_zip = isinstance(node.func, ast.Name) and node.func.id == "zip" and len(node.args) == 2
        sides = tuple(node.args) if is_zip else ()
    else:
        place = node.slice
        is_index = (
            isinstance(place, ast.Call)
            and isinstance(place.func, ast.Attribute)
            and place.func.attr == "index"
        )
        sides = (place.func.value, node.value) if is_index else ()  # type: ignore[attr-defined]
    if not sides:
        return
    keys, answers = (_values(_resolved(side, code)) for side in sides)
    entries = [
        _entry(key, _answer(answer, code), node, code) for key, answer in zip(keys, answers, strict=False)
    ]
    known = tuple(each for each in entries if each is not None)
    if known and len(known) == len(entries):
        yield Table(known, node, answers_directly=True)


def _direct_lookups(code: PythonCode) -> set[ast.AST]:
    """Tables whose entry is returned as it is: ``return T[x]``, ``return T.get(x)``, a loop that returns the second.

    What a name stands for is asked of the whole file, and where several functions use it, of each for itself.
    """
    found = _lookups(code.tree, code.names.constants)
    for owner in ast.walk(code.tree):
        if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
            own = _own_tables(owner, code)
            if own:
                found |= _lookups(owner, {**code.names.constants, **own})
    return found


def _own_tables(owner: ast.AST, code: PythonCode) -> dict[str, ast.expr]:
    """What a function puts once into a name that the file uses for more."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id not in code.names.constants:
                    values.setdefault(target.id, []).append(node.value)
    return {name: each[0] for name, each in values.items() if len(each) == 1}


def _lookups(scope: ast.AST, names: _Names) -> set[ast.AST]:
    found: set[ast.AST] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Return) and node.value is not None:
            for part in _returned_parts(node.value):
                found.update(_looked_into(part, names))
                inner = names.get(part.id) if isinstance(part, ast.Name) else None
                if isinstance(inner, ast.Subscript | ast.Call):
                    found.update(_looked_into(inner, names))
        elif isinstance(node, ast.For | ast.AsyncFor):
            targets = {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
            returns = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            if any(isinstance(each.value, ast.Name) and each.value.id in targets for each in returns):
                found.update(_looked_into(node.iter, names))
        elif isinstance(node, ast.Lambda):
            found.update(_looked_into(node.body, names))
    return found


def _looked_into(node: ast.expr, names: _Names) -> Iterator[ast.expr]:
    """What an expression takes its value from: under calls, subscripts and attributes, and behind a name."""
    while isinstance(node, ast.Call | ast.Subscript | ast.Attribute | ast.Await):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            yield from _source_of(node.args[0], names)  # dict([...]), next(...)
        node = node.func if isinstance(node, ast.Call) else node.value
    yield from _source_of(names.get(node.id, node) if isinstance(node, ast.Name) else node, names)


def _source_of(value: ast.expr, names: _Names) -> Iterator[ast.expr]:
    if isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    if isinstance(value, ast.DictComp | ast.ListComp | ast.GeneratorExp | ast.SetComp):
        value = value.generators[0].iter
    yield names.get(value.id, value) if isinstance(value, ast.Name) else value


def _returned_parts(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.IfExp):
        yield from (*_returned_parts(node.body), *_returned_parts(node.orelse))
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _returned_parts(value)
    else:
        yield node


def _cases(node: ast.Match, code: PythonCode) -> Iterator[Entry]:
    for case in node.cases:
        answer = _returned(case.body, code)
        patterns = case.pattern.patterns if isinstance(case.pattern, ast.MatchOr) else [case.pattern]
        for pattern in patterns:
            values = [each.value for each in ast.walk(pattern) if isinstance(each, ast.MatchValue)]
            if values:
                whole = values[0] if len(values) == 1 else ast.Tuple(list(values), ast.Load())
                made = _entry(whole, answer, case.body[0], code)
                if made is not None:
                    yield made


def _returned(body: Sequence[ast.stmt], code: PythonCode) -> str | None:
    last = body[-1] if len(body) <= 2 else None
    return _answer(last.value, code) if isinstance(last, ast.Return | ast.Assign) else None


def _branches(
    function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, code: PythonCode
) -> Iterator[Table]:
    """The comparisons of one function whose branch answers with a literal: one table for each value that is asked about."""
    by_subject: dict[str, list[Entry]] = {}
    for node in ast.walk(function):
        if not code.is_new(node):
            continue
        found: tuple[str, list[Entry]] | None = None
        if isinstance(node, ast.If):
            found = _compared(node.test, _returned(node.body, code), node, code)
        elif isinstance(node, ast.IfExp):
            found = _compared(node.test, _answer(node.body, code), node, code)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            found = _compared(node.values[0], _answer(node.values[-1], code), node, code)
        if found is not None:
            by_subject.setdefault(found[0], []).extend(found[1])
    total = sum(map(len, by_subject.values()))
    for entries in by_subject.values():
        yield Table(tuple(entries), entries[0].node, answers_directly=True, num_beside=total - len(entries))


def _compared(
    test: ast.expr, answer: str | None, node: ast.AST, code: PythonCode
) -> tuple[str, list[Entry]] | None:
    """What a test asks about, and the questions: ``x == 1 and y == 2`` is (1,2), ``x in (1, 2)`` are two.

    A comparison with None, a truth value or something empty asks what kind a value is, not which: it is left out.
    """
    if answer is None:
        return None
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    keys: list[ast.expr] = []
    subjects: list[str] = []
    for part in parts:
        if not isinstance(part, ast.Compare) or len(part.ops) != 1:
            continue
        sides = [
            (each, canonical(each))
            for each in (_resolved(part.left, code), _resolved(part.comparators[0], code))
        ]
        if isinstance(part.ops[0], ast.Eq | ast.Is):
            literals = [each for each, text in sides if text is not None and asks_something(text)]
            if literals:
                keys.append(literals[0])
                subjects += [ast.dump(each) for each, text in sides if text is None]
        elif isinstance(part.ops[0], ast.In) and isinstance(sides[1][0], ast.Tuple | ast.List | ast.Set):
            made = [_entry(each, answer, node, code) for each in sides[1][0].elts]
            known = [each for each in made if each is not None]
            return (ast.dump(part.left), known) if known else None
    if not keys:
        return None
    one = _entry(keys[0] if len(keys) == 1 else ast.Tuple(keys, ast.Load()), answer, node, code)
    return (" ".join(subjects), [one]) if one is not None else None
