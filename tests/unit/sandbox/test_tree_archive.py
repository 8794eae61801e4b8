"""A tree as a tar file: it travels whole, holes stay holes, and nothing is unpacked outside."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from composer_replication.records import SandboxSpec
from composer_replication.sandbox.harbor_backend import _add_shown
from composer_replication.sandbox.harbor_inside import UnsafeTreeError, pack_tree, unpack_tree


def test_a_tree_travels_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d" / "empty").mkdir(parents=True)
    (source / "d" / "f").write_bytes(b"\0\1")
    (source / "d" / "f").chmod(0o751)
    (source / "d").chmod(0o700)
    (source / "link").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    target.mkdir()
    (target / "old").write_text("gone afterwards")
    with (tmp_path / "archive").open("w+b") as archive:
        pack_tree(source, archive)
        archive.seek(0)
        unpack_tree(archive, target)
    assert sorted(path.name for path in target.rglob("*")) == ["d", "empty", "f", "link", "pipe"]
    assert (target / "d" / "f").read_bytes() == b"\0\1"
    assert (target / "d" / "f").stat().st_mode & 0o777 == 0o751
    assert (target / "d").stat().st_mode & 0o777 == 0o700
    assert (target / "link").readlink() == Path("/etc/passwd")


def test_what_cannot_be_packed_is_said(tmp_path: Path) -> None:
    with (tmp_path / "archive").open("wb") as archive, pytest.raises(OSError, match="absent"):
        pack_tree(tmp_path / "absent", archive)


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    return found


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../out")],
        [entry("/etc/cron.d/x")],
        [entry("a/../../out")],
        [entry("link", tarfile.SYMTYPE, ".."), entry("link/out")],
        [entry("file"), entry("file/x")],
        [entry("dev", tarfile.CHRTYPE)],
        [entry("link", tarfile.SYMTYPE, "/etc/passwd"), entry("hard", tarfile.LNKTYPE, "link")],
        [entry("hard", tarfile.LNKTYPE, "../secret")],
    ],
)
def test_an_archive_that_leads_out_is_refused(tmp_path: Path, entries: list[tarfile.TarInfo]) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tmp_path / "secret").write_text("hush")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for one in entries:
            archive.addfile(one)
    buffer.seek(0)
    with pytest.raises(UnsafeTreeError):
        unpack_tree(buffer, tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "tree"]
    assert (tmp_path / "secret").read_text() == "hush"


def test_no_archive_at_all(tmp_path: Path) -> None:
    with pytest.raises(UnsafeTreeError):
        unpack_tree(io.BytesIO(b"tar: error\n" * 100), tmp_path)


def test_a_shown_file_is_sent_whole_though_it_is_hard_linked_to_a_masked_one(tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "hidden").write_text("text")
    os.link(tmp_path / "shown" / "hidden", tmp_path / "shown" / "seen")
    spec = SandboxSpec(tmp_path / "tree", (tmp_path / "shown",))
    with tarfile.open(tmp_path / "archive", "w") as archive:
        _add_shown(archive, spec, {tmp_path / "shown" / "hidden"}, spec.tree)
        assert [entry.isreg() for entry in archive.getmembers()] == [False, True]
