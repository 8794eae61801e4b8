"""From a checked recipe to the parts of a run: what can be refused at once, then tasks, reward, sampler, guard, channels, model.

Building tasks may take an hour, so what is cheap to try is tried first.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.channel_tables import HintsSection
from composer_replication.cli.agent_assembly import (
    check_agent,
    cluster_options,
    find_trl_server,
    num_model_ids,
    open_player,
    refuse_long_conversations,
    require_server,
    sandbox_limits,
)
from composer_replication.cli.cluster import check_cluster, file_part, launched_rank, shards_weights
from composer_replication.cli.machine_troubles import package_version
from composer_replication.cli.task_division import RunTasks, prompt_of, read_split
from composer_replication.cli.terminal import Report, note
from composer_replication.config import RunConfig
from composer_replication.errors import InputError, UsageError, needs_extra
from composer_replication.interfaces import HintGenerator, Tokenizer
from composer_replication.records import HeldoutReading, PreferencePair, Task
from composer_replication.rollouts.curriculum import Curriculum, recorded_evidence
from composer_replication.rollouts.curriculum.chooser import has_recorded_evidence
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.generations.episode_player import EpisodeSampler, Listeners
from composer_replication.rollouts.generations.kept_episodes import KeptEpisodes
from composer_replication.rollouts.generations.observed_episodes import ObservedEpisodes
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.heldout_evaluation import HeldoutEvaluator
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker
from composer_replication.rollouts.hints.layers import open_layers
from composer_replication.rollouts.hints.task_observer import TaskObserver
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.rollouts.reward_function import FeatureDeletionReward
from composer_replication.rollouts.rewards import load_reward_rule
from composer_replication.rollouts.single_turn import refuse_leaking_prompt
from composer_replication.rollouts.task_sampler import PolicySampler, TaskSampler
from composer_replication.run_folder import RunFolder, write_json
from composer_replication.safety import CombinedGuard, EvaluationJournal, EvidenceGuard, HeldOutGuard
from composer_replication.sandbox import accept, accepted, choose_backend
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.canaries import make_canaries
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold
from composer_replication.tasks.intake.sources import is_pinned, needs_no_path, open_source
from composer_replication.tasks.journal import GATES_VERSION
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import STORE_VERSION
from composer_replication.traces.pair_files import PairRow, pair_sources, read_pair_rows, tokenised_pairs

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster


def check_recipe(
    config: RunConfig, recipe_folder: Path
) -> tuple[HeldOutGuard | CombinedGuard | None, Mapping[str, PairRow]]:
    """What needs none of the training packages. The guard and the pairs that were made to check them are the run's own."""
    checked = make_guard(config), pair_rows(config, recipe_folder)
    if config.trainer.alpha_sdpo != 0.0:
        open_layers((config.hints or HintsSection()).writing)
    check_agent(config)
    load_reward_rule(config.reward.function)
    accept_recipe(config)
    if config.ray is None:
        choose_backend(config.sandbox.backend or None)
    else:
        check_cluster(config.ray.address, "training on a Ray cluster")
        cluster_options(config)
    if config.heldout is not None and config.heldout.split:
        read_split((recipe_folder / config.heldout.split).resolve())
    return checked


def check_training(config: RunConfig, folder: RunFolder) -> tuple[Any, Any]:
    """What the training packages say: TRL's arguments and the method of the recipe."""
    with needs_extra("train", "training"):
        import composer_replication.trainer.composer_trainer  # noqa: F401  # the heaviest import of all
        from composer_replication.trainer.preset_settings import check_arguments, resolve_method
        from composer_replication.trainer.run_setup import lora_config, trl_arguments

        lora_config(config.model.lora)
    arguments, method = trl_arguments(config, folder), resolve_method(config)
    check_arguments(config, arguments, method.options)
    return arguments, method


