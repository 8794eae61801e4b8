"""``read_file``, ``write_file``, ``str_replace`` and ``list_files``. The policy reads every docstring of a tool."""

from __future__ import annotations

import difflib
import heapq
from contextlib import suppress

from composer_replication.errors import SandboxFileError
from composer_replication.interfaces import Sandbox
from composer_replication.records import FileEntry, ToolResult
from composer_replication.rollouts.tools.tool_context import MAX_FILE_BYTES, RefusedError, ToolContext, clip

_MAX_LINES = 20_000
_MAX_WANTED_LINES = 60
_MAX_COMPARED = 10
_MAX_COMPARED_CHARACTERS = 199
"""The time of a comparison grows with the square of it, or worse; from 200 on difflib leaves frequent letters out."""
_SHOWN_LINES, _SHOWN_CHARACTERS = 12, 3600
_MAX_LINE_CHARACTERS = 2000
_CONTEXT_LINES = 3
_MAX_PLACES = 10
_UNSEEN_FOLDERS = frozenset({".git", "__pycache__"})
"""Shown by their names alone."""


def near_matches(text: str, wanted: str) -> str:
    """A sentence about the place of ``text`` that is most like ``wanted``, with its lines numbered.

    Bounded for any text: places are ranked by their words first, and only a few are compared letter by letter.
    """
    if "\r\n" in text and wanted.replace("\r\n", "\n") in text.replace("\r\n", "\n"):
        return r"The lines of this file end with \r\n: write \r\n in old_str and new_str, too."
    lines = text.split("\n")[:_MAX_LINES]
    stripped = [line.strip() for line in lines]
    asked = [line.strip() for line in wanted.strip("\n").split("\n")[:_MAX_WANTED_LINES]]
    size, words = len(asked), set(" ".join(asked).split())
    hits = [len(words.intersection(line[:500].split())) for line in stripped]

    def likeness(at: int) -> tuple[bool, int]:
        return stripped[at : at + size] == asked, sum(hits[at : at + size])

    starts = heapq.nlargest(_MAX_COMPARED, range(max(1, len(lines) - size + 1)), key=likeness)
    places = {"\n".join(stripped[at : at + size])[:_MAX_COMPARED_CHARACTERS]: at for at in reversed(starts)}
    near = difflib.get_close_matches("\n".join(asked)[:_MAX_COMPARED_CHARACTERS], places, n=1)
    if not near:
        return "Nothing in the file is like it: read the file, and copy what is there."
    start = places[near[0]]
    end = min(start + min(size, _SHOWN_LINES), len(lines))
    shown, _ = _numbered(lines, start + 1, end, _SHOWN_CHARACTERS)
    how = "The same lines stand there with other spaces" if likeness(start)[0] else "The nearest place is"
    return "\n".join([f"{how}:", *shown])


def read_file(box: ToolContext, path: str, first_line: int = 1, last_line: int = 0) -> ToolResult:
    """Show a text file with line numbers.

    Example: {"path": "src/package/module.py", "first_line": 100, "last_line": 160}

    Args:
        path: The file, relative to the root of the repository.
        first_line: The first line to show, counted from 1. Default: 1.
        last_line: The last line to show; 0 for as many as fit. Default: 0.
    """
    if first_line < 1 or (last_line and last_line < first_line):
        raise RefusedError(
            f"there are no lines {first_line} to {last_line}: first_line counts from 1, and last_line is 0 "
            f'or not below it. Example: {{"path": "{path}", "first_line": 1, "last_line": 80}}'
        )
    lines = _lines(_text_of(box.sandbox, path))
    if not lines:
        return ToolResult(f"[{path} is empty]")
    if first_line > len(lines):
        raise RefusedError(f"{path} has {len(lines)} lines, so there is no line {first_line}.")
    end = min(last_line or len(lines), len(lines))
    shown, is_cut = _numbered(lines, first_line, end, box.max_characters - 200)
    next_line = first_line + len(shown)
    if next_line <= end:
        shown.append(
            f"[lines {next_line} to {end} of {len(lines)} left out: go on with first_line {next_line}]"
        )
    return ToolResult("\n".join(shown), is_truncated=is_cut or next_line <= end)


def write_file(box: ToolContext, path: str, content: str) -> ToolResult:
    r"""Write a whole file, new or in the place of what is there. Missing folders are made.

    Example: {"path": "src/package/module.py", "content": "ANSWER = 42\n"}

    Args:
        path: The file, relative to the root of the repository.
        content: The whole new text of the file.
    """
    num_bytes = _write(box.sandbox, path, content, "content")
    return ToolResult(f"wrote {num_bytes} bytes, {len(_lines(content))} lines, to {path}")


def str_replace(box: ToolContext, path: str, old_str: str, new_str: str) -> ToolResult:
    r"""Replace a text that stands exactly once in a file.

    Example: {"path": "src/package/module.py", "old_str": "    return None\n", "new_str": "    return 42\n"}

    Args:
        path: The file, relative to the root of the repository.
        old_str: The text to replace, as it stands in the file, indentation included, without line numbers.
        new_str: The text to put in its place; empty to delete.
    """
    if not old_str:
        raise RefusedError("old_str is empty. To write a whole file use write_file.")
    if old_str == new_str:
        raise RefusedError("old_str and new_str are the same: nothing would change.")
    text = _text_of(box.sandbox, path, is_exact=True)
    count = text.count(old_str)
    if count != 1:
        raise RefusedError(_not_once(path, text, old_str, count), "edit-not-applied")
    place = text.index(old_str)
    changed = text[:place] + new_str + text[place + len(old_str) :]
    _write(box.sandbox, path, changed, "new_str")
    lines = _lines(changed)
    first = changed.count("\n", 0, place) + 1
    last = first + new_str.count("\n")
    begin, end = max(1, first - _CONTEXT_LINES), min(len(lines), last + _CONTEXT_LINES)
    shown, _ = _numbered(lines, begin, end, box.max_characters - 200)
    return ToolResult("\n".join([f"replaced in {path}:", *shown]))


