"""Search files for golden code that is known by salted hashes only.

Standard library only, and without the golden code itself: the same text runs outside and,
given as source to the thief, inside a jail, where golden code must never be.

A line of the window around a hole is known by the hash of its stripped text. Inside the
tree one distinctive line is enough. Outside (standard library, other people's packages)
short lines repeat by nature: there a run of lines that follow one another as around the
hole, with a distinctive one among them, must have ``MIN_RUN_CHARACTERS`` characters.
So with compiled code: inside the tree any deleted function counts. Outside, one of fewer than
``MIN_CODE_BYTES`` (``lambda a, b: a < b``, an empty class) counts only if it comes from a file
of the same name.
"""

from __future__ import annotations

import itertools
import marshal
import os
import posixpath
import re
import stat
import types
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from composer_replication.tasks.leaks.leak_forms import Form, forms_of
from composer_replication.tasks.leaks.leak_targets import (
    EDGES,
    Target,
    all_codes,
    code_check,
    code_hash,
    hashed,
    name_check,
    target_from_json,
    target_to_json,
    without_marks,
)

__all__ = [
    "Leak",
    "Search",
    "Target",
    "all_codes",
    "code_hash",
    "hashed",
    "target_from_json",
    "target_to_json",
]

MIN_RUN_CHARACTERS = 60
MIN_CODE_BYTES = 60
MAX_FILE_BYTES = 64 * 1024**2
_CODE = re.compile(rb"[\xe3\x63][\x00-\x40]\x00\x00\x00[\x00-\x40]\x00\x00\x00[\x00-\x40]\x00\x00\x00")
_LEADS_AWAY = re.compile(rb"^\s*(?:/|\.\./)|\"editable\":\s*true", re.MULTILINE)
_MAX_CODES = 400
# A length below that of any letter, then letters; and the marks of a string with a length that looks like one.
_SHORT_NAME = re.compile(rb"([\x01-\x2f])(?:\0\0\0)?([0-9A-Za-z_\x80-\xff]+)")
_LONG_NAME = re.compile(rb"[zZ\xda\xfa][\x30-\xff]|[aAtu\xe1\xc1\xf4\xf5][\x30-\xff]\0\0\0")
_CACHES = {
    ".mypy_cache": "type-checker-cache",
    ".pytype": "type-checker-cache",
    ".pyre": "type-checker-cache",
    ".pyrefly_cache": "type-checker-cache",
    ".ty_cache": "type-checker-cache",
    ".dmypy.json": "type-checker-cache",
    ".pytest_cache": "test-cache",
    ".hypothesis": "test-cache",
}
# Where pyright and mypy's stubgen write the signatures of what they read.
_STUB_FOLDERS = frozenset({"typings", "out"})
_PACKAGE_CACHE = re.compile(
    r"(?:^|/)\.?cache/(?:pip|uv|pypoetry|pdm)/|(?:^|/)(?:http-v2|archive-v0|sdists-v\d+)/"
)
_KINDS = {"": "copy", "escaped": "escaped", "markup": "docs"}


@dataclass(frozen=True)
class Leak:
    """One place where golden code can be had."""

    task_id: str
    channel: str
    path: str


