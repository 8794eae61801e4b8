"""The toolbox: from a call to a result, whatever is wrong with the call; and the eight tools.

The policy reads every docstring of a tool.

What a run of tests says is worth nothing: it runs among whatever the policy did to its sandbox. Rewards come from grading
alone, which has sandboxes of its own. A search runs there too, because a regular expression of the policy may take for ever,
and a tree may hold anything: an interpreter in the jail does it, under the jail's limits and a time-out.
"""

from __future__ import annotations

import difflib
import heapq
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate

from composer_replication.errors import CommandError, SandboxFileError
from composer_replication.records import ExecResult, FileEntry, ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.tools.tool_context import (
    MAX_FILE_BYTES,
    RefusedError,
    VisibleTests,
    arguments_of,
    clean,
    clip,
    spec_of,
)
from composer_replication.sandbox import LocalSandbox
from composer_replication.tasks.suite_options import OVERRIDES
from composer_replication.tasks.test_run import program_text

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
    shown = _numbered(lines, start + 1, end, _SHOWN_CHARACTERS)
    how = "The same lines stand there with other spaces" if likeness(start)[0] else "The nearest place is"
    return "\n".join([f"{how}:", *shown])


def read_file(box: Toolbox, path: str, first_line: int = 1, last_line: int = 0) -> ToolResult:
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
    shown = _numbered(lines, first_line, end, box.max_characters - 200)
    next_line = first_line + len(shown)
    if next_line <= end:
        shown.append(
            f"[lines {next_line} to {end} of {len(lines)} left out: go on with first_line {next_line}]"
        )
    return ToolResult("\n".join(shown))


def write_file(box: Toolbox, path: str, content: str) -> ToolResult:
    r"""Write a whole file, new or in the place of what is there. Missing folders are made.

    Example: {"path": "src/package/module.py", "content": "ANSWER = 42\n"}

    Args:
        path: The file, relative to the root of the repository.
        content: The whole new text of the file.
    """
    num_bytes = _write(box.sandbox, path, content, "content")
    return ToolResult(f"wrote {num_bytes} bytes, {len(_lines(content))} lines, to {path}")


def str_replace(box: Toolbox, path: str, old_str: str, new_str: str) -> ToolResult:
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
    if not count:
        why = f"old_str was not found in {path}; nothing was changed. {near_matches(text, old_str)}"
        raise RefusedError(why, "edit-not-applied")
    if count > 1:
        before = accumulate(each.count("\n") for each in text.split(old_str, _MAX_PLACES)[:-1])
        places = ", ".join(str(1 + num + idx * old_str.count("\n")) for idx, num in enumerate(before))
        more = " and more" if count > _MAX_PLACES else ""
        why = f"old_str is not unique: it stands {count} times in {path}, at line {places}{more}."
        raise RefusedError(f"{why} Add lines before or after it, so that it stands once.", "edit-not-applied")
    place = text.index(old_str)
    changed = text[:place] + new_str + text[place + len(old_str) :]
    _write(box.sandbox, path, changed, "new_str")
    lines = _lines(changed)
    first = changed.count("\n", 0, place) + 1
    last = first + new_str.count("\n")
    begin, end = max(1, first - _CONTEXT_LINES), min(len(lines), last + _CONTEXT_LINES)
    shown = _numbered(lines, begin, end, box.max_characters - 200)
    return ToolResult("\n".join([f"replaced in {path}:", *shown]))


def list_files(box: Toolbox, path: str = ".") -> ToolResult:
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
    return ToolResult(clip("\n".join(lines) or f"[{path} is empty]", box.max_characters, how))


def _is_seen(entry: FileEntry) -> bool:
    return _UNSEEN_FOLDERS.isdisjoint(entry.path.split("/")[:-1])


def _text_of(sandbox: LocalSandbox, path: str, *, is_exact: bool = False) -> str:
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


def _kind_of(sandbox: LocalSandbox, path: str) -> str:
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


