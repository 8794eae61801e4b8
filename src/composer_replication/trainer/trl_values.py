"""What is wrong with values of ``[trl]``: their types and sizes by us, the rest in the words of the library that refuses it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from trl.trainer.grpo_config import GRPOConfig

from composer_replication.errors import ComposerError, UsageError

_ABOVE_ZERO = {
    "gradient_accumulation_steps",
    "max_completion_length",
    "num_iterations",
    "num_train_epochs",
    "per_device_train_batch_size",
    "steps_per_generation",
    "temperature",
    "top_p",
}
"""The libraries take 0 and less for these, and then divide by them, or train something else without a word."""
_NOT_NEGATIVE = {"beta", "entropy_coef", "epsilon", "epsilon_high", "max_grad_norm", "min_p", "top_k"}
_AT_MOST_ONE = {"min_p", "top_p"}
_ONE_OF = {
    "importance_sampling_level": ("token", "sequence"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
}
"""TRL looks at these steps later, or never."""
_ALSO_TAKEN: dict[str, Any] = {"scale_rewards": str | bool}
"""Where TRL takes more than it declares."""


def refuse_bad_values(table: Mapping[str, Any]) -> None:
    """Compare each value with the type that TRL declares; ranges are left to TRL but for those in which it says nothing.

    The keys are known to be TRL's.

    Raises:
        UsageError: a value of another type, not finite, or 0 and less where that trains nothing (CR0211).
    """
    kinds = get_type_hints(GRPOConfig)
    for key, value in table.items():
        problem = _finite_problem(value) or _type_problem(_ALSO_TAKEN.get(key, kinds[key]), value)
        problem = problem or _range_problem(key, value)
        if problem:
            raise refused(f"trl.{key} is {value!r}: {problem}", where=f"trl.{key}")


@contextmanager
def refusals(where: str = "[trl]") -> Iterator[None]:
    """Inside, what TRL, transformers or peft raise about their settings is an error of the recipe.

    Args:
        where: the tables that they may speak of.

    Raises:
        UsageError: they refuse a setting (CR0211), or as raised inside.
    """
    try:
        yield
    except ComposerError:
        raise
    except (ArithmeticError, ImportError, TypeError, ValueError) as error:
        raise refused(f"the training libraries refuse {where}: {error}", where=where) from error


def refused(sentence: str, *, where: str = "[trl]") -> UsageError:
    """The error for a table that TRL refuses."""
    return UsageError(
        "CR0211",
        f"{sentence.strip().rstrip('.')[:400]}.",
        where=where,
        fix=f"correct it in the recipe, or type --set {where}=VALUE."
        if where.startswith("trl.")
        else "correct these keys in the recipe, or type --set trl.KEY=VALUE.",
    )


def _finite_problem(value: Any) -> str:
    """TOML has inf and nan, and inf is even a float that is at least 0; no key of TRL's means anything by them."""
    if isinstance(value, Mapping):
        found = ((f"its {key}", _finite_problem(inner)) for key, inner in value.items())
        return next((f"{name}: {problem}" for name, problem in found if problem), "")
    if isinstance(value, list):
        return next(filter(None, map(_finite_problem, value)), "")
    return "" if not isinstance(value, float) or math.isfinite(value) else "it must be a finite number"


def _type_problem(kind: Any, value: Any) -> str:
    adapter: TypeAdapter[Any] = TypeAdapter(
        kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True)
    )
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return "it must be " + error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
    return ""


def _range_problem(key: str, value: Any) -> str:
    if key == "max_steps" and not (value == -1 or value >= 1):
        return "it must be at least 1, or -1 for num_train_epochs to count"
    if key in _ONE_OF and value not in _ONE_OF[key]:
        return f"it must be one of {', '.join(_ONE_OF[key])}"
    if value is None:
        return ""
    if key in _ABOVE_ZERO and not value > 0:
        return "it must be above 0"
    if key in _NOT_NEGATIVE and not value >= 0:
        return "it must be at least 0"
    return "it must be at most 1" if key in _AT_MOST_ONE and not value <= 1 else ""
