"""Requirements are read from files; nothing is run, nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping

from composer_replication.tasks.intake.requirements import Requirements, imported_modules, read_requirements
from composer_replication.tasks.intake.sources import RepositorySource


def read(metadata: Mapping[str, str], files: Mapping[str, str] | None = None) -> Requirements:
    return read_requirements(
        RepositorySource(
            source="x",
            name="thing",
            version="1",
            sha256="",
            files={name: text.encode() for name, text in (files or {}).items()},
            metadata={name: text.encode() for name, text in metadata.items()},
        )
    )


def texts(found: Requirements) -> set[str]:
    return {str(requirement) for requirement in (*found.required.values(), *found.wanted.values())}


def test_pyproject_dependencies_and_test_groups() -> None:
    found = read(
        {
            "pyproject.toml": """
[project]
dependencies = ["alpha>=1", "old ; python_version < '3'"]
[project.optional-dependencies]
test = ["beta", "pytest>=6", "pytest-cov", "ruff"]
speed = ["accelerator"]
[dependency-groups]
tests = ["gamma[extra]<3", {include-group = "more"}]
more = ["delta"]
docs = ["sphinx"]
"""
        }
    )
    assert texts(found) == {"alpha>=1", "beta", "gamma[extra]<3", "delta"}


def test_a_group_that_includes_itself_ends() -> None:
    found = read(
        {
            "pyproject.toml": '[dependency-groups]\ntest = ["a", {include-group = "test"}, {include-group = "x"}]'
        }
    )
    assert texts(found) == {"a"}


def test_package_info_setup_cfg_setup_py_and_requirement_files() -> None:
    found = read(
        {
            "PKG-INFO": "Name: thing\nRequires-Dist: alpha>=1\nRequires-Dist: beta; extra == 'test'\n"
            "Requires-Dist: gamma; extra == 'docs'\n\nRequires-Dist: not-a-header\n",
            "setup.cfg": "[options]\ninstall_requires =\n    delta\n[options.extras_require]\ntests =\n    epsilon\n    tox\n",
            "setup.py": "setup(install_requires=['zeta'], tests_require=['eta'], extras_require={'testing': ['theta']})\n",
            "requirements/tests.txt": "iota==1.0 --hash=sha256:00\n# comment\n-r other.txt\n--index-url http://x\nkappa # why\n",
            "requirements.txt": "only-declared\n",
        }
    )
    assert texts(found) == {"alpha>=1", "beta", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"}
    assert "only-declared" in found.declared


def test_an_extra_of_package_info_may_ask_for_more_than_an_extra() -> None:
    rows = (
        "elsewhere; sys_platform == 'nowhere' and extra == 'test'",
        "old; (python_version < '3') and extra == 'tests'",
        "here; extra == 'test' and python_version >= '3'",
        "second; extra == 'docs' or extra == 'test'",
        "always; extra == 'docs' or python_version >= '3'",
        "documented; extra == 'docs'",
        "never; sys_platform == 'nowhere'",
        "no requirement",
    )
    found = read({"PKG-INFO": "Name: thing\n" + "".join(f"Requires-Dist: {row}\n" for row in rows)})
    assert texts(found) == {"here", "second", "always"}
    assert {"documented", "second"} <= set(found.declared)
    assert not {"elsewhere", "old", "never"} & set(found.declared)


def test_poetry() -> None:
    found = read(
        {
            "pyproject.toml": """
[tool.poetry]
name = "thing"
[tool.poetry.dependencies]
python = "^3.8"
alpha = "^1.2"
beta = {version = ">=2", optional = true}
gamma = {version = "~3.1"}
[tool.poetry.group.test.dependencies]
delta = "*"
"""
        }
    )
    assert texts(found) == {"alpha<2,>=1.2", "gamma<3.2,>=3.1", "delta"}


def test_declared_ones_are_taken_where_tests_import_them() -> None:
    metadata = {
        "tox.ini": "[testenv]\ndeps =\n    py{38,39}: needed==1.0\n    other\n    pytest-mock\n    pytest-cov\n"
    }
    files = {
        "tests/test_thing.py": "import needed.part\nfrom hypothesis import given\nimport unknown_package, json, thing\n",
        "thing/__init__.py": "try:\n    import other\nexcept ImportError:\n    pass\n",
    }
    assert texts(read(metadata, files)) == {"needed", "hypothesis", "pytest-mock"}


def test_addresses_are_refused_and_never_passed_on() -> None:
    found = read(
        {"pyproject.toml": '[project]\ndependencies = ["evil @ git+https://example.invalid/evil", "a"]'}
    )
    assert found.refused == ["evil"]
    assert texts(found) == {"a"}


def test_broken_files_say_nothing() -> None:
    found = read({"pyproject.toml": "[[", "setup.cfg": "no section", "setup.py": "def (", "tox.ini": "[x\n"})
    assert (found.required, found.refused) == ({}, [])


def test_setup_py_is_read_and_not_run() -> None:
    found = read(
        {
            "setup.py": "import os\nos._exit(9)\nsetup(install_requires=compute() + ['x'], tests_require=('y',))\n"
        }
    )
    assert texts(found) == {"x", "y"}


def test_imported_modules() -> None:
    source = b"import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    import i\n"
    assert imported_modules(source) == {"a", "c", "d", "i"}
    assert imported_modules(b"def (") == set()
