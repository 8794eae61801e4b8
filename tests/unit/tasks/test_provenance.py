"""A store says where its repositories were fetched from, without a user's name and without a path of this machine."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from small_trees import commit_all, tar_bytes, write_tree

from composer_replication.tasks.intake.cache import CACHE_VARIABLE, sha256_of
from composer_replication.tasks.intake.git_source import parse_address
from composer_replication.tasks.intake.sources import open_source

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
    assert parse_address(source).public == kept


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
