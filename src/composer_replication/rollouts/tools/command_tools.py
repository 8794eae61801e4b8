"""``bash``: one command in the sandbox; and ``run_tests``: the visible tests in the same one, for the policy to read.

What a run of tests says is worth nothing: it runs among whatever the policy did to its sandbox. Rewards come from grading
alone, which has sandboxes of its own.

``search``: lines that match. A regular expression of the policy may take for ever, and a tree may hold anything, so neither
is touched by our own process: an interpreter in the jail does it, under the jail's limits and a time-out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from composer_replication.errors import SandboxFileError
from composer_replication.interfaces import Sandbox
from composer_replication.records import ExecResult, ToolFault, ToolResult
from composer_replication.rollouts.tools.tool_limits import Bench, ToolLimits, clip, refused
from composer_replication.tasks.suite_options import OVERRIDES
from composer_replication.tasks.test_run import runner_text

_ARGUMENTS = ("-q", "--tb=short", "--no-header", "-pno:cacheprovider", "-pno:randomly", *OVERRIDES)
# The node ids come on standard input: there may be more of them than a command line holds.
_TESTS_PROGRAM = """
import json, sys
asked = json.load(sys.stdin)
import pytest
sys.path[:0] = [os.path.abspath(path) for path in asked["import_roots"]]
options = importable_plugins(asked["options"], os.getcwd())
arguments = options + asked["arguments"] + ["--rootdir=" + os.getcwd()] + asked["node_ids"]
sys.exit(pytest.main(arguments, plugins=[make_suite(options)]))
"""
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class VisibleTests:
    """The tests that the reward counts.

    ``files`` are put back before each run: tests, their data and their configuration, as stored. ``is_left_out``
    tells which files of the tree grading will not take from it.
    """

    node_ids: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    import_roots: tuple[str, ...] = (".",)
    options: tuple[str, ...] = ()
    is_left_out: Callable[[str], bool] = field(default=lambda _: False, repr=False, compare=False)


class BenchWithTests(Bench, Protocol):
    """A bench that knows the visible tests."""

    tests: VisibleTests


def run_tests(box: BenchWithTests) -> ToolResult:
    """Put the test files back and run the visible tests; what pytest said, clipped in the middle."""
    tests = box.tests
    notes = _restore(box.sandbox, tests)
    request = {
        "options": list(tests.options),
        "arguments": list(_ARGUMENTS),
        "import_roots": list(tests.import_roots),
        "node_ids": list(tests.node_ids),
    }
    done = box.sandbox.exec(
        ["python3", "-P", "-B", "-c", f"{runner_text('suite_plugin.py')}\n{_TESTS_PROGRAM}"],
        timeout_seconds=box.limits.test_seconds,
        stdin=json.dumps(request).encode(),
        env=box.environment_variables,
    )
    result = told(done, box.limits.test_seconds, box.limits)
    return replace(result, text="\n".join([*notes, result.text]))


def _restore(sandbox: Sandbox, tests: VisibleTests) -> list[str]:
    """Put back what differs; what to tell the policy about it."""
    changed = []
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
    notes = [f"[put back as they were: {_named(changed)}]"] if changed else []
    if stray:
        notes.append(f"[not taken into grading: {_named(stray)}]")
    return notes


def _named(paths: list[str]) -> str:
    shown = [ascii(path)[1:-1] if not path.isprintable() else path for path in paths[:_MAX_NAMED]]
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(shown) + more


# Not every machine has bash; the plain shell does for most commands.
_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
_NOT_FOUND = 127
"""The exit code of a shell that does not know the command."""
HOW_TO_SEE = "write it to a file and read a part of it, or use head, tail or grep"


def bash(box: Bench, command: str, timeout_seconds: float = 60) -> ToolResult:
    """Run a command; its exit code, a time-out and a limit that it broke are said in the text too."""
    if not command.strip():
        return refused("the command is empty. Give a shell command, such as: ls -la")
    if timeout_seconds < 1:
        return refused(f"timeout_seconds is {timeout_seconds}; it must be at least 1.")
    seconds = min(timeout_seconds, box.limits.max_command_seconds)
    words = ["/bin/sh", "-c", _SHELL, "sh", command]
    done = box.sandbox.exec(words, timeout_seconds=seconds, env=box.environment_variables)
    return told(done, seconds, box.limits)


def told(done: ExecResult, seconds: float, limits: ToolLimits) -> ToolResult:
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
    fault: ToolFault = "command-not-found" if done.exit_code == _NOT_FOUND else ""
    if done.out_of_memory and not done.timed_out:
        fault = "out-of-memory"
    text, was_cut = clip("\n".join(parts), limits.max_characters - len(end) - 1, HOW_TO_SEE)
    return ToolResult(
        text="\n".join(part for part in (text, end) if part) or "[no output]",
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        is_truncated=was_cut or done.truncated,
        fault=fault,
    )


_MAX_MATCHES = 400
_MAX_PATTERN_CHARACTERS = 2000
_MAX_LINE_CHARACTERS = 300
_BAD_PATTERN, _NO_PLACE = 3, 4
# In an interpreter of its own, which imports nothing of the tree (-I).
_SEARCH_PROGRAM = """
import json, os, re, sys
asked = json.load(sys.stdin)
try:
    found = re.compile(asked["pattern"] if asked["is_regex"] else re.escape(asked["pattern"]))
