"""The table of presets, what wins over it, and what it refuses. Values are those of the papers, written by hand."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.config import RunConfig, parse_config
from composer_replication.errors import UsageError
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.preset_settings import (
    PolicyOptions,
    TrainerSettingError,
    check_arguments,
    check_policy_options,
    resolve_method,
)
from composer_replication.trainer.run_setup import trl_arguments


def recipe(
    trainer: dict[str, Any] | None = None, trl: dict[str, Any] | None = None, **tables: Any
) -> RunConfig:
    tables = {"model": {"name": "tiny-random"}, "tasks": {"store": "x"}} | tables
    return parse_config({"trainer": trainer or {}, "trl": trl or {}, **tables}, where="test")


def checked(config: RunConfig, folder: Path) -> Any:
    """TRL's arguments, which go together with our options."""
    arguments = trl_arguments(config, RunFolder(folder))[0]
    check_arguments(config, arguments, resolve_method(config).options)
    return arguments


def test_what_presets_set_beside_trl() -> None:
    assert resolve_method(recipe({"preset": "grpo"})).options == PolicyOptions(importance_clip=2.0)
    dapo = resolve_method(recipe({"preset": "dapo"}))
    assert (dapo.options.dynamic_sampling_rounds, dapo.overlong_share) == (3, 0.2)
    composer = resolve_method(recipe({"preset": "composer"})).options
    assert composer == PolicyOptions(kl_in_reward=True, effort_weight=1e-4, importance_clip=2.0)


def test_without_a_preset_nothing_is_set() -> None:
    method = resolve_method(recipe(trl={"learning_rate": 0.5}))
    assert method.trl == {"learning_rate": 0.5}
    assert method.options == PolicyOptions(importance_clip=2.0)  # which acts with [agent] alone
    assert method.overlong_share == 0.0


def test_weights_of_vllm_are_cut_by_token_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    chosen = recipe(trl={"vllm_importance_sampling_mode": "sequence_mask"})
    own, _ = trl_arguments(chosen, RunFolder(tmp_path))
    assert own.vllm_importance_sampling_mode == "sequence_mask"
    assert own.vllm_importance_sampling_clip_max == 3.0  # TRL's


def test_the_recipes_keys_win(tmp_path: Path) -> None:
    config = recipe(
        {"preset": "dapo", "dynamic_sampling_rounds": 0},
        {"epsilon_high": 0.3, "mask_truncated_completions": False, "scale_rewards": True},
    )
    arguments = trl_arguments(config, RunFolder(tmp_path))[0]
    assert (arguments.epsilon_high, arguments.mask_truncated_completions) == (0.3, False)
    assert resolve_method(config).options == PolicyOptions(importance_clip=2.0)
    assert resolve_method(recipe({"preset": "composer", "effort_weight": 0.5})).options.effort_weight == 0.5


