"""What a checkpoint keeps of the recipe, so that one of another run is known."""

from __future__ import annotations

import hashlib
import json

from composer_replication.config import RunConfig


def recipe_sha256(config: RunConfig) -> str:
    """Of what the recipe sets, without ``[ray]`` and the addresses of replicas: a run may be resumed at another cluster, and with no other change.

    Defaults are left out, so that a key which a later version adds makes no other run of it.
    """
    table = config.model_dump(
        mode="json",
        exclude_none=True,
        exclude_defaults=True,
        exclude={"ray": True, "replicas": {"interface", "lighthouse"}},
    )
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
