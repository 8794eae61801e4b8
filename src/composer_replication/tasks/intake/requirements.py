"""What a repository's tests need, read from its files; none of its code is run.

Four kinds are told apart. *Required*: what the projects themselves depend on. *Wanted*: groups and extras of
tests and developers, tooling left out; one that is not to be had is left out, too. *Declared*: everything that
any other configuration names (tox, nox, requirement files, other extras); of these what tests import or start
becomes wanted, and what a first run of the suite misses.
*Refused*: what is bound to an address, which is never asked for by name. Nothing is ever guessed from
an import alone, except for a short list of well-known test libraries: a guess could fetch somebody else's package.
Repositories that cannot be used are told with their first cause (a second copy of its modules, compiled parts …).
"""

from __future__ import annotations

import ast
import platform
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from composer_replication.tasks.intake.environment import (
    PYTESTS,
    TOOLCHAIN,
    Environment,
    EnvironmentLock,
    UnusableRepository,
    resolve,
)
from composer_replication.tasks.intake.parsed_files import ProjectFiles, parse_ini, setup_keywords, texts
from composer_replication.tasks.intake.project_files import Project, find_projects, folder_named_otherwise
from composer_replication.tasks.intake.requirement_texts import IN_TREE, holds
from composer_replication.tasks.intake.sources import RepositorySource
from composer_replication.tasks.intake.tree_rules import (
    below_root,
    is_subject_path,
    is_test_path,
    own_modules,
    recorded_folders,
)
from composer_replication.tasks.syntax_trees import parsed

_TEST_WORDS = frozenset({"test", "tests", "testing", "unittest", "unittests", "pytest"})
_DEV_GROUPS = frozenset({"dev", "develop", "development", "devel", "default"})
_TEST_FILE = re.compile(r"(^|[^a-z])tests?([^a-z]|$)")
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
_KNOWN_NAMES = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "dateutil": "python-dateutil", "jwt": "pyjwt", "markdown_it": "markdown-it-py",
    "OpenSSL": "pyopenssl", "sklearn": "scikit-learn", "yaml": "pyyaml", "zmq": "pyzmq", "attr": "attrs",
}  # fmt: skip
"""Modules that are called otherwise than their distribution: looked up among what the project itself declares."""
_SETUPTOOLS = dict.fromkeys(("setuptools", "pkg_resources", "distutils"), "setuptools<81")
"""Modules that stood in every environment when many a project was written: taken without being declared."""
_MISSING = re.compile(r"No module named '?(\w+)")
_RUNNER = re.compile(
    r"pytest.*\b(has no attribute|unexpected keyword|Removed|no longer)|(cannot import|has no attribute).*pytest"
)
"""How a suite shows that it was written for an earlier pytest."""
_WELL_KNOWN = frozenset("attrs freezegun hypothesis mock python-dateutil pytz pyyaml six whatever".split())


@dataclass(slots=True)
class Requirements:
    """Requirements by canonical name; ``refused`` are names that are bound to an address and needed.

    ``python`` is the range of a needed project that this Python does not fit, ``unread`` a file whose requirements
    only running it would tell; both are empty where there is none.
    """

    required: dict[str, Requirement] = field(default_factory=dict)
    wanted: dict[str, Requirement] = field(default_factory=dict)
    declared: dict[str, Requirement] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    pytest: SpecifierSet = field(default_factory=SpecifierSet)
    python: str = ""
    unread: str = ""

    def add(
        self, part: dict[str, Requirement], requirements: Iterable[Requirement], *, refuse: bool = False
    ) -> None:
        """Put those that hold here into a part, wanted tools among the declared; ``refuse``: addresses are refused."""
        for requirement in filter(holds, requirements):
            name = canonicalize_name(requirement.name)
            requirement.marker = None
            if requirement.url is not None:
                if not requirement.url.startswith(IN_TREE) or name not in self.own:
                    self.bound.add(name)
                    self.refused += [requirement.name] if refuse else []
            elif part is self.declared:
                part.setdefault(name, _without_pins(requirement))
            elif name == "pytest":
                self.pytest &= _without_pins(requirement).specifier
            else:
                is_tool = part is self.wanted and _TOOLING.fullmatch(name)
                _merge(self.declared if is_tool else part, name, requirement)

    def take(self, names: Iterable[str]) -> bool:
        """Want the first of some names that is declared; one that is bound to an address is refused."""
        self.refused += [name for name in names if name in self.bound]
        declared = next((name for name in names if name in self.declared), None)
        if declared is not None:
            _merge(self.wanted, declared, self.declared[declared])
        return declared is not None

    def drop_bound(self) -> None:
        """Leave nothing to be fetched by a name that is bound to an address, or that the tree itself has."""
        for part in (self.required, self.wanted, self.declared):
            for name in part.keys() & {"pytest", *self.bound, *self.own}:
                del part[name]