class Search:
    """Looks through files for several targets at once.

    What one file costs does not grow with the number of targets: each line gets a short check
    sum, and only one that is among those of known lines is hashed and looked up.

    Args:
        targets: what is looked for.
        salt: of their hashes.
        unmarshal: read marshalled code. It can crash the process on hostile bytes, so
            it is for the inside of a jail.
    """

    def __init__(self, targets: Iterable[Target], salt: str, *, unmarshal: bool) -> None:
        self.targets = list(targets)
        self.salt = salt
        self.unmarshal = unmarshal
        self.checks = {check for target in self.targets for check in target.checks}
        self.code_checks = {check for target in self.targets for check in target.code_checks}
        self.known = {line for target in self.targets for line, _, _ in target.window}
        # Where in which window a distinctive line stands.
        self.places: dict[str, list[tuple[Target, int]]] = {}
        self.by_code: dict[str, list[Target]] = {}
        self.by_module: dict[str, list[Target]] = {}
        for target in self.targets:
            for place, (digest, _, is_distinctive) in enumerate(target.window):
                if is_distinctive:
                    self.places.setdefault(digest, []).append((target, place))
            for digest in target.codes | target.names:
                self.by_code.setdefault(digest, []).append(target)
            self.by_module.setdefault(target.module, []).append(target)
        self.name_checks = {check for target in self.targets for check in target.name_checks}
        self.num_files = 0
        self.not_searched: list[str] = []

    def search_bytes(
        self, path: str, data: bytes, *, in_tree: bool, tasks: Collection[str] | None = None
    ) -> set[Leak]:
        """The leaks of one file; ``path`` is reported and tells caches and repositories.

        Args:
            path: as it is reported.
            data: its content.
            in_tree: one distinctive line is enough.
            tasks: ids of the tasks whose tree has this file; None for all.
        """
        self.num_files += 1
        found: set[Leak] = set()
        for form in forms_of(path, data):
            if form.problem:
                self.not_searched.append(f"{form.path} ({form.problem})")
            for target in self._lines_found(form.data, in_tree=in_tree):
                found.add(Leak(target.task_id, _channel(form, in_tree=in_tree), form.path))
            found |= self._codes_found(form, in_tree=in_tree)
            found |= self._records_found(form, in_tree=in_tree)
        return found if tasks is None else {leak for leak in found if leak.task_id in tasks}

    def search_text(self, text: str, *, in_tree: bool) -> list[Target]:
        """The targets whose lines stand in a text."""
        return self._lines_found(text.encode("utf-8", "surrogatepass"), in_tree=in_tree)

    def _lines_found(self, data: bytes, *, in_tree: bool) -> list[Target]:
        lines = list(filter(None, map(str.strip, data.decode("utf-8", "replace").splitlines())))
        cores = [line.strip(EDGES) for line in lines]
        checks = self.checks
        is_text = b"\0" not in data[:4096]
        hashes: dict[int, str] = {}
        for place, check in enumerate(map(zlib.crc32, map(str.encode, cores))):
            if check in checks:
                digest = self._known_line(lines[place], is_text=is_text)
                if digest:
                    hashes[place] = digest
        found: dict[int, Target] = {}
        for place, digest in hashes.items():
            for target, where in self.places.get(digest, ()):
                if id(target) not in found and (in_tree or _is_run(target, where, hashes, place)):
                    found[id(target)] = target
        return list(found.values())

    def _known_line(self, stripped: str, *, is_text: bool) -> str:
        """The hash of a line, as it is or without the marks around it; empty when it is not known."""
        digest = hashed(self.salt, stripped)
        if digest in self.known:
            return digest
        bare = without_marks(stripped) if is_text else stripped
        digest = hashed(self.salt, bare) if bare != stripped else ""
        return digest if digest in self.known else ""

    def _codes_found(self, form: Form, *, in_tree: bool) -> set[Leak]:
        found: set[Leak] = set()
        is_pyc = form.path.endswith((".pyc", ".pyo"))
        tops = self._marshalled(form.data, is_pyc=is_pyc) if self.unmarshal else ()
        for code in {code for top in tops for code in all_codes(top)}:
            if name_check(code.co_name) not in self.name_checks:
                continue
            channel = "pyc" if is_pyc and not form.kind else form.kind or "code-object"
            leaf = posixpath.basename(code.co_filename)
            # A test's name alone stands in many suites: its file must have the same name too.
            targets = list(self.by_code.get(hashed(self.salt, f"{leaf}::{code.co_name}"), ()))
            if code_check(code) in self.code_checks:
                says_enough = in_tree or len(code.co_code) >= MIN_CODE_BYTES
                targets += (
                    target
                    for target in self.by_code.get(code_hash(self.salt, code), ())
                    if says_enough or leaf == posixpath.basename(target.module)
                )
            found |= {Leak(target.task_id, channel, form.path) for target in targets}
        return found

    def _marshalled(self, data: bytes, *, is_pyc: bool) -> Iterator[types.CodeType]:
        # Bytes that only look like code are not handed to marshal without need: it can take gigabytes for them.
        code = _load(data[16:]) if is_pyc and data[2:4] == b"\r\n" else None
        if code is not None:
            yield code
        elif _CODE.search(data) and not self.name_checks.isdisjoint(map(zlib.crc32, _marshalled_names(data))):
            for match in itertools.islice(_CODE.finditer(data), _MAX_CODES):
                code = _load(data[match.start() :])
                if code is not None:
                    yield code

    def _records_found(self, form: Form, *, in_tree: bool) -> set[Leak]:
        """Caches that name the function or a hidden test, and lists of installed files."""
        parts = set(form.path.replace("!", "").split("/"))
        cache = next((channel for part, channel in _CACHES.items() if part in parts), "")
        found: set[Leak] = set()
        if cache:
            words = {
                word.decode() for word in re.findall(rb"\w+", form.data) if len(word) < 200 and word.isascii()
            }
            hashes = {hashed(self.salt, word) for word in words}
            for target in self.targets:
                if _names_any(target.last_names, words, form.data) or target.names & hashes:
                    found.add(Leak(target.task_id, cache, form.path))
        leaf = form.path.rpartition("/")[2]
        if leaf.endswith(".pyi") and not _STUB_FOLDERS.isdisjoint(parts):
            defined = set(re.findall(r"\b(?:def|class)\s+(\w+)", form.data.decode("utf-8", "replace")))
            for target in self.targets:
                is_stub = form.path.endswith("/" + target.module + "i")
                if is_stub and not defined.isdisjoint(target.last_names):
                    found.add(Leak(target.task_id, "type-checker-cache", form.path))
        if leaf in ("RECORD", "SOURCES.txt", "installed-files.txt"):
            lines = {line.split(",")[0].strip() for line in form.data.decode("utf-8", "replace").splitlines()}
            for target in (target for line in lines for target in self.by_module.get(line, ())):
                found.add(Leak(target.task_id, "metadata", form.path))
        # Digits of a hash, read as base64, may begin like a path.
        elif (
            leaf.endswith((".pth", ".egg-link", "direct_url.json"))
            and not in_tree
            and form.kind not in ("base64", "hex")
        ):
            paths = [form.path] if _LEADS_AWAY.search(form.data) else []
            found |= {Leak(target.task_id, "editable", path) for target in self.targets for path in paths}
        return found

    def search_folder(
        self, root: str, *, tree: str, skip: Iterable[str] = (), binaries: bool = True
    ) -> set[Leak]:
        """Walk a folder; what cannot be read cannot leak, what is too large is noted.

        Args:
            root: where to begin; links are not followed.
            tree: folder inside which one line is enough.
            skip: folders left out.
            binaries: also read programs and libraries (ELF, ar).
        """
        found: set[Leak] = set()
        left_out = set(skip)
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if os.path.join(folder, name) not in left_out)
            for name in sorted(names):
                path = os.path.join(folder, name)
                data = self._read(path, binaries=binaries) if path not in left_out else None
                if data is not None:
                    in_tree = (path + "/").startswith(tree + "/")
                    shown = os.path.relpath(path, tree) if in_tree else path
                    found |= self.search_bytes(shown, data, in_tree=in_tree)
        return found

    def _read(self, path: str, *, binaries: bool) -> bytes | None:
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                return None
            with open(path, "rb") as handle:
                head = handle.read(4)
                if head in (b"\x7fELF", b"!<ar") and not binaries:
                    return None
                if status.st_size > MAX_FILE_BYTES:
                    self.not_searched.append(f"{path} (larger than {MAX_FILE_BYTES // 1024**2} MiB)")
                    return None
                return head + handle.read(MAX_FILE_BYTES)
        except OSError:
            return None


