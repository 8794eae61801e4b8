"""From a recipe to the parts of a run. What is cheap to try is tried first, and the run uses what that made."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication import safety
from composer_replication.cli import flags
from composer_replication.cli.machine_troubles import package_version
from composer_replication.cli.task_division import RunTasks, read_split
from composer_replication.cli.terminal import Report, note
from composer_replication.config import AgentSection, RunConfig
from composer_replication.errors import InputError, MissingError, UsageError, needs_extra
from composer_replication.interfaces import Guard
from composer_replication.records import HeldoutReading, PreferencePair, Task
from composer_replication.rollouts import rewards, single_turn
from composer_replication.rollouts.curriculum import Curriculum, recorded_standings
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv, first_message
from composer_replication.rollouts.episodes import agent_loop, episode_player, policies, trajectories
from composer_replication.rollouts.episodes.episode_player import EpisodePlayer, EpisodeSampler, Listener
from composer_replication.rollouts.episodes.policies import ServedModel
from composer_replication.rollouts.episodes.shortcut_judge import ShortcutJudge, open_judge
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.heldout_evaluation import HeldoutEvaluator, PolicySampler, TaskSampler
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker
from composer_replication.rollouts.hints.task_observer import ObservedEpisodes, TaskObserver
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.rollouts.tokens.pair_ids import PairRow, tokenised_pairs
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.run_folder import RunFolder, write_json
from composer_replication.sandbox import accept, accepted, choose_backend
from composer_replication.tasks import build, candidate, sentinels, store_manifest
from composer_replication.tasks.intake import cache, sources
from composer_replication.tasks.store import TaskStore
from composer_replication.traces.pairs import pair_sources, read_pair_rows
from composer_replication.trainer import preset_settings

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster

MANY_GRADINGS = 64  # at a time on a cluster, where single answers are graded
READING_SECONDS = 7200.0  # that a held-out reading may take
POOL_PER_SAMPLE = 10


@dataclass
class Checked:
    """What was made to check a recipe, for its run."""

    guard: Guard | None
    pairs: Mapping[str, PairRow]
    rule: rewards.RewardRule
    cluster: ClusterOptions | None
    served: ServedModel | None = None
    judge: ShortcutJudge | None = None
    arguments: Any = None  # this and the next two are of ``check_training``
    method: Any = None
    lora: Any = None


def check_recipe(config: RunConfig, recipe_folder: Path) -> Checked:
    """What needs none of the training packages."""
    guard, pairs = make_guard(config), pair_rows(config, recipe_folder)
    served, judge = check_agent(config)
    rule, cluster = rewards.load_reward_rule(config.reward.function), None
    accept(config.sandbox.accept_no_isolation, where="sandbox.accept_no_isolation")
    if config.ray is None:
        choose_backend(config.sandbox.backend or None)
    else:
        flags.check_cluster(config.ray.address, "training on a Ray cluster")
        cluster = cluster_options(config)
    if config.heldout is not None and config.heldout.split:
        read_split((recipe_folder / config.heldout.split).resolve())
    return Checked(guard, pairs, rule, cluster, served, judge)


def check_agent(config: RunConfig) -> tuple[ServedModel | None, ShortcutJudge | None]:
    """Refuse what of ``[agent]`` can be refused before anything is built; the server that ``[trl]`` names, and the judge."""
    if config.agent is None:
        return None, None
    trl, uses_vllm = config.trl, bool(config.trl.get("use_vllm"))
    is_server = uses_vllm and trl.get("vllm_mode") == "server"
    if flags.shards_weights() and not uses_vllm:
        raise preset_settings.spread_weights("agent")
    refused: dict[str, Any] = {"use_transformers_continuous_batching": False}
    if uses_vllm and not is_server:
        refused |= {"vllm_enable_sleep_mode": False, "vllm_structured_outputs_regex": ""}
        refused["vllm_tensor_parallel_size"] = 1
    for key, idle in refused.items():
        if trl.get(key) not in (idle, None):
            problem = f"trl.{key} is set, and the agent loop does not sample so."
            fix = 'take the key out, the [agent] table, or set trl.vllm_mode = "server".'
            raise UsageError("CR0211", problem, where=f"trl.{key}", fix=fix)
    if uses_vllm and importlib.util.find_spec("vllm") is None:
        problem = "trl.use_vllm is set, and vllm is not installed here; TRL needs it to send weights, to a server too."
        fix = "pip install vllm==0.25.1 transformers==5.23.0 trl==1.16.0, which fit each other; or take trl.use_vllm out."
        raise MissingError("CR0101", problem, where="vllm", fix=fix)
    return find_trl_server(config) if is_server else None, open_judge(config.agent.judge)


@contextmanager
def training_packages(purpose: str, *, quiet: bool) -> Iterator[None]:
    """Inside, the training packages are loaded and say only what is an error; a missing one is refused (CR0101)."""
    with ExitStack() as stack:
        with needs_extra("train", purpose):
            stack.enter_context(preset_settings.calm_libraries(quiet=quiet))
            import composer_replication.trainer.composer_trainer  # noqa: F401  # the heaviest import of all
        yield


def check_training(config: RunConfig, folder: RunFolder) -> tuple[Any, Any, Any]:
    """What the training packages say: TRL's arguments, the method of the recipe, peft's configuration of adapters."""
    with needs_extra("train", "training"):
        from composer_replication.trainer.run_setup import lora_config, trl_arguments

        lora = lora_config(config.model.lora)
    arguments, method = trl_arguments(config, folder)
    preset_settings.check_arguments(config, arguments, method.options)
    return arguments, method, lora


def find_trl_server(config: RunConfig) -> ServedModel:
    """The server that ``[trl]`` names, as it describes itself; waited for ``trl.vllm_server_timeout`` where that is set."""
    of = config.trl
    host, port = of.get("vllm_server_host", "0.0.0.0"), of.get("vllm_server_port", 8000)  # noqa: S104  TRL's
    url = of.get("vllm_server_base_url") or f"http://{host}:{port}"
    seconds = float(of.get("vllm_server_timeout", 0.0))
    return policies.find_server(policies.open_server(url), wait_seconds=seconds)


def make_guard(config: RunConfig) -> Guard | None:
    """The guard of ``[guard]``, with that of ``[evidence]`` where there is one."""
    if config.guard is None:
        return None
    guard = safety.HeldOutGuard(**config.guard.model_dump())
    if config.evidence is None:
        return guard
    return safety.CombinedGuard(guard, safety.EvidenceGuard(**config.evidence.model_dump()))


def identity_table(config: RunConfig) -> dict[str, Any]:
    """What the recipe sets, without what a resumed run may change: ``[ray]`` and the addresses of lighthouse and judge.

    Defaults are left out, so that a key which a later version adds makes no other run of it.
    """
    moves: Any = {"ray": True, "agent": {"judge"}}
    table = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude=moves)
    if config.replicas is not None and config.replicas.lighthouse:
        table["replicas"]["transport"] = "torchft"
    if config.evidence is not None:  # a key in runs of older versions, whose identity must not change
        table["heldout"]["has_sentinel"] = True
    return table


def recipe_sha256(config: RunConfig) -> str:
    """Of ``identity_table``."""
    return hashlib.sha256(json.dumps(identity_table(config), sort_keys=True).encode()).hexdigest()


def open_tasks(config: RunConfig, recipe_folder: Path, report: Report | None) -> TaskStore:
    """The store that the recipe names, or one built from its sources in the cache.

    There its name is made of the tasks table, of every source that may change, and of the versions of stores and gates: another
    version of this program may run beside us, and would build the store anew under our hands.
    """
    section, backend = config.tasks, config.sandbox.backend or None
    if section.store:
        return TaskStore.open((recipe_folder / section.store).resolve(), backend=backend)

    def located(source: str) -> str:
        return source if sources.needs_no_path(source) else str((recipe_folder / source).resolve())

    named = [located(source) for source in section.source]
    versions = f"{store_manifest.STORE_VERSION}/{candidate.GATES_VERSION}"
    digest = hashlib.sha256(f"{versions}/{section.model_dump_json()}".encode())
    for source in named:
        if not sources.is_pinned(source):
            digest.update(sources.open_source(source).sha256.encode())
    key = digest.hexdigest()[:16]
    folder = cache.cache_folder() / "task-stores" / key
    with cache.cache_lock(f"task-store-{key}"):  # a second run with the same tasks waits for this build
        build.build_tasks(
            named,
            folder,
            symbols={located(source): pins for source, pins in section.symbols.items()},
            max_tasks=section.max_tasks,
            backend=backend,
            ray_address=None if config.ray is None else config.ray.address,
            progress=report,
        ).require_tasks()
        store = TaskStore.open(folder)
        store.verify()
        return store


def training_rows(config: RunConfig, store: TaskStore, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Rows for the trainer's data set: prompt and task id; no golden code, no hidden test."""
    if config.agent is not None:  # the conversation itself begins in the environment
        return [{"prompt": first_message(store, task), "task_id": task.task_id} for task in tasks]
    rows: list[dict[str, Any]] = []
    for task in tasks:
        prompt: Any = single_turn.build_prompt(store.broken_text(task), task.hole, config.rollouts)
        single_turn.refuse_leaking_prompt(prompt, store.golden_body(task), task_id=task.task_id)
        if config.rollouts.prompt_style == "chat":
            prompt = [{"role": "user", "content": prompt}]
        rows.append({"prompt": prompt, "task_id": task.task_id})
    return rows