def _merge(into: dict[str, Requirement], name: str, requirement: Requirement) -> None:
    if name in into:
        into[name].specifier &= requirement.specifier
        into[name].extras |= requirement.extras
    else:
        into[name] = requirement


def _without_pins(requirement: Requirement) -> Requirement:
    """Drop ``==`` pins of development tools: old ones have no wheel for a new Python."""
    if any(specifier.operator in ("==", "===") for specifier in requirement.specifier):
        requirement = copy(requirement)
        requirement.specifier = SpecifierSet()
    return requirement


def read_requirements(source: RepositorySource, missing: Collection[str] = ()) -> Requirements:
    """Everything that the repository says its tests need, tooling left out; ``missing`` as in ``lock_repository``."""
    files = {**source.metadata, **source.files}
    projects = find_projects(files)
    found = Requirements(own=_own_names(source, projects))
    needed = [project for project in projects if project.is_needed]
    outside = (one for one in needed if not one.accepts(platform.python_version()))
    found.python = next((one.requires_python for one in outside), "")
    found.unread = next((one.unread for one in projects if one.unread), "")
    for project in projects:
        if project.is_needed:
            found.add(found.required, project.dependencies, refuse=True)
        else:
            found.add(found.wanted, project.dependencies)
        _add_groups(found, project)
    found.add(found.declared, _of_tools(ProjectFiles(files), projects[0]))
    _take_what_is_imported(found, source)
    _take_what_is_missing(found, source, missing)
    found.drop_bound()
    return found


def _own_names(source: RepositorySource, projects: list[Project]) -> set[str]:
    """The names of the projects in the tree, and those by which the others ask for them."""
    folders = {f"{IN_TREE}{project.folder}" for project in projects}
    asked = (one for project in projects for part in project.all_requirements() for one in part)
    names = {source.name, *(project.name for project in projects)}
    names |= {one.name for one in asked if one.url in folders}
    return {canonicalize_name(name) for name in names if name}


def _add_groups(found: Requirements, project: Project) -> None:
    for path, part in project.requirement_files.items():
        if _TEST_FILE.search(path) and path.endswith(".txt"):
            found.add(found.wanted, map(_without_pins, part), refuse=True)
        else:
            found.add(found.declared, part)
    for name, part in project.groups.items():
        if not _TEST_WORDS.isdisjoint(name.split("-")):
            found.add(found.wanted, part, refuse=True)
        elif name in _DEV_GROUPS:
            found.add(found.wanted, map(_without_pins, part))
        else:
            found.add(found.declared, part)


