"""Whole checkpoints: a manifest of every file, written last.

    checkpoint-12/
        …                      what transformers saves: weights, optimizer, RNG, trainer state
        composer_state.json    guard, extra states, counters, split fingerprint
        buffered_inputs_0.pt   rollouts still to be trained on (one file a process), if any
        MANIFEST.json          size of every other file, sha256 of all but large shards

A folder without a manifest is half-written and is never chosen. Under ``run`` the state says which run it is of, so that
one of another run in this run's folder is never gone on from: ``recipe`` is a digest that the caller gives, ``model`` the
architecture in words. The same recipe gives the same weights wherever it runs, so a folder may be copied or moved.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composer_replication.errors import InputError
from composer_replication.run_folder import read_json, write_json
from composer_replication.trainer.processes import process_rank

MANIFEST_NAME = "MANIFEST.json"
STATE_NAME = "composer_state.json"
PLAIN_STATE = {
    "micro_step": "_step",
    "gate_step": "_gate_step",
    "last_round_idx": "_last_round_idx",
    "num_cadence_hits_without_new_reward": "num_cadence_hits_without_new_reward",
    "num_groups_replaced": "num_groups_replaced",
    "last_verdict": "last_verdict",
}
"""What ``composer_state.json`` has as it is, by its name there and on the trainer."""
logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"checkpoint-(\d+)")
HASHED_BYTES = 64 * 1024**2
"""The manifest has the hash of files up to this size; of larger ones, shards of weights, the size alone."""


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step that has a manifest, its bytes compared with it.

    Args:
        folder: holds ``checkpoint-N`` folders; it may be missing.

    Returns:
        None when there is no whole checkpoint.

    Raises:
        InputError: the newest one is damaged (CR0706).
    """
    whole = whole_checkpoints(folder)
    if not whole:
        return None
    newest = max(whole, key=checkpoint_step)
    check_manifest(newest)
    return newest


def whole_checkpoints(folder: Path) -> list[Path]:
    """The ``checkpoint-N`` folders that have a manifest; their bytes are not read."""
    return [path for path in _checkpoints(folder) if (path / MANIFEST_NAME).is_file()]


def choose_checkpoint(wanted: str | Path | bool | None, folder: Path) -> Path | None:
    """The checkpoint to go on from, None to begin anew; half-written ones of a crash are deleted.

    Args:
        wanted: True for the newest whole one of ``folder``, or one checkpoint's folder.
        folder: where the run keeps its checkpoints.

    Raises:
        InputError: it is damaged (CR0706) or has no manifest (CR0706).
    """
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        remove_partial_checkpoints(folder)
        return newest_whole_checkpoint(folder)
    chosen = Path(wanted)
    check_manifest(chosen)
    remove_partial_checkpoints(folder)
    return chosen


def checkpoint_step(checkpoint: Path) -> int:
    """The global step in the folder's name.

    Raises:
        InputError: the folder is not named ``checkpoint-N`` (CR0706).
    """
    match = _FOLDER.fullmatch(checkpoint.name)
    if match is None:
        raise InputError(
            "CR0706",
            "the folder is not named checkpoint-N.",
            where=str(checkpoint),
            fix="name a checkpoint folder.",
        )
    return int(match[1])


def remove_partial_checkpoints(folder: Path) -> list[Path]:
    """Delete the ``checkpoint-N`` folders without a manifest, which a crash left; return them."""
    partial = [path for path in _checkpoints(folder) if not (path / MANIFEST_NAME).is_file()]
    for path in partial:
        logger.warning("removing the half-written checkpoint %s.", path)
        shutil.rmtree(path)
    return partial


def write_manifest(checkpoint: Path) -> None:
    """Make the checkpoint whole: every file to disk, then their sizes, and hashes of those up to ``HASHED_BYTES``, atomically.

    The other processes wait meanwhile, so large shards of weights, which safetensors checks by their size when it opens
    them, are not read once more.
    """
    files = {}
    for path in _files(checkpoint):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        files[path.relative_to(checkpoint).as_posix()] = {
            "size_bytes": path.stat().st_size,
            "sha256": _sha256(path) if path.stat().st_size <= HASHED_BYTES else "",
        }
    write_json(checkpoint / MANIFEST_NAME, {"step": checkpoint_step(checkpoint), "files": files})


