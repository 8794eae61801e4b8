"""Build the optimizer and its schedule once on a stand-in, so that what they refuse is known before a model is loaded."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer
from transformers.optimization import get_scheduler
from transformers.trainer_optimizer import is_optimizer_factory

from composer_replication.errors import MissingError
from composer_replication.trainer.trl_values import refusals, refused

_CHECKPOINTING_KEYS = {"preserve_rng_state", "every_n_layers", "offload"}
"""Of ``gradient_checkpointing_kwargs``, beside what torch names in its signature."""
_INSTALL = re.compile(r"pip install [^`\s]*(?: [^`\s]+)*")


def try_optimizer(arguments: Any) -> None:
    """What transformers would say of the optimizer, its schedule and gradient checkpointing at the first step.

    Args:
        arguments: TRL's ``GRPOConfig``.

    Raises:
        UsageError: they refuse a setting (CR0211).
        MissingError: the package of an optimizer is not installed (CR0101).
    """
    model = nn.Sequential(nn.Linear(2, 2))
    with refusals():
        try:
            optimizer = _optimizer_of(arguments, model)
        except ImportError as error:
            raise _missing(arguments.optim, error) from error
        num_steps = max(int(arguments.max_steps), 100)
        get_scheduler(
            arguments.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=arguments.get_warmup_steps(num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )
        _try_checkpointing(arguments)


def _optimizer_of(arguments: Any, model: Any) -> Any:
    """As ``Trainer.create_optimizer``. The stand-in has no layer of the model's, so names of layers stand for all of its own."""
    own = copy.copy(arguments)
    if own.optim_target_modules is not None:
        own.optim_target_modules = "all-linear"
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(own, model)
    if is_optimizer_factory(kind):
        return torch.optim.SGD(model.parameters(), lr=own.learning_rate)
    given = [settings.pop(name) for name in ("params", "model", "optimizer_dict") if name in settings]
    return kind(given[-1] if given else model.parameters(), **settings)


def _missing(optimizer: Any, error: ImportError) -> MissingError:
    command = _INSTALL.search(str(error))
    name = getattr(optimizer, "value", optimizer)
    return MissingError(
        "CR0101",
        f'trl.optim = "{name}" needs a package that is not installed.',
        where="trl.optim",
        fix=f"{command[0].rstrip('.') if command else 'install it'}, or take trl.optim out.",
    )


def _try_checkpointing(arguments: Any) -> None:
    key = "gradient_checkpointing_kwargs"
    settings = dict(
        getattr(arguments, "activation_checkpointing_kwargs", None) or getattr(arguments, key) or {}
    )
    known = set(inspect.signature(checkpoint).parameters) - {"function", "args", "kwargs"}
    unknown = sorted(settings.keys() - known - _CHECKPOINTING_KEYS)
    if unknown:
        raise refused(f"trl.{key} has {unknown[0]}, which torch does not know", where=f"trl.{key}")
    own = {name: value for name, value in settings.items() if name in known | {"preserve_rng_state"}}
    checkpoint(torch.square, torch.ones(1, requires_grad=True), **{"use_reentrant": False, **own})
