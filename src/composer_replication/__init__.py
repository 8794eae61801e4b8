"""Composer replication: RL post-training of coding agents whose reward is proven honest.

Importing this package loads nothing heavy; public names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "HeldOutGuard": "composer_replication.safety",
    "HeldoutSplit": "composer_replication.safety",
    "CollapseStopError": "composer_replication.errors",
    "ComposerError": "composer_replication.errors",
    "RunConfig": "composer_replication.config",
    "ComposerReplicationTrainer": "composer_replication.trainer.composer_trainer",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
