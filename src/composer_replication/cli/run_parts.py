"""Joins the parts of a run: tasks, split, policy sampler, guard, TRL arguments."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.agent_parts import (
    agent_rows,
    counts_shares,
    refuse_unknown_weights,
    sandbox_limits,
)
from composer_replication.cli.launched_process import file_part, launched_rank, shards_weights
from composer_replication.cli.progress_bar import Report
from composer_replication.cli.task_division import RunTasks, prompt_of
from composer_replication.config import RunConfig
from composer_replication.errors import InputError, UsageError
from composer_replication.records import HeldoutReading, Task
from composer_replication.rollouts.curriculum import Curriculum
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.heldout_evaluation import HeldoutEvaluator
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.rollouts.policy_sampler import PolicySampler
from composer_replication.rollouts.reward_function import FeatureDeletionReward
from composer_replication.rollouts.rewards import load_reward_rule
from composer_replication.rollouts.single_turn import refuse_leaking_prompt
from composer_replication.rollouts.task_sampler import TaskSampler
from composer_replication.run_folder import RunFolder, read_json, write_json
from composer_replication.safety import CombinedGuard, EvaluationJournal, EvidenceGuard, HeldOutGuard
from composer_replication.sandbox import accept, accepted
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.canaries import make_canaries
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold
from composer_replication.tasks.intake.sources import is_pinned, needs_no_path, open_source
from composer_replication.tasks.journal import GATES_VERSION
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import STORE_VERSION

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster

_DAMAGED_STORE = "CR0411"


def open_tasks(config: RunConfig, recipe_folder: Path, report: Report | None) -> TaskStore:
    """The store that the recipe names, or one built from its sources in the cache.

    ``report`` is told of the progress of the build.

    Raises:
        InputError: no such store or source, or no valid task in it.
    """
    accept_recipe(config)
    section = config.tasks
    if section.store:
        return TaskStore.open(
            (recipe_folder / section.store).resolve(), backend=config.sandbox.backend or None
        )
    sources = [_resolve_source(source, recipe_folder) for source in section.source]
    symbols = {_resolve_source(source, recipe_folder): pins for source, pins in section.symbols.items()}
    key = _tasks_key(config, sources)
    folder = cache_folder() / "task-stores" / key

    def build() -> TaskStore:
        build_tasks(
            sources,
            folder,
            symbols=symbols or None,
            max_tasks=section.max_tasks,
            backend=config.sandbox.backend or None,
            ray_address=None if config.ray is None else config.ray.address,
            progress=report,
        ).require_tasks()
        hold(folder)
        store = TaskStore.open(folder)
        store.verify()
        return store

    with cache_lock(f"task-store-{key}"):  # a second run with the same tasks waits for the first one's build
        try:
            return build()
        except InputError as error:
            if error.code != _DAMAGED_STORE:
                raise
            # It is only a copy of what can be built again, so nobody needs to be asked.
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "LOCK":
                    path.unlink()
            return build()


def training_rows(config: RunConfig, store: TaskStore, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Rows for the trainer's data set: prompt and task id; no golden code, no hidden test."""
    if config.agent is not None:
        refuse_unknown_weights(config, store)
        return agent_rows(store, tasks)
    rows: list[dict[str, Any]] = []
    for task in tasks:
        prompt = prompt_of(config, store, task)
        refuse_leaking_prompt(prompt, store.golden_body(task), task_id=task.task_id)
        as_chat = config.rollouts.prompt_style == "chat"
        rows.append(
            {"prompt": [{"role": "user", "content": prompt}] if as_chat else prompt, "task_id": task.task_id}
        )
    return rows


def accept_recipe(config: RunConfig) -> None:
    """From now on do without the guards that the recipe does without.

    Raises:
        UsageError: there is no guard of that name (CR0341).
    """
    accept(config.sandbox.accept_no_isolation, where="sandbox.accept_no_isolation")


