"""From a checked recipe to the parts of a run: what can be refused at once, then tasks, reward, sampler, guard, channels, model.

Building tasks may take an hour, so what is cheap to try is tried first; what was made to try it is what the run uses.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.cluster import check_cluster, launched_size, shards_weights
from composer_replication.cli.machine_troubles import package_version
from composer_replication.cli.task_division import RunTasks, read_split
from composer_replication.cli.terminal import Report
from composer_replication.config import AgentSection, RunConfig
from composer_replication.errors import MissingError, UsageError, needs_extra
from composer_replication.records import Task
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.policies import ServedModel, find_server, open_server
from composer_replication.rollouts.episodes.shortcut_judge import open_judge
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.rewards import load_reward_rule
from composer_replication.rollouts.single_turn import build_prompt, refuse_leaking_prompt
from composer_replication.run_folder import RunFolder, write_json
from composer_replication.safety import CombinedGuard, EvidenceGuard, HeldOutGuard
from composer_replication.sandbox import accept, accepted, choose_backend
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.build_state import GATES_VERSION
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold
from composer_replication.tasks.intake.sources import is_pinned, needs_no_path, open_source
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import STORE_VERSION
from composer_replication.traces.pairs import PairRow, pair_sources, read_pair_rows
from composer_replication.trainer.library_notices import calm_libraries
from composer_replication.trainer.preset_settings import check_arguments, resolve_method
from composer_replication.trainer.setting_errors import spread_weights

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster

MANY_GRADINGS = 64
"""At a time on a cluster, where single answers are graded and nobody says how many."""

# --------------------------------------------------------------------------- what is refused at once


def check_recipe(
    config: RunConfig, recipe_folder: Path
) -> tuple[HeldOutGuard | CombinedGuard | None, Mapping[str, PairRow]]:
    """What needs none of the training packages. The guard and the pairs that were made to check them are the run's own."""
    checked = make_guard(config), pair_rows(config, recipe_folder)
    check_agent(config)
    load_reward_rule(config.reward.function)
    accept(config.sandbox.accept_no_isolation, where="sandbox.accept_no_isolation")
    if config.ray is None:
        choose_backend(config.sandbox.backend or None)
    else:
        check_cluster(config.ray.address, "training on a Ray cluster")
        cluster_options(config)
    if config.heldout is not None and config.heldout.split:
        read_split((recipe_folder / config.heldout.split).resolve())
    return checked


def check_agent(config: RunConfig) -> None:
    """What of ``[agent]`` can be refused before anything is built, the server that ``[trl]`` names among it."""
    if config.agent is None:
        return
    uses_vllm, is_server = config.trl.get("use_vllm"), config.trl.get("vllm_mode") == "server"
    if shards_weights() and not uses_vllm:
        raise spread_weights("agent")
    refused = ["use_transformers_continuous_batching"]
    if uses_vllm and not is_server:
        refused += ["vllm_enable_sleep_mode", "vllm_structured_outputs_regex"]
        refused += ["vllm_tensor_parallel_size"] * (config.trl.get("vllm_tensor_parallel_size", 1) != 1)
    key = next((key for key in refused if config.trl.get(key)), None)
    if key is not None:
        problem = f"trl.{key} is set, and the agent loop does not sample so."
        fix = 'take the key out, the [agent] table, or set trl.vllm_mode = "server".'
        raise UsageError("CR0211", problem, where=f"trl.{key}", fix=fix)
    if uses_vllm and importlib.util.find_spec("vllm") is None:
        problem = "trl.use_vllm is set, and vllm is not installed here; TRL needs it to send weights, to a server too."
        fix = "composer-rl doctor names the version that fits; or take trl.use_vllm out."
        raise MissingError("CR0101", problem, where="vllm", fix=fix)
    if uses_vllm and is_server:
        find_trl_server(config)
    open_judge(config.agent.judge)


@contextmanager
def training_packages(purpose: str, *, quiet: bool) -> Iterator[None]:
    """Inside, the training packages are loaded and say only what is an error; a missing one is refused (CR0101)."""
    with ExitStack() as stack:
        with needs_extra("train", purpose):
            stack.enter_context(calm_libraries(quiet=quiet))
            import composer_replication.trainer.composer_trainer  # noqa: F401  # the heaviest import of all
        yield


