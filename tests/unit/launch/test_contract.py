"""What is rendered for each target runs: its command, variables, files and ranks, as the target would start them.

First every command is recorded and read by the parsers that will read it; errors planted into the
rendered text must be found there. Then the same processes train the tiny recipe.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import build_parser
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
    "eks": {"image": "registry.example/trainer:1", "cluster": "c", "region": "us-east-1", "role": ROLE, "efa": 1},
    "sagemaker": {
        "image": "registry.example/trainer:1", "region": "us-east-1", "role": ROLE,
        "instance_type": "ml.p5.48xlarge", "bucket": "s3://runs/a",
    },
    "skypilot": {"image": "docker:trainer", "store": "s3://runs"},
}  # fmt: skip
READERS: dict[str, Callable[[Mapping[str, str], Path], list[rendered.NodeProcess]]] = {
    "local": rendered.of_local,
    "slurm": lambda files, root: rendered.of_slurm(files, root, NODES),
    "ray": rendered.of_ray,
    "kubernetes": lambda files, root: rendered.of_pods(files["manifests.yaml"], root),
    "eks": lambda files, root: rendered.of_pods(files["manifests.yaml"], root),
    "sagemaker": lambda files, root: rendered.of_sagemaker(files["training-job-contract.json"], root),
    "skypilot": lambda files, root: rendered.of_skypilot(files["task-contract.yaml"], root),
}
KNOWN_VARIABLES = {"HF_HOME", "COMPOSER_RL_CACHE", "JOB_COMPLETION_INDEX", "GIVEN"}
"""Read by the Hugging Face libraries, by ours, by the command, and given by the test."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def rendered_files(target: str, root: Path, python: str) -> dict[str, str]:
    """What the target would be given, with the recipe beside it."""
    options = {**OPTIONS[target], "port": free_port()}
    if target in ("local", "slurm", "ray"):
        options |= {"run": str(root / "run"), "python": python}
    one_node = target in ("local", "ray")
    resources = Resources(nodes=1 if one_node else NODES, processes=NODES if one_node else 1)
    job = Job(
        "contract", RECIPE, recipe_files(RECIPE), SETTINGS, resources, environment={"GIVEN": "a 'b' $c"}
    )
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


