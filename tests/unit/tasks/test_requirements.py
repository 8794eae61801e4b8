"""Requirements are read from files; nothing is run, nothing is guessed."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_trees import write_tree

from composer_replication.records import Outcome
from composer_replication.tasks import repository as repository_module
from composer_replication.tasks.intake import requirements
from composer_replication.tasks.intake.environment import (
    PYTESTS,
    EnvironmentLock,
    LockedWheel,
    UnusableRepository,
)
from composer_replication.tasks.intake.requirements import (
    Requirements,
    imported_modules,
    lock_repository,
    modules_missing,
    read_requirements,
    wants_older_pytest,
)
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.test_run import TestReport
from composer_replication.tasks.workers import OWN_THREADS

PYTHON = ".".join(platform.python_version_tuple()[:2])


def read(metadata: Mapping[str, str], files: Mapping[str, str] | None = None) -> Requirements:
    read_files = {name: text.encode() for name, text in (files or {}).items()}
    about = {name: text.encode() for name, text in metadata.items()}
    return read_requirements(RepositorySource("x", "thing", "1", "", read_files, about))


def texts(found: Requirements) -> set[str]:
    return {str(requirement) for requirement in (*found.required.values(), *found.wanted.values())}


GROUPS = """
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
POETRY = """
[tool.poetry]
name = "thing"
[tool.poetry.dependencies]
python = "^3.8"
alpha = "^1.2"
beta = {version = ">=2", optional = true}
gamma = {version = "~2 || ~3.1"}
[tool.poetry.group.test.dependencies]
delta = "*"
"""
MARKERS = """
[tool.poetry.dependencies]
never = {version = "^1", markers = "sys_platform == 'nowhere'"}
odd = {version = "*", markers = "no ="}
old = {version = "^1", python = "<3"}
new = {version = "*", python = "^3.6"}
other = {version = "^1", platform = "nowhere"}
both = [{version = "^1", python = "<3"}, {version = "^2", python = ">=3"}]
"""
MARKED = f"pywin32==306; sys_platform == 'nowhere'\ntomli>=1; python_version == '{PYTHON}'\npinned==1\n"
INCLUDES_ITSELF = '[dependency-groups]\ntest = ["a", {include-group = "test"}, {include-group = "x"}]'
ENDS_THE_PROCESS = "import os\nos._exit(9)\nsetup(install_requires=compute() + ['x'], tests_require=('y',))\n"


@pytest.mark.parametrize(
    ("name", "text", "more", "wanted"),
    [
        ("pyproject.toml", GROUPS, "", {"alpha>=1", "beta", "gamma[extra]<3", "delta"}),
        ("pyproject.toml", POETRY, "", {"alpha==1.*,>=1.2", "gamma==3.1.*,>=3.1", "delta"}),
        ("pyproject.toml", MARKERS, MARKED, {"odd", "new", "both==2.*,>=2", "tomli>=1", "pinned"}),
        ("pyproject.toml", INCLUDES_ITSELF, "", {"a"}),
        ("setup.py", ENDS_THE_PROCESS, "", {"x", "y"}),  # it is read and not run
    ],
    ids=["groups of tests", "poetry", "markers", "a group that includes itself", "setup.py"],
)
def test_what_a_project_file_asks_for(name: str, text: str, more: str, wanted: set[str]) -> None:
    assert texts(read({name: text, "requirements-test.txt": more})) == wanted


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


def test_declared_ones_are_taken_where_tests_import_them() -> None:
    metadata = {
        "tox.ini": "[testenv]\ndeps =\n    py{38,39}: needed==1.0\n    other\n    pytest-mock\n    pytest-cov\n"
    }
    files = {
        "tests/test_thing.py": "import needed.part\nfrom hypothesis import given\nimport unknown_package, json, thing\n",
        "thing/__init__.py": "try:\n    import other\nexcept ImportError:\n    pass\n",
    }
    assert texts(read(metadata, files)) == {"needed", "hypothesis", "pytest-mock"}


