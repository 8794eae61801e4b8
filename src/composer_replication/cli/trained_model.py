"""What was trained, as a model of its own in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from composer_replication.cli.launched_process import launched_rank
from composer_replication.report import read_run, write_model_card
from composer_replication.run_folder import RunFolder


def keep_model(
    trainer: Any, run_folder: RunFolder, summary: Mapping[str, Any], progress: Callable[[str], None]
) -> str | None:
    """Write ``model/`` with its card, from the first process; every process has to come here.

    Returns:
        The folder; None in the other processes, and where no process can have all weights.

    Raises:
        InputError: the folder cannot be written (CR0880), or what was written is not the trained model (CR0890).
    """
    from composer_replication.trainer.model_modes import weights_are_sharded
    from composer_replication.trainer.saved_model import gathered_weights, probe_logps, save_model

    folder, weights, trained = run_folder.model, None, None
    if weights_are_sharded(trainer.model):
        weights = gathered_weights(trainer)
        if weights is None:
            progress(
                f"model: its weights are spread over processes and {folder} is not written; take the newest checkpoint"
            )
            return None
        trained = probe_logps(trainer.model, trainer.processing_class)
    if launched_rank():
        return None
    progress(f"model: saving it to {folder}")
    run = replace(read_run(run_folder.root), summary=dict(summary))
    save_model(
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),
        trainer.processing_class,
        folder,
        describe=lambda begun: write_model_card(run, begun),
        weights=weights,
        trained=trained,
    )
    return str(folder)
