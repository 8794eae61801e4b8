"""A store says where its repositories were fetched from, without a user's name and without a path of this machine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from small_trees import commit_all, tar_bytes, write_tree

from composer_replication.errors import InputError
from composer_replication.tasks.blobs import read_file, write_file
from composer_replication.tasks.intake.cache import CACHE_VARIABLE, sha256_of
from composer_replication.tasks.intake.git_source import parse_address, public_address
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.repository import prepare
from composer_replication.tasks.store import TaskStore

ID = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "pyproject.toml": '[project]\nname = "planted-thing"\nversion = "2.1"\n',
    "planted.py": "def one():\n    return 11\n",
    "test_planted.py": "import planted\n\n\ndef test_one():\n    assert planted.one() == 11\n\n\n"
    "def test_nothing():\n    pass\n",
}


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("git+https://host.example/owner/repo@v1.2", "git+https://host.example/owner/repo@v1.2"),
        ("git+https://host.example:8443/owner/repo", "git+https://host.example:8443/owner/repo"),
        (f"https://host.example/owner/repo.git@{ID}", f"git+https://host.example/owner/repo.git@{ID}"),
        ("git+ssh://mallory@host.example/owner/repo@main", "git+ssh://host.example/owner/repo@main"),
        ("git+ssh://user%3Asecret@host.example:22/owner/repo", "git+ssh://host.example:22/owner/repo"),
        ("git@host.example:owner/repo.git@v1", "git+ssh://host.example/owner/repo.git@v1"),
        ("git+file:///home/mallory/repo@main", ""),
    ],
)
def test_what_is_kept_of_an_address(source: str, kept: str) -> None:
    assert public_address(parse_address(source)) == kept


def pack(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(tar_bytes(FILES, "planted_thing-2.1/", "w"), mtime=0))
    return path


def shelve(cache: Path) -> str:
    """An sdist in a cache, as if it had been fetched."""
    path = pack(cache / "sdists" / "planted-thing-2.1" / "planted_thing-2.1.tar.gz")
    (path.parent / "SHA256").write_text(f"{sha256_of(path.read_bytes())}  {path.name}\n")
    return "sdist:planted-thing==2.1"


def test_what_lies_here_has_none_and_what_was_fetched_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    root = write_tree(tmp_path / "repo", FILES)
    commit_all(root)
    origins = {
        source: open_source(source).origin
        for source in (
            str(root),
            str(pack(tmp_path / "planted.tar.gz")),
            f"git+file://{root}@main",
            shelve(tmp_path / "cache"),
            f"{shelve(tmp_path / 'cache')} ",
        )
    }
    assert list(origins.values()) == ["", "", "", "sdist:planted-thing==2.1", "sdist:planted-thing==2.1"]


@pytest.mark.long
def test_a_store_keeps_it_and_stays_the_same_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive has the bytes of the sdist, so what was measured of one counts for the other."""
    with monkeypatch.context() as own_cache:
        own_cache.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
        fetched = open_source(shelve(tmp_path / "cache"))
    plain = open_source(str(pack(tmp_path / "planted.tar.gz")))
    assert fetched.sha256 == plain.sha256
    first, second, other = (
        measured(tmp_path / name, source)
        for name, source in (("first", fetched), ("second", fetched), ("other", plain))
    )
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    assert first == second != other
    assert source_of(tmp_path / "first") == "sdist:planted-thing==2.1"
    assert source_of(tmp_path / "other") == ""
    assert str(tmp_path).encode() not in b"".join(contents(tmp_path / "other").values())
    # What is said follows the source of this build, and not of an earlier one of the same bytes.
    assert measured(tmp_path / "second", plain) == other
    assert source_of(tmp_path / "second") == ""
    assert measured(tmp_path / "second", fetched) == first
    # A store from before has no such word, and the next build adds it; something else than a text is damage.
    record = changed(tmp_path / "second", None)
    assert "source" not in record
    TaskStore.open(tmp_path / "second").verify()
    assert source_of(tmp_path / "second") == ""
    assert measured(tmp_path / "second", fetched) == first
    changed(tmp_path / "second", 3)
    with pytest.raises(InputError, match=r"CR0411.*source is not a text"):
        source_of(tmp_path / "second")


def measured(folder: Path, source: RepositorySource) -> str:
    """The fingerprint of a store that holds the repository and its baseline, new or as it was kept."""
    store = TaskStore.create(folder)
    prepare(source, store, None, map_calls=False)
    store.settle()
    return store.fingerprint


def source_of(folder: Path) -> str:
    store = TaskStore.open(folder)
    (record,) = store.repositories()
    return record.source


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that a store holds; a record as it is before it is compressed."""
    return {
        str(path.relative_to(folder)): read_file(path) if path.suffix == ".zst" else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "LOCK"
    }


def changed(folder: Path, value: object) -> dict[str, object]:
    """The store with another ``source`` in its repository's record, or with none."""
    manifest = json.loads((folder / "manifest.json").read_text())
    name = "repositories/planted-thing-2.1.json"
    record: dict[str, object] = json.loads(read_file(folder / f"{name}.zst"))
    record.pop("source", None)
    if value is not None:
        record["source"] = value
    data = (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
    write_file(folder / name, data)
    manifest["records"][name] = sha256_of(data)
    manifest["fingerprint"] = sha256_of(json.dumps(sorted(manifest["records"].items())).encode())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return record
