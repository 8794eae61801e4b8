"""Search files for golden code that is known by salted hashes only.

Standard library only, and without the golden code itself: the same text runs outside and,
given as source to the thief, inside a jail, where golden code must never be.

A line of the window around a hole is known by the hash of its stripped text. Inside the
tree one distinctive line is enough. Outside (standard library, other people's packages)
short lines repeat by nature: there a run of lines that follow one another as around the
hole, with a distinctive one among them, must have ``MIN_RUN_CHARACTERS`` characters.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import posixpath
import re
import stat
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from composer_replication.tasks.leaks.leak_forms import Form, forms_of

MIN_RUN_CHARACTERS = 60
MAX_FILE_BYTES = 64 * 1024**2
_CODE = re.compile(rb"[\xe3\x63][\x00-\x40]\x00\x00\x00[\x00-\x40]\x00\x00\x00[\x00-\x40]\x00\x00\x00")
_LEADS_AWAY = re.compile(rb"^\s*(?:/|\.\./)|\"editable\":\s*true", re.MULTILINE)
_MAX_CODES = 400
_MARKS = re.compile(r"^(?:(?:[+\-<>#|*%\"',]+|\.\.\.|\d+[:.|]?)\s*)+")
_MARK_STARTS = frozenset("+-<>#|*%\"',.0123456789")
_ENDS = re.compile(r"[\"',|]+$")
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
class Target:
    """What is known of one golden body.

    ``window`` are (hash, characters, is distinctive) of the lines around and in the hole, in
    order; ``codes`` hashes of its code objects, and ``functions`` the names that these have;
    ``name`` the last part of the symbol, ``names`` hashes of the names of hidden tests;
    ``module`` the path that it is imported from; ``symbols`` the qualified names that this module
    had or has in that place.
    """

    task_id: str
    window: tuple[tuple[str, int, bool], ...]
    codes: frozenset[str]
    name: str
    names: frozenset[str]
    module: str
    functions: frozenset[str] = frozenset()
    symbols: tuple[str, ...] = ()

    @property
    def last_names(self) -> frozenset[str]:
        """What a cache would call the deleted code."""
        return frozenset({self.name, *(symbol.rpartition(".")[2] for symbol in self.symbols)})


@dataclass(frozen=True)
class Leak:
    """One place where golden code can be had."""

    task_id: str
    channel: str
    path: str


def hashed(salt: str, text: str) -> str:
    """The first 24 hexadecimal digits of the salted sha256."""
    return hashlib.sha256(f"{salt}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()[:24]


def code_hash(salt: str, code: types.CodeType) -> str:
    """A hash of what a function does: names, constants and instructions, not its place."""
    consts = [
        item.co_code.hex() if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts
    ]
    parts = (code.co_qualname, code.co_code.hex(), code.co_names, code.co_varnames, consts)
    return hashed(salt, repr(parts))


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all that lie in its constants."""
    yield code
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from all_codes(item)