def check_training(config: RunConfig, folder: RunFolder) -> tuple[Any, Any]:
    """What the training packages say: TRL's arguments and the method of the recipe."""
    with needs_extra("train", "training"):
        from composer_replication.trainer.run_setup import lora_config, trl_arguments

        lora_config(config.model.lora)
    arguments, method = trl_arguments(config, folder), resolve_method(config)
    check_arguments(config, arguments, method.options)
    return arguments, method


def find_trl_server(config: RunConfig) -> ServedModel:
    """The server that ``[trl]`` names, as it describes itself; waited for ``trl.vllm_server_timeout`` where that is set."""
    of = config.trl
    url = of.get("vllm_server_base_url")
    url = url or f"http://{of.get('vllm_server_host', '0.0.0.0')}:{of.get('vllm_server_port', 8000)}"  # noqa: S104  TRL's
    return find_server(open_server(url), wait_seconds=float(of.get("vllm_server_timeout", 0.0)))


def make_guard(config: RunConfig) -> HeldOutGuard | CombinedGuard | None:
    """The guard of ``[guard]``, with that of ``[evidence]`` where there is one."""
    if config.guard is None:
        return None
    guard = HeldOutGuard(**config.guard.model_dump())
    if config.evidence is None:
        return guard
    return CombinedGuard(guard, EvidenceGuard(**config.evidence.model_dump()))


def identity_table(config: RunConfig) -> dict[str, Any]:
    """What the recipe sets, without ``[ray]`` and the addresses of lighthouse and judge: a run may be resumed at another cluster, and with no other change.

    Defaults are left out, so that a key which a later version adds makes no other run of it.
    """
    moves: Any = {"ray": True, "agent": {"judge"}}
    table = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude=moves)
    if config.replicas is not None and config.replicas.is_torchft:
        table["replicas"]["transport"] = "torchft"
    if config.evidence is not None:  # a key in runs of older versions, whose identity must not change
        table["heldout"]["has_sentinel"] = True
    return table


def recipe_sha256(config: RunConfig) -> str:
    """Of ``identity_table``."""
    return hashlib.sha256(json.dumps(identity_table(config), sort_keys=True).encode()).hexdigest()


# --------------------------------------------------------------------------- tasks


def open_tasks(config: RunConfig, recipe_folder: Path, report: Report | None) -> TaskStore:
    """The store that the recipe names, or one built from its sources in the cache; ``report`` is told of the build's progress."""
    section = config.tasks
    if section.store:
        folder = (recipe_folder / section.store).resolve()
        return TaskStore.open(folder, backend=config.sandbox.backend or None)

    def located(source: str) -> str:
        return source if needs_no_path(source) else str((recipe_folder / source).resolve())

    sources = [located(source) for source in section.source]
    key = _tasks_key(config, sources)
    folder = cache_folder() / "task-stores" / key
    with cache_lock(f"task-store-{key}"):  # a second run with the same tasks waits for the first one's build
        build_tasks(
            sources,
            folder,
            symbols={located(source): pins for source, pins in section.symbols.items()},
            max_tasks=section.max_tasks,
            backend=config.sandbox.backend or None,
            ray_address=None if config.ray is None else config.ray.address,
            progress=report,
        ).require_tasks()
        hold(folder)
        store = TaskStore.open(folder)
        store.verify()
        return store


def _tasks_key(config: RunConfig, sources: Sequence[str]) -> str:
    """Names the cached store by the tasks table and by what a task could hold of every source that may change.

    And by the versions of stores and gates: another version of this program may run beside us, and
    would build the store anew under our hands.
    """
    digest = hashlib.sha256(f"{STORE_VERSION}/{GATES_VERSION}/{config.tasks.model_dump_json()}".encode())
    for source in sources:
        if not is_pinned(source):
            digest.update(open_source(source).sha256.encode())
    return digest.hexdigest()[:16]