def _write(sandbox: LocalSandbox, path: str, text: str, name: str) -> int:
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


def _numbered(lines: list[str], first: int, last: int, max_characters: int) -> list[str]:
    """As many of these lines as fit, with their numbers; the first at any price."""
    shown: list[str] = []
    room, longest = max_characters, min(_MAX_LINE_CHARACTERS, max(max_characters - 40, 1))
    for number in range(first, last + 1):
        line = lines[number - 1].removesuffix("\r")
        if len(line) > longest:
            line = f"{line[:longest]} [... {len(line) - longest} more characters of this line]"
        text = f"{number:>6}\t{line}"
        room -= len(text) + 1
        if room < 0 and shown:
            break
        shown.append(text)
    return shown


MAX_COMMAND_SECONDS = 300.0
"""A command that asks for more gets so much."""
SEARCH_SECONDS = 20.0
TEST_SECONDS = 120.0
_ARGUMENTS = ("-q", "--tb=short", "--no-header", "-pno:cacheprovider", "-pno:randomly", *OVERRIDES)
# The node ids come on standard input: there may be more of them than a command line holds.
_TESTS_PROGRAM = """
import json, sys
options, arguments, import_roots, node_ids = json.load(sys.stdin)
import pytest
sys.path[:0] = [os.path.abspath(path) for path in import_roots]
options = importable_plugins(options, os.getcwd())
arguments = options + arguments + ["--rootdir=" + os.getcwd()] + node_ids
sys.exit(pytest.main(arguments, plugins=[make_suite(options)]))
"""
_MAX_NAMED = 5


def run_tests(box: Toolbox) -> ToolResult:
    """Run the visible tests of the task. Test files and their configuration are put back as they were first.

    Example: {}
    """
    notes, tests = _restore(box), box.tests
    request = (tests.options, _ARGUMENTS, tests.import_roots, tests.node_ids)
    done = box.sandbox.exec(
        ["python3", "-P", "-B", "-c", f"{program_text('running.pytest_runner')}\n{_TESTS_PROGRAM}"],
        timeout_seconds=TEST_SECONDS,
        stdin=json.dumps(request).encode(),
        env=box.environment_variables,
    )
    result = told(done, TEST_SECONDS, box.max_characters)
    return replace(result, text="\n".join([*notes, result.text]))


def _restore(box: Toolbox) -> list[str]:
    """Put back what differs; what to tell the policy about it."""
    sandbox, tests, changed = box.sandbox, box.tests, []
    for path, data in sorted(tests.files.items()):
        try:
            is_same = sandbox.read_file(path, max_bytes=len(data) + 1) == data
        except SandboxFileError:
            is_same = False
        if not is_same:
            sandbox.write_file(path, data)
            changed.append(path)
    stray = [
        entry.path
        for entry in sandbox.list_files(".")
        if entry.kind == "file" and entry.path not in tests.files and tests.is_left_out(entry.path)
    ]
    notes = {"put back as they were": changed, "not taken into grading": stray}
    return [f"[{note}: {_named(paths)}]" for note, paths in notes.items() if paths]


def _named(paths: list[str]) -> str:
    shown = [ascii(path)[1:-1] if not path.isprintable() else path for path in paths[:_MAX_NAMED]]
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(shown) + more


# Not every machine has bash; the plain shell does for most commands.
_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
_NOT_FOUND = 127
"""The exit code of a shell that does not know the command."""
_HOW_TO_SEE = "write it to a file and read a part of it, or use head, tail or grep"


