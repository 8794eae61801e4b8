"""The rows of a text log: JSON lines, printed dictionaries, a table with separators, or one JSON document.

Rows are given as they stand in the file, so that whoever needs more than its numbers (pairs of
scores, for example) reads them here too.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from typing import TYPE_CHECKING, Any, BinaryIO

from composer_replication.errors import InputError
from composer_replication.report.log_columns import number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    Report = Callable[[int, int, str], None]

MAX_LINE_BYTES = 16 * 2**20
MAX_DOCUMENT_BYTES = 512 * 2**20
"""A JSON document is read as a whole; JSON lines and tables have no such limit."""

_MEGABYTE = 10**6
_REPORT_EVERY = 4 * _MEGABYTE
_SEPARATORS = (",", "\t", ";")
_PRINTED = re.compile(r"\{['\"]")
_NO_LITERAL = (
    (re.compile(r"(?<![\w'\"])-?(?:nan|inf)\b(?!['\"])"), r"'\g<0>'"),
    (re.compile(r"\b(?:np|numpy)\.\w+\(([^()]*)\)"), r"\1"),
    (re.compile(r"\btensor\(([^(),]*)[^()]*\)"), r"\1"),
)
"""What Python prints for a number and does not read as one."""
_SEARCHED_LINES = 10_000
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?\s*%?")
_FORMS = "JSON lines, printed dictionaries, CSV, trainer_state.json and TensorBoard event files can be read."

Row = tuple[int, dict[str, Any]]


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
    number, first = _first_line(path)
    if first.startswith("{"):
        parsed = _parsed(first)
        if parsed is None and _printed(first) is not None:
            return "printed", "line", _printed_rows(path, notes, report)
        if isinstance(parsed, dict) and not isinstance(parsed.get("log_history"), list):
            return "jsonl", "line", _json_lines(path, notes, report)
        if parsed is None and number == 1 and _is_last(path, number):
            raise _broken(path, number, "it is not JSON")
        return _document(path)
    if first.startswith("["):
        return _document(path)
    if _prints_rows(path):
        return "printed", "line", _printed_rows(path, notes, report)
    return "csv", "line", _table(path, first, number, notes, report)


def _lines(path: Path, report: Report | None = None) -> Iterator[tuple[int, bytes]]:
    size, done, reported = path.stat().st_size, 0, 0
    with _opened(path) as handle:
        number = 0
        while line := handle.readline(MAX_LINE_BYTES + 1):
            number, done = number + 1, done + len(line)
            if len(line) > MAX_LINE_BYTES:
                raise _broken(path, number, f"it is longer than {MAX_LINE_BYTES // 2**20} MiB")
            if report is not None and done - reported >= _REPORT_EVERY:
                reported = done
                report(done // _MEGABYTE, size // _MEGABYTE, "reading, MB")
            yield number, line


def _opened(path: Path) -> BinaryIO:
    """The file's bytes as UTF-8; one in UTF-16, as a Windows shell writes it, is read as a whole."""
    with path.open("rb") as handle:
        head = handle.read(4)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    elif len(head) == 4 and head[1] == head[3] == 0 != head[0]:
        encoding = "utf-16-le"
    elif len(head) == 4 and head[0] == head[2] == 0 != head[1]:
        encoding = "utf-16-be"
    else:
        return path.open("rb")
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise _not_a_log(path, f"as UTF-16 text it is larger than {MAX_DOCUMENT_BYTES // 2**20} MiB")
    try:
        return io.BytesIO(path.read_bytes().decode(encoding).encode())
    except UnicodeDecodeError as error:
        raise _not_a_log(path, "it begins as UTF-16 text and is none") from error


def _text(line: bytes, number: int) -> str:
    return line.decode("utf-8-sig" if number == 1 else "utf-8")


def _first_line(path: Path) -> tuple[int, str]:
    """The first line that is not blank, and its number."""
    for number, line in _lines(path):
        if b"\0" in line:
            raise _not_a_log(path, "it is a binary file")
        try:
            text = _text(line, number).strip()
        except UnicodeDecodeError as error:
            raise _not_a_log(path, "it is not UTF-8 text") from error
        if text:
            return number, text
    raise InputError("CR0631", "the log is empty.", where=str(path), fix="give the log of a run that began.")


def _is_last(path: Path, number: int) -> bool:
    return not any(line.strip() for later, line in _lines(path) if later > number)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_lines(path: Path, notes: list[str], report: Report | None) -> Iterator[Row]:
    """Each line's object; a last line that is no JSON was torn by a crash and is left out."""
    torn = 0
    for number, line in _lines(path, report):
        if not line.strip():
            continue
        if torn:
            raise _broken(path, torn, "it is not JSON")
        try:
            row = json.loads(_text(line, number))
        except (ValueError, RecursionError):
            torn = number
            continue
        if not isinstance(row, dict):
            raise _broken(path, number, "it is not a JSON object")
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
    for number, line in _lines(path):
        if number > _SEARCHED_LINES:
            break
        row = _printed(line.decode("utf-8", errors="replace"))
        if row and any(number_of(value) is not None for value in row.values()):
            return True
    return False


