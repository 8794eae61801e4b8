"""Joins rollouts of several turns to a recipe: environments, conversations, limits, the actors of a cluster, and who hears of every episode."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from composer_replication.channel_tables import AgentSection
from composer_replication.cli.cluster import launched_size, shards_weights
from composer_replication.config import RunConfig
from composer_replication.errors import InputError, MissingError, UsageError
from composer_replication.records import Limits, Task
from composer_replication.rollouts.environment.feature_deletion_env import (
    AttemptOptions,
    FeatureDeletionEnv,
    first_message,
)
from composer_replication.rollouts.environment.reward_options import RewardOptions
from composer_replication.rollouts.episodes.episode_options import EpisodeOptions
from composer_replication.rollouts.episodes.ledger_talk import LedgerTalk
from composer_replication.rollouts.episodes.served_policy import (
    ServedModel,
    find_server,
    open_server,
    require_fit,
)
from composer_replication.rollouts.generations.episode_player import EpisodePlayer, EpisodeSampler, Listeners
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tokens.call_dialects import require_dialect
from composer_replication.rollouts.tools.tool_limits import ToolLimits
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.tasks.store import TaskStore

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster

MANY_GRADINGS = 64
"""At a time on a cluster, where single answers are graded and nobody says how many."""


def check_agent(config: RunConfig) -> None:
    """What of ``[agent]`` can be refused before anything is built, the server that ``[trl]`` names among it."""
    if config.agent is None:
        return
    if config.agent.dialect:
        require_dialect(config.agent.dialect, where="agent.dialect")
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


def find_trl_server(config: RunConfig) -> ServedModel:
    """The server that ``[trl]`` names, as it describes itself; waited for ``trl.vllm_server_timeout`` where that is set."""
    of = config.trl
    url = of.get("vllm_server_base_url")
    url = url or f"http://{of.get('vllm_server_host', '0.0.0.0')}:{of.get('vllm_server_port', 8000)}"  # noqa: S104  TRL's
    return find_server(open_server(url), wait_seconds=float(of.get("vllm_server_timeout", 0.0)))


def open_player(
    config: RunConfig,
    grader: Grader,
    tokenizer: Any,
    *,
    listeners: Listeners | None = None,
    num_ids: int | None = None,
    is_evaluation: bool = False,
    cluster: RolloutCluster | None = None,
) -> EpisodePlayer:
    """Who plays episodes as ``[agent]`` says; with ``is_evaluation`` those that ``EpisodeSampler`` takes.

    With ``cluster`` attempts are made in its actors, and no more of them at a time than it has. ``num_ids`` as
    ``LedgerTalk``.
    """
    section = config.agent or AgentSection()
    options = episode_options(section, temperature=float(config.trl.get("temperature", 1.0)))
    open_environment: Callable[[], Any] = partial(
        FeatureDeletionEnv,
        grader,
        attempt=attempt_options(config),
        reward=reward_options(config),
        monitor="off" if is_evaluation else section.monitor,
    )
    if cluster is not None:
        from composer_replication.rollouts.cluster.ray_environment import RayEnvironment

        open_environment = partial(RayEnvironment, cluster)
        options = replace(options, max_concurrent=min(options.max_concurrent, cluster.options.num_actors))
    talk = LedgerTalk(
        tokenizer,
        tokenizer.chat_template,
        system=section.system,
        template_options=section.template_options,
        dialect=section.dialect,
        tools=TOOLS,
        num_ids=num_ids,
    )
    return EpisodePlayer(
        grader,
        open_environment,
        talk,
        options,
        seed=config.seed,
        listeners=listeners,
        keeps_trees=is_evaluation,
        num_places=None if cluster is None else lambda: len(cluster.places()),
    )


def sandbox_limits(config: RunConfig) -> Limits:
    """Of every sandbox of a recipe."""
    return Limits(**config.sandbox.model_dump(include={"memory_bytes", "num_processes", "disk_bytes"}))


def attempt_options(config: RunConfig) -> AttemptOptions:
    """How the sandbox of an attempt is opened."""
    section = (config.agent or AgentSection()).tools
    return AttemptOptions(
        is_warm=section.is_warm,
        sandbox_limits=sandbox_limits(config),
        tool_limits=ToolLimits(max_characters=section.max_characters),
    )


def reward_options(config: RunConfig) -> RewardOptions:
    """What ``[agent.reward]`` says; tests that are drawn depend on the run's seed."""
    section = (config.agent or AgentSection()).reward
    return RewardOptions(**section.model_dump(), break_seed=config.seed)


def episode_options(section: AgentSection, *, temperature: float) -> EpisodeOptions:
    """The loop's limits as ``[agent]`` has them."""
    same = [field.name for field in fields(EpisodeOptions) if field.name in AgentSection.model_fields]
    return EpisodeOptions(**{name: getattr(section, name) for name in same}, temperature=temperature)


def require_server(config: RunConfig, served: ServedModel, model: Any, tokenizer: Any) -> None:
    """Stop where a server cannot sample the recipe's episodes; ``model`` may have no weights."""
    require_fit(
        served,
        tokenizer,
        max_context_tokens=(config.agent or AgentSection()).max_context_tokens,
        model_name=config.model.name,
        model_config=model.config.get_text_config().to_dict(),
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

    section = config.agent or AgentSection()
    judge = open_player(
        config, grader, tokenizer, num_ids=num_model_ids(model), is_evaluation=True, cluster=cluster
    )
    refuse_long_conversations(config, judge, tasks, model)
    if served is not None:
        require_server(config, served, model, tokenizer)
    endpoint = None if served is None else served.endpoint
    policy = TrainedPolicy(max_batch=section.max_concurrent, endpoint=endpoint)
    policy.trainer = still_trainer(config, model, tokenizer)
    return EpisodeSampler(judge, policy)


def num_model_ids(model: Any) -> int:
    """How many ids the model has a row for, often some more than its tokenizer."""
    return int(model.config.get_text_config().vocab_size)


def checks_of(config: RunConfig) -> Any:
    """The trainer's ``checks``: with ``[agent]`` its table says what is done where trainer and sampler disagree."""
    if config.agent is None or not config.trainer.checks:
        return config.trainer.checks
    from composer_replication.trainer.checks.judgement import CheckThresholds

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
    store = player.grader.store
    for task in tasks:
        length = player.talk.open(first_message(store, task), TOOLS).num_tokens
        if length + min_new_tokens > limit:
            problem = f"the first prompt takes {length} of {limit} tokens and leaves no room for an answer."
            fix = "raise agent.max_context_tokens, or leave the task out."
            raise InputError("CR0705", problem, where=task.task_id, fix=fix)


def cluster_options(config: RunConfig) -> ClusterOptions:
    """The actors of ``[ray]``, with the sandboxes, limits and reward that the recipe has without it."""
    from composer_replication.rollouts.cluster.rollout_actor import ClusterOptions

    if config.ray is None:
        raise ValueError("the recipe has no [ray] table")
    placing = config.ray.model_dump(exclude={"address"})
    most = MANY_GRADINGS if config.agent is None else config.agent.max_concurrent
    return ClusterOptions(
        **(placing | {"num_actors": config.ray.num_actors or most}),
        fits_nodes=config.ray.num_actors == 0,
        num_drivers=launched_size(),
        backend=config.sandbox.backend,
        attempt=attempt_options(config),
        reward=reward_options(config),
        monitor="off" if config.agent is None else config.agent.monitor,
        limits=sandbox_limits(config),
        timeout_seconds=config.rollouts.test_timeout_seconds,
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
