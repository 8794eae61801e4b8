"""Foreign archives and folders: the good ones are read, the hostile ones refused in one sentence."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_trees import tar_bytes, write_tree

from composer_replication.errors import InputError
from composer_replication.tasks.intake import archives
from composer_replication.tasks.intake.archives import list_archive
from composer_replication.tasks.intake.packed_forms import Budget
from composer_replication.tasks.intake.sources import open_source

Pack = Callable[..., Path]

GOOD = {
    "pyproject.toml": b'[project]\nname = "Some_Thing"\nversion = "2.1"\n',
    "thing/__init__.py": b"def f():\n    return 1\n",
    "thing/data.json": b"{}",
    "tests/test_thing.py": b"def test_f():\n    pass\n",
    "tests/data/table.csv": b"1,2\n",
}
LEAKS = {
    ".git/objects/aa/bb": b"old code",
    "thing/__pycache__/__init__.cpython-311.pyc": b"code",
    "build/lib/thing/__init__.py": b"def f():\n    return 1\n",
    "dist/thing-2.1-py3-none-any.whl": b"wheel",
    "thing.egg-info/SOURCES.txt": b"names",
    ".mypy_cache/thing.json": b"{}",
    ".mypy_cache/3.11/cache.db": b"f",
    ".pytype/pyi/thing/__init__.pyi": b"def f(): ...",
    ".pytest_cache/v/cache/nodeids": b"[]",
    "typings/thing/__init__.pyi": b"def f(): ...",
    ".cache/pip/http-v2/a/b.body": b"wheel",
    ".cache/uv/archive-v0/x/thing/__init__.py": b"def f():\n    return 1\n",
    ".tox/py/lib/thing.py": b"def f():\n    return 1\n",
    "thing-2.1.egg": b"egg",
    "dist/thing-2.1.tar.gz": b"sdist",
    "tests/__pycache__/test_thing.cpython-311.pyc": b"code",
    ".venv/lib/thing.py": b"def f():\n    return 1\n",
    "docs/howto.md": b"return 1",
    "notebook.ipynb": b"{}",
    "thing/fast.so": b"elf",
    "tests/old.orig": b"x",
    "CHANGELOG.md": b"x",
}


def tar_of(path: Path, files: Mapping[str, bytes], top: str = "thing-2.1/") -> Path:
    path.write_bytes(tar_bytes(files, top))
    return path


def zip_of(path: Path, files: Mapping[str, bytes], top: str = "thing-2.1/") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(top + name, data)
    return path


@pytest.mark.parametrize("kind", ["folder", "tar", "zip", "flat tar"])
def test_every_kind_gives_the_same_tree(tmp_path: Path, kind: str) -> None:
    files = {**GOOD, **LEAKS}
    if kind == "folder":
        path = write_tree(tmp_path / "thing", files)
    elif kind == "zip":
        path = zip_of(tmp_path / "thing-2.1.zip", files)
    else:
        path = tar_of(tmp_path / "thing-2.1.tar.gz", files, top="" if kind == "flat tar" else "thing-2.1/")
    source = open_source(str(path))
    assert source.repository == "some-thing==2.1"
    generated = source.files["some_thing-2.1.dist-info/METADATA"]
    assert generated.decode().splitlines()[1:] == ["Name: Some_Thing", "Version: 2.1"]
    assert {name: data for name, data in source.files.items() if "dist-info" not in name} == GOOD
    assert len(source.sha256) == 64


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_what_macos_puts_beside_the_files_is_not_there(tmp_path: Path, pack: Pack) -> None:
    packed = {f"thing-2.1/{name}": data for name, data in GOOD.items()}
    beside = {
        "__MACOSX/thing-2.1/._pyproject.toml": b"\0\5\26\7",
        "._thing-2.1": b"\0\5\26\7",
        ".DS_Store": b"\0\0\0\1Bud1",
        "thing-2.1/tests/.DS_Store": b"\0\0\0\1Bud1",
        "thing-2.1/tests/._test_thing.py": b"\0\5\26\7",
        "thing-2.1/thing/._data.json": b"\0\5\26\7",
    }
    name = "a.zip" if pack is zip_of else "a.tar.gz"
    source = open_source(str(pack(tmp_path / name, {**packed, **beside}, top="")))
    assert {name: data for name, data in source.files.items() if "dist-info" not in name} == GOOD
    assert source.left_out == ()
    write_tree(tmp_path / "b", {**packed, **beside})
    assert open_source(str(tmp_path / "b" / "thing-2.1")).files == source.files


def test_a_folder_has_its_hash_by_its_tree_and_its_links_are_not_followed(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "thing", {**GOOD, **LEAKS})
    first = open_source(str(root))
    (tmp_path / "secret.py").write_text("SECRET = 1\n")
    (root / "thing" / "link.py").symlink_to(tmp_path / "secret.py")
    (root / "linked").symlink_to(tmp_path)
    (root / "CHANGELOG.md").write_text("left out anyway")
    again = open_source(str(root))
    assert (again.files, again.sha256) == (first.files, first.sha256)
    (root / "thing" / "__init__.py").write_text("def f():\n    return 2\n")
    assert open_source(str(root)).sha256 != first.sha256


# the second is an unset variable of a shell, and not this folder
@pytest.mark.parametrize("source", ["no/such/path", "", "sdist:toolz", "sdist:toolz>=1", "sdist:../x==1"])
def test_a_wrong_source_is_one_sentence(source: str) -> None:
    with pytest.raises(InputError, match="CR0402") as caught:
        open_source(source)
    assert caught.value.where == source


def without(name: str) -> dict[str, bytes]:
    return {path: data for path, data in GOOD.items() if path != name}


@pytest.mark.parametrize("files", [without("pyproject.toml"), {"pyproject.toml": b"", "README.md": b""}])
def test_an_unusable_project_is_one_sentence(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(InputError, match="CR0402"):
        open_source(str(write_tree(tmp_path / "thing", files)))


def tar_with(path: Path, kind: bytes, target: str = "") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in (*GOOD, "thing/special.py"):
            info = tarfile.TarInfo(name)
            info.size = len(GOOD.get(name, b""))
            if name not in GOOD:
                info.type, info.linkname = kind, target
            archive.addfile(info, io.BytesIO(GOOD.get(name, b"")))
    return path


def zip_with_link(path: Path) -> Path:
    info = zipfile.ZipInfo("thing/link.py")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(zip_of(path, GOOD, top=""), "a") as archive:
        archive.writestr(info, "../../etc/passwd")
    return path


CLIMBING = ("../evil.py", "/etc/evil.py", "a/../../evil.py")


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        *((lambda path, name=name: tar_of(path, {**GOOD, name: b"x"}, top=""), "leaves the archive") for name in CLIMBING),
        *((lambda path, name=name: zip_of(path, {**GOOD, name: b"x"}, top=""), "leaves the archive") for name in CLIMBING),
    ],
)  # fmt: skip
def test_a_hostile_archive_is_refused(tmp_path: Path, pack: Callable[[Path], Path], words: str) -> None:
    path = pack(tmp_path / "packed")
    path = path.rename(tmp_path / ("evil.zip" if zipfile.is_zipfile(path) else "evil.tar.gz"))
    with pytest.raises(InputError, match=f"CR0402.*{words}"):
        open_source(str(path))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "pack",
    [
        *(lambda path, kind=kind: tar_with(path, kind, "/etc/passwd") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)),
        *(lambda path, kind=kind: tar_with(path, kind) for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE)),
        zip_with_link,
    ],
)  # fmt: skip
def test_links_and_devices_of_an_archive_are_not_read(tmp_path: Path, pack: Callable[[Path], Path]) -> None:
    path = pack(tmp_path / "packed")
    path = path.rename(tmp_path / ("evil.zip" if zipfile.is_zipfile(path) else "evil.tar.gz"))
    found = open_source(str(path))
    assert not [name for name in found.files if "special" in name or "link" in name]
    assert found.left_out


@pytest.mark.parametrize(
    ("limit", "value", "packed"),
    [
        ("MAX_MEMBERS", 3, "unpacks to too much"),
        ("MAX_MEMBER_BYTES", 20, "a task tree has at most"),
        ("MAX_TOTAL_BYTES", 50, "(unpacks to too much|a task tree has at most)"),
    ],
)
@pytest.mark.parametrize("name", ["thing.tar.gz", "thing.zip", "thing"])
def test_what_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, packed: str, name: str
) -> None:  # fmt: skip
    pack: Pack = {"thing.tar.gz": tar_of, "thing.zip": zip_of, "thing": write_tree}[name]
    path = pack(tmp_path / name, GOOD)
    monkeypatch.setattr(archives, limit, value)
    words = "a task tree has at most" if name == "thing" else packed
    with pytest.raises(InputError, match=f"CR0402.*{words}"):
        open_source(str(path))


@pytest.mark.parametrize("name", ["broken.tar.gz", "broken.zip", "broken.tar"])
@pytest.mark.parametrize("data", [b"", b"this is no archive at all" * 40, b"\x1f\x8b\x08\x00rest"])
def test_a_damaged_archive_is_one_sentence(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert sentence(tmp_path / name)


# --- members of a foreign zip ---


MIB = 1024**2


def read_members(path: Path) -> dict[str, bytes]:
    return list_archive(path).read()


def sentence(path: Path) -> str:
    with pytest.raises(InputError, match="CR0402") as caught:
        read_members(path)
    return caught.value.message


def zip_bytes(method: int, data: bytes = b"x = 1\n" * 200) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("thing/a.py", data)
    return out.getvalue()


LOCAL, CENTRAL = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")


def patched(data: bytes, *, flags: int = 0, method: int | None = None, size: int | None = None) -> bytes:
    """The one member's two headers with other flags, method or size."""
    made = bytearray(data)
    for layout, at, field in ((LOCAL, 0, 2), (CENTRAL, data.rindex(b"PK\x01\x02"), 3)):
        fields = list(layout.unpack_from(made, at))
        fields[field] |= flags
        fields[field + 1] = fields[field + 1] if method is None else method
        fields[field + 6] = fields[field + 6] if size is None else size
        layout.pack_into(made, at, *fields)
    return bytes(made)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_stored_and_deflated_members_come_whole(tmp_path: Path, method: int) -> None:
    data = os.urandom(3 * MIB) + b"x" * 500  # longer than what is read at a time
    (tmp_path / "a.zip").write_bytes(zip_bytes(method, data))
    assert read_members(tmp_path / "a.zip") == {"a.py": data}


