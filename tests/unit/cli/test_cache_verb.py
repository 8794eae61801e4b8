"""The verb ``cache``: keys, exit codes, what a person reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import main
from composer_replication.sandbox import process_folder

Answer = Callable[..., tuple[int, dict[str, Any]]]
STORE = "task-stores/0123456789abcdef/objects/file"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(process_folder.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "cache" / STORE
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * 1500)
    (tmp_path / "cache" / "models" / "mine").mkdir(parents=True)
    return tmp_path / "cache"


def test_prune(cache: Path, answer: Answer) -> None:
    expected = {
        "folder": str(cache),
        "freed_bytes": 1500,
        "paths": [str((cache / STORE).parents[1])],
        "in_use": False,
    }
    assert answer("cache", "prune", "--dry-run") == (0, {**expected, "dry_run": True})
    assert (cache / STORE).is_file()
    assert answer("cache", "prune") == (0, {**expected, "dry_run": False})
    assert not (cache / STORE).exists()
    assert (cache / "models" / "mine").is_dir()


def test_what_a_person_reads(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", "--dry-run", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"folder      {cache}" in lines
    assert "freed bytes 1500" in lines
    assert "in use      False" in lines


def test_a_cache_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "file"))
    code, value = answer("cache", "prune")
    assert (code, value["error"]["code"]) == (2, "CR0209")
