"""Search files for golden code that is told as plain lines.

Standard library only: the same text runs outside and, given as source to ``inside_search``, inside a jail.

Inside the tree one distinctive line is enough. Outside (standard library, other people's packages) short lines repeat by
nature: there a run of lines that follow one another as around the hole, with a distinctive one among them, must have
``MIN_RUN_CHARACTERS`` characters. So with compiled code: inside the tree any deleted function counts. Outside, one of
fewer than ``MIN_CODE_BYTES`` (``lambda a, b: a < b``, an empty class) counts only if it comes from a file of that name.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import posixpath
import stat
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from composer_replication.tasks.intake.packed_forms import Form, forms_of

MIN_RUN_CHARACTERS = 60
MIN_CODE_BYTES = 60
MAX_FILE_BYTES = 64 * 1024**2
MARKS, END_MARKS = "+-<>#|*%\"',.:0123456789 \t", "\"',| \t"
"""Before and after a line in a diff, a comment, a list of strings or a listing with numbers; it counts without them, too."""


@dataclass(frozen=True)
class Target:
    """One golden body.

    ``window`` are (text, is distinctive) of the lines around and in the hole, in order and without indentation; ``codes``
    digests of its code objects; ``module`` the path that it is imported from.
    """

    task_id: str
    window: tuple[tuple[str, bool], ...]
    codes: frozenset[str]
    module: str


@dataclass(frozen=True, order=True)
class Leak:
    """One place where golden code can be had."""

    task_id: str
    channel: str
    path: str


def code_digest(code: types.CodeType) -> str:
    """What a function does, in short: its name, constants and instructions, not its place."""
    consts = [
        item.co_code.hex() if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts
    ]
    parts = (code.co_qualname, code.co_code.hex(), code.co_names, code.co_varnames, consts)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all that lie in its constants."""
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from all_codes(item)


class Search:
    """Looks through files for several targets at once; what one file costs hardly grows with their number.

    ``unmarshal`` reads bytecode, too. It can crash the process on hostile bytes, so it is for the inside of a jail.
    """

    def __init__(self, targets: Iterable[Target], *, unmarshal: bool) -> None:
        self.unmarshal = unmarshal
        self.known: set[str] = set()
        self.places: dict[str, list[tuple[Target, int]]] = {}  # of distinctive lines in windows
        self.by_code: dict[str, list[Target]] = {}
        for target in targets:
            for place, (line, is_distinctive) in enumerate(target.window):
                self.known.add(line)
                if is_distinctive:
                    self.places.setdefault(line, []).append((target, place))
            for key in target.codes:
                self.by_code.setdefault(key, []).append(target)
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
            if self.unmarshal and form.path.endswith((".pyc", ".pyo")):
                by_code = self._codes_found(form.data, in_tree=in_tree)
                found |= {Leak(task_id, form.kind or "pyc", form.path) for task_id in by_code}
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

    def _codes_found(self, data: bytes, *, in_tree: bool) -> set[str]:
        try:
            top = marshal.loads(data[16:])  # noqa: S302  inside a jail only
        except (ValueError, EOFError, TypeError, MemoryError, SystemError, OverflowError):
            return set()
        found: set[str] = set()
        for code in set(all_codes(top)) if isinstance(top, types.CodeType) else ():
            leaf = posixpath.basename(code.co_filename)
            says_enough = in_tree or len(code.co_code) >= MIN_CODE_BYTES
            for target in self.by_code.get(code_digest(code), ()):
                if says_enough or leaf == posixpath.basename(target.module):
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