def open_curriculum(
    config: RunConfig, store: TaskStore, rows: Sequence[Mapping[str, Any]], model: Any
) -> Curriculum | None:
    """Who chooses the tasks of each generation; kept pass rates count if they are of ``model``, which has no adapter yet."""
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


def open_grader(
    config: RunConfig, store: TaskStore, *unseen: Path, cluster: RolloutCluster | None = None
) -> Grader:
    """A grader with the recipe's sandbox, which must pass its self-test and not show ``unseen``; or one of the ``cluster``."""
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
    resources = dict(config.ray.resources)
    return ClusterOptions(
        num_actors=most,
        num_cpus=resources.pop("CPU", 1.0),
        resources=resources,
        fits_nodes=True,
        num_drivers=flags.launched_size(),
        attempt=attempt_options(config),
        grader={"backend": config.sandbox.backend},
    )


def open_actors(
    config: RunConfig, options: ClusterOptions | None, store: TaskStore
) -> AbstractContextManager[RolloutCluster | None]:
    """The actors that ``[ray]`` asks for, gone after the block; None without the table."""
    if config.ray is None or options is None:
        return nullcontext()
    from composer_replication.rollouts.cluster import open_cluster

    return open_cluster(config.ray.address, store, options, waits_for_all=config.agent is not None)


