"""Whole checkpoints: a manifest of every file, written last; and what we keep in one beside transformers' files.

    checkpoint-12/
        …                      what transformers saves: weights, optimizer, RNG, trainer state
        composer_state.json    guard, extra states, counters, split fingerprint, and the digest of the run's recipe
        buffered_inputs_0.pt   rollouts still to be trained on, and what channels learn of them (one file a process), if any
        loss_channels.pt       the teacher and the reference of the two loss channels, if any
        MANIFEST.json          size of every other file, sha256 of all but large shards

A folder without a manifest is half-written and is never chosen. The same recipe gives the same weights wherever it runs, so a
folder may be copied or moved.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device

from composer_replication.errors import ComposerError, InputError
from composer_replication.interfaces import Stateful
from composer_replication.records import HintedTurn
from composer_replication.run_folder import read_json, write_json
from composer_replication.trainer.checks import ChecksThatSpeak
from composer_replication.trainer.collator import SiblingPair
from composer_replication.trainer.guard import GuardHook, refuse_foreign_split
from composer_replication.trainer.loss_channels import read_channels
from composer_replication.trainer.metrics_log import InLoopSignals
from composer_replication.trainer.preset_settings import TrainerSettingError
from composer_replication.trainer.processes import num_processes, process_rank

MANIFEST_NAME = "MANIFEST.json"
STATE_NAME = "composer_state.json"
logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"checkpoint-(\d+)")
HASHED_BYTES = 64 * 1024**2
"""The manifest has the hash of files up to this size; of larger ones, shards of weights, the size alone."""


def newest_whole_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step that has a manifest, its bytes compared with it (CR0706); None where there is none."""
    if (newest := max(_checkpoints(folder, are_whole=True), key=checkpoint_step, default=None)) is not None:
        check_manifest(newest)
    return newest


def choose_checkpoint(wanted: str | Path | bool | None, folder: Path) -> Path | None:
    """The checkpoint to go on from, None to begin anew; half-written ones of a crash are deleted.

    ``wanted`` is True for the newest whole one of ``folder``, or one checkpoint's folder. One that is damaged or has no
    manifest is refused (CR0706).
    """
    if wanted is None or wanted is False:
        return None
    if wanted is not True:
        check_manifest(Path(wanted))
    for partial in _checkpoints(folder, are_whole=False):
        logger.warning("removing the half-written checkpoint %s.", partial)
        shutil.rmtree(partial)
    return newest_whole_checkpoint(folder) if wanted is True else Path(wanted)


def checkpoint_step(checkpoint: Path) -> int:
    """The global step in the folder's name."""
    match = _FOLDER.fullmatch(checkpoint.name)
    if match is None:
        raise _unusable("the folder is not named checkpoint-N.", checkpoint, "name a checkpoint folder.")
    return int(match[1])


def _checkpoints(folder: Path, *, are_whole: bool) -> list[Path]:
    found = sorted(path for path in folder.glob("*/") if _FOLDER.fullmatch(path.name))
    return [path for path in found if (path / MANIFEST_NAME).is_file() is are_whole]


def write_manifest(checkpoint: Path) -> None:
    """Make the checkpoint whole: every file to disk, then their sizes, and hashes of those up to ``HASHED_BYTES``, atomically.

    The other processes wait meanwhile, so large shards of weights, whose size safetensors checks, are not read once more.
    """
    manifest, files = checkpoint / MANIFEST_NAME, {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != manifest):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        size, name = path.stat().st_size, path.relative_to(checkpoint).as_posix()
        files[name] = {"size_bytes": size, "sha256": _sha256(path) if size <= HASHED_BYTES else ""}
    write_json(manifest, {"step": checkpoint_step(checkpoint), "files": files})


def check_manifest(checkpoint: Path) -> None:
    """Compare every file with the manifest (CR0706); files it does not name are ignored."""
    manifest = checkpoint / MANIFEST_NAME
    if not manifest.is_file():
        words = "the checkpoint has no manifest: it is half-written."
        fix = "resume from another checkpoint, or with --resume from the newest whole one."
        raise _unusable(words, checkpoint, fix)
    try:
        files = read_json(manifest)["files"].items()
        wanted = {name: (entry["size_bytes"], entry["sha256"]) for name, entry in files}
    except (InputError, AttributeError, KeyError, TypeError) as error:
        raise _damaged(manifest, checkpoint) from error
    for name, (size_bytes, sha256) in wanted.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size_bytes or (sha256 and _sha256(path) != sha256):
            raise _damaged(path, checkpoint)


