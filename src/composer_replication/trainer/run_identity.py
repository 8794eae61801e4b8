"""Which run a checkpoint is of, so that one of another run in this run's folder is never gone on from.

``composer_state.json`` keeps it under ``run``: ``recipe`` is a digest that the caller gives (the command line's is of the
resolved recipe), ``model`` the architecture in words. The same recipe gives the same weights wherever it runs, so a
folder may be copied or moved. Older checkpoints have no such entry.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.trainer.checkpoints import read_state, whole_checkpoints

logger = logging.getLogger(__name__)

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
