"""What a recipe asks of a Ray cluster: actors that attempt and grade as this machine would."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.cli.assembly import MANY_GRADINGS, attempt_options, cluster_options
from composer_replication.cli.cluster import placed_at
from composer_replication.config import RunConfig, parse_config
from composer_replication.errors import UsageError


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
    ("tables", "num_actors", "fits"),
    [
        ({"agent": {"max_concurrent": 5}}, 5, True),
        ({}, MANY_GRADINGS, True),
        ({"agent": {"max_concurrent": 5}, "ray": {"address": "auto", "num_actors": 9}}, 9, False),
    ],
)
def test_how_many_actors_there_are(tables: dict[str, Any], num_actors: int, *, fits: bool) -> None:
    options = cluster_options(recipe(**tables))
    assert (options.num_actors, options.fits_nodes) == (num_actors, fits)


def test_a_share_of_a_resource_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"ray\.resources"):
        recipe(ray={"address": "auto", "resources": {"jail": -1.0}})


def test_an_evaluation_is_placed_by_its_flag_alone() -> None:
    trained = recipe(ray={"address": "old:1", "resources": {"CPU": 0.5, "jail": 1.0}})
    assert placed_at(trained, None).ray is None
    moved = placed_at(trained, "new:2").ray
    assert moved is not None and (moved.address, moved.resources) == ("new:2", {"CPU": 0.5, "jail": 1.0})
    options = cluster_options(trained)
    assert (options.num_cpus, options.resources) == (0.5, {"jail": 1.0})
    plain = placed_at(recipe(ray=None), "new:2")
    assert plain.ray is not None and plain.ray.address == "new:2"
    assert (cluster_options(plain).num_cpus, cluster_options(plain).resources) == (1.0, {})
