"""Which files of a repository enter a task tree: an allow-list, so that no used tree leaks code.

In: Python sources, everything inside packages and test folders, configuration of the test runner, a few texts at the
top. Out: version control, caches, build output, installed metadata, stubs that a type checker wrote, compiled code,
most archives, notebooks, documentation. What a tree records of its places of import is read here as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath

_OUT_FOLDERS = frozenset("__pycache__ node_modules htmlcov site-packages CVS __MACOSX".split())
_OUT_TOP_FOLDERS = frozenset("doc docs build dist site notebooks _build typings".split())
_NAMED_TOP_FOLDERS = frozenset("examples benchmarks bench target out tools".split())
"""Out unless a test names what lies in it, or it is a package."""
_ENVIRONMENTS = frozenset("venv env virtualenv".split())
"""At the top and out unless it is a package; what any environment has installed lies in ``site-packages``."""
_NEVER_MISSED = _OUT_TOP_FOLDERS | _ENVIRONMENTS
_OUT_FOLDER_SUFFIXES = (".egg-info", ".dist-info", ".egg")
_BYTECODE_SUFFIXES = (".pyc", ".pyo")
_OUT_SUFFIXES = frozenset(
    ".so .pyd .dll .dylib .a .o .obj .whl .egg .7z .ipynb .orig .rej .patch .diff .swp .bak .lock .pkl .pickle .log"
    " .cover .bz2 .xz".split()
).union(_BYTECODE_SUFFIXES)
"""The search for leaks looks into zip, tar and gzip, which may be data."""
_IN_TESTS_SUFFIXES = frozenset({".lock", ".log"})
"""Of texts that tests read; elsewhere they are what a tool left."""
_QUOTED = re.compile(rb"""['"]([^'"\n\\]{2,200})['"]""")
_SOURCE_SUFFIXES = (".py", ".pyi")
PYTEST_FILES = tuple(
    "pytest.toml .pytest.toml pytest.ini .pytest.ini pyproject.toml tox.ini setup.cfg".split()
)
"""Where pytest looks for its configuration, in its order."""
_TOP_TEXTS = ("README*", "VERSION*", "version*")
_LICENCE_TEXTS = ("LICEN[CS]E*", "COPYING*", "UNLICEN[CS]E*")
"""At the top, whatever their letters' case: the licence goes with every copy."""
_MAX_TEXT_DEPTH = 3
_TEST = frozenset({"test", "testing"})
_TEST_WORDS = frozenset("tests unittest unittests testcase testcases testsuite testsuites".split())
"""A folder is one of tests where one of the words of its name is: ``tests``, ``unit_tests``, ``tests-py3``.

``test`` and ``testing`` need a kind beside them, if anything: ``ab_testing`` and ``test_utils`` are products.
"""
_KINDS = frozenset(
    "unit integration functional regression system acceptance smoke e2e end to api cli suite suites case cases data"
    " fixture fixtures files resources assets src py py2 py3 python".split()
)
"""Words beside ``test`` in names of folders of tests: ``integration_test``, ``test-suite``, ``test_data``."""
_NOT_A_SUBJECT = frozenset(
    "setup.py conftest.py noxfile.py tasks.py fabfile.py versioneer.py _version.py __about__.py __main__.py dodo.py".split()
)


def skips_folder(name: str) -> bool:
    """Whether a folder of that name is left out wherever it stands, whatever it holds."""
    return name in _OUT_FOLDERS or name.startswith(".") or name.endswith(_OUT_FOLDER_SUFFIXES)


def is_system_file(path: PurePosixPath) -> bool:
    """Whether macOS put the file beside those of an archive: ``._a.py`` is no Python."""
    return path.parts[:1] == ("__MACOSX",) or path.name.startswith("._") or path.name == ".DS_Store"


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_licence_text(path: PurePosixPath) -> bool:
    """Whether the file holds a licence of the repository."""
    return len(path.parts) == 1 and _fits(path.name.upper(), _LICENCE_TEXTS)


def in_test_folder(path: PurePosixPath) -> bool:
    """Whether the path lies below a folder of tests."""
    return any(map(_is_test_folder, path.parts[:-1]))


@lru_cache(maxsize=4096)
def _is_test_folder(name: str) -> bool:
    words = frozenset(re.split(r"[-_.]", name.lower()))
    return not _TEST_WORDS.isdisjoint(words) or (not _TEST.isdisjoint(words) and words - _TEST <= _KINDS)


def is_test_path(path: str) -> bool:
    """Whether a Python file holds tests or their support by its place or name."""
    pure = PurePosixPath(path)
    is_named = pure.name.startswith("test_") or pure.stem.endswith("_test")
    is_whole = pure.stem in ("tests", "test", "conftest")
    return pure.suffix == ".py" and (is_named or is_whole or in_test_folder(pure))