def record_sandbox(config: RunConfig, folder: RunFolder, grader: Grader) -> None:
    """Write into the run's environment which jails it used, for gradings and for attempts, and without which guards.

    Raises:
        SandboxFailure: the jail of attempts does not hold (CR0306).
    """
    known = read_json(folder.environment)
    attempts = {}
    if config.agent is not None and config.ray is None:  # nodes choose for themselves
        is_warm = config.agent.tools.is_warm
        attempts["attempts"] = grader.attempt_backend(config.sandbox.backend, is_warm=is_warm).name
    known["sandbox"] = {
        **attempts,
        "backend": grader.backend_name,
        "accepted_no_isolation": list(accepted()),
        "not_effective": list(grader.missing_guards),
    }
    write_json(folder.environment, known)


def open_grader(
    config: RunConfig, store: TaskStore, *unseen: Path, cluster: RolloutCluster | None = None
) -> Grader:
    """A grader with the recipe's sandbox and limits; refuses a sandbox whose self-test fails, or that shows ``unseen``.

    With ``cluster`` it grades there, and the nodes try their sandboxes themselves.
    """
    accept_recipe(config)
    if cluster is not None:
        from composer_replication.rollouts.cluster.ray_grader import RayGrader

        return RayGrader(cluster)
    return Grader(
        store,
        backend=config.sandbox.backend,
        limits=sandbox_limits(config),
        timeout_seconds=config.rollouts.test_timeout_seconds,
        num_jobs=config.rollouts.grading_jobs,
        unseen=unseen,
    )


def open_reward(
    config: RunConfig,
    tasks: RunTasks,
    grader: Grader,
    folder: RunFolder,
    curriculum: Curriculum | None,
    *,
    end_token_ids: Sequence[int],
) -> FeatureDeletionReward:
    """The recipe's reward over the training tasks; a curriculum hears of every outcome.

    Raises:
        UsageError: the reward's function cannot be used (CR0210).
    """
    return FeatureDeletionReward(
        {task.task_id: task for task in tasks.train},
        grader,
        load_reward_rule(config.reward.function),
        prompt_style=config.rollouts.prompt_style,
        tests=config.reward.tests,
        folder=folder.rollouts,
        part=file_part(),
        on_outcomes=None if curriculum is None else curriculum.note,
        end_token_ids=end_token_ids,
        shuffle_seed=config.seed if config.reward.is_shuffled else None,
    )


def open_sampler(config: RunConfig, grader: Grader, model: Any, tokenizer: Any) -> PolicySampler:
    """Fresh samples of the model as it is now, asked as in training."""
    from composer_replication.trainer.policy import InProcessPolicy
    from composer_replication.trainer.preset_settings import sampling_settings

    sampling = sampling_settings(config)
    as_chat = config.rollouts.prompt_style == "chat"
    policy = InProcessPolicy(model, tokenizer, as_chat=as_chat, sampling=sampling)
    sampler = PolicySampler(
        policy,
        grader,
        prompt_style=config.rollouts.prompt_style,
        context_lines=config.rollouts.context_lines,
        max_new_tokens=sampling.max_completion_length,
        temperature=float(sampling.temperature),
    )
    policy.on_prompts = sampler.note_prompts
    return sampler


POOL_PER_SAMPLE = 10


