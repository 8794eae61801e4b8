"""``train --ray`` on a real Ray of this machine gives what it gives without it, and leaves it clean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.config import dump_config, load_config
from composer_replication.run_folder import RunFolder, read_json, read_jsonl
from composer_replication.tasks.intake.cache import cache_folder
from composer_replication.trainer.checkpoints import newest_whole_checkpoint

pytest.importorskip("ray", reason="the extra ray is not installed")
from agentic_runs import SETTINGS, what_was_played, without_times
from ray_head import RayHead, actors_of, further_node, processes, running_ray

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
WORKER = Path(__file__).with_name("ray_rollout_worker.py")
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-tools" / "run.toml"
SINGLE = RECIPE.parents[1] / "tiny-cpu" / "run.toml"
PINS = ("tinymath/numbers.py::clamp", "tinymath/numbers.py::mean", "tinymath/numbers.py::sign")
SMALL = ("--set", "ray.resources.CPU=0.1")
_BY_THE_CLOCK = ("rollouts/infrastructure_failures",)


@pytest.fixture(scope="module")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("ray-store") / "tasks", PINS)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """The one Ray of this file."""
    with running_ray(tmp_path_factory.mktemp("ray")) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Guard, hints, curriculum and monitor are on, and two episodes run at a time."""
    settings = {"tasks": {"store": str(store)}, **SETTINGS, "trl.max_steps": 2, "agent.max_concurrent": 2}
    path = tmp_path_factory.mktemp("ray-recipe") / "run.toml"
    path.write_text(dump_config(load_config(RECIPE, settings)))
    return path