def open_tasks(config: RunConfig, recipe_folder: Path, report: Report | None) -> TaskStore:
    """The store that the recipe names, or one built from its sources in the cache.

    ``report`` is told of the progress of the build.
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

    with cache_lock(f"task-store-{key}"):  # a second run with the same tasks waits for the first one's build
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


def training_rows(config: RunConfig, store: TaskStore, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Rows for the trainer's data set: prompt and task id; no golden code, no hidden test."""
    if config.agent is not None:  # the conversation itself begins in the environment
        return [{"prompt": first_message(store, task), "task_id": task.task_id} for task in tasks]
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
    """From now on do without the guards that the recipe does without."""
    accept(config.sandbox.accept_no_isolation, where="sandbox.accept_no_isolation")


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
    config: RunConfig, folder: RunFolder, sampler: TaskSampler, tasks: RunTasks
) -> tuple[PatientEvaluation[HeldoutReading] | None, Callable[[], Any] | None]:
    """The guard's truth, and how it is asked: with ``[evidence]`` every score is on disk before the evidence is told.

    Both are None where the recipe holds nothing out.
    """
    section = config.heldout
    if section is None or tasks.split is None:
        return None, None
    canaries, refused = make_canaries(sampler.grader.store, tasks.heldout if section.num_canaries else ())
    if refused:
        note(f"canaries: {len(canaries)} made, {len(refused)} held-out tasks cannot be one")
    evaluator = HeldoutEvaluator(
        sampler,
        tasks.heldout,
        split_fingerprint=tasks.split.fingerprint,
        seed=config.seed,
        every=section.every,
        samples_per_task=section.samples_per_task,
        sample_size=section.sample_size,
        canaries=canaries,
        num_canaries=section.num_canaries,
        has_sentinel=section.has_sentinel,
        # a reward that is a share of tests needs a truth that is one, too
        counts_shares=config.agent is not None and config.agent.reward.rule != "all_or_nothing",
    )
    if config.evidence is not None and len(tasks.heldout) < POOL_PER_SAMPLE * section.sample_size:
        pool = f"a pool of {len(tasks.heldout)} tasks for samples of {section.sample_size}"
        note(f"evidence: {pool} is small; its guarantee speaks of these tasks only")
    # Where weights are sharded every process evaluates, and an alarm in one would leave the others waiting.
    patience = None if shards_weights() else section.timeout_seconds
    evaluation = PatientEvaluation(evaluator, timeout_seconds=patience)
    if config.evidence is None or launched_rank():  # the process that evaluates keeps the journal
        return evaluation, evaluation
    journal = EvaluationJournal(folder.evaluations, run=f"{tasks.split.fingerprint}/{config.seed}")
    return evaluation, lambda: (reading := evaluation()) and journal.settled(reading)  # None: not due


def make_guard(config: RunConfig) -> HeldOutGuard | CombinedGuard | None:
    """The guard of ``[guard]``, with that of ``[evidence]`` where there is one."""
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
            "split_fingerprint": tasks.split.fingerprint if tasks.split else "",
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


def _resolve_source(source: str, recipe_folder: Path) -> str:
    """Sources that are paths are relative to the recipe."""
    if needs_no_path(source):
        return source
    path = (recipe_folder / source).resolve()
    if not path.exists():
        problem = f"there is no {source!r} beside the recipe."
        fix = "give a path relative to the recipe's folder, sdist:NAME==VERSION or git+URL@REF."
        raise InputError("CR0402", problem, where=f"tasks.source = {path}", fix=fix)
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


@dataclass(frozen=True, slots=True)
class Attempts:
    """What a trainer takes to attempt tasks, and who samples for evaluation; ``rollouts`` is None for single answers."""

    reward: Any
    rollouts: Any
    hint_source: HintGenerator | None
    sampler: TaskSampler


