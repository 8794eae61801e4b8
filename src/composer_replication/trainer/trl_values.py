"""Refuse values of ``[trl]`` that TRL takes at first and chokes on steps later."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers.training_args import trainer_log_levels
from trl.trainer.grpo_config import GRPOConfig

from composer_replication.errors import ComposerError, UsageError

_AT_LEAST = {
    "adam_beta1": 0,
    "adam_beta2": 0,
    "adam_epsilon": 0,
    "beta": 0,
    "entropy_coef": 0,
    "entropy_coef_delta": 0,
    "entropy_coef_max": 0,
    "entropy_coef_min": 0,
    "entropy_target": 0,
    "epsilon": 0,
    "epsilon_high": 0,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0,
    "max_completion_length": 1,
    "max_grad_norm": 0,
    "min_p": 0,
    "num_generations": 2,
    "num_iterations": 1,
    "per_device_train_batch_size": 1,
    "ref_model_mixup_alpha": 0,
    "ref_model_sync_steps": 1,
    "steps_per_generation": 1,
    "temperature": 0.001,  # below it logits overflow, or one token has all the probability
    "top_entropy_quantile": 0,
    "top_k": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
}
_ABOVE = {
    "delta": 0,
    "num_train_epochs": 0,
    "repetition_penalty": 0,
    "sapo_temperature_neg": 0,
    "sapo_temperature_pos": 0,
    "temperature": 0,
    "top_p": 0,
    "vllm_importance_sampling_clip_max": 0,
}
_AT_MOST = {"min_p": 1, "ref_model_mixup_alpha": 1, "top_entropy_quantile": 1, "top_p": 1}
_BELOW = {"adam_beta1": 1, "adam_beta2": 1}
_ALSO_TAKEN: dict[str, Any] = {"scale_rewards": str | bool}
"""Where TRL takes more than it declares."""
_LEVELS = tuple(trainer_log_levels)
_ONE_OF = {
    "importance_sampling_level": ("token", "sequence"),
    "log_level": _LEVELS,
    "log_level_replica": _LEVELS,
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
}


def refuse_bad_values(table: Mapping[str, Any]) -> None:
    """Compare each value with the type that TRL declares, and with the range that its use needs.

    The keys are known to be TRL's.

    Raises:
        UsageError: a value of another type, out of range or not finite, or none of those that there are (CR0211).
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
    if key in _ONE_OF and value not in _ONE_OF[key]:
        return f"it must be one of {', '.join(_ONE_OF[key])}"
    if key == "max_steps" and not (value == -1 or value >= 1):
        return "it must be at least 1, or -1 for num_train_epochs to count"
    if key == "optim_args" and value and any(part.count("=") != 1 for part in value.split(",")):
        return "it must be of the form NAME=VALUE,NAME=VALUE"
    return _number_problem(key, value) if isinstance(value, int | float) else ""


def _number_problem(key: str, value: float) -> str:
    if key in _ABOVE and not value > _ABOVE[key]:
        return f"it must be above {_ABOVE[key]}"
    if key in _AT_LEAST and not value >= _AT_LEAST[key]:
        return f"it must be at least {_AT_LEAST[key]}"
    if key in _AT_MOST and not value <= _AT_MOST[key]:
        return f"it must be at most {_AT_MOST[key]}"
    if key in _BELOW and not value < _BELOW[key]:
        return f"it must be below {_BELOW[key]}"
    return ""
