"""How a recipe's attempts are made and judged: who plays or answers, the reward, the truth, hints, curriculum and pairs.

Needs the training packages: whoever imports this has loaded them, or said that they are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from composer_replication.cli.assembly import attempt_options, find_trl_server
from composer_replication.cli.cluster import file_part, launched_rank, shards_weights
from composer_replication.cli.task_division import RunTasks
from composer_replication.cli.terminal import note
from composer_replication.config import AgentSection, RunConfig
from composer_replication.errors import InputError
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
from composer_replication.rollouts.episodes.policies import ServedModel, require_fit
from composer_replication.rollouts.episodes.shortcut_judge import open_judge
from composer_replication.rollouts.episodes.trajectories import KeptEpisodes
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.heldout_evaluation import HeldoutEvaluator, PolicySampler, TaskSampler
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker
from composer_replication.rollouts.hints.task_observer import ObservedEpisodes, TaskObserver
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.rollouts.rewards import FeatureDeletionReward, load_reward_rule
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.run_folder import RunFolder
from composer_replication.safety import EvaluationJournal
from composer_replication.tasks.sentinels import make_canaries
from composer_replication.tasks.store import TaskStore
from composer_replication.traces.pairs import PairRow, tokenised_pairs
from composer_replication.trainer.collator import refuse_unfit_pairs
from composer_replication.trainer.episode_rollouts import (
    EpisodeReward,
    EpisodeRollouts,
    TrainedPolicy,
    still_trainer,
)
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.policy import InProcessPolicy, end_token_ids
from composer_replication.trainer.preset_settings import sampling_settings

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster

POOL_PER_SAMPLE = 10


@dataclass(frozen=True)
class Attempts:
    """How a recipe's attempts are made: episodes where it has an ``[agent]`` table, else single answers.

    With ``cluster`` its actors make them, and no more of them at a time than it has. ``model`` may have no weights where a
    server samples, and is None where only conversations are opened.
    """

    config: RunConfig
    grader: Grader
    tokenizer: Any
    model: Any = None
    cluster: RolloutCluster | None = None

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
            LedgerTalk(self.tokenizer, options, num_ids=num_ids),
            options,
            seed=self.config.seed,
            temperature=float(self.config.trl.get("temperature", 1.0)),
            judge=None if is_evaluation else open_judge(options.judge),
            listeners=listeners,
            keeps_trees=is_evaluation,
            num_places=None if cluster is None else lambda: len(cluster.places()),
        )

    def for_training(
        self, folder: RunFolder, tasks: RunTasks, curriculum: Curriculum | None
    ) -> tuple[Any, Any, HintGenerator | None, TaskSampler]:
        """What a trainer takes as reward, rollout function (None for single answers) and source of hints, and who samples for
        evaluation. A curriculum hears of every outcome.
        """
        config = self.config
        reward: Any
        rollouts: EpisodeRollouts | None = None
        sampler: TaskSampler
        observer: ObservedEpisodes | TaskObserver
        has_hints = config.trainer.alpha_sdpo != 0.0
        if config.agent is None:
            reward, sampler = self._answers_reward(folder, tasks, curriculum), self.answers()
            observer = TaskObserver(self.grader, tests=config.reward.tests, options=config.rollouts)
        else:
            name, most = config.model.name, self.agent.max_concurrent
            kept = KeptEpisodes(
                folder.rollouts, part=file_part(), session_id=folder.root.name, model_name=name
            )
            observer = ObservedEpisodes(self.grader.store)
            listeners: list[Listener] = [kept.keep]
            if curriculum is not None:
                listeners.append(lambda played: curriculum.note(list(map(outcome_of_episode, played))))
            if has_hints:
                listeners.append(observer.note)
            if config.trl.get("use_vllm") and config.trl.get("vllm_mode") == "server":
                self.require_server(find_trl_server(config))
            player = self.player(*listeners)
            self.refuse_long_conversations(player, (*tasks.train, *tasks.heldout))
            judge = self.player(is_evaluation=True)
            sampler = EpisodeSampler(judge, TrainedPolicy(max_batch=most), keep=kept.keep_evaluation)
            reward, rollouts = EpisodeReward(player), EpisodeRollouts(player, max_batch=most)
        hints = HintedTurnMaker(self.tokenizer, observe=observer) if has_hints else None
        return reward, rollouts, hints, sampler

    def _answers_reward(self, folder: RunFolder, tasks: RunTasks, curriculum: Curriculum | None) -> Any:
        config = self.config
        return FeatureDeletionReward(
            {task.task_id: task for task in tasks.train},
            self.grader,
            load_reward_rule(config.reward.function),
            prompt_style=config.rollouts.prompt_style,
            tests=config.reward.tests,
            folder=folder.rollouts,
            part=file_part(),
            on_outcomes=None if curriculum is None else curriculum.note,
            end_token_ids=end_token_ids(self.model, self.tokenizer),
            shuffle_seed=config.seed if config.reward.is_shuffled else None,
        )

    def answers(self) -> TaskSampler:
        """Fresh single answers of the model as it is now, asked as in training."""
        sampling, options = sampling_settings(self.config), self.config.rollouts
        as_chat = options.prompt_style == "chat"
        policy = InProcessPolicy(self.model, self.tokenizer, as_chat=as_chat, sampling=sampling)
        length, temperature = sampling.max_completion_length, float(sampling.temperature)
        sampler = PolicySampler(policy, self.grader, options, max_new_tokens=length, temperature=temperature)
        policy.on_prompts = sampler.note_prompts
        return sampler

    def episodes(self, tasks: Sequence[Task], served: ServedModel | None) -> EpisodeSampler:
        """Who attempts ``tasks`` by episodes of a model that nobody trains now, sampled by a server where one is ``served``."""
        judge = self.player(is_evaluation=True)
        self.refuse_long_conversations(judge, tasks)
        if served is not None:
            self.require_server(served)
        endpoint = None if served is None else served.endpoint
        still = still_trainer(self.config, self.model, self.tokenizer)
        return EpisodeSampler(judge, TrainedPolicy(self.agent.max_concurrent, endpoint, still))

    def require_server(self, served: ServedModel) -> None:
        """Stop where a server cannot sample the recipe's episodes."""
        require_fit(
            served,
            self.tokenizer,
            max_context_tokens=self.agent.max_context_tokens,
            model_name=self.config.model.name,
            model_config=self.model.config.get_text_config().to_dict(),
        )

    def refuse_long_conversations(self, player: EpisodePlayer, tasks: Sequence[Task]) -> None:
        """Stop before the first step when a first message leaves no room for an answer."""
        limit = player.options.max_context_tokens
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None and positions < limit:
            problem = f"agent.max_context_tokens is {limit}, and the model has {positions} positions."
            fix = f"set it to at most {positions}."
            raise InputError("CR0705", problem, where="agent.max_context_tokens", fix=fix)
        for task in tasks:
            length = player.talk.open(first_message(self.grader.store, task), TOOLS).num_tokens
            if length + self.agent.min_new_tokens > limit:
                problem = (
                    f"the first prompt takes {length} of {limit} tokens and leaves no room for an answer."
                )
                fix = "raise agent.max_context_tokens, or leave the task out."
                raise InputError("CR0705", problem, where=task.task_id, fix=fix)


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


def open_curriculum(
    config: RunConfig, store: TaskStore, rows: Sequence[Mapping[str, Any]], model: Any
) -> Curriculum | None:
    """Who chooses the tasks of each generation; None without a ``[curriculum]`` table.

    ``model`` as it was loaded, before adapters: its weights say which recorded pass rates are its own.
    """
    if config.curriculum is None:
        return None
    recorded = recorded_standings(store.root, parameter_sha256=partial(parameter_sha256, model))
    return Curriculum(rows, seed=config.seed, fingerprint=store.fingerprint, recorded=recorded)


def open_pairs(rows: Mapping[str, PairRow], tokenizer: Any, model: Any) -> tuple[PreferencePair, ...] | None:
    """The same as token ids, None without any; each fits the model that is trained."""
    if not rows:
        return None
    pairs = tokenised_pairs(rows, tokenizer)
    refuse_unfit_pairs(pairs, model, name=list(rows).__getitem__)
    return pairs