def _of_tools(read: ProjectFiles, project: Project) -> Iterator[Requirement]:
    """What tox, nox and the tables of other tools install for their runs."""
    for text in (read.text("tox.ini"), read.text("setup.cfg"), *read.strings("tool.tox.legacy_tox_ini")):
        for name, section in parse_ini(text.encode()).items():
            if "testenv" not in name and name != "default":
                continue
            # A factor condition stands before the requirement: "py{38,39}: mock"
            lines = [
                re.sub(r"^[\w{},.!-]+:\s+", "", line.strip()) for line in section.get("deps", "").splitlines()
            ]
            yield from read.lines(lines)
            asked = f"{section.get('extras', '')} {section.get('dependency_groups', '')}"
            for group in map(canonicalize_name, asked.replace(",", " ").split()):
                yield from project.groups.get(group, [])
    yield from read.lines(list(_strings_in(read.table("tool"))))
    yield from read.lines(list(_installed_by_nox(read.read("noxfile.py"))))


def _strings_in(value: object) -> Iterator[str]:
    """Lists named like dependencies anywhere in tool tables (hatch, pdm, tox in TOML)."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, list) and ("depend" in key or key in ("deps", "dev", "test", "tests")):
            yield from texts(inner)
        yield from _strings_in(inner)


def _nodes(data: bytes) -> Iterable[ast.AST]:
    """All of a source file's syntax; nothing where it does not parse."""
    module = parsed(data)
    return () if module is None else ast.walk(module)


def _installed_by_nox(data: bytes) -> Iterator[str]:
    """The literal arguments of ``session.install``, an option put together with its file."""
    for call in _nodes(data):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "install":
            words = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
            for before, word in zip(["", *words], words, strict=False):
                yield f"{before} {word}" if before in ("-r", "-c", "-e") else word


def imported_modules(data: bytes) -> set[str]:
    """Top-level names of all modules that a source file imports."""
    names: set[str] = set()
    for node in _nodes(data):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _started_programs(data: bytes) -> set[str]:
    """What a test starts: the first word of a list of texts, and the module behind a ``-m``."""
    found: set[str] = set()
    for node in _nodes(data):
        if isinstance(node, ast.List | ast.Tuple):
            words = [getattr(one, "value", "") for one in node.elts]
            found |= {
                str(word) for before, word in zip(["-m", *words], words, strict=False) if before == "-m"
            }
    return found


def _names_of(module: str) -> tuple[str, ...]:
    """The distributions that a module may come from, by its name and the short list."""
    return canonicalize_name(module), _KNOWN_NAMES.get(module, "")


def _take_what_is_imported(found: Requirements, source: RepositorySource) -> None:
    """Take declared requirements where a test imports or starts them; one that is bound to an address is refused then.

    Imports of the package itself do not count: an optional accelerator would bring a
    second implementation of what gets deleted.
    """
    imported: set[str] = set()
    for name, data in source.files.items():
        if is_test_path(name):
            imported |= imported_modules(data) | (_started_programs(data) & found.declared.keys())
    for module in sorted(imported - sys.stdlib_module_names - own_modules(source.files)):
        if not found.take(_names_of(module)):
            known = next((name for name in _names_of(module) if name in _WELL_KNOWN), "")
            if known and known not in found.required:
                found.wanted.setdefault(known, Requirement(known))
    for name, requirement in found.declared.items():
        if name.startswith("pytest-") and not _TOOLING.fullmatch(name):
            found.wanted.setdefault(name, requirement)


def _take_what_is_missing(found: Requirements, source: RepositorySource, missing: Collection[str]) -> None:
    """Take what declares a missing module; where none does by its name, the declared ones that the package imports.

    The latter bring modules of other names along: ``h2`` brings ``hpack``.
    """
    unknown = []
    for module in sorted(set(missing) - own_modules(source.files)):
        if not found.take(_names_of(module)):
            if module in _SETUPTOOLS:
                found.wanted.setdefault("setuptools", Requirement(_SETUPTOOLS[module]))
            elif module not in sys.stdlib_module_names:
                unknown.append(module)
    if unknown:
        sources = [data for name, data in source.files.items() if is_subject_path(name)]
        imported = set[str]().union(*map(imported_modules, sources))
        for name in sorted({_KNOWN_NAMES.get(module, canonicalize_name(module)) for module in imported}):
            if name in found.declared and not _TOOLING.fullmatch(name):
                _merge(found.wanted, name, found.declared[name])


