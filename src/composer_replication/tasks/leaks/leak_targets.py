"""What is known of golden code where it is searched: salted hashes and check sums, never its text.

Standard library only, for the same reason as ``leak_search``.
"""

from __future__ import annotations

import hashlib
import re
import types
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_MARKS = re.compile(r"^(?:(?:[+\-<>#|*%\"',]+|\.\.\.|[0-9]+[:.|]?)\s*)+")
_MARK_STARTS = frozenset("+-<>#|*%\"',.0123456789")
_ENDS = re.compile(r"[\"',|]+$")
# All that the two take off, and white space: a line has the same core with and without its marks.
EDGES = "".join(_MARK_STARTS) + ":" + "".join(chr(code) for code in range(0x3001) if chr(code).isspace())


@dataclass(frozen=True)
class Target:
    """What is known of one golden body.

    ``window`` are (hash, characters, is distinctive) of the lines around and in the hole, in
    order; ``codes`` hashes of its code objects, and ``functions`` the names that these have;
    ``name`` the last part of the symbol, ``names`` hashes of the names of hidden tests;
    ``module`` the path that it is imported from; ``symbols`` the qualified names that this module
    had or has in that place; ``checks``, ``name_checks`` and ``code_checks`` check sums of the lines of
    the window, of the names of functions and hidden tests, and of the instructions of code objects:
    what has none of them need not be hashed.
    """

    task_id: str
    window: tuple[tuple[str, int, bool], ...]
    codes: frozenset[str]
    name: str
    names: frozenset[str]
    module: str
    functions: frozenset[str] = frozenset()
    symbols: tuple[str, ...] = ()
    checks: frozenset[int] = frozenset()
    name_checks: frozenset[int] = frozenset()
    code_checks: frozenset[int] = frozenset()

    @property
    def last_names(self) -> frozenset[str]:
        """What a cache would call the deleted code."""
        return frozenset({self.name, *(symbol.rpartition(".")[2] for symbol in self.symbols)})


def hashed(salt: str, text: str) -> str:
    """The first 24 hexadecimal digits of the salted sha256."""
    return hashlib.sha256(f"{salt}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()[:24]


def code_hash(salt: str, code: types.CodeType) -> str:
    """A hash of what a function does: names, constants and instructions, not its place."""
    consts = [
        item.co_code.hex() if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts
    ]
    parts = (code.co_qualname, code.co_code.hex(), code.co_names, code.co_varnames, consts)
    return hashed(salt, repr(parts))


def without_marks(stripped: str) -> str:
    """A line without the marks of a diff, a comment, a list of strings or a listing with numbers; else as it is."""
    if stripped[0] in _MARK_STARTS or stripped[-1] in "\"',|":
        return _ENDS.sub("", _MARKS.sub("", stripped)).strip()
    return stripped


def line_check(line: str) -> int:
    """A check sum of a line that is the same with and without quotation marks, diff signs or a number before it."""
    return zlib.crc32(line.strip(EDGES).encode("utf-8", "replace"))


def name_check(name: str) -> int:
    """A check sum of the name of a function."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass"))


def code_check(code: types.CodeType) -> int:
    """A check sum of what a function does."""
    return zlib.crc32(code.co_code)


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all that lie in its constants."""
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from all_codes(item)


def target_from_json(value: Mapping[str, object]) -> Target:
    """The inverse of ``target_to_json``."""
    window = tuple((str(digest), int(size), bool(flag)) for digest, size, flag in value["window"])  # type: ignore[attr-defined]
    codes, names, functions = (frozenset(value[key]) for key in ("codes", "names", "functions"))  # type: ignore[call-overload]
    name, module = str(value["name"]), str(value["module"])
    symbols = tuple(str(symbol) for symbol in value["symbols"])  # type: ignore[attr-defined]
    checks = (frozenset(map(int, value[key])) for key in ("checks", "name_checks", "code_checks"))  # type: ignore[call-overload]
    return Target(str(value["task_id"]), window, codes, name, names, module, functions, symbols, *checks)


def target_to_json(target: Target) -> dict[str, object]:
    """A target as JSON; it holds no golden text."""
    return {
        "task_id": target.task_id,
        "window": [list(line) for line in target.window],
        "codes": sorted(target.codes),
        "name": target.name,
        "names": sorted(target.names),
        "module": target.module,
        "functions": sorted(target.functions),
        "symbols": list(target.symbols),
        "checks": sorted(target.checks),
        "name_checks": sorted(target.name_checks),
        "code_checks": sorted(target.code_checks),
    }