def begin(
    events: str, head: RayHead | None, *words: object, cache: Path | None = None
) -> subprocess.Popen[str]:
    """The command in a process of its own, since one reads its token for Ray once; with a terminal's group of its own."""
    ours = {"HF_HUB_OFFLINE": "1", **({} if head is None else head.token)}
    ours |= {} if cache is None else {"COMPOSER_RL_CACHE": str(cache)}
    program = [sys.executable, str(WORKER), events, *map(str, words), "--quiet", "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        program, env={**os.environ, **ours}, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen[str], code: int) -> dict[str, Any]:
    out, err = process.communicate()
    assert process.returncode == code, err[-3000:]
    found: dict[str, Any] = json.loads(out or "{}")
    return found


def done(events: str, head: RayHead | None, *words: object, cache: Path | None = None) -> dict[str, Any]:
    return ended(begin(events, head, *words, cache=cache), 0)


def left_by(scratch: Path) -> list[str]:
    """Jails of ours on a node; a folder is removed by the next process of ours there."""
    return [words for _, words in processes() if str(scratch) in words]


def assert_clean(head: RayHead) -> None:
    """Nothing of ours is left on the cluster: no actor, no jail."""
    assert actors_of(head.session) == []
    wait_until_clean(head.session, head.scratch)


def wait_until_clean(session: int, scratch: Path) -> None:
    """For what nobody waits for; the test's time-out ends it."""
    while actors_of(session) or left_by(scratch):
        time.sleep(0.1)


@pytest.fixture(scope="module")
def here(recipe: Path) -> RunFolder:
    """The run without Ray."""
    folder = recipe.parent / "here"
    done("none", None, "train", recipe, "--out", folder)
    return RunFolder(folder)


def assert_same_run(theirs: RunFolder, mine: RunFolder) -> None:
    for name in ("parameter_sha256", "heldout_last", "verdict"):
        assert read_json(theirs.summary)[name] == read_json(mine.summary)[name]
    played = what_was_played(mine)
    assert what_was_played(theirs) == played
    assert len({episode[2] for step in played for episode in step}) > 1, "not every reward is the same"
    rows = [
        [
            {name: value for name, value in row.items() if name not in _BY_THE_CLOCK}
            for row in without_times(rows)
        ]
        for rows in (read_jsonl(theirs.metrics), read_jsonl(mine.metrics))
    ]
    assert rows[0] == rows[1]
    assert read_jsonl(theirs.verdicts) == read_jsonl(mine.verdicts)


def test_a_run_on_ray_whose_actor_is_killed_equals_one_without_ray(
    recipe: Path, head: RayHead, here: RunFolder
) -> None:
    folder = RunFolder(recipe.parent / "there")
    done(f"actor={head.session}", head, "train", recipe, "--out", folder.root, "--ray", head.address, *SMALL)
    assert_same_run(folder, here)
    lost = [row["rollouts/infrastructure_failures"] for row in read_jsonl(folder.metrics)]
    assert sum(lost) == 1, "the killed actor's episode, and no other"
    assert sum(row["rollouts/dropped"] for row in read_jsonl(folder.metrics)) == sum(
        row["rollouts/dropped"] for row in read_jsonl(here.metrics)
    )
    assert read_json(folder.environment)["sandbox"]["backend"] == "the best of each node"
    assert_clean(head)


def lose_a_node(head: RayHead, folder: Path, *words: object) -> None:
    """A run over two further nodes, the first of which dies amid its work; both are clean in the end."""
    nodes = [folder / "first", folder / "second"]
    with further_node(head, nodes[0], '{"side": 1}') as session, further_node(head, nodes[1], '{"side": 1}'):
        done(f"node={session}", head, *words, "--set", "ray.resources.side=0.6")
    for node in nodes:
        wait_until_clean(session, node / "scratch")


def test_a_run_that_loses_a_node_for_good_goes_on_with_the_other(
    recipe: Path, head: RayHead, here: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(recipe.parent / "lost")
    words = ("train", recipe, "--out", folder.root, "--ray", head.address, *SMALL)
    lose_a_node(head, tmp_path, *words)
    assert_same_run(folder, here)
    lost = [row["rollouts/infrastructure_failures"] for row in read_jsonl(folder.metrics)]
    assert sum(lost) == 1, "the lost node's episode, and no other"


@pytest.mark.parametrize("events", ["ctrl-c", "ctrl-c,ctrl-c", "killed"])
def test_whatever_ends_a_run_on_ray_leaves_nothing_there_and_a_run_to_be_resumed_without_it(
    recipe: Path, head: RayHead, here: RunFolder, events: str
) -> None:
    folder = RunFolder(recipe.parent / events)
    words = ("train", recipe, "--out", folder.root)
    process = begin(events, head, *words, "--ray", head.address, *SMALL)
    if events == "killed":
        ended(process, -signal.SIGKILL)
        wait_until_clean(head.session, head.scratch)
    else:
        assert ended(process, 130)["error"]["code"] == "CR0103"
        assert_clean(head)
    checkpoint = newest_whole_checkpoint(folder.checkpoints)
    assert (checkpoint and checkpoint.name) == ("checkpoint-1" if events == "ctrl-c" else None)
    done("none", None, *words, "--resume")
    assert_same_run(folder, here)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of single answers that builds its tasks."""
    project = str(SINGLE.parent / "project")
    settings = {
        "tasks": {"source": [project], "symbols": {project: list(PINS)}},
        "heldout.every": 1,
        "heldout.sample_size": 1,
        "evidence": {"planned_evaluations": 2, "tolerated_gap": 0.1},
        "trl.max_steps": 2,
    }
    path = tmp_path_factory.mktemp("single") / "run.toml"
    path.write_text(dump_config(load_config(SINGLE, settings)))
    return path


@pytest.fixture(scope="module")
def single_here(single: Path) -> RunFolder:
    folder = RunFolder(single.parent / "here")
    done("none", None, "train", single, "--out", folder.root)
    return folder


def assert_same_answers(theirs: RunFolder, mine: RunFolder) -> None:
    assert read_json(theirs.summary)["parameter_sha256"] == read_json(mine.summary)["parameter_sha256"]
    rows = [without_times(read_jsonl(folder.metrics)) for folder in (theirs, mine)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2
    assert all(row["rollouts/infrastructure_failures"] == 0 for row in rows[0])


def test_single_answers_are_graded_and_their_tasks_built_there_as_here_though_actors_are_killed(
    single: Path, head: RayHead, single_here: RunFolder, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"  # without the store that the run here has built
    cache.mkdir()
    for entry in cache_folder().iterdir():
        if entry.name != "task-stores":
            (cache / entry.name).symlink_to(entry)
    folder = RunFolder(single.parent / "there")
    words = ("train", single, "--out", folder.root, "--ray", head.address, "--set", "ray.resources.CPU=0.5")
    done(f"build,actors={head.session}", head, *words, cache=cache)
    assert_same_answers(folder, single_here)
    assert_clean(head)
