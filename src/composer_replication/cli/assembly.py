"""From a checked recipe to the parts of a run: what can be refused at once, then tasks, reward, sampler, guard, channels, model.

Building tasks may take an hour, so what is cheap to try is tried first.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.channel_tables import HintsSection
from composer_replication.cli.agent_assembly import (
    agent_rows,
    check_agent,
    cluster_options,
    counts_shares,
    open_agent,
    refuse_long_conversations,
    sandbox_limits,
)
from composer_replication.cli.cluster import (
    check_cluster,
    file_part,
    launched_rank,
    shards_by_fsdp2,
    shards_weights,
)
from composer_replication.cli.machine_troubles import package_version
from composer_replication.cli.task_division import RunTasks, prompt_of, read_split
from composer_replication.cli.terminal import Report, note
from composer_replication.config import RunConfig
from composer_replication.errors import InputError, UsageError, needs_extra
from composer_replication.interfaces import HintGenerator, Tokenizer
from composer_replication.records import HeldoutReading, PreferencePair, Task
from composer_replication.report import read_run, write_model_card
from composer_replication.rollouts.curriculum import Curriculum, recorded_evidence
from composer_replication.rollouts.curriculum.standing import has_recorded_evidence
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
from composer_replication.run_folder import RunFolder, read_json, write_json
from composer_replication.safety import CombinedGuard, EvaluationJournal, EvidenceGuard, HeldOutGuard
from composer_replication.sandbox import accept, accepted, choose_backend
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.canaries import make_canaries
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold
from composer_replication.tasks.intake.sources import is_pinned, needs_no_path, open_source
from composer_replication.tasks.journal import GATES_VERSION
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import STORE_VERSION
from composer_replication.traces.pair_files import PairRow, read_pair_rows, tokenised_pairs

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster


def check_recipe(
    config: RunConfig, recipe_folder: Path
) -> tuple[HeldOutGuard | CombinedGuard | None, Mapping[str, PairRow]]:
    """What needs none of the training packages. The guard and the pairs that were made to check them are the run's own.

    Raises:
        UsageError: a guard out of range (CR0204), a reward that cannot be used (CR0210), a
            loss channel without anything to learn from (CR0755) or with spread weights (CR0757), hints that nobody can write
            (CR0221), an unknown sandbox (CR0305), none that nobody accepted (CR0340), an
            acceptance of no guard (CR0340), a key or a dialect that the agent loop cannot follow (CR0211, CR0818), a
            sampling server that does not fit (CR0826),
            hints of other tasks or spread weights with ``[agent]`` (CR0760, CR0757).
        InputError: a file of preference pairs (CR0881) or of a split (CR0504) that cannot be used.
        MissingError: no sandbox works here (CR0301), no sampling server answers (CR0824); with ``[ray]`` none is needed, but a cluster, and as ``check_cluster``.
    """
    checked = make_guard(config), pair_rows(config, recipe_folder)
    _refuse_empty_channels(config)
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


def _refuse_empty_channels(config: RunConfig) -> None:
    """A recipe's hints come from its own rollouts; its preference pairs from a file, from siblings, or from both.

    Neither channel can be trained where the weights are spread over processes by anything but FSDP2.
    """
    is_trainable = not shards_weights() or shards_by_fsdp2()
    if not is_trainable and (config.trainer.alpha_sdpo != 0.0 or config.trainer.beta_replay != 0.0):
        raise UsageError(
            "CR0757",
            "hint distillation and replay cannot train this model: its weights are to be spread over processes, and not by FSDP2.",
            where="trainer.alpha_sdpo, trainer.beta_replay",
            fix="set both weights to 0, or launch with fsdp_version: 2, or without FSDP and ZeRO-3.",
        )
    if config.trainer.alpha_sdpo != 0.0:
        open_layers((config.hints or HintsSection()).writing)
    replay = config.replay
    if config.trainer.beta_replay != 0.0 and not (replay and (replay.sibling_pairs or replay.pairs)):
        raise UsageError(
            "CR0755",
            "beta_replay is not 0, but there is no preference pair to learn from.",
            where="trainer.beta_replay",
            fix="name a file of pairs in replay.pairs, set replay.sibling_pairs = true, or beta_replay to 0.",
        )


def check_training(config: RunConfig, folder: RunFolder) -> tuple[Any, Any]:
    """What the training packages say: TRL's arguments and the method of the recipe.

    Raises:
        UsageError: a ``[trl]`` table that TRL refuses (CR0211), a method that contradicts itself or that
            ``check_arguments`` refuses (CR0760).
        MissingError: a package is missing (CR0101).
    """
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
    if config.agent is not None:
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
        UsageError: there is no guard of that name (CR0340).
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
        InputError: the journal belongs to another run or is damaged (CR0602).
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
            "versions": {name: package_version(name) for name in packages},
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
) -> tuple[Any, Any, HintGenerator | None, TaskSampler]:
    """Reward, rollout function (None for single answers), source of hints, and who samples for evaluation."""
    agent = open_agent(config, grader, model, tokenizer, folder, curriculum=curriculum, cluster=cluster)
    if agent is not None:
        refuse_long_conversations(config, agent.player, (*tasks.train, *tasks.heldout), model)
        return agent.reward, agent.rollouts, agent.hint_source, agent.sampler
    from composer_replication.trainer.policy import end_token_ids

    ends = end_token_ids(model, tokenizer)
    reward = open_reward(config, tasks, grader, folder, curriculum, end_token_ids=ends)
    hint_source = open_hint_source(config, grader.store, grader, tokenizer)
    return reward, None, hint_source, open_sampler(config, grader, model, tokenizer)


def open_hint_source(
    config: RunConfig, store: TaskStore, grader: Grader, tokenizer: Tokenizer
) -> HintGenerator | None:
    """Hints for the rollouts of training; None where ``trainer.alpha_sdpo`` is 0.

    ``grader`` is the reward's own, which keeps its scores: no answer is run twice.

    Raises:
        UsageError: a layer cannot be used (CR0221).
    """
    if config.trainer.alpha_sdpo == 0.0:
        return None
    observe = TaskObserver(
        store,
        grader=grader,
        tests=config.reward.tests,
        prompt_style=config.rollouts.prompt_style,
        context_lines=config.rollouts.context_lines,
    )
    section = config.hints or HintsSection()
    return HintedTurnMaker(tokenizer, observe=observe, options=section.writing, strict=section.strict)


def pair_rows(config: RunConfig, recipe_folder: Path) -> dict[str, PairRow]:
    """The rows of ``replay.pairs`` by their places; none where it is not set, or the channel is off.

    Raises:
        InputError: the file cannot be used (CR0881).
    """
    replay = config.replay
    if config.trainer.beta_replay == 0.0 or replay is None or not replay.pairs:
        return {}
    return read_pair_rows(recipe_folder / replay.pairs)


def open_pairs(
    rows: Mapping[str, PairRow], tokenizer: Tokenizer, model: Any
) -> tuple[PreferencePair, ...] | None:
    """The same as token ids, None without any; each fits the model that is trained.

    Raises:
        InputError: the file cannot be used (CR0881), has messages where the model has no chat template (CR0810), a pair has
            ids that the model does not know (CR0751) or more than its context (CR0705).
    """
    if not rows:
        return None
    from composer_replication.trainer.prompt_fit import refuse_unfit_pairs

    pairs = tokenised_pairs(rows, tokenizer)
    refuse_unfit_pairs(pairs, model, name=list(rows).__getitem__)
    return pairs


def open_curriculum(
    config: RunConfig, store: TaskStore, rows: Sequence[Mapping[str, Any]], model: Any
) -> Curriculum | None:
    """Who chooses the tasks of each generation; None without a ``[curriculum]`` table.

    ``model`` as it was loaded, before adapters: its weights say which recorded pass rates are its own.

    Raises:
        InputError: recorded pass rates cannot be read (CR0411).
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


def keep_model(
    trainer: Any, run_folder: RunFolder, summary: Mapping[str, Any], progress: Callable[[str], None]
) -> str | None:
    """Write ``model/`` with its card, from the first process; every process has to come here.

    Returns:
        The folder; None in the other processes, and where no process can have all weights.

    Raises:
        InputError: the folder cannot be written (CR0209), or what was written is not the trained model (CR0890).
    """
    from composer_replication.trainer.model_modes import weights_are_sharded
    from composer_replication.trainer.saved_model import gathered_weights, probe_logps, save_model

    folder, weights, trained = run_folder.model, None, None
    if weights_are_sharded(trainer.model):
        weights = gathered_weights(trainer)
        if weights is None:
            progress(
                f"model: its weights are spread over processes and {folder} is not written; take the newest checkpoint"
            )
            return None
        trained = probe_logps(trainer.model, trainer.processing_class)
    if launched_rank():
        return None
    progress(f"model: saving it to {folder}")
    run = replace(read_run(run_folder.root), summary=dict(summary))
    save_model(
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),
        trainer.processing_class,
        folder,
        describe=lambda begun: write_model_card(run, begun),
        weights=weights,
        trained=trained,
    )
    return str(folder)
