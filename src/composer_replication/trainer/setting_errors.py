"""What the trainer refuses before a model loads."""

from __future__ import annotations

from composer_replication.errors import UsageError


def spread_weights(where: str) -> UsageError:
    """Episodes ask for answers at times of their own, and each forward of spread weights needs every process."""
    return UsageError(
        "CR0757",
        "the agent loop cannot sample weights that are spread over processes.",
        where=where,
        fix="sample by vLLM (trl.use_vllm), or launch with whole weights on each process (accelerate's MULTI_GPU).",
    )


class TrainerSettingError(UsageError, ValueError):
    """A trainer argument that cannot work; a ``ValueError`` too, as Python code expects."""