def bash(box: Toolbox, command: str, timeout_seconds: int = 60) -> ToolResult:
    """Run a shell command in the root of the repository.

    Every call has a shell of its own: cd and variables are forgotten, files stay. There is no network.
    Example: {"command": "python -m pytest -q tests | tail -20"}

    Args:
        command: What to run.
        timeout_seconds: After so many seconds it is stopped. Default: 60.
    """
    if not command.strip():
        raise RefusedError("the command is empty. Give a shell command, such as: ls -la")
    if timeout_seconds < 1:
        raise RefusedError(f"timeout_seconds is {timeout_seconds}; it must be at least 1.")
    seconds = min(timeout_seconds, MAX_COMMAND_SECONDS)
    words = ["/bin/sh", "-c", _SHELL, "sh", command]
    done = box.sandbox.exec(words, timeout_seconds=seconds, env=box.environment_variables)
    return told(done, seconds, box.max_characters)


def told(done: ExecResult, seconds: float, max_characters: int) -> ToolResult:
    """What a command said, clipped in the middle; how it ended stands in the last lines, which are never cut."""
    parts = [done.stdout.rstrip("\n")] if done.stdout.strip() else []
    if done.stderr.strip():
        parts.append(f"[stderr]\n{done.stderr.rstrip()}" if parts else done.stderr.rstrip())
    ends = []
    if done.timed_out:
        ends.append(f"[stopped: it ran longer than {seconds:g} s, and everything it started was killed]")
    elif done.out_of_memory:
        ends.append("[killed: it used more memory than it may]")
    if done.truncated:
        ends.append("[it printed more than is kept]")
    if done.exit_code:
        ends.append(f"[exit code {done.exit_code}]")
    end = "\n".join(ends)
    fault = "command-not-found" if done.exit_code == _NOT_FOUND else ""
    if done.out_of_memory and not done.timed_out:
        fault = "out-of-memory"
    text = clip("\n".join(parts), max_characters - len(end) - 1, _HOW_TO_SEE)
    return ToolResult(
        text="\n".join(part for part in (text, end) if part) or "[no output]",
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        fault=fault,
    )


_MAX_PATTERN_CHARACTERS = 2000
_BAD_PATTERN, _NO_PLACE = 3, 4
# In an interpreter of its own, which imports nothing of the tree (-I). At most 400 lines, 300 characters of each.
_SEARCH_PROGRAM = """
import json, os, re, sys
pattern, is_regex, root, max_bytes = json.load(sys.stdin)
try:
    found = re.compile(pattern if is_regex else re.escape(pattern))
except (re.error, OverflowError, RecursionError) as error:
    print(error)
    sys.exit(3)
if not os.path.lexists(root):
    sys.exit(4)
def files():
    if not os.path.isdir(root):
        yield root
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in (".git", "__pycache__"))
        yield from (os.path.join(folder, name) for name in sorted(names))
count = 0
for path in files():
    if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) > max_bytes:
        continue
    try:
        with open(path, "rb") as handle:
            data = handle.read()
    except OSError:
        continue
    if b"\\0" in data[:8192]:
        continue
    for number, line in enumerate(data.decode("utf-8", "replace").split("\\n"), 1):
        if found.search(line):
            count += 1
            if count > 400:
                print("[more than 400 matches: ask for less]")
                sys.exit(0)
            name = os.path.normpath(path).encode("utf-8", "backslashreplace").decode()
            said = "%s:%d:%s\\n" % (name, number, line.strip("\\r")[:300])
            sys.stdout.buffer.write(said.encode("utf-8", "replace"))
"""