def folders_of_tests(tests: Collection[str], files: Collection[str]) -> frozenset[str]:
    """Folders that are there for tests whatever they are called: ``spec/`` with ``test_url.py`` and ``helpers.py``.

    At least half of the modules in such a folder are tests, none of them has its own test beside it, it is no package,
    and none lies directly in it. ``tests`` are the paths of files that hold tests, ``files`` all of the repository.
    """
    stems: dict[PurePosixPath, set[str]] = {}
    for path in map(PurePosixPath, files):
        if path.suffix == ".py":
            stems.setdefault(path.parent, set()).add(path.stem)
    packages = {folder for folder, own in stems.items() if "__init__" in own}
    others = {PurePosixPath(), *packages, *(one.parent for one in packages)}

    def are_tests(own: set[str]) -> bool:
        plain = {stem for stem in own if not is_test_path(f"{stem}.py")}
        is_tested = any(f"test_{stem}" in own or f"{stem}_test" in own for stem in plain)
        return not is_tested and 2 * len(plain) <= len(own)

    folders = {PurePosixPath(path).parent for path in tests} - others
    return frozenset(str(folder) for folder in folders if are_tests(stems.get(folder, set())))


def is_subject_path(path: str) -> bool:
    """Whether functions of that file may be deleted: package code, no tests, no build scripts."""
    pure = PurePosixPath(path)
    return pure.suffix == ".py" and not is_test_path(path) and pure.name not in _NOT_A_SUBJECT


class TreeRules:
    """What the paths of all files of a repository tell of them.

    Of folders at the top that may be tools or packages the tree takes the packages.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        paths = [PurePosixPath(name) for name in self.names]
        self._packages = {path.parent for path in paths if path.name == "__init__.py"} - {PurePosixPath()}
        # Folders whose data may be that of a package, namespace packages (no ``__init__.py``) too.
        usual = map(PurePosixPath, ("src", "lib", "python"))
        self._with_modules = {*usual, *(path.parent for path in paths if path.suffix == ".py")} - {
            PurePosixPath()
        }
        self._of_tests = folders_of_tests([name for name in self.names if is_test_path(name)], self.names)

    def belongs(self, path: PurePosixPath) -> bool:
        """Whether a file belongs to a task tree."""
        if is_system_file(path) or self._stay_out(path.parts[:-1]):
            return False
        in_tests, suffix = self._in_tests(path), path.suffix.lower()
        if suffix in _OUT_SUFFIXES and not (in_tests and suffix in _IN_TESTS_SUFFIXES):
            return False
        if path.suffix in _SOURCE_SUFFIXES or path.name in PYTEST_FILES:
            return True
        if path.name.startswith("."):
            return in_tests  # settings that tests read
        if len(path.parts) == 1:
            return is_licence_text(path) or _fits(path.name, _TOP_TEXTS)
        return in_tests or not self._with_modules.isdisjoint(path.parents)

    def _in_tests(self, path: PurePosixPath) -> bool:
        return in_test_folder(path) or not self._of_tests.isdisjoint(map(str, path.parents))

    def _stay_out(self, folders: Sequence[str], *, is_named: bool = False) -> bool:
        """Whether all files in a folder stay out; ``is_named``: a test names them."""
        top = folders[0] if folders else ""
        is_package = PurePosixPath(top) in self._packages
        may_stay_out = top in _ENVIRONMENTS or (top in _NAMED_TOP_FOLDERS and not is_named)
        return top in _OUT_TOP_FOLDERS or (may_stay_out and not is_package) or any(map(skips_folder, folders))

    def named_data(self, found: Mapping[str, bytes]) -> frozenset[str]:
        """Files outside of packages and folders of tests whose own name, or whose folder's, stands in a string of a test.

        They are data of tests (``xmltestdata/``, ``schemas/a.json``), or examples that tests run. ``found`` belong to the tree.
        """
        words = _quoted_words(data for path, data in found.items() if is_test_path(path))

        def is_named(path: PurePosixPath) -> bool:
            is_plain = path.suffix.lower() not in _OUT_SUFFIXES and not path.name.startswith(".")
            is_told = is_plain and not words.isdisjoint(path.parts)
            return is_told and not self._stay_out(path.parts[:-1], is_named=True)

        return frozenset(name for name in self.names.difference(found) if is_named(PurePosixPath(name)))

    def left_out(self, kept: Mapping[str, bytes], links: Collection[str] = ()) -> tuple[str, ...]:
        """What was left out and might be missed by a test: links, files of tests and packages and other sources, then what a
        string of the package names; of caches, environments and documentation none.
        """
        ranked: list[tuple[bool, str]] = []
        words = _quoted_words(data for path, data in kept.items() if is_subject_path(path))
        for name in {*self.names.difference(kept), *links}:
            path, is_link = PurePosixPath(name), name in links
            is_near = self._in_tests(path) or not self._packages.isdisjoint(path.parents)
            is_likely = is_near or path.suffix in _SOURCE_SUFFIXES or (is_link and not path.suffix)
            folders = path.parts if is_link else path.parts[:-1]  # a link may stand for a folder
            is_made = any(map(skips_folder, folders)) or path.suffix.lower() in _BYTECODE_SUFFIXES
            is_foreign = is_system_file(path) or not _NEVER_MISSED.isdisjoint(folders[:1])
            if (is_likely or path.name in words) and not (is_made or is_foreign):
                ranked.append((not is_likely, f"{name} (a link)" if is_link else name))
        return tuple(name for _, name in sorted(ranked))


def _quoted_words(files: Iterable[bytes]) -> set[str]:
    """What stands in the strings of some sources, of paths each part."""
    quoted = (text.decode("utf-8", "replace") for data in files for text in _QUOTED.findall(data))
    return {word for text in quoted for word in text.split("/")}


def is_metadata_path(path: PurePosixPath) -> bool:
    """Whether a file may declare the project's name, version or requirements, or where a build writes a version.

    Requirements may stand in any text that the project's tables name, so texts near the top are read.
    """
    at_top = len(path.parts) == 1 and path.name in (*PYTEST_FILES, "PKG-INFO", "meson.build", "setup.py")
    is_text = path.suffix in (".txt", ".in") and len(path.parts) <= _MAX_TEXT_DEPTH
    return at_top or (is_text and not any(map(skips_folder, path.parts[:-1])))


# --- Where the modules of a task tree are imported from, as its tree records it.

USUAL_FOLDERS = ("lib", "src")
"""Places of import by custom, where they are no packages themselves."""
FOLDERS_FILE = "source_folders.txt"
"""Beside the metadata that we write into a task tree: the places of import, where they are not the usual ones.

