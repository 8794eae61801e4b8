"""What a repository's tests need, read from its files; none of its code is run.

Two kinds are found. *Required*: the project's own dependencies and the groups and extras
that are named after tests. *Declared*: everything that any tool configuration names (tox,
requirement files, other extras); of these only what tests or package import is taken.
Nothing is ever guessed from an import alone, except for a short list of well-known test
libraries: a guess could fetch somebody else's package.
"""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import PurePosixPath
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from composer_replication.tasks.intake.sources import RepositorySource, inner_table, read_toml
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.syntax_trees import parse_syntax

_TEST_GROUPS = frozenset(
    {"test", "tests", "testing", "unittest", "unittests", "pytest", "all-tests", "test-core"}
)
_DEV_GROUPS = frozenset({"dev", "develop", "development", "devel"})
_TOOLING = re.compile(
    r"(sphinx.*|furo|coverage|coveralls|codecov.*|tox.*|nox|mypy.*|types-.*|pyright|basedpyright|pyre.*|ruff|black|flake8.*"
    r"|pylint.*|isort|pycodestyle|pyflakes|pydocstyle|bandit|pre-commit|build|twine|wheel|setuptools.*|hatch.*|flit.*|poetry.*"
    r"|invoke|nox-.*|docformatter|pep8.*|check-manifest|ipython|ipdb|jupyter.*|notebook|mkdocs.*|pdoc.*|bump.*|zest.*|towncrier"
    r"|asv|myst.*|recommonmark|readme-renderer|docutils|codespell|vulture|safety|interrogate|commitizen|pip|pip-tools|uv"
    r"|auditwheel|cibuildwheel|rope|restructuredtext.*|doc8|yapf|autopep8|pyupgrade|virtualenv|cython|towncrier|gitpython"
    r"|pytest-(cov|xdist|randomly|random-order|sugar|html|flake.*|black.*|isort|ruff|mypy.*|pylint|pycodestyle|codestyle|pep8.*"
    r"|rerunfailures|github.*|clarity|pretty|instafail|codspeed|parallel|watch.*|testmon|profiling|reportlog|icdiff|checkdocs"
    r"|enabler|runner|cover))"
)
_WELL_KNOWN = {
    "attr": "attrs", "attrs": "attrs", "dateutil": "python-dateutil", "freezegun": "freezegun", "hypothesis": "hypothesis",
    "mock": "mock", "pytz": "pytz", "six": "six", "whatever": "whatever", "yaml": "pyyaml",
}  # fmt: skip
UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""What the parser raises for a source that it cannot take: broken, too deep, or not a literal."""
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
_OPTION = re.compile(r"\s(--\S.*|#.*)$")


@dataclass(slots=True)
class Requirements:
    """Requirements by canonical name; ``refused`` are those that are no plain name (a URL, a path)."""

    required: dict[str, Requirement] = field(default_factory=dict)
    declared: dict[str, Requirement] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def require(self, texts: Iterable[str], *, skip_tooling: bool) -> None:
        for requirement in self._parsed(texts, refuse=True):
            name = canonicalize_name(requirement.name)
            if not (skip_tooling and _TOOLING.fullmatch(name)):
                _merge(self.required, name, requirement)

    def declare(self, texts: Iterable[str]) -> None:
        for requirement in self._parsed(texts, refuse=False):
            name = canonicalize_name(requirement.name)
            if not _TOOLING.fullmatch(name):
                self.declared.setdefault(name, _without_pins(requirement))

    def _parsed(self, texts: Iterable[str], *, refuse: bool) -> Iterator[Requirement]:
        for text in texts:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.marker is not None and not _marker_holds(requirement):
                continue
            requirement.marker = None
            if requirement.url is not None:
                if refuse:
                    self.refused.append(requirement.name)
                continue
            yield requirement


def _marker_holds(requirement: Requirement, extra: str = "") -> bool:
    environment: dict[str, Any] = dict(default_environment())
    return requirement.marker is None or requirement.marker.evaluate({**environment, "extra": extra})


def _merge(into: dict[str, Requirement], name: str, requirement: Requirement) -> None:
    if name in into:
        into[name].specifier &= requirement.specifier
        into[name].extras |= requirement.extras
    else:
        into[name] = requirement


def _without_pins(requirement: Requirement) -> Requirement:
    """Drop ``==`` pins of development tools: old ones have no wheel for a new Python."""
    if any(specifier.operator in ("==", "===") for specifier in requirement.specifier):
        return Requirement(requirement.name)
    return requirement


def read_requirements(source: RepositorySource) -> Requirements:
    """Everything that the repository says its tests need, tooling left out."""
    found = Requirements()
    table = read_toml(source.metadata, "pyproject.toml")
    _read_project(found, table)
    _read_poetry(found, inner_table(table, "tool", "poetry"))
    _read_groups(found, inner_table(table, "dependency-groups"))
    _read_package_info(found, source.metadata)
    _read_setup_cfg(found, source.metadata)
    _read_setup_py(found, source.metadata)
    _read_requirement_files(found, source.metadata)
    found.declare(_tox_lines(source.metadata))
    found.declare(_strings_in(table.get("tool", {})))
    _take_what_is_imported(found, source)
    own = canonicalize_name(source.name)
    found.required.pop(own, None)
    found.required.pop("pytest", None)
    return found


def _group_kind(name: str) -> str:
    plain = canonicalize_name(name)
    return "test" if plain in _TEST_GROUPS else "dev" if plain in _DEV_GROUPS else "other"


def _add_group(found: Requirements, name: str, texts: Iterable[str]) -> None:
    texts = list(texts)
    if _group_kind(name) == "test":
        found.require(texts, skip_tooling=True)
    else:
        found.declare(texts)


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _read_project(found: Requirements, table: Mapping[str, Any]) -> None:
    project = inner_table(table, "project")
    found.require(_texts(project.get("dependencies")), skip_tooling=False)
    for name, texts in inner_table(project, "optional-dependencies").items():
        _add_group(found, name, _texts(texts))


def _read_groups(found: Requirements, groups: Mapping[str, Any]) -> None:
    def expand(name: str, seen: frozenset[str]) -> Iterator[str]:
        listed = groups.get(name)
        for item in listed if isinstance(listed, list) else ():
            included = item.get("include-group") if isinstance(item, dict) else None
            if isinstance(item, str):
                yield item
            elif isinstance(included, str) and included not in seen:
                yield from expand(included, seen | {included})

    for name in groups:
        _add_group(found, name, expand(name, frozenset({name})))


def _read_poetry(found: Requirements, poetry: Mapping[str, Any]) -> None:
    found.require(_poetry_texts(inner_table(poetry, "dependencies")), skip_tooling=False)
    groups = {"dev": inner_table(poetry, "dev-dependencies")}
    groups |= {
        name: inner_table(poetry, "group", name, "dependencies") for name in inner_table(poetry, "group")
    }
    for name, table in groups.items():
        _add_group(found, name, _poetry_texts(table))


def _poetry_texts(table: Mapping[str, Any]) -> list[str]:
    """Poetry's tables as requirement texts; its caret ranges become a lower bound."""
    texts = []
    for name, value in table.items():
        if canonicalize_name(name) == "python" or (isinstance(value, dict) and value.get("optional")):
            continue
        given = value.get("version") if isinstance(value, dict) else value
        version = given if isinstance(given, str) else ""
        bound = re.match(r"[\^~]=?\s*(\d[\w.]*)", version)
        specifier = f">={bound[1]}" if bound else version if re.match(r"[<>=!]", version) else ""
        texts.append(f"{name}{specifier}")
    return texts


