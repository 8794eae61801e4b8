"""Which process of a launch this is, and what a recipe asks of a Ray cluster."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.cli.assembly import MANY_GRADINGS, attempt_options, cluster_options
from composer_replication.cli.flags import file_part, launched_rank, launched_size, shards_weights
from composer_replication.cli.main import main
from composer_replication.config import RunConfig, parse_config


def recipe(**tables: Any) -> RunConfig:
    table = {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}, "ray": {"address": "auto"}}
    return parse_config({**table, **tables}, where="here")


def test_actors_have_the_sandboxes_and_reward_of_the_recipe() -> None:
    config = recipe(
        agent={"reward": {"invalid_call_cost": 0.25, "breaks": "cost"}, "tools": {"max_characters": 7000}},
        sandbox={"backend": "sandlock"},
    )
    options = cluster_options(config)
    assert options.attempt == attempt_options(config)
    assert options.attempt["reward"].invalid_call_cost == 0.25
    assert options.attempt["tools"].max_characters == 7000
    assert options.grader == {"backend": "sandlock"}


@pytest.mark.parametrize(
    ("tables", "num_actors"), [({"agent": {"max_concurrent": 5}}, 5), ({}, MANY_GRADINGS)]
)
def test_how_many_actors_there_are(tables: dict[str, Any], num_actors: int) -> None:
    options = cluster_options(recipe(**tables))
    assert (options.num_actors, options.fits_nodes) == (num_actors, True)


def test_an_actor_takes_the_resources_of_the_table() -> None:
    options = cluster_options(recipe(ray={"address": "auto", "resources": {"CPU": 0.5, "jail": 1.0}}))
    assert (options.num_cpus, options.resources) == (0.5, {"jail": 1.0})
    assert (cluster_options(recipe()).num_cpus, cluster_options(recipe()).resources) == (1.0, {})


@pytest.mark.parametrize(
    ("environment", "rank", "size"),
    [
        ({}, 0, 1),
        ({"WORLD_SIZE": "8", "RANK": "0"}, 0, 8),
        ({"WORLD_SIZE": "8", "RANK": "5"}, 5, 8),
        ({"RANK": "5"}, 0, 1),  # left over in a shell: a lone process writes its folder all the same
        ({"WORLD_SIZE": "1", "RANK": "5"}, 0, 1),
        ({"WORLD_SIZE": "all", "RANK": "5"}, 0, 1),
    ],
    ids=str,
)
def test_the_launcher_tells_rank_and_size(environment: dict[str, str], rank: int, size: int) -> None:
    assert (launched_rank(environment), launched_size(environment)) == (rank, size)


def test_the_first_process_has_the_plain_names_and_other_verbs_than_train_always_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        assert main(["explain", "CR0757", "--json"]) == 0
        said[rank] = (capsys.readouterr().out, file_part())
    assert said["0"][0] == said["1"][0] != ""
    assert (said["0"][1], said["1"][1]) == ("", "-process-1")


def test_accelerate_tells_whether_weights_are_spread() -> None:
    assert shards_weights({"ACCELERATE_USE_FSDP": "true"})
    assert not shards_weights({"ACCELERATE_USE_OTHER": "true"})
    stages = ("1", "2", "3", "")
    under = [
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage} for stage in stages
    ]
    assert [shards_weights(environment) for environment in under] == [False, False, True, False]
    assert not shards_weights({"ACCELERATE_USE_FSDP": "false"})
    assert not shards_weights({})