@pytest.mark.parametrize(
    ("trainer", "trl", "words"),
    [
        ({"preset": "gspo"}, {"importance_sampling_level": "token"}, "gspo"),
        ({"preset": "gspo"}, {"loss_type": "dapo"}, 'trl.loss_type = "grpo"'),
        ({"preset": "dr_grpo"}, {"scale_rewards": True}, "scale_rewards"),
        ({"preset": "composer"}, {"scale_rewards": "group"}, "scale_rewards"),
        ({"preset": "composer"}, {"num_iterations": 2}, "num_iterations"),
        ({"preset": "composer", "kl_in_reward": False}, {}, "trainer.kl_in_reward = true by definition"),
        ({"preset": "gspo"}, {"beta": 0.04}, "trl.beta = 0.0 by definition"),
        ({"preset": "dapo"}, {"beta": 0.04}, "trl.beta = 0.0 by definition"),
        ({"kl_in_reward": True}, {}, "trl.scale_rewards is 'group'"),
        ({"kl_in_reward": True}, {"scale_rewards": "batch"}, "'batch'"),
        ({"effort_weight": 0.1}, {"scale_rewards": "group"}, "effort_weight is exact only"),
        (
            {"preset": "composer"},
            {"multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation is 'normalize_then_sum'",
        ),
        ({"kl_in_reward": True}, {"scale_rewards": "none"}, "trl.beta, which is 0"),
        ({"preset": "composer"}, {"beta": 0.0}, "trl.beta, which is 0"),
        ({}, {"loss_type": "cispo"}, "on-policy gradients would shrink"),
    ],
)
def test_a_contradiction_is_refused_in_one_sentence(
    tmp_path: Path, trainer: dict[str, Any], trl: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match="CR0760") as caught:
        checked(recipe(trainer, trl), tmp_path)
    assert words in caught.value.message
    assert caught.value.fix
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("trainer", "trl"),
    [
        ({"kl_in_reward": True}, {"scale_rewards": "none", "beta": 0.1}),
        ({"kl_in_reward": True}, {"scale_rewards": False, "beta": 0.1}),
        ({"preset": "composer", "kl_in_reward": True}, {"beta": 0.01}),
        ({"preset": "composer", "effort_weight": 0.0}, {}),
        ({"preset": "dr_grpo", "kl_in_reward": False}, {"beta": 0.01}),
        ({"preset": "grpo"}, {"beta": 0.04}),
        ({"preset": "gspo"}, {"beta": 0.0}),
        # legal; the preset is who switches the scaling off
        ({}, {"loss_type": "dr_grpo", "scale_rewards": "group"}),
        ({"effort_weight": 0.0}, {"scale_rewards": "group"}),
        ({"preset": "dr_grpo"}, {"scale_rewards": False}),
        ({"preset": "dr_grpo"}, {"num_train_epochs": 3.0}),
        ({"preset": "composer"}, {"num_train_epochs": 3.0}),
    ],
)
def test_what_does_not_contradict_is_taken(
    tmp_path: Path, trainer: dict[str, Any], trl: dict[str, Any]
) -> None:
    arguments = checked(recipe(trainer, trl), tmp_path)
    taken = {key: getattr(arguments, key) for key in trl}
    assert taken == {**trl, **({"scale_rewards": "none"} if trl.get("scale_rewards") is False else {})}


@pytest.mark.parametrize(
    "trl",
    [
        {"learning_rate": float("inf")},
        {"beta": float("nan")},
        {"max_grad_norm": float("inf")},
        {"reward_weights": [1.0, float("nan")]},
    ],
)
def test_a_value_of_trl_that_is_not_finite_is_one_sentence_with_its_key(
    tmp_path: Path, trl: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="finite number") as caught:
        trl_arguments(recipe(trl=trl), RunFolder(tmp_path))
    assert (caught.value.code, caught.value.where) == ("CR0211", f"trl.{next(iter(trl))}")


def test_a_value_of_no_type_of_trl_is_refused_before_the_preset_is_compared_with_it(tmp_path: Path) -> None:
    wrong = recipe({"preset": "dapo"}, trl={"beta": date(2020, 1, 1)})
    with pytest.raises(UsageError, match=r"CR0211: trl.beta is .*valid number"):
        trl_arguments(wrong, RunFolder(tmp_path))


def test_a_term_in_the_reward_needs_unscaled_rewards_from_python_too() -> None:
    options = PolicyOptions(kl_in_reward=True)
    check_policy_options(options, SimpleNamespace(scale_rewards="none", beta=0.1))
    with pytest.raises(TrainerSettingError, match="CR0760"):
        check_policy_options(options, SimpleNamespace(scale_rewards="none", beta=0.0))
    check_policy_options(PolicyOptions(), None)
    for args in (None, SimpleNamespace(scale_rewards=True)):
        with pytest.raises(TrainerSettingError, match="CR0760"):
            check_policy_options(options, args)
