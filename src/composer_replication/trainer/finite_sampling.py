"""Weights that give numbers that are not finite cannot be sampled from: that is said, and no token is made up.

Checks of loss and gradient see such weights only after a generation, and torch's own words name neither cause nor step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from composer_replication.errors import InputError

_TORCH_SAYS = "probability tensor contains"  # multinomial on a processor; on a GPU it ends the process's CUDA


class NonFiniteSamplingError(InputError, ArithmeticError):
    """The weights give logits that are not finite numbers.

    Args:
        step: in which they were sampled, from 1; None outside of training steps.
    """

    def __init__(self, step: int | None = None) -> None:
        where = "sampling" if step is None else f"step {step}"
        super().__init__(
            "CR0771",
            f"the weights of the model gave numbers that are not finite while sampling"
            f"{'' if step is None else f' for step {step}'}.",
            where=where,
            fix="lower trl.learning_rate or trl.weight_decay and begin a new run; to go on from the newest checkpoint "
            "whose weights are finite, name its folder in model.name.",
        )


def refuse_non_finite(logps: Iterable[float]) -> None:
    """A drawn token may have probability 0 by rounding, but its log-probability is never no number.

    Raises:
        NonFiniteSamplingError: one of them is NaN (CR0771).
    """
    if any(map(math.isnan, logps)):
        raise NonFiniteSamplingError


@contextmanager
def sampling_for_step(step: int) -> Iterator[None]:
    """Inside, what our sampler or torch says of such numbers is an error that names the step.

    Raises:
        NonFiniteSamplingError: CR0771.
    """
    try:
        yield
    except NonFiniteSamplingError as error:
        raise NonFiniteSamplingError(step) from error
    except RuntimeError as error:
        if _TORCH_SAYS not in str(error):
            raise
        raise NonFiniteSamplingError(step) from error
