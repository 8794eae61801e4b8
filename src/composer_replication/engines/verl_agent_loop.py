"""verl's agent loop over our attempts: its server samples, our loop calls tools, our tests give the reward."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from composer_replication.errors import SandboxFailure
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.agent_loop import run_episodes
from composer_replication.rollouts.episodes.episode import RolloutRow, rollout_row
from composer_replication.rollouts.episodes.episode_player import EpisodePlayer
from composer_replication.rollouts.grading import Grader, GradeRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentLoopParts:
    """Who plays: ``training`` for the reward, ``evaluation`` for the trees that hidden tests judge, and the grader."""

    training: EpisodePlayer
    evaluation: EpisodePlayer
    grader: Grader
    seed: int


class VerlPolicy:
    """A ``TokenPolicy`` over verl's own servers, of whatever engine; the weights there are verl's to keep."""

    def __init__(
        self, server: Any, tokenizer: Any, sampling: dict[str, Any], end_token_ids: Sequence[int]
    ) -> None:
        self.server, self.tokenizer, self.sampling = server, tokenizer, dict(sampling)
        self.end_token_ids = frozenset(end_token_ids)
        self.request_id = uuid4().hex  # one for an episode: its turns go to the server that has its cache
        self.newest: dict[str, Any] = {}
        for name in ("max_tokens", "max_new_tokens", "temperature"):
            self.sampling.pop(name, None)

    async def sample(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Completion:
        del seed  # verl's servers draw by their own
        asked = {**self.sampling, "max_tokens": max_new_tokens, "temperature": temperature, "logprobs": True}
        answer = await self.server.generate(
            request_id=self.request_id, prompt_ids=list(prompt_ids), sampling_params=asked
        )
        if not answer.token_ids or answer.stop_reason == "aborted":
            raise SandboxFailure("CR0824", "verl's server gave no whole answer.")
        self.newest = dict(answer.extra_fields)
        ids = tuple(int(each) for each in answer.token_ids)
        reason = StopReason.FINISHED if ids[-1] in self.end_token_ids else StopReason.LENGTH
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
        return Completion(ids, text, reason, tuple(answer.log_probs or ()))


@dataclass(frozen=True, slots=True)
class Attempted:
    """One attempt as verl takes it; ``figures`` are logged, ``acc`` first."""

    row: RolloutRow
    reward: float
    figures: dict[str, float]
    num_turns: int


async def attempt(
    parts: AgentLoopParts, policy: VerlPolicy, task_id: str, *, step: int, is_heldout: bool
) -> Attempted:
    """One episode at a task, graded: by the reward of training, or by hidden tests where the task is held out.

    A held-out attempt is worth 1 where its hidden tests all pass. What the sandbox lost has an empty mask and moves nothing.
    """
    player = parts.evaluation if is_heldout else parts.training
    made, options = player.parts(policy), player.options
    [episode] = await run_episodes([task_id], made, options=options, seed=parts.seed, step=step)
    row = rollout_row(episode, filler_id=next(iter(policy.end_token_ids)))
    visible = 0.0 if episode.score is None else float(episode.score.all_passed)
    reward, hidden, is_lost = episode.paid or 0.0, 0.0, episode.paid is None
    if is_heldout and episode.judgement is not None and episode.judgement.tree is not None:
        task = parts.grader.store.get(task_id)
        request = GradeRequest(task, "", tests="hidden", tree=episode.judgement.tree)
        [score] = await asyncio.to_thread(parts.grader.grade_many, [request])
        reward = hidden = float(score is not None and score.all_passed)
        is_lost |= score is None
    figures = {
        "acc": hidden if is_heldout else visible,
        "visible": visible,
        "lost": float(is_lost),
    }
    return Attempted(row, reward, figures, len(episode.turns))


def verl_output(attempted: Attempted, policy: VerlPolicy, *, prompt_length: int, response_length: int) -> Any:
    """verl's record of it: ids, mask and log-probabilities as they are, cut where verl has no more room."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    row = attempted.row
    if len(row.prompt_ids) > prompt_length or len(row.completion_ids) > response_length:
        logger.warning(
            "an attempt of %d and %d tokens is cut to verl's data.max_prompt_length %d and data.max_response_length %d",
            len(row.prompt_ids),
            len(row.completion_ids),
            prompt_length,
            response_length,
        )
    kept = slice(response_length)
    return AgentLoopOutput(
        prompt_ids=list(row.prompt_ids)[-prompt_length:],
        response_ids=list(row.completion_ids)[kept],
        response_mask=list(row.mask)[kept],
        response_logprobs=list(row.sampled_logp)[kept] or None,
        reward_score=attempted.reward,
        num_turns=attempted.num_turns,
        metrics=AgentLoopMetrics(),
        extra_fields={**policy.newest, "reward_extra_info": dict(attempted.figures)},
    )


class AgentLoop:
    """One attempt for verl, which makes an object for each; ``open_parts`` gives all of a process the same parts."""

    def __init__(
        self, settings: Any, server: Any, tokenizer: Any, open_parts: Callable[[Any], AgentLoopParts]
    ) -> None:
        self.rollout, self.server, self.tokenizer = settings.actor_rollout_ref.rollout, server, tokenizer
        self.end_token_ids = end_token_ids(str(settings.actor_rollout_ref.model.path), tokenizer)
        self.open_parts = open_parts

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """The attempt at the row's task."""
        parts, about = self.open_parts(self.tokenizer), row["extra_info"]
        policy = VerlPolicy(self.server, self.tokenizer, sampling_params, self.end_token_ids)
        how: Any = {"step": int(row.get("global_steps") or 0), "is_heldout": bool(about["is_heldout"])}
        attempted = await attempt(parts, policy, str(about["task_id"]), **how)
        lengths = {name: int(getattr(self.rollout, name)) for name in ("prompt_length", "response_length")}
        return verl_output(attempted, policy, **lengths)


def end_token_ids(model: str, tokenizer: Any) -> list[int]:
    """What ends an answer: the tokenizer's end token and those of the model's generation settings, where they are here."""
    path = Path(model) / "generation_config.json"
    ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    more = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return [int(each) for each in dict.fromkeys([tokenizer.eos_token_id, *more]) if each is not None]
