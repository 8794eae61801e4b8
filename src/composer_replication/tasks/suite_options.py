"""How a repository has its tests run: what of its own configuration of pytest each of our runs takes over.

All settings of the one file that pytest would choose hold as they stand (``python_files``, ``asyncio_mode``,
``pythonpath``, ``testpaths`` …). Of the options in ``addopts`` those are kept that a suite may need; reports,
coverage, parallel runs, limits of time and strictness are ours to choose. What pytest cannot take because its plugin
is not installed is dropped inside the sandbox (``pytest_runner``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

from composer_replication.tasks.intake.project_files import parse_ini, parse_toml, texts, values_at
from composer_replication.tasks.intake.tree_rules import PYTEST_FILES

OVERRIDES = tuple(
    word
    for setting in (
        "addopts=", "required_plugins=", "minversion=", "filterwarnings=", "strict=false",
        "strict_config=false", "strict_markers=false",
    )
    for word in ("-o", setting)
)  # fmt: skip
"""A tool that was left out, or a pytest that is newer or older than the suite's, must not end a run."""
_DROPPED = re.compile(
    r"--(no-)?(cov|junit|html|self-contained-html|json|report|allure|durations|strict|timeout|reruns|retr|random|log-|pdb|trace"
    r"|cache-|last-failed|failed-first|new-first|stepwise|sw-|setup-|fixtures|collect-?only|doctest|xdoctest|flake8|mypy|pylint"
    r"|black|isort|ruff|pycodestyle|codestyle|pydocstyle|pep8|header|summary|show-?locals|show-capture|verbos|rsync)[\w-]*"
    r"|--(lf|ff|nf|sw|co|tb|color|code-highlight|css|dist|tx|px|numprocesses|maxprocesses|max-worker-restart|boxed|forked"
    r"|looponfail|only-rerun|rerun-except|quiet|exitfirst|maxfail|full-trace|disable-warnings|disable-pytest-warnings|pythonwarnings"
    r"|basetemp|rootdir|confcutdir|config-file|markers|help|version|debug|pastebin|instafail|continue-on-collection-errors"
    r"|benchmark-(?!disable$|skip$)[\w-]+)"
)
_FLAG = re.compile(
    r"--(no-.*|noconftest|disable-.*|pyargs|runxfail|keep-duplicates|collect-in-virtualenv|benchmark-(disable|skip))"
)
"""Kept, and without a value: the next word is something else."""
_TAKES_WORD = frozenset("pmkoWrcn")
_KEPT_SHORT = frozenset("pmko")
_PLACES = {"pyproject.toml": ("tool.pytest.ini_options", "tool.pytest"), "setup.cfg": ("tool:pytest",)}
_USUAL = ("test_*.py", "*_test.py")
_PATTERN = re.compile(
    r"\bunittest[\s\"',]+discover\b[^\n;&|]{0,500}?(?:-p|--pattern)[ =\"',]+([\w*?\[\].-]+)"
)
_UNITTEST = re.compile(r"-m[\"', ]+unittest\b|\bsetup\.py\s+test\b|\btest_suite\s*=|\bnose(?:tests|2)\b")


def suite_arguments(tree: Path) -> list[str]:
    """The arguments with which the repository has pytest called: its file of settings, then its options, each one word."""

    def read(name: str) -> bytes | None:
        return (tree / name).read_bytes() if (tree / name).is_file() else None

    name, settings = pytest_settings(read)
    files = [] if "python_files" in settings else _unittest_files(read, map(str, tree.rglob("*.py")))
    return [*([f"--config-file={name}"] if name else []), *_kept(_words(settings.get("addopts", ""))), *files]


def names_tried(files: Mapping[str, bytes]) -> str:
    """The names by which pytest looked for tests in files of a tree, for a sentence."""
    _, settings = pytest_settings(files.get)
    usual = "".join(_unittest_files(files.get, files)).partition("=")[2] or " ".join(_USUAL)
    looked_at = {"files": usual, "functions": "test*", "classes": "Test*"}
    tried = {kind: settings.get(f"python_{kind}") or names for kind, names in looked_at.items()}
    tried["below"] = settings.get("testpaths") or "."
    return "; ".join(f"{kind} {' '.join(_words(names))}" for kind, names in tried.items())


def pytest_settings(read: Callable[[str], bytes | None]) -> tuple[str, dict[str, Any]]:
    """The file in which pytest finds its settings (empty: none), and these; in its order, then in a folder of tests.

    ``read`` gives the bytes of a file of the project by its path, or None.
    """
    for folder, name in product(("", "tests/", "test/"), PYTEST_FILES):
        data = read(folder + name)
        if data is not None:
            is_toml = name.endswith(".toml")
            tables = parse_toml(data) if is_toml else parse_ini(data.decode("utf-8", "replace"))
            places = _PLACES.get(name, ("pytest",))
            found = [one for place in places for one in values_at(tables, place) if isinstance(one, dict)]
            # An empty table counts, and a file of pytest's own even where it says nothing; a broken one does not.
            is_own = name.lstrip(".").startswith("pytest.") and (tables or not data.strip())
            if found or is_own:
                return folder + name, (found or [{}])[0]
    return "", {}


def _words(added: object) -> list[str]:
    if isinstance(added, list):
        return texts(added)
    try:
        return shlex.split(str(added), comments=True)
    except ValueError:
        return str(added).split()


def _kept(words: list[str]) -> Iterator[str]:
    """The options that stay, a value in one word with its option; places of tests are left to ``testpaths``."""
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        has_next = bool(waiting) and not waiting[-1].startswith("-")
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            if has_next and not value and not _FLAG.fullmatch(flag):
                word = f"{flag}={waiting.pop()}"
            if not _DROPPED.fullmatch(flag):
                yield word
        elif word.startswith("-") and word[1:2] in _TAKES_WORD:
            if len(word) == 2 and waiting:
                word += waiting.pop()
            if word[1] in _KEPT_SHORT:
                yield word
        elif word.startswith("-") and "s" in word:
            yield "-s"


def _unittest_files(read: Callable[[str], bytes | None], paths: Iterable[str]) -> list[str]:
    """``python_files`` with the names by which unittest finds tests, where the repository has unittest find them."""
    said = "\n".join(
        (read(name) or b"").decode("utf-8", "replace")
        for name in ("setup.py", "setup.cfg", "tox.ini", "pyproject.toml", "noxfile.py")
    )
    patterns = _PATTERN.findall(said) or (["test*.py"] if _UNITTEST.search(said) else [])
    if not patterns and not any(PurePosixPath(path).match(usual) for path in paths for usual in _USUAL):
        patterns = ["test*.py", "*_tests.py", "tests_*.py", "*Test.py", "*Tests.py"]
    return [f"-opython_files={' '.join([*_USUAL, *dict.fromkeys(patterns)])}"] if patterns else []
