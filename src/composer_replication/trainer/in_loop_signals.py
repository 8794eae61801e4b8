"""The newest in-loop reward and KL, remembered across TRL's clearing of its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class InLoopSignals:
    """What training measured last.

    TRL collects ``reward`` (one value a generation) and ``kl`` (one a micro-step) in
    lists that ``log()`` empties. ``read`` is called before each emptying and at each
    fold; a value that is not a finite number counts as none.

    Attributes:
        reward: newest finite reward, None before the first.
        kl: newest finite KL that TRL logged, nats; None before the first.
        is_reward_new: a reward arrived since the last fold.
        num_rewards_read: entries of the present list that were read already.
    """

    reward: float | None = None
    kl: float | None = None
    is_reward_new: bool = False
    num_rewards_read: int = 0

    def read(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Take over what is new in TRL's lists."""
        rewards = metrics.get("reward", ())
        unread = rewards[self.num_rewards_read :] if len(rewards) >= self.num_rewards_read else rewards
        newest = _newest_finite(rewards)
        if newest is not None:
            self.is_reward_new = (
                self.is_reward_new or newest != self.reward or _newest_finite(unread) is not None
            )
            self.reward = newest
        self.num_rewards_read = len(rewards)
        newest_kl = _newest_finite(metrics.get("kl", ()))
        if newest_kl is not None:
            self.kl = newest_kl

    def after_clearing(self, metrics: Mapping[str, Sequence[float]]) -> None:
        """Note that TRL may have emptied its lists."""
        self.num_rewards_read = min(self.num_rewards_read, len(metrics.get("reward", ())))

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.__slots__:
            setattr(self, name, state[name])


def _newest_finite(values: Sequence[Any]) -> float | None:
    """The last one that is a finite number, also as a scalar of torch or numpy."""
    numbers = (finite(value) for value in reversed(values))
    return next((number for number in numbers if number is not None), None)


def finite(value: Any) -> float | None:
    """A finite number, or an array of one, as a float; None for anything else."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # more than one element
            return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
