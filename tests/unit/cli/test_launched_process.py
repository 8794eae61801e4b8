"""Which process of a launch this is, and what only the first one does."""

from __future__ import annotations

import pytest

from composer_replication.cli.cluster import file_part, launched_rank, launched_size, shards_weights
from composer_replication.cli.main import main


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
