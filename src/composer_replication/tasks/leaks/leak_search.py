"""Search files for golden code that is told as plain lines.

Standard library only: the same text runs outside and, started by ``pytest_runner.hand_over`` with ``main``, inside a jail.

Inside the tree one distinctive line is enough. Outside (standard library, other people's packages) short lines repeat by
nature: there it takes a run of lines that follow one another as around the hole. Bytecode is not read: inside the tree, which is made of text, a compiled file with the name of
a module that lost code counts as a copy of it.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
import subprocess
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

from composer_replication.tasks.intake.packed_forms import forms_of

MAX_FILE_BYTES = 64 * 1024**2
MARKS, END_MARKS = "+-<>#|*%\"',.:0123456789 \t", "\"',| \t"
"""Before and after a line in a diff, a comment, a list of strings or a listing with numbers; in the tree it counts without them, too."""


@dataclass(frozen=True)
class Target:
    """One golden body.

    ``lines`` are its distinctive ones, ``runs`` stretches of lines around and in the hole, each long enough to be no
    chance and behind a distinctive line of it; all without indentation. ``path`` is its file.
    """

    task_id: str
    lines: tuple[str, ...]
    runs: tuple[tuple[str, str], ...]
    path: str


@dataclass(frozen=True, order=True)
class Leak:
    """One place where golden code can be had."""

    task_id: str
    channel: str
    path: str


class Search:
    """Looks through files for several targets at once; what one file costs hardly grows with their number."""

    def __init__(self, targets: Iterable[Target]) -> None:
        self.lines: dict[str, set[str]] = {}  # tasks by distinctive line
        self.runs: dict[str, set[tuple[str, str]]] = {}  # with their tasks, by a distinctive line in them
        self.by_module: dict[str, set[str]] = {}  # tasks by the name of a module that lost code
        for target in targets:
            for line in target.lines:
                self.lines.setdefault(line, set()).add(target.task_id)
            for line, run in target.runs:
                self.runs.setdefault(line, set()).add((f"\n{run}\n", target.task_id))
            self.by_module.setdefault(_stem(target.path), set()).add(target.task_id)
        self.walked: set[tuple[int, int]] = set()
        self.num_files = 0
        self.not_searched: list[str] = []

    def search_bytes(self, path: str, data: bytes, *, in_tree: bool) -> set[Leak]:
        """The leaks of one file; ``path`` is reported and tells repositories and packages."""
        self.num_files += 1
        found: set[Leak] = set()
        for name, kind, content in forms_of(path, data, self.not_searched):
            channel = _channel(name, kind, in_tree=in_tree)
            found |= {Leak(task_id, channel, name) for task_id in self._lines_found(content, in_tree=in_tree)}
            if in_tree and name.endswith((".pyc", ".pyo")):
                ours = self.by_module.get(_stem(name), ())
                found |= {Leak(task_id, kind or "pyc", name) for task_id in ours}
        return found

    def _lines_found(self, data: bytes, *, in_tree: bool) -> set[str]:
        """The tasks of which lines stand in a text."""
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
        if in_tree:
            forms = {*lines, *(line.lstrip(MARKS).rstrip(END_MARKS) for line in lines)}
            return {task_id for line in forms & self.lines.keys() for task_id in self.lines[line]}
        runs = [one for line in self.runs.keys() & set(lines) for one in self.runs[line]]
        text = "\n".join(["", *filter(None, lines), ""]) if runs else ""
        return {task_id for run, task_id in runs if run in text}

    def search_folder(self, root: str, *, tree: str, skip: Iterable[str] = ()) -> set[Leak]:
        """Walk a folder, no links, none a second time by another name; in ``tree`` one line is enough. What cannot be read
        cannot leak, what is too large is noted.
        """
        found: set[Leak] = set()
        left_out = set(skip)
        for folder, subfolders, names in os.walk(root):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in self.walked:
                subfolders.clear()
                continue
            self.walked.add((status.st_dev, status.st_ino))
            subfolders[:] = sorted(name for name in subfolders if os.path.join(folder, name) not in left_out)
            for name in sorted(names):
                path = os.path.join(folder, name)
                if path not in left_out and (data := self._read(path)):
                    in_tree = (path + "/").startswith(tree + "/")
                    shown = os.path.relpath(path, tree) if in_tree else path
                    found |= self.search_bytes(shown, _unpacked(path, data), in_tree=in_tree)
        return found

    def _read(self, path: str) -> bytes:
        """The bytes of a file; none of programs and libraries (ELF, ar) and of what cannot be read."""
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return b""
            with open(path, "rb") as handle:
                data = handle.read(MAX_FILE_BYTES + 1)
        except OSError:
            return b""
        if len(data) > MAX_FILE_BYTES:
            self.not_searched.append(f"{path} (larger than {MAX_FILE_BYTES // 1024**2} MiB)")
        return b"" if len(data) > MAX_FILE_BYTES or data.startswith((b"\x7fELF", b"!<ar")) else data


def _unpacked(path: str, data: bytes) -> bytes:
    """What a loose object of git holds, whose check sum may look like a short line; other files as they are."""
    with suppress(zlib.error):
        return zlib.decompressobj().decompress(data, MAX_FILE_BYTES) if "/.git/objects/" in path else data
    return data


def _stem(path: str) -> str:
    """The name of a module by a file of it: ``numbers`` of ``__pycache__/numbers.cpython-311.pyc``."""
    return posixpath.basename(path).partition(".")[0]


def _channel(path: str, kind: str, *, in_tree: bool) -> str:
    parts = path.partition("!")[0].split("/")
    if ".git" in parts:
        return "git"
    is_installed = "site-packages" in parts or "dist-packages" in parts
    return kind or ("installed" if is_installed else "copy" if in_tree else "visible-copy")


# --- Inside a jail. No code of the tree is run.


def main(request: Mapping[str, Any], send: Callable[..., None]) -> None:
    """Search what the request names, from the folder of the tree; the answer is one record."""
    search = Search([Target(*fields) for fields in request["targets"]])
    tree = os.getcwd()
    leaks, failed_checks = _ask_git(search, tree) if request["asks_git"] else (set[Leak](), list[str]())
    for root in map(os.path.abspath, request["roots"]):
        leaks |= search.search_folder(root, tree=tree, skip=["/proc", "/sys", *request["skip"]])
    searched = {"num_files": search.num_files, "not_searched": search.not_searched[:100]}
    send("searched", leaks=sorted(map(astuple, leaks)), failed_checks=failed_checks, **searched)


def _ask_git(search: Search, tree: str) -> tuple[set[Leak], list[str]]:
    """What a history at or above the tree tells: every object of it, whatever names it."""
    if shutil.which("git") is None:
        return set(), []
    words = ["git", "-c", "safe.directory=*", "-C", tree, "cat-file", "--batch-all-objects", "--batch"]
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode == 0:
        return search.search_bytes(".git/objects", done.stdout, in_tree=True), []
    has_history = os.path.exists(os.path.join(tree, ".git"))
    return set(), ["git cat-file: no answer"] if has_history else []
