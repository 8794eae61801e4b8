"""Which files of a repository enter a task tree: an allow-list, so that no used tree leaks code.

In: Python sources, everything inside packages and test folders, configuration of the
test runner, a few texts at the top. Out: version control, caches, build output,
installed metadata, stubs that a type checker wrote, compiled code, archives, notebooks, documentation.
A name alone does not make a folder one of these where packages are called like that, too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import PurePosixPath

_OUT_FOLDERS = frozenset("__pycache__ node_modules htmlcov site-packages CVS __MACOSX".split())
_OUT_UNLESS_PACKAGE = frozenset("venv env virtualenv eggs parts wheels wheelhouse".split())
"""Environments, and what buildout and pip leave behind; also words that packages are called by."""
_ENVIRONMENT_MARK = "pyvenv.cfg"
_ACTIVATORS = ("bin/activate", "Scripts/activate", "Scripts/activate.bat")
"""In an environment of a tool that writes no ``pyvenv.cfg``."""
_OUT_TOP_FOLDERS = frozenset("doc docs build dist site notebooks _build typings".split())
_OUT_TOP_UNLESS_IMPORTED = frozenset("examples benchmarks bench target out tools".split())
_OUT_FOLDER_SUFFIXES = (".egg-info", ".dist-info", ".egg")
_OUT_SUFFIXES = frozenset(
    ".pyc .pyo .so .pyd .dll .dylib .a .o .obj .whl .egg .tar .gz .tgz .bz2 .xz .zip .7z .ipynb .orig .rej .patch"
    " .diff .swp .bak .lock .pkl .pickle .log .cover".split()
)
PACKED_SUFFIXES = (".gz", ".tgz", ".bz2", ".xz", ".tar", ".zip")
_IN_TESTS_SUFFIXES = frozenset({".lock", ".log"})
"""Of texts that tests read; elsewhere they are what a tool left."""
_TOOL_DOTFILES = (
    ".coverage*",
    ".testmon*",
    ".noseids",
    ".lock*",
    ".*.sw?",
    ".*_history",
    ".fuse_hidden*",
    ".nfs*",
)
"""In which tools keep what they saw; other files of tests that begin with a dot are settings that tests read."""
_SYSTEM_NAMES = ("._*", ".DS_Store")
"""What macOS puts beside the files of an archive; ``._a.py`` is no Python."""
_BYTECODE_SUFFIXES = frozenset({".pyc", ".pyo"})
_QUOTED = re.compile(rb"""['"]([^'"\n\\]{2,200})['"]""")
_SOURCE_SUFFIXES = frozenset({".py", ".pyi"})
_CONFIG_NAMES = frozenset(
    {"pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"}
)
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
    """Whether the system that packed an archive added the file: no person put it into the repository."""
    return path.parts[:1] == ("__MACOSX",) or any(
        fnmatch.fnmatchcase(path.name, one) for one in _SYSTEM_NAMES
    )


def is_licence_text(path: PurePosixPath) -> bool:
    """Whether the file holds a licence of the repository."""
    return len(path.parts) == 1 and any(
        fnmatch.fnmatchcase(path.name.upper(), pattern) for pattern in _LICENCE_TEXTS
    )


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
    named = fnmatch.fnmatch(pure.name, "test_*.py") or fnmatch.fnmatch(pure.name, "*_test.py")
    return pure.suffix == ".py" and (
        named or pure.name in ("tests.py", "test.py", "conftest.py") or in_test_folder(pure)
    )


def test_folders(tests: Collection[str], files: Collection[str]) -> frozenset[str]:
    """Folders that are there for tests whatever they are called: ``spec/`` with ``test_url.py`` and ``helpers.py``.

    At least half of the modules in such a folder are tests, none of them has its own test beside it (``core.py``,
    ``test_core.py``), it is no package, and none lies directly in it. Packages of data below are no objection.

    Args:
        tests: paths of files that hold tests.
        files: all paths of the repository.
    """
    folders = {str(PurePosixPath(path).parent) for path in tests} - {"."}
    inits = (PurePosixPath(path) for path in files if PurePosixPath(path).name == "__init__.py")
    with_packages = {str(folder) for path in inits for folder in (path.parent, path.parent.parent)}
    modules: dict[str, set[str]] = {folder: set() for folder in folders - with_packages}
    for path in map(PurePosixPath, files):
        if path.suffix == ".py" and str(path.parent) in modules:
            modules[str(path.parent)].add(path.stem)
    return frozenset(folder for folder, stems in modules.items() if _are_tests(stems))


def _are_tests(stems: Collection[str]) -> bool:
    others = {stem for stem in stems if not is_test_path(f"{stem}.py")}
    tested = any(f"test_{stem}" in stems or f"{stem}_test" in stems for stem in others)
    return not tested and 2 * len(others) <= len(stems)


def is_subject_path(path: str) -> bool:
    """Whether functions of that file may be deleted: package code, no tests, no build scripts."""
    pure = PurePosixPath(path)
    return pure.suffix == ".py" and not is_test_path(path) and pure.name not in _NOT_A_SUBJECT


def tree_rule(names: frozenset[str]) -> Callable[[PurePosixPath], bool]:
    """The rule that chooses the files of a task tree, given all paths of the repository.

    Of folders at the top that may be tools or packages it takes the packages; ``without_unused``
    drops those that nothing imports, which only their content tells.
    """
    folders = _Folders(names)
    of_tests = test_folders([name for name in names if is_test_path(name)], names)

    def belongs(path: PurePosixPath) -> bool:
        if is_system_file(path) or not folders.are_kept(path.parts[:-1]):
            return False
        in_tests = in_test_folder(path) or not of_tests.isdisjoint(map(str, path.parents))
        suffix = path.suffix.lower()
        if suffix in _OUT_SUFFIXES and not (in_tests and suffix in _IN_TESTS_SUFFIXES):
            return False
        if path.suffix in _SOURCE_SUFFIXES or path.name in _CONFIG_NAMES:
            return True
        if path.name.startswith("."):
            return in_tests and not any(fnmatch.fnmatchcase(path.name, one) for one in _TOOL_DOTFILES)
        if len(path.parts) == 1:
            return is_licence_text(path) or any(
                fnmatch.fnmatchcase(path.name, pattern) for pattern in _TOP_TEXTS
            )
        return in_tests or not folders.with_modules.isdisjoint(path.parents)

    return belongs


class _Folders:
    """Which folders of a repository may hold files of its tree."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        paths = [PurePosixPath(name) for name in names]
        self.packages = frozenset(
            path.parent for path in paths if path.name == "__init__.py" and path.parts[1:]
        )
        self._with_sources = frozenset(path.parent for path in paths if path.suffix == ".py")
        usual = frozenset(map(PurePosixPath, ("src", "lib", "python")))
        self.with_modules = self.packages | usual | (self._with_sources - {PurePosixPath()})
        """Folders whose data may be that of a package, namespace packages (no ``__init__.py``) too."""
        self._environments = frozenset(path.parent for path in paths if path.name == _ENVIRONMENT_MARK)
        self._known: dict[tuple[str, ...], bool] = {(): True}

    def are_kept(self, parts: tuple[str, ...]) -> bool:
        if parts not in self._known:
            self._known[parts] = self.are_kept(parts[:-1]) and self._is_kept(PurePosixPath(*parts))
        return self._known[parts]

    def are_environment(self, path: PurePosixPath) -> bool:
        """Whether it lies in a virtual environment."""
        return not self._environments.isdisjoint(path.parents[:-1])

    def _is_kept(self, folder: PurePosixPath) -> bool:
        is_top = len(folder.parts) == 1
        if (
            skips_folder(folder.name)
            or (is_top and folder.name in _OUT_TOP_FOLDERS)
            or folder in self._environments
        ):
            return False
        if is_top and folder.name in _OUT_TOP_UNLESS_IMPORTED:
            return folder in self.packages
        return folder.name not in _OUT_UNLESS_PACKAGE or self._is_no_leftover(folder)

    def _is_no_leftover(self, folder: PurePosixPath) -> bool:
        """Whether a folder that is called like an environment or build output is a package or data of tests."""
        if any(f"{folder}/{activator}" in self._names for activator in _ACTIVATORS):
            return False
        is_portion = folder.parent in self.packages and folder in self._with_sources
        return folder in self.packages or is_portion or in_test_folder(folder)