def check_is_resumable(checkpoint: Path) -> None:
    """Refuse weights without what an exact resume needs; transformers would go on with a fresh optimizer and say nothing."""
    rng = "rng_state.pth" if num_processes() == 1 else f"rng_state_{process_rank()}.pth"
    wanted = {"optimizer": "optimizer*", "scheduler": "scheduler.pt", "random numbers": rng}
    if any(checkpoint.glob("global_step*")):  # DeepSpeed's folder has both
        del wanted["optimizer"], wanted["scheduler"]
    missing = [name for name, pattern in wanted.items() if not any(checkpoint.glob(pattern))]
    if missing:
        words = f"the checkpoint lacks the state of {' and '.join(missing)}: the run could not go on exactly."
        fix = "resume from a checkpoint that was saved without save_only_model, with as many processes as it had."
        raise _unusable(words, checkpoint, fix)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _damaged(path: Path, checkpoint: Path) -> InputError:
    fix = f"delete the folder {checkpoint} and resume; the run goes on from the checkpoint before."
    return _unusable("the checkpoint is damaged: this file is not the one that was saved.", path, fix)


def _unusable(words: str, path: Path, fix: str) -> InputError:
    return InputError("CR0706", words, where=str(path), fix=fix)


def _foreign(words: str, checkpoint: Path, fix: str) -> InputError:
    return InputError("CR0884", words, where=str(checkpoint), fix=fix)


def refuse_foreign_run(saved: Mapping[str, Any], recipe: str, checkpoint: Path) -> None:
    """Go on from checkpoints of the same recipe alone, as far as both say which (CR0884)."""
    found = saved.get("run", {}).get("recipe")
    if found and recipe and found != recipe:
        words = f"{checkpoint.name} is a checkpoint of another run: its recipe is not this run's."
        fix = "move that folder away and resume: the run goes on from its own newest checkpoint."
        raise _foreign(words, checkpoint, fix)


def refuse_foreign_checkpoints(folder: Path, recipe: str) -> None:
    """The same for all whole checkpoints of a folder, before any model is loaded; unreadable ones are refused when chosen."""
    for checkpoint in _checkpoints(folder, are_whole=True):
        try:
            saved = read_json(checkpoint / STATE_NAME)
        except InputError:
            continue
        refuse_foreign_run(saved, recipe, checkpoint)