def modules_missing(said: Iterable[str]) -> frozenset[str]:
    """The modules that a run did not find, by what it says of its failures."""
    return frozenset(name for text in said for name in _MISSING.findall(text))


def wants_older_pytest(said: Iterable[str]) -> bool:
    """Whether failures of a run show that the suite was written for an earlier pytest."""
    return any(_RUNNER.search(text) for text in said)


def lock_repository(
    source: RepositorySource, missing: Collection[str] = (), newer_than_needed: str = ""
) -> EnvironmentLock:
    """The environment of a repository's tests.

    Args:
        source: the repository.
        missing: modules that a first run did not find.
        newer_than_needed: a version of pytest that is too new for its tests.

    Raises:
        UnusableRepository: ``another-python``, ``runner-dependency``, ``dependency-by-url``,
            ``dependency-without-wheel``.
        InputError: the index cannot be reached (CR0407).
    """
    own = canonicalize_name(source.name)
    if own in TOOLCHAIN:
        raise UnusableRepository("runner-dependency", f"the test runner itself imports {own}")
    found = read_requirements(source, missing)
    if found.python:
        detail = f"it asks for Python {found.python}, and this is {platform.python_version()}"
        raise UnusableRepository("another-python", detail)
    if found.refused:
        raise UnusableRepository("dependency-by-url", f"{found.refused[0]} is asked for by address")
    runners = PYTESTS[PYTESTS.index(newer_than_needed) + 1 :] if newer_than_needed in PYTESTS else PYTESTS
    pytest = next((one for one in runners if found.pytest.contains(one)), (*runners, PYTESTS[-1])[0])
    lock = resolve(
        list(found.required.values()), source.repository, list(found.wanted.values()), pytest=pytest
    )
    # What a test dependency needs of the package itself it finds in the tree, as everything else does.
    return replace(lock, wheels=tuple(wheel for wheel in lock.wheels if wheel.name not in found.own))


# --- Repositories that cannot be used: which, and why.

_COMPILING_KEYWORDS = ("ext_modules", "cffi_modules", "rust_extensions", "ext_package")
_COMPILING_BACKENDS = ("maturin", "scikit_build_core", "mesonpy", "setuptools_rust")
_NUM_NAMED = 3


def refuse_second_copy(source: RepositorySource, environment: Environment) -> None:
    """No module of the tree may also be installed: tests would import the old code.

    Two portions of one namespace package (no ``__init__.py`` in either) may lie side by side,
    as long as no module has the same name in both.
    """
    roots = recorded_folders(source.files)
    own = {below_root(path, roots) for path in source.files if is_subject_path(path)}
    for folder in environment.root.glob("lib/python*/site-packages"):
        clash = next(filter(None, (_clash(path, own, folder) for path in sorted(own))), "")
        if clash:
            raise UnusableRepository("runner-dependency", f"the environment holds a module {clash}, too")


def _clash(path: str, own: Collection[str], installed: Path) -> str:
    """The module that is installed, too, on the way to one of ours; empty where both are portions of a namespace."""
    parts = PurePosixPath(path).with_suffix("").parts
    for depth, name in enumerate(parts, start=1):
        is_there = (installed / name).is_dir() or any(installed.glob(f"{name}.*"))
        if not is_there or name == "__init__":
            return ""
        is_package = "/".join([*parts[:depth], "__init__.py"]) in own
        installed /= name
        if (
            depth == len(parts)
            or is_package
            or not installed.is_dir()
            or (installed / "__init__.py").exists()
        ):
            return ".".join(parts[:depth])
    return ""