except (re.error, OverflowError, RecursionError) as error:
    print(error)
    sys.exit(asked["bad_pattern"])
root, count = asked["path"], 0
if not os.path.lexists(root):
    sys.exit(asked["no_place"])
def files():
    if not os.path.isdir(root):
        yield root
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in (".git", "__pycache__"))
        yield from (os.path.join(folder, name) for name in sorted(names))
for path in files():
    if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) > asked["max_bytes"]:
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
            if count > asked["max_matches"]:
                print("[more than %d matches: ask for less]" % asked["max_matches"])
                sys.exit(0)
            shown = line.strip("\\r")[:asked["max_line"]]
            name = os.path.normpath(path).encode("utf-8", "backslashreplace").decode()
            sys.stdout.buffer.write(("%s:%d:%s\\n" % (name, number, shown)).encode("utf-8", "replace"))
"""


def search(box: Bench, pattern: str, path: str = ".", *, is_regex: bool = True) -> ToolResult:
    """Lines that match as ``path:number:line``, clipped; none is no error.

    Links, binary files, files above ``max_file_bytes`` and what git keeps are left out.
    """
    if not pattern or len(pattern) > _MAX_PATTERN_CHARACTERS:
        return refused(f"pattern must have 1 to {_MAX_PATTERN_CHARACTERS} characters.")
    if path.startswith("/") or ".." in path.split("/"):  # the jail shows system folders as well
        raise SandboxFileError("CR0309", "the path is not in the repository: give one relative to its root.")
    request = {
        "pattern": pattern,
        "path": path,
        "is_regex": is_regex,
        "max_matches": _MAX_MATCHES,
        "max_line": _MAX_LINE_CHARACTERS,
        "max_bytes": box.limits.max_file_bytes,
        "bad_pattern": _BAD_PATTERN,
        "no_place": _NO_PLACE,
    }
    done = box.sandbox.exec(
        ["python3", "-I", "-S", "-B", "-c", _SEARCH_PROGRAM],
        timeout_seconds=box.limits.search_seconds,
        stdin=json.dumps(request).encode(),
        env=box.environment_variables,
    )
    if done.timed_out:
        return ToolResult(
            f"[stopped: the search took longer than {box.limits.search_seconds:g} s. "
            "Use a simpler pattern, or a smaller folder]",
            is_error=True,
            timed_out=True,
        )
    if done.exit_code == _BAD_PATTERN:
        return refused(
            f"the pattern is no regular expression: {done.stdout.strip()[:300]}. To find it as it is written, "
            "give is_regex false."
        )
    if done.exit_code == _NO_PLACE:
        return refused(
            f"{path}: No such file or directory. Use list_files to see what is there.", "missing-file"
        )
    if done.exit_code:
        why = done.stderr.strip().rsplit("\n", 1)[-1][:300]
        return refused(f"the search failed: {why or f'exit code {done.exit_code}'}.")
    if not done.stdout.strip():
        return ToolResult("[no line matches]")
    text, is_cut = clip(done.stdout.rstrip("\n"), box.limits.max_characters, "search a smaller folder")
    return ToolResult(text, is_truncated=is_cut or done.truncated)