@contextmanager
def memory_below(most_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        (zipfile.ZIP_DEFLATED, {"flags": 1}, "is encrypted"),
        (zipfile.ZIP_DEFLATED, {"method": 9}, "member 'thing/a.py' is neither stored nor deflated"),
        # A size that is a lie takes no memory.
        (zipfile.ZIP_DEFLATED, {"size": 100}, "CRC"),
        (zipfile.ZIP_BZIP2, {"size": 100}, "neither stored nor deflated"),
        (zipfile.ZIP_LZMA, {"size": 100}, "neither stored nor deflated"),
    ],
)
def test_a_member_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, method: int, changes: Mapping[str, int], words: str
) -> None:
    data = patched(zip_bytes(method, bytes(32 * MIB if "size" in changes else 100)), **changes)
    assert len(data) < MIB
    (tmp_path / "a.zip").write_bytes(data)
    with memory_below(4 * MIB):
        assert words in sentence(tmp_path / "a.zip")


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_zip_with_changed_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    made = bytearray(zip_bytes(zipfile.ZIP_DEFLATED, zlib.compress(bytes(range(256)) * 4)))
    for place, value in changes:
        made[place % len(made)] = value
    path = tmp_path_factory.mktemp("zip") / "a.zip"
    path.write_bytes(made)
    with suppress(InputError):  # and nothing else
        assert all(isinstance(data, bytes) for data in read_members(path).values())


