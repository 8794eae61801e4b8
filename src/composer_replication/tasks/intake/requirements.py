"""What a repository's tests need, read from its files; none of its code is run.

Four kinds are told apart. *Required*: what the projects themselves depend on. *Wanted*: groups and extras of
tests and developers, tooling left out; one that is not to be had is left out, too. *Declared*: everything that
any other configuration names (tox, requirement files, other extras); of these what tests import
becomes wanted, and what a first run of the suite misses. *Refused*: what is bound to an address, which is never asked
for by name. Nothing is guessed from an import alone, except for a short list of well-known test libraries: a guess
could fetch somebody else's package.
"""

from __future__ import annotations

import ast
import platform
import re
import sys
from collections.abc import Collection, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import PurePosixPath

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from composer_replication.tasks.intake import tree_rules
from composer_replication.tasks.intake.environment import (
    PYTESTS,
    TOOLCHAIN,
    Environment,
    EnvironmentLock,
    UnusableRepository,
    resolve,
)
from composer_replication.tasks.intake.project_files import (
    IN_TREE,
    TEXT_SUFFIXES,
    find_projects,
    fits_python,
)
from composer_replication.tasks.intake.sources import RepositorySource
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.syntax_trees import parsed

_DEV_GROUPS = frozenset({"dev", "develop", "development", "devel", "default"})
_OF_TESTS = re.compile(r"(^|[^a-z])(unit|py)?test(s|ing)?([^a-z]|$)")
"""Names of groups, extras and files of requirements that are for tests."""
_TOOLING = re.compile(
    r"(sphinx.*|furo|coverage|coveralls|codecov.*|(tox|nox|mypy|types-|pyre|flake8|hatch|flit|poetry|jupyter|setuptools|pdoc|bump).*"
    r"|pyright|basedpyright|ruff|black|pylint.*|isort|pycodestyle|pyflakes|pydocstyle|bandit|pre-commit|build|twine|wheel|invoke"
    r"|docformatter|pep8.*|check-manifest|ipython|ipdb|notebook|mkdocs.*|zest.*|towncrier|asv|myst.*|recommonmark|readme-renderer"
    r"|docutils|codespell|vulture|safety|interrogate|commitizen|pip|pip-tools|uv|auditwheel|cibuildwheel|rope|restructuredtext.*"
    r"|doc8|yapf|autopep8|pyupgrade|virtualenv|cython|gitpython|pytest-(cov|xdist|randomly|random-order|sugar|html|flake.*|black.*"
    r"|isort|ruff|mypy.*|pylint|pycodestyle|codestyle|pep8.*|rerunfailures|github.*|clarity|pretty|instafail|codspeed|parallel"
    r"|watch.*|testmon|profiling|reportlog|icdiff|checkdocs|enabler|runner|cover))"
)
_KNOWN_NAMES = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "dateutil": "python-dateutil", "jwt": "pyjwt", "markdown_it": "markdown-it-py",
    "OpenSSL": "pyopenssl", "sklearn": "scikit-learn", "yaml": "pyyaml", "zmq": "pyzmq", "attr": "attrs",
    "pkg_resources": "setuptools", "distutils": "setuptools",
}  # fmt: skip
"""Modules that are called otherwise than their distribution: looked up among what the project itself declares."""
_MISSING = re.compile(r"No module named '?([\w.]+)")
_NO_NAME = re.compile(r"cannot import name '(_\w+)' from (?:partially initialized module )?'([\w.]+)'")
_RUNNER = re.compile(
    r"pytest.*\b(has no attribute|unexpected keyword|Removed|no longer)|(cannot import|has no attribute).*pytest"
)
"""How a suite shows that it was written for an earlier pytest."""
_WELL_KNOWN: dict[str, str] = {
    canonicalize_name(Requirement(text).name): text
    for text in "attrs freezegun hypothesis mock python-dateutil pytz pyyaml setuptools<81 six whatever".split()
}
"""Libraries that are taken without being declared; setuptools stood in every environment when many a project was written."""


