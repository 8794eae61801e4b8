"""From a checked recipe to the parts of a run: what can be refused at once, then tasks, reward, sampler, guard, channels, model.

Building tasks may take an hour, so what is cheap to try is tried first; what was made to try it is what the run uses.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.cluster import (
    check_cluster,
    file_part,
    launched_rank,
    launched_size,
    shards_weights,
)
from composer_replication.cli.machine_troubles import package_version
from composer_replication.cli.task_division import RunTasks, read_split
from composer_replication.cli.terminal import Report, note
from composer_replication.config import AgentSection, RunConfig
from composer_replication.errors import InputError, MissingError, UsageError, needs_extra
from composer_replication.interfaces import HintGenerator
from composer_replication.records import HeldoutReading, PreferencePair, Task
from composer_replication.rollouts.curriculum import Curriculum, recorded_standings
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv, first_message
from composer_replication.rollouts.episodes.agent_loop import LedgerTalk
from composer_replication.rollouts.episodes.episode_player import (
    EpisodePlayer,
    EpisodeSampler,
    Listener,
    outcome_of_episode,
)
from composer_replication.rollouts.episodes.policies import ServedModel, find_server, open_server, require_fit
from composer_replication.rollouts.episodes.shortcut_judge import open_judge
from composer_replication.rollouts.episodes.trajectories import KeptEpisodes
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.heldout_evaluation import HeldoutEvaluator, PolicySampler, TaskSampler
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker
from composer_replication.rollouts.hints.task_observer import ObservedEpisodes, TaskObserver
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.rollouts.rewards import FeatureDeletionReward, load_reward_rule
from composer_replication.rollouts.single_turn import build_prompt, refuse_leaking_prompt
from composer_replication.rollouts.tokens.pair_ids import PairRow, tokenised_pairs
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.run_folder import RunFolder, write_json
from composer_replication.safety import CombinedGuard, EvaluationJournal, EvidenceGuard, HeldOutGuard
from composer_replication.sandbox import accept, accepted, choose_backend
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.build_state import GATES_VERSION
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold
from composer_replication.tasks.intake.sources import is_pinned, needs_no_path, open_source
from composer_replication.tasks.sentinels import make_canaries
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import STORE_VERSION
from composer_replication.traces.pairs import pair_sources, read_pair_rows

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster

MANY_GRADINGS = 64
"""At a time on a cluster, where single answers are graded and nobody says how many."""
POOL_PER_SAMPLE = 10

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
        from composer_replication.trainer.setting_errors import spread_weights

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
        fix = "see docs/recipe-keys.md."
        raise UsageError("CR0204", f"guard: {error}.", where="[guard], [evidence]", fix=fix) from error


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
        if needs_no_path(source):
            return source
        path = (recipe_folder / source).resolve()
        if source in section.source and not os.path.exists(path):  # noqa: PTH110 - false for a name that is too long
            raise InputError(
                "CR0402",
                f"there is no {source!r} beside the recipe.",
                where=f"tasks.source = {source}",
                fix="give a path relative to the recipe's folder.",
            )
        return str(path)

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


def open_curriculum(
    config: RunConfig, store: TaskStore, rows: Sequence[Mapping[str, Any]], model: Any
) -> Curriculum | None:
    """Who chooses the tasks of each generation; None without a ``[curriculum]`` table.

    ``model`` as it was loaded, before adapters: its weights say which recorded pass rates are its own.
    """
    from composer_replication.trainer.model_modes import parameter_sha256

    if config.curriculum is None:
        return None
    recorded = recorded_standings(store.root, parameter_sha256=partial(parameter_sha256, model))
    return Curriculum(rows, seed=config.seed, fingerprint=store.fingerprint, recorded=recorded)


def pair_rows(config: RunConfig, recipe_folder: Path) -> dict[str, PairRow]:
    """The rows of ``replay.pairs`` by their places; none where it is not set, or the channel is off."""
    if config.trainer.beta_replay == 0.0 or config.replay is None or not config.replay.pairs:
        return {}
    return read_pair_rows(recipe_folder / config.replay.pairs)


def open_pairs(rows: Mapping[str, PairRow], tokenizer: Any, model: Any) -> tuple[PreferencePair, ...] | None:
    """The same as token ids, None without any; each fits the model that is trained."""
    if not rows:
        return None
    from composer_replication.trainer.collator import refuse_unfit_pairs

    pairs = tokenised_pairs(rows, tokenizer)
    refuse_unfit_pairs(pairs, model, name=list(rows).__getitem__)
    return pairs


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


# --------------------------------------------------------------------------- attempts


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
    """The recipe's attempts: episodes where it has an ``[agent]`` table, else single answers. A curriculum hears of every outcome.

    Returns:
        What a trainer takes as reward, rollout function (None for single answers) and source of hints, and who samples
        for evaluation.
    """

    def hinted(observer: Any) -> HintGenerator | None:
        if config.trainer.alpha_sdpo == 0.0:
            return None
        return HintedTurnMaker(tokenizer, observe=observer)

    if config.agent is not None:
        from composer_replication.trainer.episode_rollouts import (
            EpisodeRollouts,
            TrainedPolicy,
            episode_reward_of,
        )

        kept = KeptEpisodes(
            folder.rollouts, part=file_part(), session_id=folder.root.name, model_name=config.model.name
        )
        observed = ObservedEpisodes(grader.store)
        listeners: list[Listener] = [kept.keep]
        if curriculum is not None:
            listeners.append(lambda played: curriculum.note(list(map(outcome_of_episode, played))))
        if config.trainer.alpha_sdpo != 0.0:
            listeners.append(observed.note)
        if config.trl.get("use_vllm") and config.trl.get("vllm_mode") == "server":
            require_server(config, find_trl_server(config), model, tokenizer)
        open_one = partial(
            open_player, config, grader, tokenizer, num_ids=num_model_ids(model), cluster=cluster
        )
        player = open_one(listeners=listeners)
        refuse_long_conversations(config, player, (*tasks.train, *tasks.heldout), model)
        policy, judge = TrainedPolicy(max_batch=config.agent.max_concurrent), open_one(is_evaluation=True)
        sampler = EpisodeSampler(judge, policy, keep=kept.keep_evaluation)
        rollouts = EpisodeRollouts(player, max_batch=config.agent.max_concurrent)
        return episode_reward_of(player), rollouts, hinted(observed), sampler
    from composer_replication.trainer.policy import end_token_ids

    reward = FeatureDeletionReward(
        {task.task_id: task for task in tasks.train},
        grader,
        load_reward_rule(config.reward.function),
        prompt_style=config.rollouts.prompt_style,
        tests=config.reward.tests,
        folder=folder.rollouts,
        part=file_part(),
        on_outcomes=None if curriculum is None else curriculum.note,
        end_token_ids=end_token_ids(model, tokenizer),
        shuffle_seed=config.seed if config.reward.is_shuffled else None,
    )
    observer = TaskObserver(grader, tests=config.reward.tests, options=config.rollouts)
    return reward, None, hinted(observer), open_sampler(config, grader, model, tokenizer)


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
        config.rollouts,
        max_new_tokens=sampling.max_completion_length,
        temperature=float(sampling.temperature),
    )
    policy.on_prompts = sampler.note_prompts
    return sampler


# --------------------------------------------------------------------------- episodes


def open_player(
    config: RunConfig,
    grader: Grader,
    tokenizer: Any,
    *,
    listeners: Sequence[Listener] = (),
    num_ids: int | None = None,
    is_evaluation: bool = False,
    cluster: RolloutCluster | None = None,
) -> EpisodePlayer:
    """Who plays episodes as ``[agent]`` says; with ``is_evaluation`` those that ``EpisodeSampler`` takes.

    With ``cluster`` attempts are made in its actors, and no more of them at a time than it has. ``num_ids`` as
    ``LedgerTalk``.
    """
    options = config.agent or AgentSection()
    attempt = attempt_options(config) | ({"monitor": "off"} if is_evaluation else {})
    open_environment: Callable[[], Any] = partial(FeatureDeletionEnv, grader, **attempt)
    if cluster is not None:
        from composer_replication.rollouts.cluster.rollout_cluster import RayEnvironment

        open_environment = partial(RayEnvironment, cluster)
        fewer = min(options.max_concurrent, cluster.options.num_actors)
        options = options.model_copy(update={"max_concurrent": fewer})
    return EpisodePlayer(
        grader,
        open_environment,
        LedgerTalk(tokenizer, options, num_ids=num_ids),
        options,
        seed=config.seed,
        temperature=float(config.trl.get("temperature", 1.0)),
        judge=None if is_evaluation else open_judge(options.judge),
        listeners=listeners,
        keeps_trees=is_evaluation,
        num_places=None if cluster is None else lambda: len(cluster.places()),
    )


def open_episode_sampler(
    config: RunConfig,
    grader: Grader,
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    cluster: RolloutCluster | None = None,
    served: ServedModel | None = None,
) -> EpisodeSampler:
    """Who attempts ``tasks`` by episodes of a model that nobody trains now; tools, limits and sampling are the recipe's.

    With ``served`` that server samples, and ``model`` needs no weights.
    """
    from composer_replication.trainer.episode_rollouts import TrainedPolicy, still_trainer

    judge = open_player(
        config, grader, tokenizer, num_ids=num_model_ids(model), is_evaluation=True, cluster=cluster
    )
    refuse_long_conversations(config, judge, tasks, model)
    if served is not None:
        require_server(config, served, model, tokenizer)
    endpoint = None if served is None else served.endpoint
    policy = TrainedPolicy(max_batch=(config.agent or AgentSection()).max_concurrent, endpoint=endpoint)
    policy.trainer = still_trainer(config, model, tokenizer)
    return EpisodeSampler(judge, policy)


def find_trl_server(config: RunConfig) -> ServedModel:
    """The server that ``[trl]`` names, as it describes itself; waited for ``trl.vllm_server_timeout`` where that is set."""
    of = config.trl
    url = of.get("vllm_server_base_url")
    url = url or f"http://{of.get('vllm_server_host', '0.0.0.0')}:{of.get('vllm_server_port', 8000)}"  # noqa: S104  TRL's
    return find_server(open_server(url), wait_seconds=float(of.get("vllm_server_timeout", 0.0)))


def require_server(config: RunConfig, served: ServedModel, model: Any, tokenizer: Any) -> None:
    """Stop where a server cannot sample the recipe's episodes; ``model`` may have no weights."""
    require_fit(
        served,
        tokenizer,
        max_context_tokens=(config.agent or AgentSection()).max_context_tokens,
        model_name=config.model.name,
        model_config=model.config.get_text_config().to_dict(),
    )


