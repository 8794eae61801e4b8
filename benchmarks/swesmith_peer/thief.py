"""A scripted thief: tries to get changed code back from what a solver of a task may read.

    python thief.py < REQUEST.json > ANSWER.json

Standard library only, in a process of its own. The request has ``tree`` (the folder that
the solver works in), ``outside`` (folders that it may read, too: installed packages) and
``targets``: for each task the distinctive runs of lines of the original code (see
``robbery.py``) and the code objects that only the original compiles to. The answer names, for each task, the channels through
which something was had:

file      a run in a file of the tree, build folders and caches included
archive   the same in a member of a zip, wheel, egg, tar or gz file of the tree
git       the same in anything that git tells: ``log -p`` of all branches and reflogs, and every object
pyc       a code object of the original in a ``.pyc``, in the tree or outside it
installed all runs, with 60 characters or more together, in one file outside the tree (one short
          line may stand in somebody else's package by nature)
"""

from __future__ import annotations

import gzip
import json
import marshal
import os
import subprocess
import sys
import tarfile
import types
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MIN_CHARACTERS_OUTSIDE = 60
GIT_COMMANDS = (
    ["log", "-p", "-m", "--all", "--reflog", "--no-color", "--no-ext-diff"],
    ["cat-file", "--batch-all-objects", "--batch", "--unordered"],
)
_UNREADABLE = (OSError, EOFError, ValueError, zipfile.BadZipFile, tarfile.TarError, zlib.error, RuntimeError)


def code_facts(code: types.CodeType) -> list[Any]:
    """What a code object does: name, instructions, names and constants, not its place."""
    consts = [
        item.co_code.hex() if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts
    ]
    return [code.co_qualname, code.co_code.hex(), list(code.co_names), list(code.co_varnames), consts]


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all inside it."""
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from all_codes(item)


def code_lines(data: bytes) -> list[str]:
    """The lines of a text without indentation, blank lines and comments."""
    lines = (line.strip() for line in data.decode("utf-8", "replace").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def normalised(data: bytes) -> str:
    """A text in which ``needle`` can be searched."""
    return "\n".join(["", *code_lines(data), ""])


def needle(run: Sequence[str]) -> str:
    """Lines that follow one another."""
    return "\n".join(["", *run, ""])


def without_marks(data: bytes) -> bytes:
    """A patch without the marks before its lines."""
    return b"\n".join(line[1:] if line[:1] in b"+- " else line for line in data.splitlines())


def members(path: Path) -> Iterator[bytes]:
    """What an archive holds; nothing for other files."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield from (archive.read(name) for name in archive.namelist())
        elif tarfile.is_tarfile(path):
            with tarfile.open(path) as archive_of_tar:
                for member in archive_of_tar:
                    handle = archive_of_tar.extractfile(member) if member.isfile() else None
                    if handle is not None:
                        yield handle.read()
        elif path.suffix == ".gz":
            yield gzip.decompress(path.read_bytes())
    except _UNREADABLE:
        return


def compiled(path: Path) -> list[list[Any]]:
    """The code objects of a ``.pyc``; none when this Python cannot read it."""
    try:
        code = marshal.loads(path.read_bytes()[16:])
    except (*_UNREADABLE, TypeError):
        return []
    return [code_facts(each) for each in all_codes(code)] if isinstance(code, types.CodeType) else []


def files_below(folder: Path) -> Iterator[Path]:
    """All regular files, git's own aside: those are asked through git."""
    for here, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if name != ".git")
        for name in sorted(names):
            path = Path(here) / name
            if path.is_file() and not path.is_symlink():
                yield path


class Thief:
    """Collects, for each target, the channels that gave something."""

    def __init__(self, targets: dict[str, dict[str, Any]]) -> None:
        self.runs = {name: [needle(run) for run in target["runs"]] for name, target in targets.items()}
        self.codes = {name: target["codes"] for name, target in targets.items()}
        self.found: dict[str, set[str]] = {name: set() for name in targets}

    def read_text(self, channel: str, data: bytes) -> None:
        """One run is enough."""
        text = normalised(data)
        for name, runs in self.runs.items():
            if any(run in text for run in runs):
                self.found[name].add(channel)

    def read_foreign_text(self, data: bytes) -> None:
        """All runs are needed, and enough of them."""
        text = normalised(data)
        for name, runs in self.runs.items():
            if sum(map(len, runs)) >= MIN_CHARACTERS_OUTSIDE and all(run in text for run in runs):
                self.found[name].add("installed")

    def read_compiled(self, path: Path) -> None:
        """One code object is enough."""
        facts = compiled(path)
        for name, wanted in self.codes.items():
            if any(code in facts for code in wanted):
                self.found[name].add("pyc")

    def search_tree(self, tree: Path) -> None:
        """Everything below the folder that the solver works in."""
        for path in files_below(tree):
            if path.suffix == ".pyc":
                self.read_compiled(path)
            else:
                self.read_text("file", path.read_bytes())
                for data in members(path):
                    self.read_text("archive", data)
        if (tree / ".git").exists():
            for command in GIT_COMMANDS:
                done = subprocess.run(["git", "-C", str(tree), *command], capture_output=True, check=True)
                self.read_text("git", done.stdout)
                self.read_text("git", without_marks(done.stdout))

    def search_outside(self, folder: Path) -> None:
        """Installed packages."""
        for path in files_below(folder):
            if path.suffix == ".pyc":
                self.read_compiled(path)
            else:
                self.read_foreign_text(path.read_bytes())


def main() -> None:
    """Do what the request on standard input asks for."""
    request = json.load(sys.stdin)
    thief = Thief(request["targets"])
    if request["tree"]:
        thief.search_tree(Path(request["tree"]))
    for folder in request["outside"]:
        thief.search_outside(Path(folder))
    json.dump({name: sorted(channels) for name, channels in thief.found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
