"""The toolbox: from a call to a result, whatever is wrong with the call; and the tools that run a program in the sandbox.

The policy reads every docstring of a tool.

What a run of tests says is worth nothing: it runs among whatever the policy did to its sandbox. Rewards come from grading
alone, which has sandboxes of its own. A search runs there too, because a regular expression of the policy may take for ever,
and a tree may hold anything: an interpreter in the jail does it, under the jail's limits and a time-out.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

from composer_replication.errors import CommandError, SandboxFileError
from composer_replication.records import ExecResult, ToolCall, ToolFault, ToolResult, ToolSpec
from composer_replication.rollouts.tools.file_tools import list_files, read_file, str_replace, write_file
from composer_replication.rollouts.tools.tool_context import (
    MAX_FILE_BYTES,
    RefusedError,
    ToolContext,
    arguments_of,
    clean,
    clip,
    spec_of,
)
from composer_replication.tasks.suite_options import OVERRIDES
from composer_replication.tasks.test_run import runner_text

MAX_COMMAND_SECONDS = 300.0
"""A command that asks for more gets so much."""
SEARCH_SECONDS = 20.0
TEST_SECONDS = 120.0
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


def run_tests(box: ToolContext) -> ToolResult:
    """Run the visible tests of the task. Test files and their configuration are put back as they were first.

    Example: {}
    """
    notes = _restore(box)
    tests = box.tests
    request = {
        "options": list(tests.options),
        "arguments": list(_ARGUMENTS),
        "import_roots": list(tests.import_roots),
        "node_ids": list(tests.node_ids),
    }
    done = box.sandbox.exec(
        ["python3", "-P", "-B", "-c", f"{runner_text('suite_plugin.py')}\n{_TESTS_PROGRAM}"],
        timeout_seconds=TEST_SECONDS,
        stdin=json.dumps(request).encode(),
        env=box.environment_variables,
    )
    result = told(done, TEST_SECONDS, box.max_characters)
    return replace(result, text="\n".join([*notes, result.text]))


def _restore(box: ToolContext) -> list[str]:
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


def bash(box: ToolContext, command: str, timeout_seconds: int = 60) -> ToolResult:
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
    fault: ToolFault = "command-not-found" if done.exit_code == _NOT_FOUND else ""
    if done.out_of_memory and not done.timed_out:
        fault = "out-of-memory"
    text, was_cut = clip("\n".join(parts), max_characters - len(end) - 1, _HOW_TO_SEE)
    return ToolResult(
        text="\n".join(part for part in (text, end) if part) or "[no output]",
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        is_truncated=was_cut or done.truncated,
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


def search(box: ToolContext, pattern: str, path: str = ".", is_regex: bool = True) -> ToolResult:  # noqa: FBT001, FBT002  # called by name
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
    text, is_cut = clip(done.stdout.rstrip("\n"), box.max_characters, "search a smaller folder")
    return ToolResult(text, is_truncated=is_cut or done.truncated)


def submit(box: ToolContext) -> ToolResult:
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


class Toolbox(ToolContext):
    """The eight tools over one sandbox, for one attempt; used by one thread at a time."""

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
        except ValueError as error:  # a NUL byte, or text that has no bytes: see ``interfaces.Sandbox``
            why = error.message if isinstance(error, CommandError) else f"{error}."
            result = ToolResult(f"this cannot be done: {why}", is_error=True)
        text, was_cut = clip(result.text, self.max_characters, "ask for less at a time")
        is_truncated, seconds = result.is_truncated or was_cut, time.monotonic() - started
        return replace(result, text=clean(text), is_truncated=is_truncated, seconds=seconds)
