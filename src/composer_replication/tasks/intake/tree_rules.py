"""Which files of a repository enter a task tree: an allow-list, so that no used tree leaks code.

In: Python sources, everything inside packages and test folders, configuration of the
test runner, a few texts at the top. Out: version control, caches, build output,
installed metadata, stubs that a type checker wrote, compiled code, archives, notebooks, documentation.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import PurePosixPath

_OUT_FOLDERS = frozenset(
    "__pycache__ node_modules venv env virtualenv htmlcov eggs parts wheels wheelhouse site-packages CVS".split()
)
_OUT_TOP_FOLDERS = frozenset(
    "doc docs build dist site notebooks examples benchmarks bench _build target out tools typings".split()
)
_OUT_FOLDER_SUFFIXES = (".egg-info", ".dist-info", ".egg")
_OUT_SUFFIXES = frozenset(
    ".pyc .pyo .so .pyd .dll .dylib .a .o .obj .whl .egg .tar .gz .tgz .bz2 .xz .zip .7z .ipynb .orig .rej .patch"
    " .diff .swp .bak .lock .pkl .pickle .log .cover".split()
)
_SOURCE_SUFFIXES = frozenset({".py", ".pyi"})
_CONFIG_NAMES = frozenset(
    {"pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"}
)
_TOP_TEXTS = ("README*", "VERSION*", "version*")
LICENCE_TEXTS = ("LICEN[CS]E*", "COPYING*", "UNLICEN[CS]E*")
"""At the top, whatever their letters' case: the licence goes with every copy."""
_TEST_FOLDERS = frozenset({"tests", "test", "testing"})
_NOT_A_SUBJECT = frozenset(
    "setup.py conftest.py noxfile.py tasks.py fabfile.py versioneer.py _version.py __about__.py __main__.py dodo.py".split()
)


def skips_folder(name: str) -> bool:
    """Whether a folder of that name is left out wherever it stands."""
    return name in _OUT_FOLDERS or name.startswith(".") or name.endswith(_OUT_FOLDER_SUFFIXES)


def in_test_folder(path: PurePosixPath) -> bool:
    """Whether the path lies below a folder of tests."""
    return not _TEST_FOLDERS.isdisjoint(path.parts[:-1])


def is_test_path(path: str) -> bool:
    """Whether a Python file holds tests or their support by its place or name."""
    pure = PurePosixPath(path)
    named = fnmatch.fnmatch(pure.name, "test_*.py") or fnmatch.fnmatch(pure.name, "*_test.py")
    return pure.suffix == ".py" and (
        named or pure.name in ("tests.py", "test.py", "conftest.py") or in_test_folder(pure)
    )


def is_subject_path(path: str) -> bool:
    """Whether functions of that file may be deleted: package code, no tests, no build scripts."""
    pure = PurePosixPath(path)
    return pure.suffix == ".py" and not is_test_path(path) and pure.name not in _NOT_A_SUBJECT


def tree_rule(names: frozenset[str]) -> Callable[[PurePosixPath], bool]:
    """The rule that chooses the files of a task tree, given all paths of the repository."""
    packages = {PurePosixPath(name).parent for name in names if name.endswith("/__init__.py")}

    def belongs(path: PurePosixPath) -> bool:
        folders = path.parts[:-1]
        if any(skips_folder(folder) for folder in folders) or (folders and folders[0] in _OUT_TOP_FOLDERS):
            return False
        if path.suffix.lower() in _OUT_SUFFIXES:
            return False
        if path.suffix in _SOURCE_SUFFIXES or path.name in _CONFIG_NAMES:
            return True
        if path.name.startswith("."):
            return False
        if not folders:
            return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _TOP_TEXTS) or any(
                fnmatch.fnmatchcase(path.name.upper(), pattern) for pattern in LICENCE_TEXTS
            )
        return in_test_folder(path) or not packages.isdisjoint(path.parents)

    return belongs


def is_metadata_path(path: PurePosixPath) -> bool:
    """Whether a file may declare the project's name, version or requirements."""
    if len(path.parts) == 1 and path.name in (
        "PKG-INFO",
        "setup.py",
        "setup.cfg",
        "pyproject.toml",
        "tox.ini",
    ):
        return True
    in_requirements = len(path.parts) == 2 and path.parts[0] in ("requirements", "reqs")
    named = "requirement" in path.name and len(path.parts) <= 2
    return path.suffix in (".txt", ".in") and (in_requirements or named)