def search(box: Toolbox, pattern: str, path: str = ".", is_regex: bool = True) -> ToolResult:  # noqa: FBT001, FBT002  # called by name
    r"""Find lines in the text files of the repository.

    Example: {"pattern": "def parse_\\w+", "path": "src"}

    Args:
        pattern: A regular expression of Python, searched in each line.
        path: The file or folder to search, relative to the root of the repository. Default: the root.
        is_regex: False to search for the pattern as plain text. Default: true.
    """
    if not pattern or len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise RefusedError(f"pattern must have 1 to {_MAX_PATTERN_CHARACTERS} characters.")
    if path.startswith("/") or ".." in path.split("/"):  # the jail shows system folders as well
        raise SandboxFileError("CR0309", "the path is not in the repository: give one relative to its root.")
    request = (pattern, is_regex, path, MAX_FILE_BYTES)
    done = box.sandbox.exec(
        ["python3", "-I", "-S", "-B", "-c", _SEARCH_PROGRAM],
        timeout_seconds=SEARCH_SECONDS,
        stdin=json.dumps(request).encode(),
        env=box.environment_variables,
    )
    if done.timed_out:
        why = f"[stopped: the search took longer than {SEARCH_SECONDS:g} s. Use a simpler pattern, or a smaller folder]"
        return ToolResult(why, is_error=True, timed_out=True)
    if done.exit_code == _BAD_PATTERN:
        why = f"the pattern is no regular expression: {done.stdout.strip()[:300]}."
        raise RefusedError(f"{why} To find it as it is written, give is_regex false.")
    if done.exit_code == _NO_PLACE:
        why = f"{path}: No such file or directory. Use list_files to see what is there."
        raise RefusedError(why, "missing-file")
    if done.exit_code:
        why = done.stderr.strip().rsplit("\n", 1)[-1][:300]
        raise RefusedError(f"the search failed: {why or f'exit code {done.exit_code}'}.")
    if not done.stdout.strip():
        return ToolResult("[no line matches]")
    return ToolResult(clip(done.stdout.rstrip("\n"), box.max_characters, "search a smaller folder"))


def submit(box: Toolbox) -> ToolResult:
    """End the attempt: the repository as it stands is your answer. Nothing can be done afterwards.

    Example: {}
    """
    box.is_over = True
    return ToolResult("submitted: the attempt is over.")


ACTIONS = {
    tool.__name__: tool
    for tool in (bash, read_file, write_file, str_replace, list_files, search, run_tests, submit)
}
"""The tools by name, in the order in which the policy sees them."""
TOOLS: tuple[ToolSpec, ...] = tuple(spec_of(tool) for tool in ACTIONS.values())
"""What the policy is told of them: each signature and docstring, as a JSON schema."""


@dataclass(slots=True)
class Toolbox:
    """The eight tools over one sandbox, which has limits of its own; for one attempt, used by one thread at a time.

    ``is_over`` is set by ``submit``, or by whoever ends the attempt; from then on every call is refused. Of ``num_calls``,
    ``num_invalid`` could not be made: unknown tool, bad JSON, wrong arguments, or after the end. A command that fails, or a
    file that is not there, is a valid call.
    """

    sandbox: LocalSandbox
    tests: VisibleTests  # what ``run_tests`` runs
    # Of every command, over the sandbox's.
    environment_variables: Mapping[str, str] = field(default_factory=dict)
    max_characters: int = 16_000  # of an answer, at least 1,000; a small context holds several
    num_calls: int = 0
    num_invalid: int = 0
    is_over: bool = False

    def call(self, call: ToolCall) -> ToolResult:
        """Do what was asked; a call that cannot be made says why and shows a right one."""
        started = time.monotonic()
        self.num_calls += 1
        try:
            spec, arguments = arguments_of(call, TOOLS)
            if self.is_over:
                raise RefusedError("the attempt is over. No tool can be used any more.", "invalid")
            result = ACTIONS[spec.name](self, **arguments)
        except RefusedError as error:
            self.num_invalid += error.fault == "invalid"
            result = ToolResult(str(error), is_error=True, fault=error.fault)
        except SandboxFileError as error:
            place = f" [{error.where}]" if error.where else ""
            result = ToolResult(f"{error.message}{place}", is_error=True)
        except ValueError as error:  # a NUL byte, or text that has no bytes: see ``LocalSandbox``
            why = error.message if isinstance(error, CommandError) else f"{error}."
            result = ToolResult(f"this cannot be done: {why}", is_error=True)
        text = clean(clip(result.text, self.max_characters, "ask for less at a time"))
        return replace(result, text=text, seconds=time.monotonic() - started)