An attempt cannot change it, as no file in a ``dist-info`` is taken from one; ``pyproject.toml`` it can.
"""
_FOLDERS_PATH = re.compile(rf"[^/]*\.dist-info/{re.escape(FOLDERS_FILE)}")


def usual_folders(files: Collection[str]) -> list[str]:
    """The places of import by custom, the top last as ``.``."""
    return [*(folder for folder in USUAL_FOLDERS if is_place(folder, files)), "."]


def is_place(folder: str, files: Collection[str]) -> bool:
    """Whether modules may be imported from a folder: it is there and is no package itself."""
    return f"{folder}/__init__.py" not in files and any(path.startswith(f"{folder}/") for path in files)


def folders_file(paths: Iterable[str]) -> str:
    """The path of the file that names the places of import of a task tree; empty where it has none."""
    return next((path for path in paths if _FOLDERS_PATH.fullmatch(path)), "")


def recorded_folders(files: Mapping[str, bytes]) -> list[str]:
    """The places of import of a task tree, the top last as ``.``."""
    path = folders_file(files)
    return files[path].decode().splitlines() if path else usual_folders(files)


def folders_of_tree(tree: Path) -> list[str]:
    """The places of import of a task tree on disk, the top last as ``.``."""
    records = sorted(tree.glob(f"*.dist-info/{FOLDERS_FILE}"))
    below = [path for folder in USUAL_FOLDERS for path in tree.glob(f"{folder}/*")]
    files = {path.relative_to(tree).as_posix(): b"" for path in below}
    return recorded_folders(files | {f"{one.parent.name}/{one.name}": one.read_bytes() for one in records})


def own_modules(files: Mapping[str, bytes]) -> frozenset[str]:
    """The first names by which an import finds something in the tree: at its places of import, or beside a test."""
    roots = recorded_folders(files)
    found: set[str] = set()
    for path in map(PurePosixPath, files):
        if path.suffix == ".py":
            found.add(below_root(str(path), roots).partition("/")[0].removesuffix(".py"))
            if is_test_path(str(path)):
                found.add(path.parent.name if path.name == "__init__.py" else path.stem)
    return frozenset(found)


def below_root(path: str, roots: Iterable[str]) -> str:
    """A path as it is imported: without the longest place of import that it lies below."""
    start = max((f"{root}/" for root in roots if path.startswith(f"{root}/")), key=len, default="")
    return path.removeprefix(start)
