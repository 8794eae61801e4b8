"""Who makes the rollouts of a run, rewards them, hints at them and measures by them: single answers, or the agent loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_replication.cli import run_parts
from composer_replication.cli.agent_parts import open_agent, refuse_long_conversations
from composer_replication.cli.hint_parts import open_hint_source
from composer_replication.cli.task_division import RunTasks
from composer_replication.config import RunConfig
from composer_replication.interfaces import HintGenerator
from composer_replication.rollouts.curriculum import Curriculum
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.task_sampler import TaskSampler
from composer_replication.run_folder import RunFolder

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster


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
    reward = run_parts.open_reward(config, tasks, grader, folder, curriculum, end_token_ids=ends)
    hint_source = open_hint_source(config, grader.store, grader, tokenizer, tasks=tasks.train)
    return reward, None, hint_source, run_parts.open_sampler(config, grader, model, tokenizer)
