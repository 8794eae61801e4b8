"""The trained model as a folder of its own, which anybody loads without this package."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.trainer.processes import process_rank
from composer_replication.trainer.whole_weights import lies_in_parts, whole_tensors


def gathered_weights(trainer: Any) -> dict[str, Any] | None:
    """All weights of a model that FSDP2 or ZeRO-3 spread over processes, in the memory of the first; empty on the others.

    None where they cannot be had: those of an adapter, which would have to be added first, and those that no step has
    spread yet. A collective call; no more than one tensor is whole on the device at a time.
    """
    model = trainer.model
    if hasattr(model, "merge_and_unload") or not any(map(lies_in_parts, model.parameters())):
        return None
    weights: dict[str, Any] = {}
    for name, whole in whole_tensors(model):
        if process_rank() == 0:
            weights[name] = whole.to("cpu", copy=True)
    return weights


def save_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    describe: Callable[[Path], None],
    *,
    weights: dict[str, Any] | None = None,
) -> None:
    """Write weights, configuration and tokenizer; the folder is there as a whole, or as it was before.

    It loads with ``AutoModelForCausalLM.from_pretrained`` and ``AutoModel.from_pretrained``, without peft: an adapter is
    added to the weights that it was trained on, in ``model`` itself, which is not to be trained any more.

    Args:
        model: a transformers model, with or without a peft adapter, its weights whole in this process or in ``weights``.
        tokenizer: its tokenizer, saved with the chat template.
        folder: replaced where it exists.
        describe: writes further files into a folder that is not in its place yet, such as a model card.
        weights: of ``gathered_weights``.

    Raises:
        InputError: the folder cannot be written (CR0880).
    """
    whole = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    begun = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(begun, ignore_errors=True)
        whole.save_pretrained(begun, state_dict=weights)
        tokenizer.save_pretrained(begun)
        describe(begun)
        shutil.rmtree(folder, ignore_errors=True)
        begun.replace(folder)
    except OSError as error:
        shutil.rmtree(begun, ignore_errors=True)
        raise InputError(
            "CR0880",
            f"the trained model cannot be saved: {error.strerror or error}.",
            where=str(folder),
            fix="make room, and give the same command again with --resume: nothing is trained twice.",
        ) from error