def test_broken_files_say_nothing() -> None:
    found = read({"pyproject.toml": "[[", "setup.cfg": "no section", "setup.py": "def (", "tox.ini": "[x\n"})
    assert (found.required, found.refused) == ({}, [])


def test_imported_modules() -> None:
    source = b"import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    import i\n"
    assert imported_modules(source) == {"a", "c", "d", "i"}
    assert imported_modules(b"def (") == set()


@pytest.mark.parametrize(
    "table",
    [
        '[tool.poetry.dependencies]\nfromgit = {git = "https://example.invalid/x"}',
        '[tool.poetry.dependencies]\nfromgit = {path = "../x"}',
        '[tool.poetry.dependencies]\nfromgit = {version = "1", source = "private"}',
        '[project]\ndependencies = ["fromgit"]\n[tool.uv.sources]\nfromgit = {git = "https://example.invalid/x"}',
        '[project]\ndependencies = ["fromgit"]\n[tool.uv.sources]\nFrom-Git = {git = "x"}\nfromgit = {workspace = true}',
        '[project]\ndependencies = ["fromgit"]\n[tool.uv.sources]\nfromgit = [{index = "private"}]',
        '[project]\ndependencies = ["fromgit"]\n[tool.poetry.dependencies]\nfromgit = {git = "x"}',
        '[project]\ndependencies = ["fromgit @ file:///elsewhere", "a"]',
        '[tool.pdm.dev-dependencies]\ntest = ["-e file:///${PROJECT_ROOT}/../x#egg=fromgit"]',
        '[dependency-groups]\ndev = ["fromgit @ git+https://example.invalid/x"]',
        '[dependency-groups]\ndev = ["fromgit==1"]\n[tool.uv.sources]\nfromgit = {git = "x"}',
    ],
)
def test_what_is_bound_to_an_address_is_never_asked_for_by_name(table: str) -> None:
    files = {"tests/test_a.py": "import fromgit\n", "requirements-test.txt": "fromgit>=1\n"}
    found = read({"pyproject.toml": table, "requirements-test.txt": "fromgit>=1\n"}, files)
    assert "fromgit" in found.refused
    assert texts(found) == ({"a"} if '"a"' in table else set())
    assert "fromgit" not in found.declared