def num_model_ids(model: Any) -> int:
    """How many ids the model has a row for, often some more than its tokenizer."""
    return int(model.config.get_text_config().vocab_size)


def checks_of(config: RunConfig) -> Any:
    """The trainer's ``checks``: with ``[agent]`` its table says what is done where trainer and sampler disagree."""
    if config.agent is None:
        return True
    from composer_replication.trainer.checks import CheckThresholds

    if config.agent.log_prob_check == "off":
        return CheckThresholds(max_token_drift=math.inf)
    return CheckThresholds(stops_at_drift=config.agent.log_prob_check == "error")


def refuse_long_conversations(
    config: RunConfig, player: EpisodePlayer, tasks: Sequence[Task], model: Any
) -> None:
    """Stop before the first step when a first message leaves no room for an answer."""
    min_new_tokens, limit = (config.agent or AgentSection()).min_new_tokens, player.options.max_context_tokens
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions < limit:
        problem = f"agent.max_context_tokens is {limit}, and the model has {positions} positions."
        fix = f"set it to at most {positions}."
        raise InputError("CR0705", problem, where="agent.max_context_tokens", fix=fix)
    for task in tasks:
        length = player.talk.open(first_message(player.grader.store, task), TOOLS).num_tokens
        if length + min_new_tokens > limit:
            problem = f"the first prompt takes {length} of {limit} tokens and leaves no room for an answer."
            fix = "raise agent.max_context_tokens, or leave the task out."
            raise InputError("CR0705", problem, where=task.task_id, fix=fix)


# --------------------------------------------------------------------------- the truth, and what is written of a run


def open_evaluator(
    config: RunConfig, folder: RunFolder, sampler: TaskSampler, tasks: RunTasks
) -> tuple[PatientEvaluation[HeldoutReading] | None, Callable[[], Any] | None]:
    """The guard's truth, and how it is asked: with ``[evidence]`` every score is on disk before the evidence is told, and a
    sentinel says whether the grader itself can be believed.

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
        section,
        split_fingerprint=tasks.split.fingerprint,
        seed=config.seed,
        canaries=canaries,
        has_sentinel=config.evidence is not None,
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