def open_evaluator(
    config: RunConfig, sampler: TaskSampler, tasks: RunTasks
) -> PatientEvaluation[HeldoutReading] | None:
    """The guard's truth, or None when the recipe holds nothing out.

    Raises:
        UsageError: the pool is smaller than the sample, or gives no canary (CR0452).
    """
    section = config.heldout
    if section is None or tasks.split is None:
        return None
    canaries, refused = make_canaries(sampler.grader.store, tasks.heldout if section.num_canaries else ())
    if refused:
        note(f"canaries: {len(canaries)} made, {len(refused)} held-out tasks cannot be one")
    evaluator = HeldoutEvaluator(
        sampler,
        tasks.heldout,
        split_fingerprint=tasks.split.fingerprint,
        seed=section.seed + config.seed,
        every=section.every,
        samples_per_task=section.samples_per_task,
        sample_size=section.sample_size,
        canaries=canaries,
        num_canaries=section.num_canaries,
        has_sentinel=section.has_sentinel,
        counts_shares=counts_shares(config),
    )
    if config.evidence is not None and len(tasks.heldout) < POOL_PER_SAMPLE * section.sample_size:
        note(
            f"evidence: a pool of {len(tasks.heldout)} tasks for samples of {section.sample_size} is small; "
            "its guarantee speaks of these tasks only"
        )
    # Where weights are sharded every process evaluates, and an alarm in one would leave the others waiting.
    return PatientEvaluation(evaluator, timeout_seconds=None if shards_weights() else section.timeout_seconds)


def journalled(
    config: RunConfig,
    folder: RunFolder,
    tasks: RunTasks,
    evaluation: PatientEvaluation[HeldoutReading] | None,
) -> Callable[[], Any] | None:
    """``evaluation``, with every score on disk before the evidence is told, in the process that evaluates.

    Raises:
        InputError: the journal belongs to another run or is damaged (CR0602, CR0603).
    """
    if evaluation is None or tasks.split is None or config.evidence is None or launched_rank():
        return evaluation
    journal = EvaluationJournal(folder.evaluations, run=f"{tasks.split.fingerprint}/{config.seed}")
    return lambda: (reading := evaluation()) and journal.settled(reading)  # None: not due


def make_guard(config: RunConfig) -> HeldOutGuard | CombinedGuard | None:
    """The guard of ``[guard]``, with that of ``[evidence]`` where there is one.

    Raises:
        UsageError: a value out of range (CR0204).
    """
    if config.guard is None:
        return None
    try:
        guard = HeldOutGuard(**config.guard.model_dump())
        if config.evidence is None:
            return guard
        return CombinedGuard(guard, EvidenceGuard(**config.evidence.model_dump()))
    except ValueError as error:
        raise UsageError(
            "CR0204", f"guard: {error}.", where="[guard], [evidence]", fix="see docs/recipe-keys.md."
        ) from error


def write_environment(folder: RunFolder, config: RunConfig, store: TaskStore, tasks: RunTasks) -> None:
    """Versions, seeds, git revision and fingerprints; never an environment variable."""
    packages = ("composer-replication", "torch", "transformers", "trl", "accelerate", "peft")
    write_json(
        folder.environment,
        {
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "versions": {name: _version(name) for name in packages},
            "seed": config.seed,
            "git_revision": _git_revision(),
            "tasks_fingerprint": store.fingerprint,
            "split_fingerprint": tasks.split.fingerprint if tasks.split else "",
            "split_checked": list(tasks.split.checked) if tasks.split else [],
            "train_tasks": [task.task_id for task in tasks.train],
            "heldout_tasks": [task.task_id for task in tasks.heldout],
            "heldout_without_hidden_tests": tasks.num_blind,
            "left_out_prompt_shows_golden": tasks.num_leaking,
            "left_out_other_sizes": tasks.num_other_sizes,
        },
    )


def _resolve_source(source: str, recipe_folder: Path) -> str:
    """Sources that are paths are relative to the recipe."""
    if needs_no_path(source):
        return source
    path = (recipe_folder / source).resolve()
    if not path.exists():
        raise InputError(
            "CR0402",
            f"there is no {source!r} beside the recipe.",
            where=f"tasks.source = {path}",
            fix="give a path relative to the recipe's folder, sdist:NAME==VERSION or git+URL@REF.",
        )
    return str(path)


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


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _git_revision() -> str:
    """The checkout's revision; nothing for an installed package, whatever repository is around it."""
    if not (Path(__file__).parents[3] / "pyproject.toml").is_file():
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def note(text: str) -> None:
    """A line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)