def test_a_bomb_in_the_headers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a.py")
        info.pax_headers = {"comment": "x" * 200_000}
        archive.addfile(info)
    monkeypatch.setattr(archives, "MAX_TOTAL_BYTES", 1000)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 10)
    assert "unpacks to too much" in sentence(path)


def test_a_bomb_behind_the_members_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar_of(tmp_path / "thing-2.1.tar.gz", GOOD)
    assert read_members(path) == GOOD
    path.write_bytes(path.read_bytes() + gzip.compress(b"\0" * 2**26, 1))
    monkeypatch.setattr(archives, "MAX_TOTAL_BYTES", MIB)
    with memory_below(2**26):
        assert "unpacks to too much" in sentence(path)


def test_a_sparse_member_is_refused_and_takes_no_memory(tmp_path: Path) -> None:
    """Its header says four GiB of holes, in a file of a few hundred bytes."""
    info = tarfile.TarInfo("a.py")
    info.pax_headers = {"GNU.sparse.map": f"{2**32},0", "GNU.sparse.size": str(2**32)}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info)
    with memory_below(2**24):
        assert "has holes" in sentence(tmp_path / "a.tar")


def test_a_negative_size_leads_back_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, take = list[bytes](), Budget.take
    monkeypatch.setattr(Budget, "take", lambda *given: read.append(take(*given)) or read[-1])
    members = [tarfile.TarInfo(f"a/{name}.py") for name in ("first", "large", "back")]
    members[1].size, members[2].size = MIB, -MIB - 1024
    first, large, back = (member.tobuf(tarfile.GNU_FORMAT) for member in members)
    (tmp_path / "a.tar").write_bytes(first + large + bytes(MIB) + back + bytes(1024))
    assert "too much data" in sentence(tmp_path / "a.tar")
    assert 1 <= sum(data != b"" for data in read) <= 512 + 2
