"""The settings of a new recipe, by hand-computed numbers."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from composer_replication.cli.recipe_verb import (
    completion_tokens,
    recipe_text,
    whole_table,
)
from composer_replication.config import parse_config
from composer_replication.errors import UsageError


def table_of(**changes: Any) -> dict[str, Any]:
    first = {"model": {"name": "tiny-random", "lora": {"rank": 16}}, "tasks": {"store": "tasks"}}
    first["heldout"] = {"fraction": 0.3}
    sizes = {"num_train": 10, "num_heldout": 4, "num_prompts": 2, "num_tokens": 24}
    rest = {"num_parameters": 10**8, "is_shared": True, "cpu_threads": 1}
    return whole_table(first, **{**sizes, **rest, **changes})


@pytest.mark.parametrize(
    ("lengths", "as_chat", "tokens"),
    [
        ([10] * 9 + [100], False, 24),  # nearest rank 9 of 10 is 10: 12.5 + 8 = 20.5, up to 24
        ([10] * 8 + [100] * 2, False, 136),  # now it is 100: 125 + 8 = 133, up to 136
        ([32], False, 48),  # 40 + 8 = 48 exactly
        ([32], True, 160),  # 2 x 48 + 64
        ([1], False, 16),  # the floor
        ([5000], False, 1024),  # the ceiling
        ([5000], True, 1024),
    ],
)
def test_room_for_an_answer(lengths: list[int], as_chat: bool, tokens: int) -> None:
    assert completion_tokens(lengths, as_chat=as_chat) == tokens
    assert completion_tokens(lengths[::-1], as_chat=as_chat) == tokens


def test_a_written_table_is_a_recipe_and_keeps_its_values() -> None:
    table = table_of()
    assert tomllib.loads(recipe_text(table)) == table
    config = parse_config(table, where="here")
    assert (config.trl["per_device_train_batch_size"], config.trl["max_steps"]) == (16, 40)
    assert config.heldout is not None
    assert (config.heldout.fraction, config.heldout.sample_size) == (0.3, 0)
    assert config.heldout.before_and_after_samples == 4
    assert config.model.lora is not None


def test_many_tasks_are_sampled_and_not_measured_twice() -> None:
    heldout = parse_config(table_of(num_train=100, num_heldout=17), where="here").heldout
    assert heldout is not None
    assert (heldout.sample_size, heldout.before_and_after_samples) == (16, 0)


def test_a_key_that_is_no_key_would_be_noticed() -> None:
    with pytest.raises(UsageError, match="CR0204"):
        parse_config({**table_of(), "trainr": {}}, where="here")
