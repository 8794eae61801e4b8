"""The settings of a new recipe: plain numbers of tasks, tokens and weights in, TOML out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w

GROUP_SIZE = 8
"""Completions of one prompt: the group whose mean is the baseline; the size of the quick start."""
PROMPTS_PER_STEP = 2
STEP_SHAPES = ((PROMPTS_PER_STEP, GROUP_SIZE), (1, GROUP_SIZE), (1, GROUP_SIZE // 2))
"""(prompts, completions of each) of a step, tried from the left until one fits into memory."""
HELDOUT_FRACTION = 0.3
_LARGE_MODEL = 3 * 10**9
_CHAT_TOKENS = 64
_MIN_TOKENS, _MAX_TOKENS = 16, 1024
_VISITS = 8
_MIN_STEPS, _MAX_STEPS = 30, 300
_MANY_HELDOUT = 16
_FEW_TASKS = 40

_COMMENTS = {
    "": "Written by composer-rl recipe new. docs/recipe-keys.md lists every key.",
    "model": "Adapters instead of all weights: less memory, and the guard gets the KL to the initial policy for free.",
    "heldout": "Tasks that are never trained on; their hidden tests are the truth that the guard compares with.",
    "guard": "The guard as it comes. Its ceilings are not yet fitted to your tasks: run a few honest seeds with the\n"
    "# ceilings out of reach, and set them above what those runs show (recipes/quickstart/README.md does so).",
    "trl": "max_completion_length holds nine in ten of the golden bodies with room to spare.",
}


def completion_tokens(golden_lengths: Sequence[int], *, as_chat: bool) -> int:
    """Room for an answer, in tokens.

    1.25 times the 90th percentile (nearest rank) of the golden bodies' lengths plus 8, rounded
    up to a multiple of 8, in [16, 1024]. In chat style twice that plus 64, for the fence and for
    words around it. Longer bodies exist; room for the longest would cost every step.
    """
    ranked = sorted(golden_lengths)
    percentile = ranked[math.ceil(0.9 * len(ranked)) - 1]
    room = 8 * math.ceil((1.25 * percentile + 8) / 8)
    return min(_MAX_TOKENS, max(_MIN_TOKENS, 2 * room + _CHAT_TOKENS if as_chat else room))


def learning_rate(num_parameters: int) -> float:
    """1e-4 for adapters, 5e-5 from three billion parameters on: rules of thumb, not measured on your tasks."""
    return 5e-5 if num_parameters >= _LARGE_MODEL else 1e-4


def num_steps(num_tasks: int, prompts_per_step: int) -> int:
    """Steps that show each task eight times, in [30, 300]."""
    return min(_MAX_STEPS, max(_MIN_STEPS, math.ceil(_VISITS * num_tasks / prompts_per_step)))


def first_table(
    *, store: str, model: Mapping[str, Any], prompt_style: str, seed: int, has_split: bool
) -> dict[str, Any]:
    """What can be said before tasks and model are opened: enough to divide the tasks."""
    heldout = {"every": 2, "samples_per_task": 2, "seed": seed}
    return {
        "seed": seed,
        "model": {**model, "lora": {"rank": 16, "lora_alpha": 32}},
        "tasks": {"store": store},
        "heldout": heldout if has_split else {"fraction": HELDOUT_FRACTION, **heldout},
        "rollouts": {"prompt_style": prompt_style},
    }


def whole_table(
    first: Mapping[str, Any],
    *,
    num_train: int,
    num_heldout: int,
    num_prompts: int,
    group_size: int,
    num_tokens: int,
    num_parameters: int,
    is_shared: bool,
    cpu_threads: int,
) -> dict[str, Any]:
    """The whole recipe as a table.

    More than 16 held-out tasks: each evaluation draws 16 afresh. Up to 40 tasks: pass rates are
    measured before and after with four samples each.
    """
    heldout = dict(first["heldout"])
    if num_heldout > _MANY_HELDOUT:
        heldout["sample_size"] = _MANY_HELDOUT
    if num_train + num_heldout <= _FEW_TASKS:
        heldout["before_and_after_samples"] = 4
    return {
        **first,
        "heldout": heldout,
        "guard": {
            "min_steps": 5,
            "decline_patience": 8,
            "ema_alpha": 0.8,
            "kl_hard_stop": 0.08,
            "max_proxy_real_gap": 0.35,
        },
        "trainer": {"prefix_sharing": is_shared, "checkpoint_every": 10, "cpu_threads": cpu_threads},
        "trl": {
            "max_steps": num_steps(num_train, num_prompts),
            "learning_rate": learning_rate(num_parameters),
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 5,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "per_device_train_batch_size": num_prompts * group_size,
            "gradient_accumulation_steps": 1,
            "num_generations": group_size,
            "max_completion_length": num_tokens,
            "temperature": 1.0,
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "beta": 0.0,
            "bf16": False,
            "gradient_checkpointing": False,
        },
    }


def recipe_text(table: Mapping[str, Any]) -> str:
    """The recipe as TOML, with a comment above the tables that need one."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    parts = [f"# {_COMMENTS['']}\n{tomli_w.dumps(plain)}"]
    for name, section in table.items():
        if isinstance(section, Mapping):
            comment = f"# {_COMMENTS[name]}\n" if name in _COMMENTS else ""
            parts.append(comment + tomli_w.dumps({name: section}))
    return "\n".join(parts)
