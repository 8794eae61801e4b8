"""Which checkpoint is whole, which is half-written, which is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.run_folder import write_json
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer import checkpoints
from composer_replication.trainer.checkpoints import (
    MANIFEST_NAME,
    check_is_resumable,
    check_manifest,
    choose_checkpoint,
    newest_whole_checkpoint,
    write_manifest,
)


def make_checkpoint(folder: Path, step: int, *, is_whole: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "inner").mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(bytes(range(256)))
    (checkpoint / "inner" / "note.txt").write_text(f"step {step}")
    if is_whole:
        write_manifest(checkpoint)
    return checkpoint


def test_the_newest_is_that_of_the_highest_step_not_of_the_greatest_name(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        make_checkpoint(tmp_path, step)
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_there_may_be_none(tmp_path: Path) -> None:
    assert newest_whole_checkpoint(tmp_path / "missing") is None
    make_checkpoint(tmp_path, 4, is_whole=False)
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file, not a folder")
    assert newest_whole_checkpoint(tmp_path) is None


def test_the_manifest_names_every_other_file_with_size_and_hash(tmp_path: Path) -> None:
    manifest = json.loads((make_checkpoint(tmp_path, 3) / MANIFEST_NAME).read_text())
    assert manifest["step"] == 3
    assert sorted(manifest["files"]) == ["inner/note.txt", "weights.bin"]
    assert manifest["files"]["weights.bin"] == {
        "size_bytes": 256,
        "sha256": "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880",
    }


@pytest.mark.parametrize("damage", ["flip", "shorten", "delete", "manifest"])
def test_a_damaged_checkpoint_is_an_error_that_names_the_file(tmp_path: Path, damage: str) -> None:
    checkpoint = make_checkpoint(tmp_path, 6)
    make_checkpoint(tmp_path, 3)
    broken = checkpoint / (MANIFEST_NAME if damage == "manifest" else "weights.bin")
    if damage == "flip":
        broken.write_bytes(bytes([1, *range(1, 256)]))
    elif damage == "shorten":
        broken.write_bytes(b"")
    elif damage == "delete":
        broken.unlink()
    else:
        broken.write_text('{"schema_version": 1, "files": {"weights.bin": 3}}')
    with pytest.raises(InputError, match="delete the folder") as caught:
        newest_whole_checkpoint(tmp_path)
    assert caught.value.code == "CR0706"
    assert caught.value.where == str(broken)
    shutil.rmtree(checkpoint)
    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_a_file_that_someone_added_does_not_matter(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, 6)
    (checkpoint / "README.md").write_text("mine")
    check_manifest(checkpoint)
    assert newest_whole_checkpoint(tmp_path) == checkpoint


def test_only_half_written_folders_are_removed(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path, 2)
    partial = make_checkpoint(tmp_path, 4, is_whole=False)
    other = tmp_path / "completions"
    other.mkdir()
    assert newest_whole_checkpoint(tmp_path) == whole
    assert choose_checkpoint(True, tmp_path) == whole
    assert (whole.is_dir(), partial.exists(), other.is_dir()) == (True, False, True)


def test_choosing(tmp_path: Path) -> None:
    assert choose_checkpoint(None, tmp_path) is None
    assert choose_checkpoint(False, tmp_path) is None
    assert choose_checkpoint(True, tmp_path) is None
    early, late = make_checkpoint(tmp_path, 2), make_checkpoint(tmp_path, 4)
    assert choose_checkpoint(True, tmp_path) == late
    assert choose_checkpoint(str(early), tmp_path) == early


def test_a_half_written_checkpoint_cannot_be_named(tmp_path: Path) -> None:
    partial = make_checkpoint(tmp_path, 4, is_whole=False)
    with pytest.raises(InputError, match=r"CR0706.*half-written"):
        choose_checkpoint(str(partial), tmp_path)


@pytest.mark.parametrize(
    ("lost", "what"),
    [("optimizer.pt", "optimizer"), ("scheduler.pt", "scheduler"), ("rng_state.pth", "random numbers")],
)
def test_what_an_exact_resume_needs_has_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, what: str
) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (tmp_path / name).touch()
    check_is_resumable(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(InputError, match=f"CR0706.*lacks the state of {what}:"):
        check_is_resumable(tmp_path)
    monkeypatch.setattr(checkpoints, "num_processes", lambda: 2)  # of the other one nothing is there
    with pytest.raises(InputError, match="random numbers:"):
        check_is_resumable(tmp_path)


def test_a_checkpoint_of_another_version_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / checkpoints.STATE_NAME, {"gate_step": 1})
    trainer = SimpleNamespace(run_identity="", split_fingerprint="")
    with pytest.raises(
        InputError, match=r"CR0884: the state of the run .* cannot be used: KeyError: 'split_finge"
    ):
        checkpoints.OwnState(trainer, None, None).read(tmp_path)


def test_a_state_that_its_part_does_not_take_is_refused_by_its_name(tmp_path: Path) -> None:
    class Broken:
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise state["error"]

    for part, error, words in (
        (HeldOutGuard(), {"version": 0}, r"of the guard in .*: the state is version 0 of None"),
        (Broken(), {"error": KeyError("seed")}, r"of the guard in .*: KeyError: 'seed'"),
    ):
        with (
            pytest.raises(InputError, match=f"CR0884: the state {words}"),
            checkpoints._usable("guard", tmp_path),
        ):
            part.load_state_dict(error)
