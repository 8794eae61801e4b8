"""Unified diffs of whole trees: written here, applied by ``git apply``.

The writer and the program that applies are independent of each other, so "the golden diff
applied to the broken tree restores everything" is more than the code agreeing with itself.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

from composer_replication.errors import InputError, MissingError
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.cache import refuse_full_disk
from composer_replication.tasks.planning.edits import write_files

APPLY_SECONDS = 120
MAX_READABLE_FILES, MAX_READABLE_BYTES, MAX_READABLE_CHARACTERS = 20, 100_000, 20_000
"""Of ``readable_patch``, whose trees a policy has made: ``difflib`` takes seconds for a long file."""
_MODE = "100644"
_NO_NEWLINE = "\\ No newline at end of file\n"
_PLAIN_NAME = re.compile(r"(?!\s)[^\x00-\x1f\x7f\"\\]+(?<!\s)")
"""Any other git writes in C's notation, which no readable source file needs."""
_NO_PATH = re.compile(r"[\x00\ud800-\udfff]")
"""What no UTF-8 path holds."""


def make_patch(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str:
    """The unified diff that turns one tree into another; empty where they are equal.

    Paths in order, three lines of context, git's headers, so that new, deleted and empty files and a missing newline at
    the end survive. An InputError (CR0446) where a file that differs is not UTF-8, or a path leaves the tree.
    """
    return "".join(_file_patch(path, old.get(path), new.get(path)) for path in _changed(old, new))


def readable_patch(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str:
    """``make_patch`` for a person: a file that no diff shows is named, and a long diff is cut. Nothing is refused."""
    parts = []
    for path in _changed(old, new)[:MAX_READABLE_FILES]:
        before, after = old.get(path), new.get(path)
        try:
            if max(len(before or b""), len(after or b"")) > MAX_READABLE_BYTES:
                raise _refused("the file is too long for a diff", path)
            parts.append(_file_patch(path, before, after))
        except InputError as error:
            parts.append(f"{path!a}: {error.message}\n")
    return "".join(parts)[:MAX_READABLE_CHARACTERS]


def _changed(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    return sorted(path for path in {*old, *new} if old.get(path) != new.get(path))


def _file_patch(path: str, old: bytes | None, new: bytes | None) -> str:
    _check_path(path)
    if not _PLAIN_NAME.fullmatch(path):
        raise _refused("the name holds signs that no patch of ours can write", ascii(path[:80]))
    try:
        before, after = (None if data is None else data.decode() for data in (old, new))
    except UnicodeDecodeError as error:
        raise _refused("the file is not UTF-8 text, so no patch can hold it", path) from error
    head = f"diff --git a/{path} b/{path}\n"
    if before is None:
        head += f"new file mode {_MODE}\n"
    elif after is None:
        head += f"deleted file mode {_MODE}\n"
    hunks = difflib.unified_diff(_lines(before), _lines(after))
    # What ``difflib`` makes of two texts, without its lines of names.
    body = "".join(
        line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in islice(hunks, 2, None)
    )
    if body:
        end = "\t" if " " in path else ""  # a date could follow a name with a blank
        head += f"--- {'/dev/null' if before is None else f'a/{path}{end}'}\n"
        head += f"+++ {'/dev/null' if after is None else f'b/{path}{end}'}\n"
    return head + body


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    is_odd = pure.is_absolute() or str(pure) != path or not pure.parts or _NO_PATH.search(path)
    if is_odd or any(part == ".." or part.lower() == ".git" for part in pure.parts):
        raise _refused("the path leaves the tree or is none", ascii(path[:80]))


def _lines(text: str | None) -> list[str]:
    """At line feeds alone: a carriage return or a form feed is a part of its line."""
    return io.StringIO(text, newline="\n").readlines()


def apply_patch(files: Mapping[str, bytes], patch: str) -> dict[str, bytes]:
    """A tree after a patch, by the real ``git apply`` in a temporary folder of its own.

    No configuration of user or system, no hooks, no attributes of the tree, no ``--unsafe-paths``: git itself refuses a
    path that climbs out or goes through a link. ``patch`` is a unified diff with ``a/`` and ``b/``; a blank one changes
    nothing. File modes are not part of a tree: of a link it has the text.

    Raises:
        InputError: the patch does not apply as a whole, or leaves the tree (CR0446).
        MissingError: there is no git (CR0440).
    """
    for path in files:
        _check_path(path)
    if not patch.strip():
        return dict(files)
    with tempfile.TemporaryDirectory(prefix="patch-", dir=process_folder()) as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        write_files(tree, files)
        _run_git_apply(tree, patch.encode())
        # With core.symlinks off git itself makes no link, whatever a patch says; none would be followed.
        paths = (path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink())
        return {path.relative_to(tree).as_posix(): path.read_bytes() for path in paths}


def _run_git_apply(tree: Path, patch: bytes) -> None:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "HOME": str(tree.parent),
        "GIT_CEILING_DIRECTORIES": str(tree.parent),  # there is no repository: nothing of one is read
        **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
        **dict.fromkeys(("GIT_CONFIG_NOSYSTEM", "GIT_ATTR_NOSYSTEM"), "1"),
    }
    try:
        done = subprocess.run(
            ["git", "-c", "core.symlinks=false", "-c", "core.fileMode=false", "apply", "--whitespace=nowarn", "-"],
            input=patch, cwd=tree, env=environment, capture_output=True, timeout=APPLY_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        problem = "patches are applied by git, which is not installed."
        raise MissingError("CR0440", problem, where="git", fix="install git.") from error
    except subprocess.TimeoutExpired as error:
        raise _refused(f"git apply did not end within {APPLY_SECONDS} seconds", "") from error
    if done.returncode:
        told = done.stderr.decode("utf-8", "replace")
        refuse_full_disk(told, tree)
        said = told.strip().splitlines()
        reason = next((line for line in said if line.startswith(("error:", "fatal:"))), "git apply failed")
        raise _refused(f"the patch does not apply, {reason.partition(': ')[2] or reason}"[:300], "")


def _refused(detail: str, where: str) -> InputError:
    fix = "give a patch of text files, made by git diff against exactly that tree."
    return InputError("CR0446", f"{detail.rstrip('.')}.", where=where, fix=fix)
