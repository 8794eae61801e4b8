"""What a package asks of its own metadata it is told, wherever the project writes its name and version."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from composer_replication.tasks.intake.sources import RepositorySource, open_source

CODE = {"pkg/__init__.py": "", "tests/test_a.py": "def test_a():\n    pass\n"}


def opened(tmp_path: Path, files: Mapping[str, str]) -> RepositorySource:
    root = tmp_path / "folder"
    for name, text in {**CODE, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return open_source(str(root))


def found_version(source: RepositorySource, name: str, folder: Path) -> str | None:
    """What ``importlib.metadata`` finds in the task tree."""
    for path, data in source.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return next((one.version for one in Distribution.discover(name=name, path=[str(folder)])), None)


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"pyproject.toml": '[project]\nname = "Some-Thing.x"\nversion = "2.1"\n'}, "2.1"),
        ({"pyproject.toml": '[project]\nname = "some.thing_x"\ndynamic = ["version"]\n'}, "0"),
        (
            {"pyproject.toml": '[project]\nname = "some-thing-x"\n[tool.poetry]\nversion = "3.0"\n'},
            "3.0",
        ),
        ({"setup.cfg": "[metadata]\nname = some-thing-x\nversion = attr: pkg.__version__\n"}, "0"),
        ({"setup.cfg": "[metadata]\nname = some-thing-x\n", "setup.py": 'setup(version="4")\n'}, "4"),
        ({"setup.py": 'import setuptools\nsetuptools.setup(name="some-thing-x", version="5.1")\n'}, "5.1"),
        ({"setup.py": 'setup(name="some-thing-x", version=read_it())\n'}, "0"),
    ],
)
def test_a_package_finds_its_own_version(tmp_path: Path, files: Mapping[str, str], version: str) -> None:
    source = opened(tmp_path, files)
    assert source.name == "some-thing-x"
    assert found_version(source, "some-thing-x", tmp_path / "tree") == version


@pytest.mark.parametrize(
    "setup",
    [
        "setup(**read())\n",
        "def (\n",
        'other(name="no", version="1")\n',  # not setup
        'setup(name=NAME, version=("1",))\n',
    ],
)
def test_a_name_that_only_running_would_tell_is_that_of_the_folder(tmp_path: Path, setup: str) -> None:
    source = opened(tmp_path, {"setup.py": setup})
    assert (source.name, source.version) == ("folder", "")
    assert not [path for path in source.files if path.endswith("METADATA")]