def list_files(box: ToolContext, path: str = ".") -> ToolResult:
    """List the files and folders below a folder.

    Example: {"path": "src"}

    Args:
        path: The folder, relative to the root of the repository. Default: the root.
    """
    try:
        entries = box.sandbox.list_files(path)
    except SandboxFileError as error:
        kind = _kind_of(box.sandbox, path)
        why = "is a file. Use read_file to see it." if kind == "file" else "is no folder."
        raise RefusedError(f"{path} {why}") from error
    lines = []
    for entry in filter(_is_seen, entries):
        name = ascii(entry.path)[1:-1] if not entry.path.isprintable() else entry.path
        size = f" ({entry.num_bytes} bytes)"
        tails = {"file": size, "folder": "/", "link": " (link)", "other": " (no file)"}
        lines.append(name + tails[entry.kind])
    how = "list a folder below, or search for what you need"
    text, is_cut = clip("\n".join(lines) or f"[{path} is empty]", box.max_characters, how)
    return ToolResult(text, is_truncated=is_cut)


def _is_seen(entry: FileEntry) -> bool:
    return _UNSEEN_FOLDERS.isdisjoint(entry.path.split("/")[:-1])


def _text_of(sandbox: Sandbox, path: str, *, is_exact: bool = False) -> str:
    """The text of a file; ``is_exact`` refuses one that would not come back byte for byte."""
    try:
        data = sandbox.read_file(path, max_bytes=MAX_FILE_BYTES + 1)
    except SandboxFileError as error:
        is_folder = _kind_of(sandbox, path) == "folder"
        why = " is a folder. Use list_files to see what is in it." if is_folder else f": {error.message}"
        raise RefusedError(f"{path}{why}") from error
    if len(data) > MAX_FILE_BYTES:
        how = "Look at a part of it with bash: head, tail or grep."
        raise RefusedError(f"{path} has more than {MAX_FILE_BYTES} bytes. {how}")
    if b"\0" in data:
        how = "Use bash, such as: file, od or strings."
        raise RefusedError(f"{path} is no text: it is binary, {len(data)} bytes. {how}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if is_exact:
            how = "Change it with bash, or write it anew."
            raise RefusedError(f"{path} is not UTF-8 (byte {error.start}). {how}") from error
        return data.decode("utf-8", "replace")


def _kind_of(sandbox: Sandbox, path: str) -> str:
    """What stands at a path; where nothing does, or where it leads out, a refusal that names what is like it."""
    name = path.removeprefix("./").rstrip("/")
    if name in ("", "."):
        return "folder"
    entries: list[FileEntry] = []
    with suppress(SandboxFileError):
        entries = sandbox.list_files(".")
    if kind := next((entry.kind for entry in entries if entry.path == name), None):
        return kind
    if path.startswith("/") or ".." in path.split("/"):
        why = f"{path}: it is not in the repository. Give a path relative to its root."
        raise RefusedError(why, "missing-file")
    paths = [entry.path for entry in entries if _is_seen(entry)]
    leaf = path.rstrip("/").rsplit("/", 1)[-1]
    same = [each for each in paths if each.rsplit("/", 1)[-1] == leaf][:3]
    near = same or difflib.get_close_matches(path[:200], paths[:5000], n=3, cutoff=0.6)
    guess = f" Did you mean {', '.join(near)}?" if near else " Use list_files to see what is there."
    raise RefusedError(f"{path}: No such file or directory.{guess}", "missing-file")


def _write(sandbox: Sandbox, path: str, text: str, name: str) -> int:
    """How many bytes were written; ``name`` is the argument that the text comes from."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        why = f"{name} holds half of a surrogate pair, which no file can hold: write it as plain text."
        raise RefusedError(why) from error
    if len(data) > MAX_FILE_BYTES:
        raise RefusedError(f"{path} would have {len(data)} bytes; a file may have {MAX_FILE_BYTES}.")
    sandbox.write_file(path, data)
    return len(data)


def _lines(text: str) -> list[str]:
    """Lines as an editor counts them: only a line feed ends one."""
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines


def _numbered(lines: list[str], first: int, last: int, max_characters: int) -> tuple[list[str], bool]:
    """Lines with their numbers, the first at any price; whether one was cut."""
    shown: list[str] = []
    is_cut, room = False, max_characters
    for number in range(first, last + 1):
        line = lines[number - 1].removesuffix("\r")
        longest = min(_MAX_LINE_CHARACTERS, max(max_characters - 40, 1))
        if len(line) > longest:
            is_cut = True
            line = f"{line[:longest]} [... {len(line) - longest} more characters of this line]"
        text = f"{number:>6}\t{line}"
        room -= len(text) + 1
        if room < 0 and shown:
            break
        shown.append(text)
    return shown, is_cut


def _not_once(path: str, text: str, old_str: str, count: int) -> str:
    """Why a replacement was not made, and what to do about it."""
    if count > 1:
        places: list[str] = []
        at = -1
        while len(places) < _MAX_PLACES and (at := text.find(old_str, at + 1)) >= 0:
            places.append(str(text.count("\n", 0, at) + 1))
        more = " and more" if count > len(places) else ""
        return (
            f"old_str is not unique: it stands {count} times in {path}, at line {', '.join(places)}{more}. "
            "Add lines before or after it, so that it stands once."
        )
    return f"old_str was not found in {path}; nothing was changed. {near_matches(text, old_str)}"