def without_unused(found: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files without those packages at the top that are tools, not parts: no test or source outside imports them."""
    optional = {name.partition("/")[0] for name in found if "/" in name} & _OUT_TOP_UNLESS_IMPORTED
    kept = {name: data for name, data in found.items() if name.partition("/")[0] not in optional}
    while used := {top for top in sorted(optional) if _imports(top, kept.items())}:
        optional -= used
        kept = {name: data for name, data in found.items() if name.partition("/")[0] not in optional}
    return kept


def _imports(top: str, files: Iterable[tuple[str, bytes]]) -> bool:
    statement = re.compile(
        rb"^[ \t]*(?:from[ \t]+%(top)b(?:\.[\w.]+)?[ \t]+import\b|import[ \t](?:[\w., \t]*[, \t])?%(top)b\b)"
        % {b"top": top.encode()},
        re.MULTILINE,
    )
    return any(statement.search(data) for name, data in files if is_test_path(name) or is_subject_path(name))


def named_data(names: Iterable[str], found: Mapping[str, bytes]) -> frozenset[str]:
    """Files outside of packages and folders of tests whose own name, or whose folder's, stands in a string of a test.

    They are data of tests (``xmltestdata/``, ``schemas/a.json``), or examples that tests run. What the top folders of
    documentation and builds hold is not among them, nor what is left out for its suffix.
    """
    everything = frozenset(names)
    folders = _Folders(everything)
    words = {
        word.decode("utf-8", "replace")
        for path, data in found.items()
        if is_test_path(path)
        for text in _QUOTED.findall(data)
        for word in text.split(b"/")
    }

    def is_named(path: PurePosixPath) -> bool:
        top = path.parts[0] if path.parts[1:] else ""
        is_kept = folders.are_kept(path.parts[:-1]) or (
            top in _OUT_TOP_UNLESS_IMPORTED and folders.are_kept(path.parts[1:-1])
        )
        is_plain = path.suffix.lower() not in _OUT_SUFFIXES and not path.name.startswith(".")
        return is_kept and is_plain and not words.isdisjoint(path.parts)

    return frozenset(name for name in everything.difference(found) if is_named(PurePosixPath(name)))


def packed_data(names: Iterable[str]) -> frozenset[str]:
    """Compressed files and archives in packages and folders of tests, which may be data; their content decides."""
    everything = frozenset(names)
    folders = _Folders(everything)
    of_tests = test_folders([name for name in everything if is_test_path(name)], everything)
    paths = (PurePosixPath(name) for name in everything if name.lower().endswith(PACKED_SUFFIXES))
    return frozenset(
        str(path)
        for path in paths
        if folders.are_kept(path.parts[:-1])
        and (
            in_test_folder(path)
            or not of_tests.isdisjoint(map(str, path.parents))
            or not folders.with_modules.isdisjoint(path.parents)
        )
    )


def left_out(names: Iterable[str], kept: Collection[str], links: Collection[str] = ()) -> tuple[str, ...]:
    """What was left out and might be missed by a test, the likeliest first: files of tests and packages, then other sources.

    Version control, caches, environments, documentation and loose files at the top are not named. ``links``
    are symbolic ones, which are never followed; where one may stand for a source or a folder it is named first.
    """
    everything = frozenset(names)
    folders = _Folders(everything)
    of_tests = test_folders([name for name in everything if is_test_path(name)], everything)
    linked: list[str] = []
    near: list[str] = []
    far: list[str] = []
    for name in sorted({*everything.difference(kept), *links}):
        path = PurePosixPath(name)
        parents = path.parts[:-1]
        in_tests = in_test_folder(path) or not of_tests.isdisjoint(map(str, path.parents))
        is_near = in_tests or not folders.packages.isdisjoint(path.parents)
        looked_at = path.parts if name in links else parents  # a link may stand for a folder
        is_known = any(map(skips_folder, looked_at)) or (looked_at and looked_at[0] in _OUT_TOP_FOLDERS)
        if (
            is_known
            or is_system_file(path)
            or folders.are_environment(path)
            or path.suffix.lower() in _BYTECODE_SUFFIXES
            or (is_metadata_path(path) and not is_near)
        ):
            continue
        if name in links:
            if is_near or path.suffix in ("", *_SOURCE_SUFFIXES):
                linked.append(f"{name} (a link)")
        elif is_near:
            near.append(name)
        elif path.suffix in _SOURCE_SUFFIXES:
            far.append(name)
    return (*linked, *near, *far)


def is_metadata_path(path: PurePosixPath) -> bool:
    """Whether a file may declare the project's name, version or requirements.

    Requirements may stand in any text that the project's tables name, so texts near the top are read; which
    of them count is not decided here.
    """
    at_top = len(path.parts) == 1 and path.name in (*_CONFIG_NAMES, "PKG-INFO", "setup.py")
    is_text = path.suffix in (".txt", ".in") and len(path.parts) <= _MAX_TEXT_DEPTH
    return at_top or is_text or path.name == "meson.build"