@pytest.mark.parametrize(
    "line", ["./libs/x", "-e ./libs/x", "x @ file:libs/x", "file:./libs/x", "-e libs/x", "libs/x/"]
)
def test_what_lies_in_the_tree_is_used_from_there(line: str) -> None:
    project = '[project]\nname = "x"\ndependencies = ["needed-by-x"]\n'
    found = read(
        {"pyproject.toml": "", "requirements-test.txt": f"{line}\n", "requirements.txt": "x\n"},
        {"libs/x/pyproject.toml": project, "libs/x/x.py": "", "tests/test_a.py": "import x\n"},
    )
    assert found.refused == []
    assert "x" not in {*found.required, *found.wanted, *found.declared}
    poetry = read(
        {"pyproject.toml": '[tool.poetry.dependencies]\nx = {path = "libs/x", develop = true}'},
        {"libs/x/pyproject.toml": project, "libs/x/x.py": ""},
    )
    assert (poetry.refused, texts(poetry)) == ([], {"needed-by-x"})


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": '[tool.setuptools.dynamic]\ndependencies = {file = ["needs.txt"]}', "needs.txt": "alpha>=1\n"},
        {"pyproject.toml": '[tool.setuptools.dynamic]\ndependencies = {file = "needs.in"}', "needs.in": "alpha>=1\n"},
        {
            "pyproject.toml": '[project]\ndynamic = ["dependencies"]\n[tool.hatch.metadata.hooks.requirements_txt]\nfiles = ["requirements.txt"]',
            "requirements.txt": "-r reqs/more.txt\n",
            "reqs/more.txt": "alpha>=1\n",
        },
        {"setup.cfg": "[options]\ninstall_requires = file: requirements.txt\n", "requirements.txt": "alpha>=1\n"},
        {"setup.py": "NEEDS = ['alpha>=1']\nsetup(install_requires=NEEDS)"},
        {"setup.py": "NEEDS: list[str] = ['alpha>=1']\nsetup(install_requires=NEEDS)"},
        {"setup.py": f"setup(install_requires=['alpha>=1'], long_description='{'a' * 6_000}')"},
        {"pyproject.toml": "[tool.poetry.dependencies]\nalpha = '>=1.*'"},
        {"setup.py": "BASE = ['alpha']\nNEEDS = BASE + ['alpha>=1']\nsetup(**dict(install_requires=NEEDS))"},
        {"setup.py": "args = {'install_requires': ['alpha>=1']}\nsetup(**args)"},
        {"setup.py": "\ufeffsetup(install_requires='alpha>=1')"},
        {"setup.py": "setup(install_requires=open('requirements.txt').read().splitlines())", "requirements.txt": "alpha>=1\n"},
        {
            "setup.py": "with open('requirements.txt') as f:\n    needs = [line.strip() for line in f]\nsetup(install_requires=needs)",
            "requirements.txt": "alpha>=1\n",
        },
        {
            "setup.py": "def read(name):\n    return open(join(here, 'reqs', name)).readlines()\nsetup(install_requires=read('reqs/base.txt'))",
            "reqs/base.txt": "alpha>=1\n",
            "requirements.txt": "beta\n",
        },
        {
            "setup.py": "def needs():\n    with open('requirements.txt') as f:\n        return f.readlines()\nsetup(install_requires=needs())",
            "requirements.txt": "alpha>=1\n",
        },
        {"setup.py": "setup(install_requires=open('deps.txt').readlines())", "deps.txt": "alpha>=1\n"},
        {
            "setup.py": "needs = []\nfor line in open('requirements.txt'):\n    needs.append(line)\nsetup(install_requires=needs)",
            "requirements.txt": "alpha>=1\n",
        },
        {"setup.py": "setup(install_requires=find_needs('requirements.txt'))", "requirements.txt": "alpha>=1\n"},
        {"setup.py": "setup(extras_require={'test': {'alpha>=1'}})"},
        {
            "setup.py": "settings.update(install_requires=read('reqs/base.txt'), tests_require=read('reqs/tests.txt'))\nsetup(**settings)",
            "reqs/base.txt": "alpha>=1\n",
        },
        {"setup.py": "extras = {'a': ['alpha>=1']}\nextras['test'] = ['alpha>=1'] + ['gamma']\nsetup(extras_require=extras)"},
        {"setup.py": "setup(requires=['alpha>=1'], extras_require={':python_version < \"3\"': ['old'], 'docs': ['sphinx']})"},
    ],
)  # fmt: skip
def test_requirements_are_taken_from_where_the_project_names_them(files: Mapping[str, str]) -> None:
    assert "alpha>=1" in texts(read(files))
    assert not {"beta", "old", "sphinx"} & texts(read(files))


@pytest.mark.parametrize(
    "table",
    [
        '[dependency-groups]\ndev = [{include-group = "more"}]\nmore = ["respx"]',
        '[tool.uv]\ndev-dependencies = ["respx"]',
        '[tool.pdm.dev-dependencies]\ntesting = ["respx"]',
        '[tool.poetry.group.dev.dependencies]\nrespx = "*"',
        '[tool.hatch.envs.default]\ndependencies = ["respx"]',
        '[tool.hatch.envs.hatch-test]\nextra-dependencies = ["respx"]',
        '[project]\nname = "thing"\n[project.optional-dependencies]\ndev = ["thing[all]"]\nall = ["respx"]',
        '[tool.poetry.dependencies]\nrespx = {version = "*", optional = true}\n[tool.poetry.extras]\ntest = ["respx"]',
        '[tool.poetry.dependencies]\nrespx = {version = "*", optional = true, markers = "extra == \\"test\\""}\n[tool.poetry.extras]\ntest = ["respx"]',
    ],
)
def test_groups_of_tests_and_developers_are_wanted(table: str) -> None:
    assert texts(read({"pyproject.toml": table})) == {"respx"}


