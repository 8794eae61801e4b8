"""Joins the curriculum to a recipe: rows, recorded pass rates and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.config import RunConfig
from composer_replication.rollouts.curriculum import Curriculum, recorded_evidence
from composer_replication.rollouts.curriculum.evidence import has_recorded_evidence
from composer_replication.tasks.store import TaskStore


def open_curriculum(
    config: RunConfig, store: TaskStore, rows: Sequence[Mapping[str, Any]], model: Any
) -> Curriculum | None:
    """Who chooses the tasks of each generation; None without a ``[curriculum]`` table.

    ``model`` as it was loaded, before adapters: its weights say which recorded pass rates are its own.

    Raises:
        InputError: recorded pass rates cannot be read (CR0456).
    """
    options = config.curriculum
    if options is None:
        return None
    recorded = None
    if has_recorded_evidence(store.root, options):
        from composer_replication.trainer.parameter_hash import parameter_sha256

        recorded = recorded_evidence(store.root, options, parameter_sha256=parameter_sha256(model))
    return Curriculum(
        rows, seed=config.seed, options=options, fingerprint=store.fingerprint, recorded=recorded
    )