@dataclass(slots=True)
class Requirements:
    """Requirements by canonical name; ``refused`` are names that are needed and ``bound`` to an address.

    ``own`` are names of the projects in the tree, which lie in ``folders`` (as addresses). ``python`` is the range of
    a needed project that this Python does not fit.
    """

    required: dict[str, Requirement] = field(default_factory=dict)
    wanted: dict[str, Requirement] = field(default_factory=dict)
    declared: dict[str, Requirement] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    pytest: SpecifierSet = field(default_factory=SpecifierSet)
    python: str = ""

    def add(self, group: str, requirements: Iterable[Requirement], *, is_needed: bool) -> None:
        """Put a group of a project where it belongs by its name, wanted tools among the declared."""
        is_of_tests = group != "" and _OF_TESTS.search(group) is not None
        is_wanted = not group or is_of_tests or group in _DEV_GROUPS
        part = self.required if not group and is_needed else self.wanted if is_wanted else self.declared
        keeps_pins = not group or (is_of_tests and not group.endswith(TEXT_SUFFIXES))
        for requirement in requirements:
            name = canonicalize_name(requirement.name)
            if requirement.url in self.folders:
                self.own.add(name)
            elif requirement.url is not None:
                self.bound.add(name)
                self.refused += [requirement.name] if is_of_tests or part is self.required else []
            elif part is self.declared:
                part.setdefault(name, _without_pins(requirement))
            elif name == "pytest":
                self.pytest &= _without_pins(requirement).specifier
            else:
                is_tool = part is self.wanted and _TOOLING.fullmatch(name)
                kept = requirement if keeps_pins else _without_pins(requirement)
                self.merge(self.declared if is_tool else part, kept)

    @staticmethod
    def merge(into: dict[str, Requirement], requirement: Requirement) -> None:
        known = into.setdefault(canonicalize_name(requirement.name), requirement)
        known.specifier &= requirement.specifier
        known.extras |= requirement.extras

    def take(self, module: str) -> None:
        """Want what is declared under the name of a module, or its name of the short list, else a well-known library.

        What is bound is refused.
        """
        names = (canonicalize_name(module), _KNOWN_NAMES.get(module, ""))
        self.refused += [name for name in names if name in self.bound]
        declared = [self.declared[name] for name in names if name in self.declared]
        known = [_WELL_KNOWN[name] for name in names if name in _WELL_KNOWN and name not in self.required]
        for requirement in (*declared, *map(Requirement, known))[:1]:
            self.merge(self.wanted, requirement)


def _without_pins(requirement: Requirement) -> Requirement:
    """Drop exact pins of development tools: old ones have no wheel for a new Python."""
    if any("==" in one.operator and not one.version.endswith(".*") for one in requirement.specifier):
        requirement = copy(requirement)
        requirement.specifier = SpecifierSet()
    return requirement


def read_requirements(source: RepositorySource, missing: Collection[str] = ()) -> Requirements:
    """Everything that the repository says its tests need, tooling left out; ``missing`` as in ``lock_repository``."""
    files = source.files
    projects = find_projects({**source.metadata, **files})
    own_names = {source.name, *(project.name for project in projects)} - {""}
    folders = {f"{IN_TREE}{project.folder}" for project in projects}
    found = Requirements(own=set(map(canonicalize_name, own_names)), folders=folders)
    for project in projects:
        python = "".join(project.strings("project.requires-python")[:1])
        if project.is_needed and not found.python and not fits_python(python):
            found.python = python
        for group, requirements in project.groups.items():
            found.add(group, requirements, is_needed=project.is_needed)
    # What a test imports, or a run misses, is taken where it is declared. Imports of the package itself do not count: an optional
    # accelerator would bring a second implementation of what gets deleted.
    known_here = sys.stdlib_module_names | tree_rules.own_modules(files)
    imported = [imported_modules(data) for name, data in files.items() if is_test_path(name)]
    for module in sorted({*missing}.union(*imported) - known_here):
        found.take(module)
    for name, requirement in found.declared.items():
        if name.startswith("pytest-") and not _TOOLING.fullmatch(name):
            found.wanted.setdefault(name, requirement)
    # Nothing is fetched by a name that is bound to an address, or that the tree itself has.
    for part in (found.required, found.wanted, found.declared):
        for name in part.keys() & {"pytest", *found.bound, *found.own}:
            del part[name]
    return found