def compiled_parts(source: RepositorySource) -> str:
    """The file that asks for compiled modules, which nobody builds here; empty when none does.

    Many packages have them for speed alone and do without, so this explains a failure and is none.
    """
    read = ProjectFiles(source.metadata)
    is_asked = read.backend.partition(".")[0] in _COMPILING_BACKENDS
    if is_asked or read.table("tool", "setuptools").get("ext-modules"):
        return "pyproject.toml"
    keywords = setup_keywords(source.metadata.get("setup.py", b""))
    return "setup.py" if not keywords.isdisjoint(_COMPILING_KEYWORDS) else ""


def explain(
    error: UnusableRepository, source: RepositorySource, installed: Collection[str] = ()
) -> UnusableRepository:
    """The same refusal with its first cause named, where the files show it.

    A red baseline is often the third consequence: of a requirement that nothing declares or that has no wheel
    (``missing-requirement``), of compiled modules (``needs-compiling``), of a module that only a build writes
    (``generated-file``); else files that were left out. ``installed`` are canonical names of what its environment holds.
    """
    if error.reason != "red-baseline":
        return error
    likeliest = sorted(source.left_out, key=lambda path: path.rpartition("/")[2] not in error.detail)
    more = f" and {len(likeliest) - _NUM_NAMED} more" if len(likeliest) > _NUM_NAMED else ""
    missed = f"; left out: {', '.join(likeliest[:_NUM_NAMED])}{more}" if likeliest else ""
    detail = f"{error.detail}{missed}"
    missing = _missing_module(error.detail, source.files)
    top = missing.partition(".")[0]
    is_own = top in own_modules(source.files)
    if missing and not is_own and top not in sys.stdlib_module_names:
        if bound := read_requirements(source, {top}).refused:
            return UnusableRepository("dependency-by-url", f"{bound[0]} is asked for by address; {detail}")
        why = _why_missing(top, source, installed)
        return UnusableRepository("missing-requirement", f"{why}; {detail}")
    file = compiled_parts(source)
    if file:
        cause = f"its {file} asks for compiled modules, which are not built"
        return UnusableRepository("needs-compiling", f"{cause}; {detail}")
    if missing and is_own and not _is_module(missing, source.files):
        cause = f"the repository has no file for its own module {missing}, which a build may write"
        return UnusableRepository("generated-file", f"{cause}; {detail}")
    return UnusableRepository(error.reason, detail)


_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_NAME = re.compile(r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'")


def _missing_module(detail: str, files: Mapping[str, bytes]) -> str:
    """The module that the first reason of a red baseline misses; empty where it says something else."""
    no_module, no_name = _NO_MODULE.search(detail), _NO_NAME.search(detail)
    if no_module or no_name is None:
        return no_module[1] if no_module else ""
    package = f"/{no_name[2].replace('.', '/')}/__init__.py"
    inits = [data for path, data in files.items() if f"/{path}".endswith(package)]
    defined = re.compile(rf"^\s*(def|class)?\s*{no_name[1]}\b".encode(), re.MULTILINE)
    return f"{no_name[2]}.{no_name[1]}" if inits and not any(map(defined.search, inits)) else ""


def _is_module(name: str, files: Collection[str]) -> bool:
    """Whether a file defines a module, or the one above it, which may define it as a name."""
    path = name.replace(".", "/")
    return any(f"/{file}".endswith((f"/{path}.py", f"/{path}/__init__.py")) for file in files)


def _why_missing(module: str, source: RepositorySource, installed: Collection[str]) -> str:
    found = read_requirements(source)
    if otherwise := folder_named_otherwise(ProjectFiles(source.metadata), module):
        return f"the package {module} lies in a folder of another name, {otherwise}, which cannot be imported from the tree"
    named = canonicalize_name(module)
    if named in found.wanted and named not in installed:
        return f"what its tests want, {named}, is not to be had as a wheel for this Python"
    computed = f" ({found.unread} computes what it needs)" if found.unread else ""
    return f"nothing that is declared brings the module {module}{computed}"