def _read_package_info(found: Requirements, metadata: Mapping[str, bytes]) -> None:
    """``Requires-Dist`` of a source distribution, each filed under every extra that asks for it on this machine."""
    header = Parser().parsestr(metadata.get("PKG-INFO", b"").decode("utf-8", "replace"), headersonly=True)
    for text in header.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        found.require([text], skip_tooling=False)  # if it is asked for without an extra
        extras = dict.fromkeys(_EXTRA.findall(str(requirement.marker or "")))
        wanted = [extra for extra in extras if _marker_holds(requirement, extra)]
        requirement.marker = None
        for extra in wanted:
            _add_group(found, extra, [str(requirement)])


def _parse_ini(data: bytes) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(data.decode("utf-8", "replace"))
    except configparser.Error:
        return configparser.ConfigParser(interpolation=None)
    return parser


def _read_setup_cfg(found: Requirements, metadata: Mapping[str, bytes]) -> None:
    parser = _parse_ini(metadata.get("setup.cfg", b""))
    found.require(parser.get("options", "install_requires", fallback="").splitlines(), skip_tooling=False)
    found.require(parser.get("options", "tests_require", fallback="").splitlines(), skip_tooling=True)
    if parser.has_section("options.extras_require"):
        for name, lines in parser.items("options.extras_require"):
            _add_group(found, name, lines.splitlines())


