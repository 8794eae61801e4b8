"""Pass rates beside the tasks: counted, added up by seed, replaced by the same seed, refused when damaged."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.tasks.difficulty import (
    FOLDER,
    Difficulty,
    MeasuredPolicy,
    read_difficulty,
    record_difficulty,
)
from composer_replication.tasks.store import TaskStore

POLICY = MeasuredPolicy("runs/a model", "a" * 64, 1.0, "completion", 12, 64)


def row(
    task_id: str, samples: int, passed: int, hidden: int | None, policy: MeasuredPolicy = POLICY
) -> Difficulty:
    return Difficulty(task_id, policy, samples, passed, hidden)


def test_rates_and_intervals_by_hand() -> None:
    # Wilson, 8 of 10: centre (0.8 + z^2/20) / (1 + z^2/10), z^2 = 3.841459.
    found = row("t", 10, 8, 5).to_json()
    assert (found["pass_rate"], found["hidden_pass_rate"]) == (0.8, 0.5)
    assert found["ci95"] == pytest.approx([0.490162, 0.943318], abs=1e-6)
    assert found["hidden_ci95"] == pytest.approx([0.236593, 0.763407], abs=1e-6)
    assert row("t", 10, 0, None).to_json()["ci95"][0] == 0.0
    without = row("t", 4, 4, None).to_json()
    assert (without["hidden_pass_rate"], without["hidden_ci95"]) == (None, None)


def test_the_same_seed_replaces_and_another_adds(tmp_path: Path) -> None:
    written = [row("t", 4, 1, 0), row("u", 2, 2, 2), row("v", 4, 4, None)]
    path = record_difficulty(tmp_path, 0, written)
    assert path is not None
    assert path.parent == tmp_path / FOLDER
    assert path.name.startswith("runs-a-model--")
    assert read_difficulty(tmp_path) == {one.task_id: (one,) for one in written}
    record_difficulty(tmp_path, 0, [row("t", 8, 3, 2)])
    assert read_difficulty(tmp_path)["t"] == (row("t", 8, 3, 2),)
    record_difficulty(tmp_path, 7, [row("t", 4, 4, 1)])
    assert read_difficulty(tmp_path)["t"] == (row("t", 12, 7, 3),)


def test_other_weights_and_settings_are_other_policies(tmp_path: Path) -> None:
    others = [
        replace(POLICY, parameter_sha256="b" * 64),
        replace(POLICY, temperature=0.5),
        replace(POLICY, prompt_style="chat"),
        replace(POLICY, max_new_tokens=128),
    ]
    for number, policy in enumerate([POLICY, *others]):
        record_difficulty(tmp_path, 0, [row("t", 4, number, None, policy)])
    assert {found.policy: found.num_passed for found in read_difficulty(tmp_path)["t"]} == {
        policy: number for number, policy in enumerate([POLICY, *others])
    }


def test_the_same_evaluation_writes_the_same_bytes(tmp_path: Path) -> None:
    rows = [row("t2", 4, 1, 0), row("t1", 4, 2, 1)]
    paths = [record_difficulty(tmp_path / name, 3, order) for name, order in (("a", rows), ("b", rows[::-1]))]
    texts = [path.read_bytes() for path in (*paths, record_difficulty(tmp_path / "a", 3, rows)) if path]
    assert (len(texts), len(set(texts))) == (3, 1)
    assert b"schema_version" in texts[0]


def test_rows_with_a_hash_of_their_tests_are_read(tmp_path: Path) -> None:
    """As an earlier version wrote them."""
    path = record_difficulty(tmp_path, 0, [row("t", 4, 1, 0)])
    assert path is not None
    value = json.loads(path.read_text())
    value["evaluations"]["0"]["t"] = [4, 1, 0, "a" * 64]
    path.write_text(json.dumps(value))
    assert read_difficulty(tmp_path) == {"t": (row("t", 4, 1, 0),)}


def test_it_is_no_part_of_the_store(sized_store: TaskStore) -> None:
    fingerprint = sized_store.fingerprint
    record_difficulty(sized_store.root, 0, [row("t-class-body", 4, 1, 0)])
    assert TaskStore.create(sized_store.root).fingerprint == fingerprint


def test_nothing_measured_writes_nothing(tmp_path: Path) -> None:
    assert record_difficulty(tmp_path, 0, []) is None
    assert list(tmp_path.iterdir()) == []
    assert read_difficulty(tmp_path) == {}


DAMAGES: dict[str, dict[str, Any] | str] = {
    "more passes than samples": {"evaluations": {"0": {"t": [4, 5, None, ""]}}},
    "no samples": {"evaluations": {"0": {"t": [0, 0, None, ""]}}},
    "true is no number": {"evaluations": {"0": {"t": [4, True, None, ""]}}},
    "tests that are no hash": {"evaluations": {"0": {"t": [4, 1, None, 3]}}},
    "a seed that is none": {"evaluations": {"x": {"t": [4, 1, None, ""]}}},
    "two counts": {"evaluations": {"0": {"t": [4, 1]}}},
    "no policy": {"policy": None},
    "another key": {"policy": {**asdict(POLICY), "colour": "red"}},
    "a temperature in words": {"policy": {**asdict(POLICY), "temperature": "hot"}},
    "another version": {"schema_version": 99},
    "a list": {"evaluations": []},
    "torn": "{",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, how: str) -> None:
    path = record_difficulty(tmp_path, 0, [row("t", 4, 1, None)])
    assert path is not None
    damage, value = DAMAGES[how], json.loads(path.read_text())
    path.write_text(damage if isinstance(damage, str) else json.dumps({**value, **damage}))
    with pytest.raises(InputError) as caught:
        read_difficulty(tmp_path)
    assert caught.value.code == "CR0411"
    assert caught.value.where == str(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("CR0") == 1  # not a sentence in a sentence
    with pytest.raises(InputError, match="CR0411"):  # it is not written over either
        record_difficulty(tmp_path, 1, [row("t", 4, 1, None)])
