"""Search files for golden code that is told as plain lines.

Standard library only: the same text runs outside and, started by ``pytest_runner.hand_over`` with ``main``, inside a jail.

Inside the tree one distinctive line is enough. Outside (standard library, other people's packages) short lines repeat by
nature: there a run of lines that follow one another as around the hole, with a distinctive one among them, must have
``MIN_RUN_CHARACTERS`` characters. Bytecode is not read: inside the tree, which is made of text, a compiled file with the name of
a module that lost code counts as a copy of it.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

from composer_replication.tasks.intake.packed_forms import Form, forms_of

MIN_RUN_CHARACTERS = 60
MAX_FILE_BYTES = 64 * 1024**2
MARKS, END_MARKS = "+-<>#|*%\"',.:0123456789 \t", "\"',| \t"
"""Before and after a line in a diff, a comment, a list of strings or a listing with numbers; it counts without them, too."""


@dataclass(frozen=True)
class Target:
    """One golden body.

    ``window`` are (text, is distinctive) of the lines around and in the hole, in order and without indentation; ``path``
    is its file.
    """

    task_id: str
    window: tuple[tuple[str, bool], ...]
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
        self.known: set[str] = set()
        self.places: dict[str, list[tuple[Target, int]]] = {}  # of distinctive lines in windows
        self.by_module: dict[str, set[str]] = {}  # tasks by the name of a module that lost code
        for target in targets:
            for place, (line, is_distinctive) in enumerate(target.window):
                self.known.add(line)
                if is_distinctive:
                    self.places.setdefault(line, []).append((target, place))
            self.by_module.setdefault(_stem(target.path), set()).add(target.task_id)
        self.num_files = 0
        self.not_searched: list[str] = []

    def search_bytes(self, path: str, data: bytes, *, in_tree: bool) -> set[Leak]:
        """The leaks of one file; ``path`` is reported and tells repositories and packages."""
        self.num_files += 1
        found: set[Leak] = set()
        for form in forms_of(path, data):
            if form.problem:
                self.not_searched.append(f"{form.path} ({form.problem})")
            channel, by_line = _channel(form, in_tree=in_tree), self._lines_found(form.data, in_tree=in_tree)
            found |= {Leak(task_id, channel, form.path) for task_id in by_line}
            if in_tree and form.path.endswith((".pyc", ".pyo")):
                compiled = self.by_module.get(_stem(form.path), ())
                found |= {Leak(task_id, form.kind or "pyc", form.path) for task_id in compiled}
        return found

    def _lines_found(self, data: bytes, *, in_tree: bool) -> set[str]:
        """The tasks of which lines stand in a text."""
        lines = filter(None, map(str.strip, data.decode("utf-8", "replace").splitlines()))
        known: dict[int, str] = {}
        for place, line in enumerate(lines):
            for form in (line, line.lstrip(MARKS).rstrip(END_MARKS)):
                if form in self.known:
                    known.setdefault(place, form)
        found: set[str] = set()
        for place, line in known.items():
            for target, where in self.places.get(line, ()):
                if target.task_id not in found and (in_tree or _is_run(target, where, known, place)):
                    found.add(target.task_id)
        return found

    def search_folder(self, root: str, *, tree: str, skip: Iterable[str] = ()) -> set[Leak]:
        """Walk a folder, no links; in ``tree`` one line is enough. What cannot be read cannot leak, what is too large is noted."""
        found: set[Leak] = set()
        left_out = set(skip)
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if os.path.join(folder, name) not in left_out)
            for name in sorted(names):
                path = os.path.join(folder, name)
                data = self._read(path) if path not in left_out else None
                if data is not None:
                    in_tree = (path + "/").startswith(tree + "/")
                    shown = os.path.relpath(path, tree) if in_tree else path
                    found |= self.search_bytes(shown, data, in_tree=in_tree)
        return found

    def _read(self, path: str) -> bytes | None:
        """The bytes of a file; None for programs and libraries (ELF, ar) and for what cannot be read."""
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                return None
            with open(path, "rb") as handle:
                head = handle.read(4)
                if head in (b"\x7fELF", b"!<ar"):
                    return None
                if status.st_size > MAX_FILE_BYTES:
                    self.not_searched.append(f"{path} (larger than {MAX_FILE_BYTES // 1024**2} MiB)")
                    return None
                return head + handle.read(MAX_FILE_BYTES)
        except OSError:
            return None


def _stem(path: str) -> str:
    """The name of a module by a file of it: ``numbers`` of ``__pycache__/numbers.cpython-311.pyc``."""
    return posixpath.basename(path).partition(".")[0]


def _is_run(target: Target, where: int, known: Mapping[int, str], place: int) -> bool:
    """Whether the lines around a distinctive one stand there as around the hole, long enough to be no chance."""
    window = target.window
    num_characters = len(window[where][0])
    for step, end in ((1, len(window)), (-1, -1)):
        for mine in range(where + step, end, step):
            line, _ = window[mine]
            if num_characters >= MIN_RUN_CHARACTERS or known.get(place + mine - where) != line:
                break
            num_characters += len(line)
    return num_characters >= MIN_RUN_CHARACTERS


def _channel(form: Form, *, in_tree: bool) -> str:
    parts = form.path.partition("!")[0].split("/")
    if ".git" in parts:
        return "git"
    is_installed = "site-packages" in parts or "dist-packages" in parts
    return form.kind or ("installed" if is_installed else "copy" if in_tree else "visible-copy")


# --- Inside a jail. No code of the tree is run.


def main(request: Mapping[str, Any], send: Callable[..., None]) -> None:
    """Search what the request names, from the folder of the tree; the answer is one record."""
    search = Search([Target(*fields) for fields in request["targets"]])
    tree = os.getcwd()
    leaks, failed_checks = _ask_git(search, tree) if request["asks_git"] else (set[Leak](), list[str]())
    for root in folders_of(request["roots"], tree):
        leaks |= search.search_folder(root, tree=tree, skip=["/proc", "/sys", *request["skip"]])
    found, not_searched = sorted(map(astuple, leaks)), search.not_searched[:100]
    send(
        "searched",
        leaks=found,
        num_files=search.num_files,
        not_searched=not_searched,
        failed_checks=failed_checks,
    )


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


def folders_of(roots: Sequence[str], tree: str) -> list[str]:
    """The real folders behind some paths, none inside another; the tree where the root is closed, as without namespaces."""
    try:
        os.listdir("/")
    except OSError:
        roots = [tree if root == "/" else root for root in roots]
    found: set[str] = set()
    for root in roots:
        with suppress(OSError):  # a link that may not be read; its folder is named, too
            found.add(os.path.join(os.path.realpath(root), ""))
    return [one for one in sorted(found) if not any(map(one.startswith, found - {one}))]