@contextmanager
def _usable(name: str, checkpoint: Path) -> Iterator[None]:
    """Inside, what is missing in a part's state, or is not taken by it, is of another version or of other settings (CR0884)."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ComposerError):
            raise
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        words = f"the state of the {name} in the checkpoint cannot be used: {problem}."
        fix = "go on with the version and the settings that wrote it, or begin a new run."
        raise _foreign(words, checkpoint, fix) from error


class OwnState:
    """What a ``ComposerReplicationTrainer`` keeps in a checkpoint beside transformers' files."""

    def __init__(self, trainer: Any, hook: GuardHook, checks: ChecksThatSpeak | None) -> None:
        self._trainer, self._hook, self._checks = trainer, hook, checks
        self.num_permutations_to_skip = 0
        """Of the training data, before a resumed run draws its own."""

    def write(self, checkpoint: Path) -> None:
        """Add our files to a folder that transformers has written. Every process calls it."""
        trainer = self._trainer
        every = trainer.args.steps_per_generation * trainer.num_iterations
        is_inside = trainer._buffered_inputs is not None and trainer._step % every != 0  # noqa: SLF001 - TRL's only name
        if self._hook.channels is not None:
            self._hook.channels.write(checkpoint)
        if is_inside:
            torch.save({"buffered": trainer._buffered_inputs}, _buffer(checkpoint))  # noqa: SLF001 - TRL's only name
        if process_rank() != 0:
            return
        self._hook.lines.signals.read(trainer._metrics["train"])  # noqa: SLF001 - TRL's only name
        parts = self._parts().items()
        state: dict[str, Any] = {name: None if part is None else part.state_dict() for name, part in parts}
        state |= self._hook.state_dict() | {
            "run": {"recipe": trainer.run_identity},
            "global_step": trainer.state.global_step,
            "micro_step": trainer._step,  # noqa: SLF001 - TRL's only name
            "has_buffered_inputs": is_inside,
            "num_permutations_done": self._num_epochs_done(),
            "split_fingerprint": trainer.split_fingerprint,
            "stateful": {name: part.state_dict() for name, part in (trainer.stateful or {}).items()},
        }
        write_json(checkpoint / STATE_NAME, state)

    def read(self, checkpoint: Path) -> None:
        """Restore what ``write`` wrote; another run's, or another version's, is refused (CR0884)."""
        saved = read_json(checkpoint / STATE_NAME)
        with _usable("run", checkpoint):
            self._check_belongs(saved, checkpoint)
            self._restore(saved, checkpoint)

    def _check_belongs(self, saved: Mapping[str, Any], checkpoint: Path) -> None:
        trainer = self._trainer
        refuse_foreign_run(saved, trainer.run_identity, checkpoint)
        refuse_foreign_split(saved["split_fingerprint"], trainer.split_fingerprint, where=str(checkpoint))
        if saved["guard"] is not None and trainer.heldout_guard is None:
            words = "the checkpoint was written under a guard, and this trainer has none."
            fix = "pass heldout_guard and heldout_eval_fn again."
            raise TrainerSettingError("CR0884", words, where=str(checkpoint), fix=fix)
        had, has = sorted(saved["stateful"]), sorted(trainer.stateful or {})
        if had != has:
            words = f"the checkpoint has extra states {had}, this trainer {has}."
            raise _foreign(words, checkpoint, "pass the same stateful parts as in the run that saved it.")
        read_channels(self._hook.channels, checkpoint)

    def _restore(self, saved: Mapping[str, Any], checkpoint: Path) -> None:
        trainer = self._trainer
        self._hook.load_state_dict(saved)
        signals = self._hook.lines.signals = InLoopSignals()
        stateful = [(name, part, saved["stateful"][name]) for name, part in (trainer.stateful or {}).items()]
        own = [(name, part, saved.get(name)) for name, part in self._parts().items() if part is not None]
        for name, part, state in own + stateful:
            if state is None:
                logger.warning("%s has no state of the %s, which starts afresh from here.", checkpoint, name)
                continue
            with _usable(name, checkpoint):
                part.load_state_dict(state)
        trainer._metrics["train"].clear()  # noqa: SLF001 - TRL's only name
        signals.num_rewards_read = 0
        trainer._step = saved["micro_step"]  # noqa: SLF001 - TRL's only name
        trainer._buffered_inputs = self._read_buffer(checkpoint) if saved["has_buffered_inputs"] else None  # noqa: SLF001 - TRL's only name
        if not trainer.args.ignore_data_skip:
            self.num_permutations_to_skip = saved["num_permutations_done"]

    def _read_buffer(self, checkpoint: Path) -> Any:
        path = _buffer(checkpoint)
        if not path.is_file():
            words = "the checkpoint has no buffered rollouts for this process."
            raise _unusable(words, path, "resume with as many processes as the run had.")
        # Storages go to the CPU whatever their tag: a process group tags CPU tensors "cpu:0", which loads nowhere.
        with torch.serialization.safe_globals([HintedTurn, SiblingPair]):
            kept = torch.load(path, map_location=lambda storage, _tag: storage, weights_only=True)
        return send_to_device(kept["buffered"], self._trainer.args.device)

    def _parts(self) -> dict[str, Stateful | None]:
        trainer = self._trainer
        own = {"in_loop_signals": self._hook.lines.signals, "checks": self._checks}
        return {"guard": trainer.heldout_guard, **own, "prompt_source": trainer.prompt_source}

    def _num_epochs_done(self) -> int:
        """How many permutations the sampler has used up, by transformers' own count of epochs."""
        trainer = self._trainer
        try:
            num_batches = len(trainer.callback_handler.train_dataloader)
        except TypeError:  # an iterable dataset has no length and no permutation
            return 0
        steps_of_epoch = math.ceil(num_batches / trainer.args.gradient_accumulation_steps)
        return int(trainer.state.global_step // max(steps_of_epoch, 1))


def _buffer(checkpoint: Path) -> Path:
    return checkpoint / f"buffered_inputs_{process_rank()}.pt"