def check(calls: list[dict[str, Any]], num_nodes: int) -> None:
    """Every node starts the module that there is, with words that its parsers take, a rank of its own and one head.

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
            except (SystemExit, UsageError) as error:
                raise rendered.BrokenRenderingError(said.getvalue() or str(error)) from error
        rank, head = options.node_rank, options.head
        if options.sagemaker:
            rank, head = node_processes.sagemaker_place(Path(options.sagemaker))
            head = "127.0.0.1" if head == "algo-1" else head
        ranks.append(rank)
        places.add((head, options.port, options.nodes * options.processes))
        runs.add(str(train.out))
        recipe = Path(call["cwd"]) / train.recipe
        if train.verb != "train" or not train.resume or recipe.read_bytes() != RECIPE.read_bytes():
            raise rendered.BrokenRenderingError(f"{train.verb} does not go on with this recipe")
        given = set(call["env"]) & {"HF_HOME", "COMPOSER_RL_CACHE", "GIVEN", "REPLICA"}
        if given - KNOWN_VARIABLES or call["env"].get("GIVEN") != "a 'b' $c":
            raise rendered.BrokenRenderingError(f"variables: {given}, {call['env'].get('GIVEN')}")
    if sorted(ranks) != list(range(num_nodes)) or len(runs) != 1:
        raise rendered.BrokenRenderingError(f"ranks {ranks} of {num_nodes} nodes, runs {runs}")
    if len(places) != 1 or next(iter(places))[0] != "127.0.0.1" or next(iter(places))[2] != NODES:
        raise rendered.BrokenRenderingError(f"they would not meet: {places}")


def nodes_of(target: str) -> int:
    return 1 if target in ("local", "ray") else NODES


@pytest.mark.parametrize("target", OPTIONS)
def test_every_command_is_one_that_its_parsers_take(target: str, tmp_path: Path, recorder: str) -> None:
    files = rendered_files(target, tmp_path, recorder)
    processes = with_given(target, READERS[target](files, tmp_path))
    check(recorded(processes, recorder), nodes_of(target))


def with_given(target: str, processes: list[rendered.NodeProcess]) -> list[rendered.NodeProcess]:
    """A Ray job's variables travel with its submission: tests/e2e/test_ray_jobs.py sees them arrive."""
    if target == "ray":
        return [replace(one, environment={**one.environment, "GIVEN": "a 'b' $c"}) for one in processes]
    return processes


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("slurm", "--node-rank ", "--noderank "),
        ("slurm", "--nodes 2 --processes", "--processes"),
        ("slurm", "SLURM_NODEID", "SLURM_PROCID"),
        ("slurm", "#SBATCH --nodes=2", "#SBATCH --nodes=1"),
        ("slurm", "export head=", "export heads="),
        ("slurm", "export GIVEN='a '\"'\"'b'\"'\"' $c'", "export GIVEN=\"a 'b' $c\""),
        ("local", "node_processes --nodes", "node_process --nodes"),
        ("local", "--resume", "--resumed"),
        ("ray", "recipe/run.toml", "recipes/run.toml"),
        ("kubernetes", "$(JOB_COMPLETION_INDEX)", "$(JOB_INDEX)"),
        ("kubernetes", '"$(JOB_COMPLETION_INDEX)"', '"0"'),
        ("kubernetes", "contract-0.contract", "contract-0.contracts"),
        ("kubernetes", "subdomain: contract", "subdomain: other"),
        ("kubernetes", "mountPath: /data", "mountPath: /date"),
        ("kubernetes", 'claimName: "contract-data"', 'claimName: "data"'),
        ("kubernetes", "configMap: {name: contract-recipe", "configMap: {name: contract"),
        ("kubernetes", "completions: 2", "completions: 1"),
        ("eks", "/etc/composer-rl/recipe/run.toml", "/etc/recipe/run.toml"),
        ("sagemaker", '"InstanceCount": 2', '"InstanceCount": 1'),
        ("sagemaker", '"--sagemaker", ', '"--sage", '),
        ("sagemaker", '"LocalPath": "/opt/ml/checkpoints"', '"LocalPath": "/opt/ml/checkpoint"'),
        ("skypilot", "num_nodes: 2", "num_nodes: 3"),
        ("skypilot", "SKYPILOT_NODE_RANK", "SKYPILOT_RANK"),
        ("skypilot", "SKYPILOT_NODE_IPS", "SKYPILOT_NODES_IPS"),
    ],
)  # fmt: skip
def test_a_planted_error_is_found(target: str, old: str, new: str, tmp_path: Path, recorder: str) -> None:
    files = rendered_files(target, tmp_path, recorder)
    assert any(old in text for text in files.values()), old
    broken = {name: text.replace(old, new) for name, text in files.items()}
    with pytest.raises((rendered.BrokenRenderingError, FileNotFoundError)):
        check(recorded(with_given(target, READERS[target](broken, tmp_path)), recorder), nodes_of(target))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", OPTIONS)
def test_the_rendered_processes_train_together(target: str, tmp_path: Path) -> None:
    files = rendered_files(target, tmp_path, sys.executable)
    cache = {"COMPOSER_RL_CACHE": str(cache_folder()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    running = []
    for process in READERS[target](files, tmp_path):
        process.folder.mkdir(parents=True, exist_ok=True)
        own = {"PATH": f"{process.environment['PATH']}:{path}" if "PATH" in process.environment else path}
        running.append(process.start({**cache, **own}))
    said = [process.communicate(timeout=800)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said
    run = next(tmp_path.rglob("summary.json")).parent
    assert len(list(tmp_path.rglob("summary.json"))) == 1
    assert json.loads((run / "summary.json").read_text())["global_step"] == 1
    for part in ("", "-process-1"):  # two processes trained one model, each graded its own answers
        assert len(read_jsonl(run / "rollouts" / f"step-000001{part}.jsonl")) == 4
