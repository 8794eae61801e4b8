"""What the trainer refuses before a model loads."""

from __future__ import annotations

from composer_replication.errors import UsageError


class TrainerSettingError(UsageError, ValueError):
    """A trainer argument that cannot work; a ``ValueError`` too, as Python code expects."""


class ChannelNotBuiltError(TrainerSettingError):
    """A loss channel was weighted that this version does not have.

    Args:
        argument: the weight's name, ``alpha_sdpo`` or ``beta_replay``.
    """

    def __init__(self, argument: str) -> None:
        super().__init__(
            "CR0711",
            f"{argument} must be 0: the loss channel behind it is not part of this version.",
            where=f"trainer.{argument}",
            fix=f"set trainer.{argument} = 0, or leave it out.",
        )
