"""The rendered task under SkyPilot's own reading of it, offline, and our calls under the options of its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sky
import yaml
from sky.client.cli import command

from composer_replication.launch import skypilot
from composer_replication.launch.job import Job, Resources, recipe_files
from composer_replication.launch.job_status import JobState
from composer_replication.launch.targets import open_target

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"
OPTIONS = {
    "image": "docker:trainer:1",
    "store": "s3://runs",
    "gpu_type": "H100",
    "infra": "aws/us-east-1",
    "spot": True,
}


def rendered(tmp_path: Path) -> dict[str, str]:
    resources = Resources(nodes=2, gpus=8, processes=8)
    job = Job("run", RECIPE, recipe_files(RECIPE), (), resources, 2, {"A": "1"}, ("HF_TOKEN",))
    (tmp_path / "recipe").mkdir(exist_ok=True)
    return open_target("skypilot", OPTIONS, tmp_path).render(job)


def read(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> sky.Task:
    """As ``sky jobs launch FILE`` reads it. A bucket is looked up when its source is one: only its name is checked here."""
    monkeypatch.chdir(folder)
    table = yaml.safe_load(text)
    mount = table["file_mounts"][skypilot.RUN_MOUNT]
    mount["name"] = re.sub(r"^s3://", "", mount.pop("source"))
    return sky.Task.from_yaml_config(table, secrets_overrides=[("HF_TOKEN", "x")])


def test_the_task_is_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = rendered(tmp_path)
    assert list(files) == ["task-run-0.yaml", "task-run-1.yaml"]
    task = read(files["task-run-1.yaml"], tmp_path, monkeypatch)
    (resources,) = task.resources
    assert (task.name, task.num_nodes, resources.accelerators) == ("run-1", 2, {"H100": 8})
    assert resources.use_spot
    assert resources.job_recovery["max_restarts_on_errors"] == 0  # a halted run stays halted
    assert task.envs == {"A": "1"}
    assert "--replica 1 --of 2" in str(task.run)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_nodes: 2", "num_nodes: two"),
        ("num_nodes: 2", "nodes: 2"),
        ("memory: 16+", "memory: 16 gigs"),
        ('infra: "aws/us-east-1"', 'infra: "nowhere/x"'),
        ("mode: MOUNT_CACHED", "mode: MOUNTED"),
        ("use_spot:", "spot:"),
    ],
)
def test_a_planted_error_is_found(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = rendered(tmp_path)["task-run-0.yaml"]
    assert old in text
    with pytest.raises(Exception, match=r".") as caught:
        read(text.replace(old, new), tmp_path, monkeypatch)
    assert not isinstance(caught.value, (KeyError, AttributeError))


@pytest.mark.parametrize(
    "words", ["launch --yes --detach-run --secret", "queue --output", "logs --no-follow", "cancel --yes"]
)
def test_its_commands_take_our_options(words: str) -> None:
    name, *flags = words.split()
    options = command.jobs.commands[name].params
    assert set(flags) <= {text for one in options for text in (*one.opts, *one.secondary_opts)}


def test_every_state_of_its_jobs_has_one_of_ours() -> None:
    from sky.jobs.state import ManagedJobStatus

    for status in ManagedJobStatus:
        state = skypilot._status({"status": status.value}).state
        failed = status.value.startswith("FAILED")
        assert (state is JobState.FAILED) == failed, status
