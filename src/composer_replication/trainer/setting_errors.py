"""What the trainer refuses before a model loads."""

from __future__ import annotations

from composer_replication.errors import UsageError


class TrainerSettingError(UsageError, ValueError):
    """A trainer argument that cannot work; a ``ValueError`` too, as Python code expects."""