def training_rows(config: RunConfig, store: TaskStore, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Rows for the trainer's data set: prompt and task id; no golden code, no hidden test."""
    if config.agent is not None:  # the conversation itself begins in the environment
        return [{"prompt": first_message(store, task), "task_id": task.task_id} for task in tasks]
    rows: list[dict[str, Any]] = []
    for task in tasks:
        prompt: Any = build_prompt(store.broken_text(task), task.hole, config.rollouts)
        refuse_leaking_prompt(prompt, store.golden_body(task), task_id=task.task_id)
        if config.rollouts.prompt_style == "chat":
            prompt = [{"role": "user", "content": prompt}]
        rows.append({"prompt": prompt, "task_id": task.task_id})
    return rows


def pair_rows(config: RunConfig, recipe_folder: Path) -> dict[str, PairRow]:
    """The rows of ``replay.pairs`` by their places; none where it is not set, or the channel is off."""
    if config.trainer.beta_replay == 0.0 or config.replay is None or not config.replay.pairs:
        return {}
    return read_pair_rows(recipe_folder / config.replay.pairs)


# --------------------------------------------------------------------------- sandboxes, here or on a cluster


def open_grader(
    config: RunConfig, store: TaskStore, *unseen: Path, cluster: RolloutCluster | None = None
) -> Grader:
    """A grader with the recipe's sandbox; refuses a sandbox whose self-test fails, or that shows ``unseen``.

    With ``cluster`` it grades there, and the nodes try their sandboxes themselves.
    """
    accept(config.sandbox.accept_no_isolation, where="sandbox.accept_no_isolation")
    if cluster is not None:
        from composer_replication.rollouts.cluster.rollout_cluster import RayGrader

        return RayGrader(cluster)
    return Grader(store, backend=config.sandbox.backend, num_jobs=config.rollouts.grading_jobs, unseen=unseen)


def attempt_options(config: RunConfig) -> dict[str, Any]:
    """What ``[agent]`` says of every attempt, here or on a cluster; tests that are drawn depend on the run's seed."""
    section = config.agent or AgentSection()
    return {"tools": section.tools, "reward": section.reward, "monitor": section.monitor, "seed": config.seed}


def cluster_options(config: RunConfig) -> ClusterOptions:
    """The actors of ``[ray]``, with the sandboxes and reward that the recipe has without it."""
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions

    assert config.ray is not None
    most = MANY_GRADINGS if config.agent is None else config.agent.max_concurrent
    placing = config.ray.model_dump(exclude={"address"}) | {"num_actors": config.ray.num_actors or most}
    return ClusterOptions(
        **placing,
        fits_nodes=config.ray.num_actors == 0,
        num_drivers=launched_size(),
        attempt=attempt_options(config),
        grader={"backend": config.sandbox.backend},
    )


@contextmanager
def open_actors(config: RunConfig, store: TaskStore) -> Iterator[RolloutCluster | None]:
    """The actors that ``[ray]`` asks for, gone after the block; None without the table."""
    if config.ray is None:
        yield None
        return
    from composer_replication.rollouts.cluster import open_cluster

    options, plays_episodes = cluster_options(config), config.agent is not None
    with open_cluster(config.ray.address, store, options, waits_for_all=plays_episodes) as cluster:
        yield cluster


# --------------------------------------------------------------------------- the truth, and what is written of a run


def write_environment(
    folder: RunFolder, config: RunConfig, tasks: RunTasks, grader: Grader, pairs: Mapping[str, PairRow]
) -> None:
    """Versions, seeds, fingerprints, sources of pairs, jails and their missing guards; never an environment variable."""
    packages = ("composer-replication", "torch", "transformers", "trl", "accelerate", "peft")
    jails = {"backend": grader.backend_name}
    if config.agent is not None and config.ray is None:  # nodes choose for themselves
        is_warm = config.agent.tools.is_warm
        jails["attempts"] = grader.attempt_backend(is_warm=is_warm).name
    write_json(
        folder.environment,
        {
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "versions": {name: package_version(name) for name in packages},
            "seed": config.seed,
            **({"pairs": pair_sources(pairs.values())} if pairs else {}),
            "git_revision": _git_revision(),
            "tasks_fingerprint": grader.store.fingerprint,
            "split_fingerprint": tasks.split_fingerprint,
            "split_checked": list(tasks.split.checked) if tasks.split else [],
            "train_tasks": [task.task_id for task in tasks.train],
            "heldout_tasks": [task.task_id for task in tasks.heldout],
            "sandbox": {
                **jails,
                "accepted_no_isolation": list(accepted()),
                "not_effective": list(grader.missing_guards),
            },
        },
    )


def _git_revision() -> str:
    """The checkout's revision; nothing for an installed package, whatever repository is around it."""
    root = Path(__file__).parents[3]
    if not (root / "pyproject.toml").is_file():
        return ""
    try:
        words = ["git", "-C", str(root), "rev-parse", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
