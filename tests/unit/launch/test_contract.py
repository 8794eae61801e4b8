"""What is rendered for each target runs: its command, variables, files and ranks, as the target would start them.

First every command is recorded and read by the parsers that will read it; errors planted into the
rendered text must be found there. Then the same processes train the tiny recipe.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_head import free_port, running_ray

from composer_replication.cli.main import build_parser
from composer_replication.config import load_config, parse_override
from composer_replication.errors import UsageError
from composer_replication.launch.job import Job, Resources, recipe_files
from composer_replication.launch.job_folder import write_files
from composer_replication.launch.targets import open_target
from composer_replication.run_folder import read_jsonl
from composer_replication.tasks.intake.cache import cache_folder
from composer_replication.trainer import node_processes

from . import rendered_nodes as rendered

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"
NODES = 2
STORE = "replicas.transport=file:///store"
SETTINGS = (
    "trl.max_steps=1",
    "trl.per_device_train_batch_size=4",
    "trl.num_generations=4",
    "trl.max_completion_length=8",
    "heldout.before_and_after_samples=0",
    "trainer.save_model=false",
)
ROLE = "arn:aws:iam::123456789012:role/trainer"
OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"processes": NODES},
    "slurm": {},
    "ray": {"address": "http://127.0.0.1:8265", "processes": NODES},
    "kubernetes": {"image": "registry.example/trainer:1"},
    "kuberay": {"image": "registry.example/trainer:1", "processes": NODES},
    "eks": {"image": "registry.example/trainer:1", "cluster": "c", "region": "us-east-1", "role": ROLE, "efa": 1},
    "sagemaker": {
        "image": "registry.example/trainer:1", "region": "us-east-1", "role": ROLE,
        "instance_type": "ml.p5.48xlarge", "bucket": "s3://runs/a",
    },
    "skypilot": {"image": "docker:trainer", "store": "s3://runs"},
}  # fmt: skip


def nodes_of(
    target: str, files: Mapping[str, str], root: Path, replica: int | None = None
) -> list[rendered.NodeProcess]:
    """What the target starts, of one replica where there are several."""
    name = "contract" if replica is None else f"contract-{replica}"
    match target:
        case "local":
            return rendered.of_local(files["run.sh"], root)
        case "slurm":
            return rendered.of_slurm(files["job.sbatch"], root, NODES, replica)
        case "ray":
            return rendered.of_ray(files[f"{name}.json"], root)
        case "kuberay":
            return rendered.of_rayjob(files["manifests.yaml"], root)
        case "sagemaker":
            return rendered.of_sagemaker(files[f"training-job-{name}.json"], root)
        case "skypilot":
            return rendered.of_skypilot(files[f"task-{name}.yaml"], root)
    return rendered.of_pods(files["manifests.yaml"], root, replica)


ON_ONE_NODE = ("local", "ray", "kuberay")
KNOWN_VARIABLES = {
    "HF_HOME", "COMPOSER_RL_CACHE", "RAY_JOB_STOP_WAIT_TIME_S", "JOB_COMPLETION_INDEX", "REPLICA", "head", "GIVEN"
}  # fmt: skip
"""Read by the Hugging Face libraries, by ours, by Ray, by the rendered commands, and given by the test."""
OF_OTHERS = re.compile(r"PATH|HOME|PWD|OLDPWD|SHLVL|_|LC_CTYPE|(SLURM|SKYPILOT)_\w+")
"""Of a shell, and of the schedulers that fill them in."""


def rendered_files(target: str, root: Path, python: str, replicas: int = 1) -> dict[str, str]:
    """What the target would be given, with the recipe beside it."""
    options = {**OPTIONS[target], "port": free_port()}
    if target in ("local", "slurm", "ray"):
        options |= {"run": str(root / "run"), "python": python}
    one_node = target in ON_ONE_NODE
    resources = Resources(nodes=1 if one_node else NODES, processes=NODES if one_node else 1)
    given = {"GIVEN": "a 'b' $c"}
    settings = (*SETTINGS, STORE) if replicas > 1 else SETTINGS
    job = Job("contract", RECIPE, recipe_files(RECIPE), settings, resources, replicas, given)
    files = open_target(target, options, root).render(job)
    write_files(root, files, job.files)
    return files


@pytest.fixture
def recorder(tmp_path: Path) -> str:
    """A program in the place of Python that keeps the arguments and variables that it is started with."""
    program = tmp_path / "programs" / "python"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        f"path = '{program.parent}/' + str(os.getpid()) + '.json'\n"
        "json.dump({'argv': sys.argv[1:], 'cwd': os.getcwd(), 'env': dict(os.environ)}, open(path, 'w'))\n"
    )
    program.chmod(0o755)
    return str(program)


def recorded(processes: list[rendered.NodeProcess], recorder: str) -> list[dict[str, Any]]:
    """Start each with the recorder as its Python."""
    found = Path(recorder).parent
    for process in processes:
        command = [recorder if word == sys.executable else word for word in process.command]
        process.folder.mkdir(parents=True, exist_ok=True)
        path = f"{found}:{process.environment.get('PATH', os.environ['PATH'])}"
        started = replace(process, command=command).start({"PATH": path})
        said, _ = started.communicate(timeout=60)
        if started.returncode:
            raise rendered.BrokenRenderingError(said)
    return [json.loads(path.read_text()) for path in sorted(found.glob("*.json"))]


def check(calls: list[dict[str, Any]], num_nodes: int, replica: int | None = None) -> None:
    """Every node starts the module that there is, with words that its parsers take, a rank of its own and one head.

    Each replica has a number of its own, a run folder of its own, and knows how many there are.

    Raises:
        BrokenRenderingError: what would not have run.
    """
    ranks, places, runs = [], set(), set()
    for call in calls:
        dash, module, *words = call["argv"]
        if (dash, module) != ("-m", node_processes.__name__):
            raise rendered.BrokenRenderingError(f"{module} is not what starts processes")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                options = node_processes.build_parser().parse_args(words)
                train = build_parser(only="train").parse_args(options.words[1:])
                overrides = dict(map(parse_override, train.overrides))
                if train.num_replicas is not None:
                    overrides["replicas.num_replicas"] = train.num_replicas
                load_config(RECIPE, overrides)
            except (SystemExit, UsageError) as error:
                raise rendered.BrokenRenderingError(said.getvalue() or str(error)) from error
        rank, head = options.node_rank, options.head
        if options.sagemaker:
            rank, head = node_processes.sagemaker_place(Path(options.sagemaker))
        ranks.append(rank)
        places.add((head, options.port, options.nodes * options.processes))
        runs.add(str(train.out))
        recipe = Path(call["cwd"]) / train.recipe
        if train.verb != "train" or not train.resume or recipe.read_bytes() != RECIPE.read_bytes():
            raise rendered.BrokenRenderingError(f"{train.verb} does not go on with this recipe")
        unread = {name for name in call["env"] if not OF_OTHERS.fullmatch(name)} - KNOWN_VARIABLES
        if (train.replica, train.num_replicas) != ((None, None) if replica is None else (replica, 2)):
            raise rendered.BrokenRenderingError(
                f"replica {train.replica} of {train.num_replicas} is not {replica}"
            )
        if unread or call["env"].get("GIVEN") != "a 'b' $c":
            raise rendered.BrokenRenderingError(f"nothing reads {unread}, or GIVEN is lost")
    if sorted(ranks) != list(range(num_nodes)) or len(runs) != 1:
        raise rendered.BrokenRenderingError(f"ranks {ranks} of {num_nodes} nodes, runs {runs}")
    if replica is not None and not runs.pop().endswith(f"/replica-{replica}"):
        raise rendered.BrokenRenderingError("its folder is another replica's")
    if len(places) != 1 or next(iter(places))[0] != "127.0.0.1" or next(iter(places))[2] != NODES:
        raise rendered.BrokenRenderingError(f"they would not meet: {places}")


def hold(target: str, root: Path, recorder: str, old: str = "", new: str = "") -> int:
    """Render, plant an error where one is given, start what a target would start, and hold it against its parsers.

    How many processes were held. "slurm of 2" is the second of two replicas on Slurm.
    """
    name, _, replicas = target.partition(" of ")
    replica = 1 if replicas else None
    files = rendered_files(name, root, recorder, int(replicas or 1))
    assert any(old in text for text in files.values()), old
    broken = {path: text.replace(old, new) if old else text for path, text in files.items()}
    found = recorded(nodes_of(name, broken, root, replica), recorder)
    check(found, 1 if name in ON_ONE_NODE else NODES, replica)
    return len(found)


@pytest.mark.parametrize(
    "target", [*OPTIONS, *(f"{name} of 2" for name in OPTIONS if name not in ("local", "kuberay"))]
)
def test_every_command_is_one_that_its_parsers_take(target: str, tmp_path: Path, recorder: str) -> None:
    """Replicas on this machine are made by `replicas start`: tests/e2e/test_replicas.py launches them. KubeRay has none."""
    assert hold(target, tmp_path, recorder) == (1 if target.partition(" ")[0] in ON_ONE_NODE else NODES)


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("slurm of 2", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID"),
        ("kubernetes of 2", '"--replica", "$(REPLICA)"', '"--replica", "0"'),
        ("skypilot of 2", "--of 2", "--of 3"),
        ("sagemaker of 2", "replica-1", "replica-0"),
        ("slurm", "--node-rank ", "--noderank "),
        ("slurm", "SLURM_NODEID", "SLURM_PROCID"),
        ("slurm", "export head=", "export heads="),
        ("slurm", "export GIVEN='a '\"'\"'b'\"'\"' $c'", "export GIVEN=\"a 'b' $c\""),
        ("local", "--resume", "--resumed"),
        ("ray", "recipe/run.toml", "recipes/run.toml"),
        ("ray", '"GIVEN"', '"GIVE"'),
        ("kubernetes", '"$(JOB_COMPLETION_INDEX)"', '"0"'),
        ("kubernetes", "contract-0.contract", "contract-0.contracts"),
        ("kubernetes", "mountPath: /data", "mountPath: /date"),
        ("kubernetes", "completions: 2", "completions: 1"),
        ("kubernetes", "name: HF_HOME", "name: HF_HOMES"),
        ("kuberay", "--ray auto", "--rays auto"),
        ("sagemaker", '"InstanceCount": 2', '"InstanceCount": 1'),
        ("skypilot", "SKYPILOT_NODE_RANK", "SKYPILOT_RANK"),
    ],
)  # fmt: skip
def test_a_planted_error_is_found(target: str, old: str, new: str, tmp_path: Path, recorder: str) -> None:
    with pytest.raises((rendered.BrokenRenderingError, FileNotFoundError)):
        hold(target, tmp_path, recorder, old, new)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", [name for name in OPTIONS if name != "eks"])  # its command is kubernetes'
def test_the_rendered_processes_train_together(target: str, tmp_path: Path) -> None:
    files = rendered_files(target, tmp_path, sys.executable)
    given = {"COMPOSER_RL_CACHE": str(cache_folder()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    running = []
    with contextlib.ExitStack() as cluster:
        if target == "kuberay":
            (tmp_path / "ray").mkdir()
            head = cluster.enter_context(running_ray(tmp_path / "ray", num_cpus=4))
            given |= {**head.token, "RAY_ADDRESS": head.address}  # where it runs, "auto" finds it
        for process in nodes_of(target, files, tmp_path):
            process.folder.mkdir(parents=True, exist_ok=True)
            own = {"PATH": f"{process.environment['PATH']}:{path}" if "PATH" in process.environment else path}
            running.append(process.start({**given, **own}))
        said = [process.communicate(timeout=800)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said
    run = next(tmp_path.rglob("summary.json")).parent
    assert len(list(tmp_path.rglob("summary.json"))) == 1
    assert json.loads((run / "summary.json").read_text())["global_step"] == 1
    for part in ("", "-process-1"):  # two processes trained one model, each graded its own answers
        assert len(read_jsonl(run / "rollouts" / f"step-000001{part}.jsonl")) == 4