def imported_modules(data: bytes) -> set[str]:
    """Top-level names of all modules that a source file imports."""
    tree = parsed(data)
    nodes = list(ast.walk(tree)) if tree else []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def modules_missing(said: Iterable[str]) -> frozenset[str]:
    """The modules that a run did not find, by what it says of its failures."""
    return frozenset(name.partition(".")[0] for text in said for name in _MISSING.findall(text))


def wants_older_pytest(said: Iterable[str]) -> bool:
    """Whether failures of a run show that the suite was written for an earlier pytest."""
    return any(_RUNNER.search(text) for text in said)


def lock_repository(
    source: RepositorySource, missing: Collection[str] = (), newer_than_needed: str = ""
) -> EnvironmentLock:
    """The environment of a repository's tests.

    ``missing`` are modules that a first run did not find, ``newer_than_needed`` a version of pytest that is too new
    for its tests. UnusableRepository: ``another-python``, ``runner-dependency``, ``dependency-by-url``; also as ``resolve``.
    """
    own = canonicalize_name(source.name)
    if own in TOOLCHAIN:
        raise UnusableRepository("runner-dependency", f"the test runner itself imports {own}")
    found = read_requirements(source, missing)
    if found.python:
        asked = f"it asks for Python {found.python}, and this is {platform.python_version()}"
        raise UnusableRepository("another-python", asked)
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

_NUM_NAMED = 3


def refuse_second_copy(source: RepositorySource, environment: Environment) -> None:
    """No module of the tree may also be installed: tests would import the old code.

    Two portions of one namespace package (no ``__init__.py`` in either) may lie side by side.
    """
    roots = tree_rules.recorded_folders(source.files)
    own = {tree_rules.below_root(path, roots) for path in source.files if tree_rules.is_subject_path(path)}
    packages = {path.removesuffix("/__init__.py") for path in own if path.endswith("/__init__.py")}
    for installed in environment.root.glob("lib/python*/site-packages"):
        for path in sorted(own):
            place = PurePosixPath(path.removesuffix("/__init__.py"))
            for one in (place.with_suffix(""), *place.parents[:-1]):
                found = PathFinder.find_spec(one.name, [str(installed / one.parent)])
                if found is not None and (found.origin or str(one) in packages):
                    said = f"the environment holds a module {'.'.join(one.parts)}, too"
                    raise UnusableRepository("runner-dependency", said)


def explain(error: UnusableRepository, source: RepositorySource) -> UnusableRepository:
    """The same refusal with its first cause named, where the files show it: a red baseline is often a later consequence.

    ``missing-requirement``: nothing declares it, or it has no wheel; ``generated-file``: a module that only a build writes or
    compiles; else files that were left out.
    """
    if error.reason != "red-baseline":
        return error
    # Of what cannot be imported from a package only a hidden name is taken for a module.
    hidden = [f"{package}.{name}" for name, package in _NO_NAME.findall(error.detail)]
    names = [*_MISSING.findall(error.detail), *hidden]
    missing, reason, cause = "".join(names[:1]), error.reason, ""
    top, path = missing.partition(".")[0], missing.replace(".", "/")
    is_own = top in tree_rules.own_modules(source.files)
    if missing and not is_own and top not in sys.stdlib_module_names:
        is_bound = bool(read_requirements(source, {top}).refused)
        reason = "dependency-by-url" if is_bound else "missing-requirement"
        nothing = "nothing that is declared (what a setup.py computes is not read) brings it, or it has no wheel for this Python"
        cause = f"the module {top} is missing: {'it is asked for by address' if is_bound else nothing}"
    elif is_own and not any(
        f"/{file}".endswith((f"/{path}.py", f"/{path}/__init__.py")) for file in source.files
    ):
        reason = "generated-file"
        cause = f"the repository has no file for its own module {missing}, which a build may write or compile"
    likeliest = sorted(source.left_out, key=lambda path: path.rpartition("/")[2] not in error.detail)
    more = f" and {len(likeliest) - _NUM_NAMED} more" if len(likeliest) > _NUM_NAMED else ""
    left_out = f"left out: {', '.join(likeliest[:_NUM_NAMED])}{more}" if likeliest else ""
    return UnusableRepository(reason, "; ".join(filter(None, (cause, error.detail, left_out))))