def _printed_rows(path: Path, notes: list[str], report: Report | None) -> Iterator[Row]:
    """The dictionaries that a program printed, line by line; what else it printed is counted."""
    num_others = 0
    for number, line in _lines(path, report):
        row = _printed(line.decode("utf-8", errors="replace"))
        if row is not None:
            yield number, row
        elif line.strip():
            num_others += 1
    if num_others:
        notes.append(f"{num_others} line(s) without a whole printed dictionary were left out.")


def _document(path: Path) -> tuple[str, str, Iterator[Row]]:
    """A list of rows, or an object that holds one as ``log_history``."""
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise _not_a_log(path, f"as one JSON document it is larger than {MAX_DOCUMENT_BYTES // 2**20} MiB")
    try:
        with _opened(path) as handle:
            value = json.loads(handle.read().decode("utf-8-sig"))
    except RecursionError as error:
        raise _not_a_log(path, "its JSON is nested too deeply") from error
    except ValueError as error:  # a wrong encoding is one too
        line = getattr(error, "lineno", 1)
        raise _broken(path, line, f"it is not JSON ({getattr(error, 'msg', 'not UTF-8')})") from error
    kind = "json"
    if isinstance(value, dict):
        kind, value = "trainer_state", value.get("log_history")
    if not isinstance(value, list):
        raise _not_a_log(path, "it is a JSON object without a list named log_history")
    if not value:
        raise InputError("CR0631", "the log is empty.", where=str(path), fix="log at least one step first.")
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            raise InputError(
                "CR0634",
                f"entry {number} is not a JSON object.",
                where=str(path),
                fix="take that entry out, or give another log.",
            )
    return kind, "entry", iter(enumerate(value, start=1))


def _table(path: Path, head: str, first: int, notes: list[str], report: Report | None) -> Iterator[Row]:
    """The rows of a table whose first line names the columns."""
    separator = max(_SEPARATORS, key=head.count)
    if separator not in head:
        raise _not_a_log(path, "its first line is neither JSON nor a header with several columns")
    reader = csv.reader(_decoded(path, first, report), delimiter=separator, strict=True)
    try:
        names = [name.strip() for name in next(reader)]
        if any(number_of(name) is not None for name in names):
            raise _not_a_log(path, "its first line is no header: it holds numbers")
        twice = next((name for name in names if name and names.count(name) > 1), None)
        if twice is not None:
            raise _broken(path, first, f"the header names {twice!r} twice")
        yield from _table_rows(path, reader, names, first, notes, has_commas=separator == ",")
    except csv.Error as error:
        raise _broken(path, reader.line_num + first - 1, str(error)) from error


def _table_rows(
    path: Path, reader: Any, names: list[str], first: int, notes: list[str], *, has_commas: bool
) -> Iterator[Row]:
    """Each row of a table. A last line without its end may lack the tail of its last number: it is left out."""
    held: tuple[int, list[str]] | None = None
    for cells in reader:
        if held is not None:
            yield _table_row(path, names, *held, has_commas=has_commas)
        held = (reader.line_num + first - 1, cells) if any(cell.strip() for cell in cells) else None
    if held is None:
        return
    if len(held[1]) < len(names) or not _ends_with_newline(path):
        notes.append(f"The last line ({held[0]}) is incomplete and was left out.")
    else:
        yield _table_row(path, names, *held, has_commas=has_commas)


def _table_row(path: Path, names: list[str], number: int, cells: list[str], *, has_commas: bool) -> Row:
    """Where commas do not separate cells, the one in a number is its decimal sign."""
    if len(cells) != len(names):
        few = "fewer" if len(cells) < len(names) else "more"
        raise _broken(path, number, f"it has {few} cells than the header")
    cells = [cell.strip() for cell in cells]
    if not has_commas:
        cells = [cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell for cell in cells]
    return number, {name: cell for name, cell in zip(names, cells, strict=True) if name}


def _ends_with_newline(path: Path) -> bool:
    with _opened(path) as handle:
        handle.seek(-1, 2)
        return handle.read() in (b"\n", b"\r")


def _decoded(path: Path, first: int, report: Report | None) -> Iterable[str]:
    for number, line in _lines(path, report):
        if number < first:
            continue
        try:
            yield _text(line, number)
        except UnicodeDecodeError as error:
            raise _broken(path, number, "it is not UTF-8 text") from error


def _broken(path: Path, number: int, problem: str) -> InputError:
    return InputError(
        "CR0634",
        f"line {number} cannot be read: {problem}.",
        where=f"{path}:{number}",
        fix="take that line out, or write the log again.",
    )


def _not_a_log(path: Path, problem: str) -> InputError:
    return InputError("CR0630", f"this is no log that can be read: {problem}.", where=str(path), fix=_FORMS)
