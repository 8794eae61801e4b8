"""Joins the replay channel to a recipe: the preference pairs of the file that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_replication.config import RunConfig
from composer_replication.interfaces import Tokenizer
from composer_replication.records import PreferencePair
from composer_replication.traces.pair_files import PairRow, read_pair_rows, tokenised_pairs


def pair_rows(config: RunConfig, recipe_folder: Path) -> dict[str, PairRow]:
    """The rows of ``replay.pairs`` by their places; none where it is not set, or the channel is off.

    Raises:
        InputError: the file cannot be used (CR0881).
    """
    path = _path(config, recipe_folder)
    return {} if path is None else read_pair_rows(path)


def open_pairs(
    config: RunConfig, recipe_folder: Path, tokenizer: Tokenizer, model: Any
) -> tuple[PreferencePair, ...] | None:
    """The same as token ids, or None; each fits the model that is trained.

    Raises:
        InputError: the file cannot be used (CR0881), has messages where the model has no chat template (CR0703), a pair has
            ids that the model does not know (CR0751) or more than its context (CR0705).
    """
    path = _path(config, recipe_folder)
    if path is None:
        return None
    from composer_replication.trainer.record_limits import refuse_unfit_pairs

    rows = read_pair_rows(path)
    pairs = tokenised_pairs(rows, tokenizer)
    refuse_unfit_pairs(pairs, model, name=list(rows).__getitem__)
    return pairs


def _path(config: RunConfig, recipe_folder: Path) -> Path | None:
    replay = config.replay
    if config.trainer.beta_replay == 0.0 or replay is None or not replay.pairs:
        return None
    return recipe_folder / replay.pairs
