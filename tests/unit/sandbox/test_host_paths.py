from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from composer_replication.sandbox.host_paths import (
    base_interpreter,
    base_python,
    resolve_links,
    system_folders,
)

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Two interpreters side by side below a home folder, as pyenv keeps them."""
    for version in ("3.8.1", "3.11.7"):
        for name in (f"bin/{VERSION}", f"lib/{VERSION}/os.py", f"lib/{VERSION}/site-packages/old/__init__.py",
                     f"lib/{VERSION}/ensurepip/_bundled/pip.whl", "lib/libpython.so", "pkgs/cache/old.py"):  # fmt: skip
            path = tmp_path / "home" / "versions" / version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    return tmp_path / "home" / "versions" / "3.11.7"


def test_an_own_prefix_shows_its_programs_and_library_without_packages_and_neighbours(prefix: Path) -> None:
    found, library = base_interpreter(str(prefix)), prefix / "lib" / VERSION
    assert set(found.read_only) == {prefix / "bin", prefix / "lib"}
    assert set(found.masked) == {library / "site-packages", library / "ensurepip" / "_bundled"}


def test_the_real_base_interpreter_can_be_started_from_what_is_shown() -> None:
    shown = [path.resolve() for path in (*base_interpreter().read_only, *system_folders().read_only)]
    assert any(folder in base_python().resolve().parents for folder in shown)
    assert any(folder == Path(os.__file__).resolve().parent or folder in Path(os.__file__).resolve().parents
               for folder in shown)  # fmt: skip


def test_no_shown_folder_of_the_system_holds_unmasked_packages() -> None:
    system = system_folders()
    for folder in system.read_only:
        for pattern in ("python*/site-packages", "python*/dist-packages"):
            for packages in folder.glob(pattern) if folder.is_dir() else ():
                assert packages in system.masked


def test_private_folders_of_the_host_are_not_shown() -> None:
    shown = {path.resolve() for path in (*system_folders().read_only, *base_interpreter().read_only)}
    for hidden in "/ /etc /home /root /tmp /usr /usr/local /var /opt /proc /sys /dev".split():
        assert Path(hidden) not in shown


def test_links_on_the_way_are_listed_in_order(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "real" / "inner" / "file").write_text("")
    (tmp_path / "one").symlink_to("real")
    (tmp_path / "real" / "two").symlink_to(tmp_path / "real" / "inner")
    real, links = resolve_links(tmp_path / "one" / "two" / "file")
    assert real == tmp_path / "real" / "inner" / "file"
    assert links == (
        (tmp_path / "one", "real"),
        (tmp_path / "real" / "two", str(tmp_path / "real" / "inner")),
    )


def test_links_that_go_round_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert len(resolve_links(tmp_path / "a")[1]) == 40


def test_dots_in_a_link(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "up").symlink_to("../y/./z")
    assert resolve_links(tmp_path / "x" / "up")[0] == tmp_path / "y" / "z"