def open_attempts(
    config: RunConfig,
    grader: Grader,
    model: Any,
    tokenizer: Any,
    folder: RunFolder,
    *,
    tasks: RunTasks,
    curriculum: Curriculum | None,
    cluster: RolloutCluster | None,
) -> Attempts:
    """The recipe's attempts: episodes where it has an ``[agent]`` table, else single answers. A curriculum hears of every outcome."""
    on_outcomes = None if curriculum is None else curriculum.note
    if config.agent is not None:
        from composer_replication.trainer.episode_rollouts import (
            EpisodeReward,
            EpisodeRollouts,
            TrainedPolicy,
        )

        kept = KeptEpisodes(
            folder.rollouts, part=file_part(), session_id=folder.root.name, model_name=config.model.name
        )
        observed = ObservedEpisodes(grader.store) if config.trainer.alpha_sdpo != 0.0 else None
        if config.trl.get("use_vllm") and config.trl.get("vllm_mode") == "server":
            require_server(config, find_trl_server(config), model, tokenizer)
        open_one = partial(
            open_player, config, grader, tokenizer, num_ids=num_model_ids(model), cluster=cluster
        )
        player = open_one(listeners=Listeners(kept, on_outcomes, observed))
        refuse_long_conversations(config, player, (*tasks.train, *tasks.heldout), model)
        max_batch = config.agent.max_concurrent
        judge = EpisodeSampler(
            open_one(is_evaluation=True), TrainedPolicy(max_batch=max_batch), keep=kept.keep_evaluation
        )
        hints = _hinted_turns(config, tokenizer, observed)
        return Attempts(EpisodeReward(player), EpisodeRollouts(player, max_batch=max_batch), hints, judge)
    from composer_replication.trainer.policy import end_token_ids

    reward = FeatureDeletionReward(
        {task.task_id: task for task in tasks.train},
        grader,
        load_reward_rule(config.reward.function),
        prompt_style=config.rollouts.prompt_style,
        tests=config.reward.tests,
        folder=folder.rollouts,
        part=file_part(),
        on_outcomes=on_outcomes,
        end_token_ids=end_token_ids(model, tokenizer),
        shuffle_seed=config.seed if config.reward.is_shuffled else None,
    )
    observer = TaskObserver(  # with the reward's own grader, which keeps its scores: no answer is run twice
        grader.store,
        grader=grader,
        tests=config.reward.tests,
        prompt_style=config.rollouts.prompt_style,
        context_lines=config.rollouts.context_lines,
    )
    hints = _hinted_turns(config, tokenizer, observer)
    return Attempts(reward, None, hints, open_sampler(config, grader, model, tokenizer))


def _hinted_turns(config: RunConfig, tokenizer: Tokenizer, observe: Any) -> HintGenerator | None:
    """Hints for the rollouts of training; None where ``trainer.alpha_sdpo`` is 0."""
    if config.trainer.alpha_sdpo == 0.0:
        return None
    section = config.hints or HintsSection()
    return HintedTurnMaker(tokenizer, observe=observe, options=section.writing, strict=section.strict)


def pair_rows(config: RunConfig, recipe_folder: Path) -> dict[str, PairRow]:
    """The rows of ``replay.pairs`` by their places; none where it is not set, or the channel is off."""
    replay = config.replay
    if config.trainer.beta_replay == 0.0 or replay is None or not replay.pairs:
        return {}
    return read_pair_rows(recipe_folder / replay.pairs)


def open_pairs(
    rows: Mapping[str, PairRow], tokenizer: Tokenizer, model: Any
) -> tuple[PreferencePair, ...] | None:
    """The same as token ids, None without any; each fits the model that is trained."""
    if not rows:
        return None
    from composer_replication.trainer.collator import refuse_unfit_pairs

    pairs = tokenised_pairs(rows, tokenizer)
    refuse_unfit_pairs(pairs, model, name=list(rows).__getitem__)
    return pairs


def open_curriculum(
    config: RunConfig, store: TaskStore, rows: Sequence[Mapping[str, Any]], model: Any
) -> Curriculum | None:
    """Who chooses the tasks of each generation; None without a ``[curriculum]`` table.

    ``model`` as it was loaded, before adapters: its weights say which recorded pass rates are its own.
    """
    options = config.curriculum
    if options is None:
        return None
    recorded = None
    if has_recorded_evidence(store.root, options):
        from composer_replication.trainer.model_modes import parameter_sha256

        recorded = recorded_evidence(store.root, options, parameter_sha256=parameter_sha256(model))
    return Curriculum(
        rows, seed=config.seed, options=options, fingerprint=store.fingerprint, recorded=recorded
    )


def identity_table(config: RunConfig) -> dict[str, Any]:
    """What the recipe sets, without ``[ray]`` and the addresses of replicas: a run may be resumed at another cluster, and with no other change.

    Defaults are left out, so that a key which a later version adds makes no other run of it.
    """
    return config.model_dump(
        mode="json",
        exclude_none=True,
        exclude_defaults=True,
        exclude={"ray": True, "replicas": {"interface", "lighthouse"}},
    )


def recipe_sha256(config: RunConfig) -> str:
    """Of ``identity_table``."""
    return hashlib.sha256(json.dumps(identity_table(config), sort_keys=True).encode()).hexdigest()
