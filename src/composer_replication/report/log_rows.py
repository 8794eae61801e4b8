"""The rows of a text log: JSON lines, printed dictionaries, a table with separators, or one JSON document."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError

MAX_DOCUMENT_BYTES = 512 * 2**20
"""A JSON document is read as a whole; JSON lines and tables have no such limit."""

_REPORT_EVERY = 4 * 10**6
_SEPARATORS = (",", "\t", ";")
_SEARCHED_LINES = 10_000
_PRINTED = re.compile(r"\{['\"]")
_NO_LITERAL = (
    (re.compile(r"(?<![\w'\"])-?(?:nan|inf)\b(?!['\"])"), r"'\g<0>'"),
    (re.compile(r"\b(?:np|numpy)\.\w+\(([^()]*)\)"), r"\1"),
    (re.compile(r"\btensor\(([^(),]*)[^()]*\)"), r"\1"),
)
"""What Python prints for a number and does not read as one."""
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(\.\d{3})+),\d+([eE][+-]?\d+)?\s*%?")

Report = Callable[[int, int, str], None]
Row = tuple[int, dict[str, Any]]


def number_of(value: object) -> float | None:
    """A number, perhaps infinite or NaN; None for anything else.

    In text a per cent sign divides by 100. Of ``.`` and ``,`` the last one is the decimal sign, but
    commas that only group thousands (``1,234``) are left out; see ``_cell`` for tables.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        if not isinstance(value, str):
            return float(value)
        text = value.strip()
        share = text.removesuffix("%").strip()
        if _GROUPED.fullmatch(share):
            share = share.replace(",", "")
        elif _DECIMAL_COMMA.fullmatch(share):
            share = share.replace(".", "").replace(",", ".")
        return float(share) / 100 if text.endswith("%") else float(share)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def rows_of(path: Path, notes: list[str], report: Report | None = None) -> tuple[str, str, Iterator[Row]]:
    """Kind, what a place is called, and the rows with their places.

    Args:
        path: a text file.
        notes: takes a sentence for each thing that was tolerated.
        report: takes (done, total, what) while a large file is read, in megabytes.

    Raises:
        InputError: not a log (CR0630), empty (CR0631), or a broken row (CR0634); the last two
            also while the rows are taken.
    """
    number, first = next(((number, line.strip()) for number, line in _lines(path) if line.strip()), (0, ""))
    if not first:
        raise InputError(
            "CR0631", "the log is empty.", where=str(path), fix="give the log of a run that began."
        )
    if "\ufffd" in first:
        raise _not_a_log(path, "it is no UTF-8 text")
    lines = _lines(path, report)
    parsed = _parsed(first)
    if isinstance(parsed, dict) and not isinstance(parsed.get("log_history"), list):
        return "jsonl", "line", _json_lines(path, lines, notes)
    is_json = first.startswith(("{", "["))
    if parsed is None and (_printed(first) is not None if is_json else _prints_rows(path)):
        return "printed", "line", _printed_rows(lines, notes)
    if is_json:
        return _document(path)
    return "csv", "line", _table(path, first, lines, number, notes)


