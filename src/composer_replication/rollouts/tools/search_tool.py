"""``search``: lines that match, found inside the sandbox.

A regular expression of the policy may take for ever, and a tree may hold anything, so neither is touched by our
own process: an interpreter in the jail does it, under the jail's limits and a time-out.
"""

from __future__ import annotations

import json

from composer_replication.errors import SandboxFileError
from composer_replication.records import ToolResult
from composer_replication.rollouts.tools.tool_limits import Bench, clip, refused

_MAX_MATCHES = 400
_MAX_PATTERN_CHARACTERS = 2000
_MAX_LINE_CHARACTERS = 300
_BAD_PATTERN, _NO_PLACE = 3, 4
# In an interpreter of its own, which imports nothing of the tree (-I).
_PROGRAM = """
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

    Raises:
        SandboxFailure: the sandbox broke.
    """
    if not pattern or len(pattern) > _MAX_PATTERN_CHARACTERS:
        return refused(f"pattern must have 1 to {_MAX_PATTERN_CHARACTERS} characters.")
    _refuse_outside(path)
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
        ["python3", "-I", "-S", "-B", "-c", _PROGRAM],
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


def _refuse_outside(path: str) -> None:
    """The jail shows system folders as well, where nothing of the task is."""
    if path.startswith("/") or ".." in path.split("/"):
        raise SandboxFileError("CR0309", "the path is not in the repository: give one relative to its root.")