class Search:
    """Looks through files for several targets at once.

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
        self.lengths = {size for target in self.targets for _, size, _ in target.window}
        self.needles = {name.encode() for target in self.targets for name in (target.name, *target.functions)}
        self.known = {line for target in self.targets for line, _, _ in target.window}
        self.num_files = 0
        self.not_searched: list[str] = []

    def search_bytes(self, path: str, data: bytes, *, in_tree: bool) -> set[Leak]:
        """The leaks of one file; ``path`` is reported and tells caches and repositories."""
        self.num_files += 1
        found: set[Leak] = set()
        for form in forms_of(path, data):
            if form.problem:
                self.not_searched.append(f"{form.path} ({form.problem})")
            for target in self._lines_found(form.data, in_tree=in_tree):
                found.add(Leak(target.task_id, _channel(form, in_tree=in_tree), form.path))
            found |= self._codes_found(form)
            found |= self._records_found(form, in_tree=in_tree)
        return found

    def search_text(self, text: str, *, in_tree: bool) -> list[Target]:
        """The targets whose lines stand in a text."""
        return self._lines_found(text.encode("utf-8", "surrogatepass"), in_tree=in_tree)

    def _lines_found(self, data: bytes, *, in_tree: bool) -> list[Target]:
        hashes: list[str] = []
        any_known = False
        is_text = b"\0" not in data[:4096]
        for line in data.decode("utf-8", "replace").splitlines():
            stripped = line.strip()
            if not stripped:
                continue
            digest = hashed(self.salt, stripped) if len(stripped) in self.lengths else ""
            if (
                digest not in self.known
                and is_text
                and (stripped[0] in _MARK_STARTS or stripped[-1] in "\"',|")
            ):
                bare = _ENDS.sub("", _MARKS.sub("", stripped)).strip()
                bare_digest = (
                    hashed(self.salt, bare) if bare != stripped and len(bare) in self.lengths else ""
                )
                digest = bare_digest
            digest = digest if digest in self.known else ""
            any_known = any_known or bool(digest)
            hashes.append(digest)
        if not any_known:
            return []
        return [target for target in self.targets if _is_stolen(target, hashes, in_tree=in_tree)]

    def _codes_found(self, form: Form) -> set[Leak]:
        if not self.unmarshal or not any(needle in form.data for needle in self.needles):
            return set()
        found: set[Leak] = set()
        is_pyc = form.path.endswith((".pyc", ".pyo"))
        for code in {code for top in _marshalled(form.data, is_pyc=is_pyc) for code in all_codes(top)}:
            # A test's name alone stands in many suites: its file must have the same name too.
            digest = code_hash(self.salt, code)
            test = hashed(self.salt, f"{posixpath.basename(code.co_filename)}::{code.co_name}")
            for target in self.targets:
                if digest in target.codes or test in target.names:
                    channel = "pyc" if is_pyc and not form.kind else form.kind or "code-object"
                    found.add(Leak(target.task_id, channel, form.path))
        return found

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
            for target in self.targets:
                if target.module in lines:
                    found.add(Leak(target.task_id, "metadata", form.path))
        elif leaf.endswith((".pth", ".egg-link", "direct_url.json")) and not in_tree:
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


def _is_stolen(target: Target, hashes: list[str], *, in_tree: bool) -> bool:
    """Whether a distinctive line stands there (tree), or a long enough run around one (outside)."""
    distinctive = {digest for digest, _, is_distinctive in target.window if is_distinctive}
    if in_tree:
        return not distinctive.isdisjoint(hashes)
    places: dict[str, list[int]] = {}
    for place, digest in enumerate(hashes):
        if digest:
            places.setdefault(digest, []).append(place)
    for first in range(len(target.window)):
        for begin in places.get(target.window[first][0], ()):
            characters, has_distinctive = 0, False
            for line, place in zip(target.window[first:], range(begin, len(hashes)), strict=False):
                if line[0] != hashes[place]:
                    break
                characters, has_distinctive = characters + line[1], has_distinctive or line[2]
            if has_distinctive and characters >= MIN_RUN_CHARACTERS:
                return True
    return False


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


def _marshalled(data: bytes, *, is_pyc: bool) -> Iterator[types.CodeType]:
    if is_pyc:
        code = _load(data[16:])
        if code is not None:
            yield code
            return
    for count, match in enumerate(_CODE.finditer(data)):
        if count >= _MAX_CODES:
            return
        code = _load(data[match.start() :])
        if code is not None:
            yield code


def _load(data: bytes) -> types.CodeType | None:
    try:
        found = marshal.loads(data)  # noqa: S302  inside a jail only
    except (ValueError, EOFError, TypeError, MemoryError, SystemError, OverflowError):
        return None
    return found if isinstance(found, types.CodeType) else None


def target_from_json(value: Mapping[str, object]) -> Target:
    """The inverse of ``target_to_json``."""
    window = tuple((str(digest), int(size), bool(flag)) for digest, size, flag in value["window"])  # type: ignore[attr-defined]
    codes, names, functions = (frozenset(value[key]) for key in ("codes", "names", "functions"))  # type: ignore[call-overload]
    name, module = str(value["name"]), str(value["module"])
    symbols = tuple(str(symbol) for symbol in value["symbols"])  # type: ignore[attr-defined]
    return Target(str(value["task_id"]), window, codes, name, names, module, functions, symbols)


def target_to_json(target: Target) -> dict[str, object]:
    """A target as JSON; it holds no golden text."""
    return {
        "task_id": target.task_id,
        "window": [list(line) for line in target.window],
        "codes": sorted(target.codes),
        "name": target.name,
        "names": sorted(target.names),
        "module": target.module,
        "functions": sorted(target.functions),
        "symbols": list(target.symbols),
    }