def _read_setup_py(found: Requirements, metadata: Mapping[str, bytes]) -> None:
    """Literal lists in the call of ``setup``; anything that would have to be run is not seen."""
    try:
        module = parse_syntax(metadata.get("setup.py", b""))
    except UNREADABLE:
        return
    for node in ast.walk(module):
        if not isinstance(node, ast.keyword) or node.arg not in (
            "install_requires",
            "tests_require",
            "extras_require",
        ):
            continue
        try:
            value = ast.literal_eval(node.value)
        except UNREADABLE:
            continue
        if node.arg == "extras_require" and isinstance(value, dict):
            for name, texts in value.items():
                _add_group(found, str(name), _texts(texts))
        elif isinstance(value, list | tuple):
            found.require(_texts(list(value)), skip_tooling=node.arg == "tests_require")


def _read_requirement_files(found: Requirements, metadata: Mapping[str, bytes]) -> None:
    for name, data in metadata.items():
        path = PurePosixPath(name)
        if path.suffix not in (".txt", ".in"):
            continue
        lines = [
            _OPTION.sub("", line).strip().rstrip("\\").strip()
            for line in data.decode("utf-8", "replace").splitlines()
        ]
        texts = [line for line in lines if line and not line.startswith(("#", "-"))]
        if re.search(r"(^|[^a-z])tests?([^a-z]|$)", name) and path.suffix == ".txt":
            found.require(
                [text.partition("==")[0] if "==" in text else text for text in texts], skip_tooling=True
            )
        else:
            found.declare(texts)


def _tox_lines(metadata: Mapping[str, bytes]) -> Iterator[str]:
    for data in (metadata.get("tox.ini", b""), metadata.get("setup.cfg", b"")):
        parser = _parse_ini(data)
        for section in parser.sections():
            if "testenv" in section or section == "default":
                for line in parser.get(section, "deps", fallback="").splitlines():
                    # A factor condition stands before the requirement: "py{38,39}: mock"
                    yield re.sub(r"^[\w{},.!-]+:\s+", "", line.partition("#")[0].strip())


def _strings_in(value: object) -> Iterator[str]:
    """Lists named like dependencies anywhere in tool tables (hatch, pdm, tox in TOML)."""
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        if isinstance(inner, list) and ("depend" in key or key in ("deps", "dev", "test", "tests")):
            yield from _texts(inner)
        elif isinstance(inner, dict):
            yield from _strings_in(inner)


def imported_modules(data: bytes) -> set[str]:
    """Top-level names of all modules that a source file imports."""
    try:
        module = parse_syntax(data)
    except UNREADABLE:
        return set()
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _take_what_is_imported(found: Requirements, source: RepositorySource) -> None:
    """Move declared requirements to the required ones where a test imports them.

    Imports of the package itself do not count: an optional accelerator would bring a
    second implementation of what gets deleted.
    """
    own = {
        part for name in source.files for part in (*PurePosixPath(name).parts[:-1], PurePosixPath(name).stem)
    }
    imported: set[str] = set()
    for name, data in source.files.items():
        if is_test_path(name):
            imported |= imported_modules(data)
    for module in sorted(imported - own - set(sys.stdlib_module_names)):
        known = _WELL_KNOWN.get(module, "")
        declared = next((name for name in (canonicalize_name(module), known) if name in found.declared), None)
        if declared is not None:
            _merge(found.required, declared, found.declared[declared])
        elif known:
            found.required.setdefault(known, Requirement(known))
    for name, requirement in found.declared.items():
        if name.startswith("pytest-"):
            found.required.setdefault(name, requirement)