@dataclass(frozen=True)
class Attempts:
    """How attempts are made, here or by actors of a cluster: episodes where the recipe has ``[agent]``, else single answers.

    ``model`` may have no weights where a server samples, and is None where only conversations are opened.
    """

    config: RunConfig
    grader: Grader
    tokenizer: Any
    model: Any = None
    cluster: RolloutCluster | None = None
    rule: rewards.RewardRule = rewards.visible_tests_pass  # where single answers are trained on
    served: ServedModel | None = None  # who samples
    judge: ShortcutJudge | None = None  # of training

    @cached_property
    def sampling(self) -> Any:
        """How training, the guard and evaluations sample."""
        return preset_settings.sampling_settings(self.config)

    @property
    def agent(self) -> AgentSection:
        return self.config.agent or AgentSection()

    def player(self, *listeners: Listener, is_evaluation: bool = False) -> EpisodePlayer:
        """Who plays episodes as ``[agent]`` says; with ``is_evaluation`` those that ``EpisodeSampler`` takes."""
        options, cluster, grader = self.agent, self.cluster, self.grader
        attempt = attempt_options(self.config) | ({"monitor": "off"} if is_evaluation else {})
        open_environment: Callable[[], Any] = partial(FeatureDeletionEnv, grader, **attempt)
        if cluster is not None:
            from composer_replication.rollouts.cluster.rollout_cluster import RayEnvironment

            open_environment = partial(RayEnvironment, cluster)
            fewer = min(options.max_concurrent, cluster.options.num_actors)
            options = options.model_copy(update={"max_concurrent": fewer})
        # often some more ids than the tokenizer has
        num_ids = None if self.model is None else int(self.model.config.get_text_config().vocab_size)
        return EpisodePlayer(
            grader,
            open_environment,
            agent_loop.LedgerTalk(self.tokenizer, options, num_ids=num_ids),
            options,
            seed=self.config.seed,
            temperature=float(self.sampling.temperature),
            judge=None if is_evaluation else self.judge,
            listeners=listeners,
            keeps_trees=is_evaluation,
            num_places=None if cluster is None else lambda: len(cluster.places()),
        )

    def evaluation_player(self, tasks: Sequence[Task]) -> EpisodePlayer:
        """Who plays evaluations of ``tasks``; refuses a server that cannot sample them, and a first message without room."""
        limit, settings = self.agent.max_context_tokens, self.model.config
        if self.served is not None:
            policies.require_fit(
                self.served,
                self.tokenizer,
                max_context_tokens=limit,
                model_name=self.config.model.name,
                model_config=settings.get_text_config().to_dict(),
            )
        player = self.player(is_evaluation=True)
        positions = getattr(settings, "max_position_embeddings", None)
        if positions is not None and positions < limit:
            problem = f"agent.max_context_tokens is {limit}, and the model has {positions} positions."
            fix = f"set it to at most {positions}."
            raise InputError("CR0705", problem, where="agent.max_context_tokens", fix=fix)
        for task in tasks:
            length = player.talk.open(first_message(self.grader.store, task), TOOLS).num_tokens
            if length + self.agent.min_new_tokens > limit:
                fix = "raise agent.max_context_tokens, or leave the task out."
                words = f"the first prompt takes {length} of {limit} tokens and leaves no room for an answer."
                raise InputError("CR0705", words, where=task.task_id, fix=fix)
        return player

    def for_training(
        self, folder: RunFolder, tasks: RunTasks, curriculum: Curriculum | None
    ) -> tuple[Any, Any, HintedTurnMaker | None, TaskSampler]:
        """A trainer's reward, rollout function (None for single answers) and source of hints; who samples for evaluations."""
        config, has_hints = self.config, self.config.trainer.alpha_sdpo != 0.0
        rollouts: Any = None
        observer: ObservedEpisodes | TaskObserver
        if config.agent is None:
            reward: Any = self._answers_reward(folder, tasks, curriculum)
            sampler: TaskSampler = self.answers()
            observer = TaskObserver(self.grader, tests=config.reward.tests, options=config.rollouts)
        else:
            from composer_replication.trainer import episode_rollouts

            most = self.agent.max_concurrent
            names = {"session_id": folder.root.name, "model_name": config.model.name}
            kept = trajectories.KeptEpisodes(folder.rollouts, part=flags.file_part(), **names)
            observer = ObservedEpisodes(self.grader.store)
            listeners: list[Listener] = [kept.keep]
            if curriculum is not None:
                outcome_of = episode_player.outcome_of_episode
                listeners.append(lambda played: curriculum.note(list(map(outcome_of, played))))
            if has_hints:
                listeners.append(observer.note)
            judge = self.evaluation_player((*tasks.train, *tasks.heldout))
            policy, player = episode_rollouts.TrainedPolicy(max_batch=most), self.player(*listeners)
            sampler = EpisodeSampler(judge, policy, keep=kept.keep_evaluation)
            reward = episode_rollouts.episode_reward_of(player)
            rollouts = episode_rollouts.EpisodeRollouts(player, max_batch=most)
        hints = HintedTurnMaker(self.tokenizer, observe=observer) if has_hints else None
        return reward, rollouts, hints, sampler

    def _answers_reward(self, folder: RunFolder, tasks: RunTasks, curriculum: Curriculum | None) -> Any:
        from composer_replication.trainer.policy import end_token_ids

        config = self.config
        return rewards.FeatureDeletionReward(
            {task.task_id: task for task in tasks.train},
            self.grader,
            self.rule,
            prompt_style=config.rollouts.prompt_style,
            tests=config.reward.tests,
            folder=folder.rollouts,
            part=flags.file_part(),
            on_outcomes=None if curriculum is None else curriculum.note,
            end_token_ids=end_token_ids(self.model, self.tokenizer),
            shuffle_seed=config.seed if config.reward.is_shuffled else None,
        )

    def answers(self) -> TaskSampler:
        """Fresh single answers of the model as it is now, asked as in training."""
        from composer_replication.trainer.policy import InProcessPolicy

        sampling, options = self.sampling, self.config.rollouts
        as_chat = options.prompt_style == "chat"
        policy = InProcessPolicy(self.model, self.tokenizer, as_chat=as_chat, sampling=sampling)
        length, temperature = sampling.max_completion_length, float(sampling.temperature)
        sampler = PolicySampler(policy, self.grader, options, max_new_tokens=length, temperature=temperature)
        policy.on_prompts = sampler.note_prompts
        return sampler

    def episodes(self, tasks: Sequence[Task]) -> EpisodeSampler:
        """Who attempts ``tasks`` by episodes of a model that nobody trains now, sampled by a server where one is ``served``."""
        from composer_replication.trainer.episode_rollouts import TrainedPolicy, still_trainer

        judge = self.evaluation_player(tasks)
        endpoint = None if self.served is None else self.served.endpoint
        still = still_trainer(self.sampling, self.model, self.tokenizer)
        return EpisodeSampler(judge, TrainedPolicy(self.agent.max_concurrent, endpoint, still))