def _encoding(path: Path) -> str:
    with path.open("rb") as handle:
        head = handle.read(4096)
    if head[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        return "utf-16"
    if b"\0" in head:  # before a binary file without a line end is read as one line
        raise _not_a_log(path, "it is no UTF-8 text")
    return "utf-8-sig"


def _lines(path: Path, report: Report | None = None) -> Iterator[tuple[int, str]]:
    """Bytes that are no text become marks, which no number can hold."""
    size, done, reported = path.stat().st_size, 0, 0
    with path.open(encoding=_encoding(path), errors="replace", newline="\n") as handle:
        for number, line in enumerate(handle, start=1):
            done += len(line)
            if report is not None and done - reported >= _REPORT_EVERY:
                reported = done
                report(done // 10**6, size // 10**6, "reading, MB")
            yield number, line


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_lines(path: Path, lines: Iterator[tuple[int, str]], notes: list[str]) -> Iterator[Row]:
    """Each line's object; a last line that is no JSON was torn by a crash and is left out."""
    torn = 0
    for number, line in lines:
        if not line.strip():
            continue
        if torn:
            raise _broken(path, torn, "it is not JSON")
        row = _parsed(line)
        if row is None:
            torn = number
        elif not isinstance(row, dict):
            raise _broken(path, number, "it is not a JSON object")
        else:
            yield number, row
    if torn:
        notes.append(f"The last line ({torn}) is incomplete and was left out.")


def _printed(line: str) -> dict[str, Any] | None:
    """The dictionary that ends a line, such as transformers prints it, perhaps behind a progress bar."""
    match = _PRINTED.search(line)
    text = line[match.start() :].rstrip() if match else ""
    if not text.endswith("}"):
        return None
    for pattern, replacement in _NO_LITERAL:
        text = pattern.sub(replacement, text)
    try:
        row = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return row if isinstance(row, dict) and all(isinstance(name, str) for name in row) else None


def _prints_rows(path: Path) -> bool:
    """Whether some line near the beginning ends with a printed dictionary that holds a number."""
    rows = (_printed(line) for _, line in islice(_lines(path), _SEARCHED_LINES))
    return any(number_of(value) is not None for row in rows if row for value in row.values())


def _printed_rows(lines: Iterator[tuple[int, str]], notes: list[str]) -> Iterator[Row]:
    """The dictionaries that a program printed, line by line; what else it printed is counted."""
    num_others = 0
    for number, line in lines:
        row = _printed(line)
        if row is not None:
            yield number, row
        num_others += row is None and bool(line.strip())
    if num_others:
        notes.append(f"{num_others} line(s) without a whole printed dictionary were left out.")


def _document(path: Path) -> tuple[str, str, Iterator[Row]]:
    """A list of rows, or an object that holds one as ``log_history``."""
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise _not_a_log(path, f"as one JSON document it is larger than {MAX_DOCUMENT_BYTES // 2**20} MiB")
    try:
        value = json.loads(path.read_text(encoding=_encoding(path), errors="replace"))
    except RecursionError as error:
        raise _not_a_log(path, "its JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise _broken(path, error.lineno, f"it is not JSON ({error.msg})") from error
    kind = "json"
    if isinstance(value, dict):
        kind, value = "trainer_state", value.get("log_history")
    if not isinstance(value, list):
        raise _not_a_log(path, "it is a JSON object without a list named log_history")
    if not value:
        raise InputError("CR0631", "the log is empty.", where=str(path), fix="log at least one step first.")
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            fix = "take that entry out, or give another log."
            raise InputError("CR0634", f"entry {number} is not a JSON object.", where=str(path), fix=fix)
    return kind, "entry", iter(enumerate(value, start=1))


def _table(
    path: Path, head: str, lines: Iterator[tuple[int, str]], first: int, notes: list[str]
) -> Iterator[Row]:
    """The rows of a table whose first line names the columns.

    A last line without its end may lack the tail of its last number: it is left out.
    """
    separator = max(_SEPARATORS, key=head.count)
    if separator not in head:
        raise _not_a_log(path, "its first line is neither JSON nor a header with several columns")
    newest = ""

    def texts() -> Iterator[str]:
        nonlocal newest
        for number, newest in lines:
            if number >= first:
                yield newest

    reader = csv.reader(texts(), delimiter=separator, strict=True)
    held: tuple[int, list[str]] | None = None
    try:
        names = [name.strip() for name in next(reader)]
        if any(number_of(name) is not None for name in names):
            raise _not_a_log(path, "its first line is no header: it holds numbers")
        twice = next((name for name in names if name and names.count(name) > 1), None)
        if twice is not None:
            raise _broken(path, first, f"the header names {twice!r} twice")
        for cells in reader:
            if held is not None:
                yield _row(path, names, *held, separator)
            held = (reader.line_num + first - 1, cells) if any(map(str.strip, cells)) else None
    except csv.Error as error:
        raise _broken(path, reader.line_num + first - 1, str(error)) from error
    if held is not None and (len(held[1]) < len(names) or not newest.endswith("\n")):
        notes.append(f"The last line ({held[0]}) is incomplete and was left out.")
    elif held is not None:
        yield _row(path, names, *held, separator)


def _row(path: Path, names: list[str], number: int, cells: list[str], separator: str) -> Row:
    if len(cells) != len(names):
        few = "fewer" if len(cells) < len(names) else "more"
        raise _broken(path, number, f"it has {few} cells than the header")
    return number, {name: _cell(cell, separator) for name, cell in zip(names, cells, strict=True) if name}


def _cell(cell: str, separator: str) -> str:
    """Where commas do not separate cells, the one in a number is its decimal sign: ``1,125`` is no 1125."""
    text = cell.strip()
    is_decimal = separator != "," and "." not in text and _DECIMAL_COMMA.fullmatch(text)
    return text.replace(",", ".") if is_decimal else text


def _broken(path: Path, number: int, problem: str) -> InputError:
    return InputError(
        "CR0634",
        f"line {number} cannot be read: {problem}.",
        where=f"{path}:{number}",
        fix="take that line out, or write the log again.",
    )


def _not_a_log(path: Path, problem: str) -> InputError:
    return InputError(
        "CR0630",
        f"this is no log that can be read: {problem}.",
        where=str(path),
        fix="JSON lines, printed dictionaries, CSV, trainer_state.json and TensorBoard event files can be read.",
    )
