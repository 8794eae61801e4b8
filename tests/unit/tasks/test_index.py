"""Fetching: from where pip would, only what was asked for, never something else."""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_trees import tar_bytes

from composer_replication.errors import InputError, MissingError
from composer_replication.tasks.intake import index
from composer_replication.tasks.intake.cache import cache_folder
from composer_replication.tasks.intake.index import fetch_wheel
from composer_replication.tasks.intake.sources import open_source


@functools.cache
def sdist() -> bytes:
    files = {
        "pyproject.toml": b'[project]\nname = "tinything"\nversion = "1.0"\n',
        "tinything.py": b"def f():\n    return 1\n",
        "test_tinything.py": b"def test_f():\n    pass\n",
    }
    return tar_bytes(files, "tinything-1.0/")


@functools.cache
def wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        text = "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n"
        archive.writestr("tinything-1.0.dist-info/METADATA", text)
    return buffer.getvalue()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that serves as the only index, and an empty cache."""
    folder = tmp_path / "index"
    page = folder / "tinything"
    page.mkdir(parents=True)
    files = {"tinything-1.0.tar.gz": sdist(), "tinything-1.0-py3-none-any.whl": wheel()}
    links = ""
    for name, data in files.items():
        (page / name).write_bytes(data)
        links += f'<a href="{name}#sha256={hashlib.sha256(data).hexdigest()}">{name}</a>\n'
    (page / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    variables = {
        "INDEX_URL": folder.as_uri(),
        "EXTRA_INDEX_URL": "",
        "FIND_LINKS": "",
        "CONFIG_FILE": "/dev/null",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    index.index_settings.cache_clear()
    yield page
    index.index_settings.cache_clear()


def test_sdist_and_wheel_come_from_the_index_that_pip_uses(served: Path) -> None:
    assert open_source("sdist:tinything==1.0").repository == "tinything==1.0"
    path = fetch_wheel("tinything", "1.0")
    assert path.read_bytes() == wheel()
    assert cache_folder() in path.parents


def test_what_is_in_the_cache_is_not_fetched_again_and_a_damaged_copy_is(served: Path) -> None:
    first = index.fetch_sdist("tinything", "1.0")
    first.write_bytes(b"broken")
    assert index.fetch_sdist("tinything", "1.0").read_bytes() == sdist()
    for path in served.iterdir():
        path.unlink()
    assert index.fetch_sdist("tinything", "1.0") == first


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:9/simple"])
def test_a_version_that_is_not_there_and_an_index_that_cannot_be_reached(
    served: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    if address:
        monkeypatch.setenv("PIP_INDEX_URL", address)
        index.index_settings.cache_clear()
    with pytest.raises(InputError, match="CR0407") as caught:
        open_source("sdist:tinything==9.9")
    assert "file:" not in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)
    assert not [record for record in caplog.records if record.name.startswith("unearth")]


@pytest.mark.parametrize("is_cached", [False, True])
def test_another_hash_names_both(served: Path, is_cached: bool) -> None:
    if is_cached:
        fetch_wheel("tinything", "1.0")
    found = hashlib.sha256(wheel()).hexdigest()
    with pytest.raises(InputError) as caught:
        fetch_wheel("tinything", "1.0", sha256="0" * 64)
    assert caught.value.code == "CR0408"
    assert found in caught.value.message
    assert "0" * 64 in caught.value.message
    assert fetch_wheel("tinything", "1.0", sha256=found).is_file()


def test_other_bytes_than_the_index_promised(served: Path) -> None:
    (served / "tinything-1.0.tar.gz").write_bytes(sdist() + b"x")
    with pytest.raises(InputError, match="CR0408"):
        index.fetch_sdist("tinything", "1.0")


def test_no_index_and_no_links(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(served))
    index.index_settings.cache_clear()
    assert index.fetch_sdist("tinything", "1.0").is_file()


def test_settings_come_from_files_and_variables(
    served: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one.invalid/simple\nextra-index-url =\n    https://two.invalid/simple\n"
        "    https://three.invalid/simple\ntrusted-host = four.invalid\n[install]\ncert = /some/cert\n"
    )
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    index.index_settings.cache_clear()
    settings = index.index_settings()
    assert settings["index-url"] == "https://one.invalid/simple"
    assert settings["extra-index-url"].split() == [
        "https://two.invalid/simple",
        "https://three.invalid/simple",
    ]
    assert settings["trusted-host"] == "four.invalid"
    monkeypatch.setenv("PIP_INDEX_URL", "https://five.invalid/simple")
    index.index_settings.cache_clear()
    assert index.index_settings()["index-url"] == "https://five.invalid/simple"


def test_without_pip_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pip", None)
    with pytest.raises(MissingError, match="CR0440"):
        index.pip_command()


def test_wheels_of_another_machine_do_not_fit() -> None:
    assert index.fits_this_machine("a-1-py3-none-any.whl")
    assert not index.fits_this_machine("a-1-cp27-cp27m-win32.whl")
