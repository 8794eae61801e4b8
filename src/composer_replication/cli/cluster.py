"""Several processes of one launch, as ``torchrun`` and ``accelerate launch`` tell each, and what can be said of a Ray cluster at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_replication.config import RunConfig


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Which process of the launch this is, from 0; the first one alone writes the run folder, and speaks."""
    rank = environment.get("RANK", "")
    return int(rank) if launched_size(environment) > 1 and rank.isdecimal() else 0


def launched_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the launch has; 1 where this one is alone."""
    size = environment.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def file_part() -> str:
    """What the names of this process's own files have before their ending: nothing for the first."""
    rank = launched_rank()
    return f"-process-{rank}" if rank else ""


def shards_weights(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``accelerate launch`` was told to spread the weights over the processes."""
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":  # a file of DeepSpeed's own is read later
        return environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    return environment.get("ACCELERATE_USE_FSDP") == "true"


def check_cluster(address: str, purpose: str) -> None:
    """What can be said of a cluster before anything is built or loaded; ``purpose`` begins the sentence of a missing package."""
    from composer_replication.errors import needs_extra

    with needs_extra("ray", purpose):
        from composer_replication.tasks.workers.ray_cluster import check_address
    check_address(address)


def placed_at(config: RunConfig, address: str | None) -> RunConfig:
    """A recipe whose attempts are graded on this cluster, placed as it says; for None here, whatever it was trained on."""
    from composer_replication.config import RaySection

    placing = {} if config.ray is None else config.ray.model_dump()
    ray = None if address is None else RaySection(**(placing | {"address": address}))
    return config.model_copy(update={"ray": ray})