def _is_run(target: Target, where: int, hashes: Mapping[int, str], place: int) -> bool:
    """Whether the lines around a distinctive one stand there as around the hole, long enough to be no chance."""
    window = target.window
    characters = window[where][1]
    for step in (1, -1):
        mine, theirs = where + step, place + step
        while (
            characters < MIN_RUN_CHARACTERS
            and 0 <= mine < len(window)
            and hashes.get(theirs) == window[mine][0]
        ):
            characters += window[mine][1]
            mine, theirs = mine + step, theirs + step
    return characters >= MIN_RUN_CHARACTERS


def _marshalled_names(data: bytes) -> Iterator[bytes]:
    """What would be the names in marshalled code: what stands after its own length, in one byte or four."""
    for length, text in _SHORT_NAME.findall(data):
        yield text[: length[0]]
    for match in _LONG_NAME.finditer(data):
        length, begin = data[match.start() + 1], match.end()
        yield data[begin : begin + length]


def _names_any(names: Iterable[str], words: set[str], data: bytes) -> bool:
    """Whether a word is one of the names; in binary data a length before it may look like a letter."""
    is_binary = b"\0" in data
    return any(name in words or (is_binary and len(name) > 3 and name.encode() in data) for name in names)


def _channel(form: Form, *, in_tree: bool) -> str:
    path = form.path.partition("!")[0]
    parts = path.split("/")
    if ".git" in parts or form.kind == "git":
        return "git"
    cache = next((channel for part, channel in _CACHES.items() if part in parts), "")
    if cache:
        return cache
    if _PACKAGE_CACHE.search(path):
        return "package-cache"
    if path.endswith(".ipynb"):
        return "notebook"
    if path.endswith((".html", ".htm", ".md", ".rst")) and form.kind in ("", "markup", "escaped"):
        return "docs"
    if not form.kind and {"site-packages", "dist-packages"} & set(parts):
        return "installed"
    kind = _KINDS.get(form.kind, form.kind)
    return "visible-copy" if kind == "copy" and not in_tree else kind


def _load(data: bytes) -> types.CodeType | None:
    try:
        found = marshal.loads(data)  # noqa: S302  inside a jail only
    except (ValueError, EOFError, TypeError, MemoryError, SystemError, OverflowError):
        return None
    return found if isinstance(found, types.CodeType) else None