def check_manifest(checkpoint: Path) -> None:
    """Compare every file with the manifest; files it does not name are ignored.

    Raises:
        InputError: no manifest (CR0706); a file is missing or differs (CR0706).
    """
    manifest = checkpoint / MANIFEST_NAME
    if not manifest.is_file():
        raise InputError(
            "CR0706",
            "the checkpoint has no manifest: it is half-written.",
            where=str(checkpoint),
            fix="resume from another checkpoint, or with --resume from the newest whole one.",
        )
    try:
        files = read_json(manifest)["files"].items()
        wanted = {str(name): (int(entry["size_bytes"]), str(entry["sha256"])) for name, entry in files}
    except (InputError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(manifest, checkpoint) from error
    for name, (size_bytes, sha256) in wanted.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size_bytes or (sha256 and _sha256(path) != sha256):
            raise _damaged(path, checkpoint)


def check_is_resumable(checkpoint: Path, *, rank: int, num_processes: int) -> None:
    """Refuse weights without what an exact resume needs; transformers would go on with a fresh optimizer and say nothing.

    DeepSpeed keeps optimizer and scheduler in a folder of its own, FSDP the optimizer in one or in ``optimizer.bin``.

    Args:
        checkpoint: a whole one.
        rank: of this process.
        num_processes: of the run that resumes.

    Raises:
        InputError: optimizer, scheduler or random numbers of this process are not in it (CR0706).
    """
    rng = "rng_state.pth" if num_processes == 1 else f"rng_state_{rank}.pth"
    wanted = {"optimizer": "optimizer*", "scheduler": "scheduler.pt", "random numbers": rng}
    if any(checkpoint.glob("global_step*")):
        del wanted["optimizer"], wanted["scheduler"]
    missing = [name for name, pattern in wanted.items() if not any(checkpoint.glob(pattern))]
    if missing:
        raise InputError(
            "CR0706",
            f"the checkpoint lacks the state of {' and '.join(missing)}: the run could not go on exactly.",
            where=str(checkpoint),
            fix="resume from a checkpoint that was saved without save_only_model, with as many processes as it had.",
        )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What ``composer_state.json`` holds.

    Raises:
        InputError: it is missing, or not ours (CR0401).
    """
    return read_json(checkpoint / STATE_NAME)


def buffer_name() -> str:
    """Where this process keeps the rollouts that are still to be trained on."""
    return f"buffered_inputs_{process_rank()}.pt"


def read_buffer(checkpoint: Path, device: Any) -> list[dict[str, Any]]:
    """Those rollouts, micro-batch by micro-batch.

    Raises:
        InputError: they are missing (CR0706).
    """
    path = checkpoint / buffer_name()
    if not path.is_file():
        raise InputError(
            "CR0706",
            "the checkpoint has no buffered rollouts for this process.",
            where=str(path),
            fix="resume with as many processes as the run had.",
        )
    # Storages go to the CPU whatever their tag: a process group tags CPU tensors "cpu:0", which loads nowhere.
    inputs = torch.load(path, map_location=lambda storage, _tag: storage, weights_only=True)["inputs"]
    return [
        {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in batch.items()}
        for batch in inputs
    ]


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))


def _files(checkpoint: Path) -> list[Path]:
    return sorted(
        path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / MANIFEST_NAME
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _damaged(path: Path, checkpoint: Path) -> InputError:
    return InputError(
        "CR0706",
        "the checkpoint is damaged: this file is not the one that was saved.",
        where=str(path),
        fix=f"delete the folder {checkpoint} and resume; the run goes on from the checkpoint before.",
    )


_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


def identity_of(recipe: str, model: Any) -> dict[str, str]:
    """The entry ``run`` of a checkpoint; ``recipe`` is empty where the caller has none."""
    return {"recipe": recipe, "model": _architecture(model)}


def refuse_foreign_run(saved: Mapping[str, Any], own: Mapping[str, str], checkpoint: Path) -> None:
    """Compare a checkpoint's entry with this run's, as far as both say something.

    Args:
        saved: what ``composer_state.json`` holds.
        own: this run's entry; parts that are not known yet may be missing.
        checkpoint: its folder.

    Raises:
        InputError: it is of another run (CR0884).
    """
    found = saved.get("run")
    if not isinstance(found, dict):
        logger.warning(
            "%s does not say which run it is of (an older version wrote it): it is taken.", checkpoint
        )
        return
    for part, wanted in own.items():
        if wanted and found.get(part) and found[part] != wanted:
            what = (
                "its recipe is not this run's"
                if part == "recipe"
                else f"its model is {found[part]}, not {wanted}"
            )
            raise InputError(
                "CR0884",
                f"{checkpoint.name} is a checkpoint of another run: {what}.",
                where=str(checkpoint),
                fix="move that folder away and resume: the run goes on from its own newest checkpoint.",
            )


def refuse_foreign_checkpoints(folder: Path, recipe: str) -> None:
    """The same for all whole checkpoints of a folder, before any model is loaded; unreadable ones are refused when chosen.

    Raises:
        InputError: one is of another run (CR0884).
    """
    for checkpoint in whole_checkpoints(folder):
        try:
            saved = read_state(checkpoint)
        except InputError:
            continue
        if "run" in saved:
            refuse_foreign_run(saved, {"recipe": recipe}, checkpoint)


def _architecture(model: Any) -> str:
    """As ``qwen2, hidden_size 32, num_hidden_layers 2, vocab_size 258, with adapters``."""
    config = model.config.get_text_config()
    words = [str(config.model_type)]
    words += [f"{name} {getattr(config, name)}" for name in _SIZES if getattr(config, name, None) is not None]
    return ", ".join([*words, "with adapters"] if hasattr(model, "peft_config") else words)