def test_a_project_that_its_tests_ask_for_by_address_is_the_one_in_the_tree() -> None:
    lines = (
        "-e git+https://example.invalid/thing#egg=thing\nthing[more] @ https://example.invalid/thing.zip\n"
    )
    table = '[project]\nname = "thing"\n[project.optional-dependencies]\nmore = ["alpha"]\n'
    found = read({"pyproject.toml": table, "requirements-test.txt": lines})
    assert (found.refused, texts(found)) == ([], {"alpha"})


def test_extras_that_ask_for_one_another_are_each_read_once() -> None:
    rows = "".join(f'e{n} = ["thing[e{n + 1}]", "thing[e{n + 2}]"]\n' for n in range(60))
    table = f'[project]\nname = "thing"\n[project.optional-dependencies]\n{rows}e60 = ["alpha"]\ntest = ["thing[e0]"]\n'
    assert texts(read({"pyproject.toml": table})) == {"alpha"}


MANY = "1" * 5000
EXTRAS = "".join(f"e{n} = ['x[e{n + 1}]']\n" for n in range(1200))
NESTED = f"{'(' * 3000}os_name == 'posix'{')' * 3000}"


@pytest.mark.parametrize(
    "metadata",
    [
        {f"requirements{n}.txt": f"-r requirements{n + 1}.txt\n" * 2 for n in range(60)},
        {f"requirements{n}.txt": f"-r requirements{n + 1}.txt\n" for n in range(1200)},
        {"pyproject.toml": f"[project]\nname = 'x'\n[project.optional-dependencies]\n{EXTRAS}"},
        {"pyproject.toml": f"{'.'.join(['a'] * 2000)}.dependencies = ['y']"},
        {"pyproject.toml": f'[project]\ndependencies = ["a; {NESTED}"]'},
        {"pyproject.toml": f'[tool.poetry.dependencies]\na = {{version = "1", markers = "{NESTED}"}}'},
        {"pyproject.toml": f"[tool.poetry.dependencies]\npython = '^{MANY}'\na = '^{MANY}'"},
        {"pyproject.toml": f"[project]\nrequires-python = '>={MANY}'"},
        {"pyproject.toml": f"[project]\ndependencies = ['a>={MANY}', 'pytest<{MANY}', 'iniconfig<{MANY}']"},
        {"PKG-INFO": f"Name: x\nRequires-Dist: a; {NESTED}\n"},
    ],
)  # fmt: skip
def test_what_nests_or_counts_without_end_is_passed_over(
    metadata: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(requirements, "resolve", lambda needed, *_, **__: asked.append(needed) or LOCK)
    about = {name: text.encode() for name, text in metadata.items()}
    lock_repository(RepositorySource("x", "thing", "1", "", {}, about))
    assert {one.name for one in asked[0]} <= {"a"}


def test_a_module_of_the_package_that_is_called_like_a_library_hides_nothing() -> None:
    metadata = {"pyproject.toml": '[project.optional-dependencies]\nasyncio = ["anyio"]'}
    files = {"thing/backends/anyio.py": "", "tests/test_a.py": "import anyio\n"}
    assert texts(read(metadata, files)) == {"anyio"}


def test_another_python_is_said_before_anything_else() -> None:
    source = RepositorySource(
        "x", "thing", "1", "", {}, {"pyproject.toml": b'[project]\nrequires-python = "<3"\ndependencies = ["a @ https://x"]'}
    )  # fmt: skip
    with pytest.raises(UnusableRepository, match="Python <3") as caught:
        lock_repository(source)
    assert caught.value.reason == "another-python"


# --- what a first run misses is looked for once more ---


PROJECT = """
[project]
name = "caller"
version = "1.0"
[project.optional-dependencies]
http2 = ["h2>=3"]
fast = ["accelerator"]
[dependency-groups]
dev = ["coverage", "ruff", "pytest<9"]
"""
WHEEL = LockedWheel("pytest", PYTESTS[0], "pytest.whl", "0" * 64)
LOCK = EnvironmentLock("3", (WHEEL,), WHEEL)


def source_of(folder: Path, files: Mapping[str, str]) -> RepositorySource:
    write_tree(folder, {"pyproject.toml": PROJECT, **files})
    return open_source(str(folder))


CALLER_FILES = {
    "caller/__init__.py": "def call():\n    import h2\n    return h2\n",
    "tests/test_it.py": "from hpack import Table\n\n\ndef test_it():\n    assert Table()\n",
}


def test_a_missing_module_brings_the_declared_one_of_its_name(tmp_path: Path) -> None:
    source = source_of(tmp_path / "caller", CALLER_FILES)
    assert "accelerator" not in read_requirements(source, {"hpack"}).wanted
    assert "accelerator" in read_requirements(source, {"accelerator"}).wanted
    assert "setuptools" in read_requirements(source, {"pkg_resources"}).wanted


def test_what_a_run_says_tells_what_it_misses() -> None:
    module = "E   ModuleNotFoundError: No module named 'hpack.table'"
    said = [module, "could not import 'x': No module named 'x'"]
    assert modules_missing(said) == {"hpack", "x"}
    assert wants_older_pytest(["AttributeError: module '_pytest.monkeypatch' has no attribute 'notset'"])
    assert wants_older_pytest(["ImportError: cannot import name 'notset' from '_pytest.monkeypatch'"])
    assert not wants_older_pytest(said)


def test_the_runner_is_as_old_as_declared_and_the_package_stays_out_of_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(*_: object, pytest: str) -> EnvironmentLock:
        asked.append(pytest)
        return EnvironmentLock("3", (WHEEL, replace(WHEEL, name="caller")), WHEEL)

    monkeypatch.setattr(requirements, "resolve", resolve)
    source = source_of(tmp_path / "caller", CALLER_FILES)
    assert [wheel.name for wheel in lock_repository(source).wheels] == ["pytest"]
    lock_repository(source, newer_than_needed=PYTESTS[1])
    assert asked == list(PYTESTS[1:])


def test_a_range_of_poetry_is_no_pin_of_the_runner() -> None:
    found = read({"pyproject.toml": '[tool.poetry.dev-dependencies]\npytest = "^7"\na = "^1.2"\nb = "1.2"'})
    assert [version for version in PYTESTS if found.pytest.contains(version)] == ["7.4.4"]
    assert texts(found) == {"a==1.*,>=1.2", "b"}


def test_the_environment_with_the_most_green_tests_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = {
        "": TestReport({"t": Outcome.PASSED}, ("t",), "", 0.0, why={"u": "No module named 'one'"}),
        "one": TestReport({"t": Outcome.PASSED, "u": Outcome.PASSED}, ("t", "u"), "", 0.0, why={"v": "No module named 'two'"}),
        "one two": TestReport({}, (), "", 0.0),
    }  # fmt: skip
    patches = {
        "lock_repository": lambda _, missing, __: EnvironmentLock(" ".join(sorted(missing)), (WHEEL,), WHEEL),
        "open_environment": lambda lock, backend: SimpleNamespace(fingerprint=lock.python),
        "refuse_second_copy": lambda *_: None,
        "run_suite": lambda bench, with_calls: (reports[bench.environment.fingerprint], {}),
    }
    for name, value in patches.items():
        monkeypatch.setattr(repository_module, name, value)
    source = source_of(tmp_path / "caller", CALLER_FILES)
    bench, report, _ = repository_module._with_what_is_missing(
        source, OWN_THREADS, None, 1.0, with_calls=False
    )
    assert (bench.environment.fingerprint, report) == ("one", reports["one"])