def open_evaluator(
    config: RunConfig, folder: RunFolder, sampler: TaskSampler, tasks: RunTasks
) -> tuple[PatientEvaluation[HeldoutReading] | None, Callable[[], Any] | None]:
    """The guard's truth, and how it is asked; both are None where the recipe holds nothing out.

    With ``[evidence]`` every score is on disk before the evidence is told, and a sentinel says whether to believe the grader.
    """
    section = config.heldout
    if section is None or tasks.split is None:
        return None, None
    watched = tasks.heldout if section.num_canaries else ()
    canaries = [made for task in watched if (made := sentinels.make_canary(sampler.grader.store, task))]
    if len(canaries) < len(watched):
        note(f"canaries: {len(canaries)} made, {len(watched) - len(canaries)} held-out tasks cannot be one")
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
    evaluation = PatientEvaluation(
        evaluator, timeout_seconds=None if flags.shards_weights() else READING_SECONDS
    )
    if config.evidence is None or flags.launched_rank():  # the process that evaluates keeps the journal
        return evaluation, evaluation
    journal = safety.EvaluationJournal(folder.evaluations, run=f"{tasks.split.fingerprint}/{config.seed}")
    return evaluation, lambda: (reading := evaluation()) and journal.settled(reading)  # None: not due


def write_environment(
    folder: RunFolder, config: RunConfig, tasks: RunTasks, grader: Grader, pairs: Mapping[str, PairRow]
) -> None:
    """Versions, seeds, fingerprints, sources of pairs, jails and their missing guards; never an environment variable."""
    packages = ("composer-replication", "torch", "transformers", "trl", "accelerate", "peft")
    jails: dict[str, Any] = {"backend": grader.backend_name, "accepted_no_isolation": list(accepted())}
    jails["not_effective"] = list(grader.missing_guards)
    if config.agent is not None and config.ray is None:  # nodes choose for themselves
        jails["attempts"] = grader.attempt_backend().name
    environment = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: package_version(name) for name in packages},
        "seed": config.seed,
        "git_revision": _git_revision(),
        "tasks_fingerprint": grader.store.fingerprint,
        "split_fingerprint": tasks.split_fingerprint,
        "split_checked": list(tasks.split.checked) if tasks.split else [],
        "train_tasks": [task.task_id for task in tasks.train],
        "heldout_tasks": [task.task_id for task in tasks.heldout],
        "sandbox": jails,
    }
    write_json(folder.environment, environment | ({"pairs": pair_sources(pairs.values())} if pairs else {}))


def _git_revision() -> str:
    """The checkout's revision; nothing for an installed package, whatever repository is around it."""
    root = Path(__file__).parents[3]
    words = ["git", "-C", str(root), "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        if (root / "pyproject.toml").is_file():
            return subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
    return ""
