"""Who takes part in an episode, and its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.interfaces import AgentEnvironment, TokenPolicy
from composer_replication.rollouts.episodes.ledger_talk import LedgerTalk


class RefusedRequestError(UsageError):
    """A server refuses what it was asked as such (HTTP 400, 413): most often because it is too long for its context.

    In an episode that had an answer already it ends that episode alone (``CONTEXT``).
    """


SUMMARY_REQUEST = """\
The conversation will soon be longer than you can read. Write a summary for yourself, from which you will go on without
it: what was asked, what you found out, what you changed and where, what is left to do. Do not call a tool."""
SUMMARY_INTRODUCTION = "You worked on this already. Your own summary of what happened so far:"


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """The limits of episodes; all seconds are of the wall clock.

    Args:
        max_turns: answers of the policy, summaries not counted.
        max_context_tokens: prompt and answer together, in each segment. Never more is sampled.
        max_new_tokens: of one answer; less where the context has less room.
        min_new_tokens: with less room than this the episode ends (``CONTEXT``).
        temperature: handed to the policy.
        turn_seconds: for an answer and its calls. An answer that takes longer is thrown away; a call that began
            in time may run to its own time-out. Then the episode ends (``DEADLINE``) and is graded. The answers of a
            ``BatchingPolicy`` count neither here nor for ``episode_seconds``: ``max_new_tokens`` bounds them.
        episode_seconds: for one try, grading not counted: each of its test runs has limits of its own.
        call_seconds: the longest time-out of a call within the environment. A call may take so long however late in its
            turn it began: one that runs into its own time-out is what the policy did, and no failure of the sandbox.
        grace_seconds: an environment that does not come back so long after ``turn_seconds`` and ``call_seconds`` are both
            over has broken: its episode is tried again.
        closing_seconds: how long the end of the loop waits for environments to close.
        max_calls: of one answer; those beyond are refused and not run.
        max_tries: how often an episode is begun before it is dropped, for failures of sandbox or server only.
        max_concurrent: episodes at a time; each has an environment.
        reminder: what the policy is told after an answer without a call; empty: the episode ends (``FINISHED``).
        summary_tokens: from this prompt length on the policy is asked for a summary and goes on from it; 0 never.
            Leave room below ``max_context_tokens`` for one tool result, the request and the summary.
        max_summaries: of one episode.
        summary_request, summary_introduction: the words before and after.
    """

    max_turns: int = 50
    max_context_tokens: int = 32768
    max_new_tokens: int = 4096
    min_new_tokens: int = 16
    temperature: float = 1.0
    turn_seconds: float = 600.0
    episode_seconds: float = 3600.0
    call_seconds: float = 300.0
    grace_seconds: float = 120.0
    closing_seconds: float = 120.0
    max_calls: int = 16
    max_tries: int = 3
    max_concurrent: int = 32
    reminder: str = ""
    summary_tokens: int = 0
    max_summaries: int = 4
    summary_request: str = SUMMARY_REQUEST
    summary_introduction: str = SUMMARY_INTRODUCTION


def finish(environment: AgentEnvironment, task_id: str) -> Any:
    """The judgement of an attempt by its own environment."""
    del task_id
    return environment.finish()


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """Who takes part in every episode.

    ``open_environment`` makes a fresh environment for each try; ``talk`` opens its conversations and finds the calls in an answer;
    ``finish`` judges what an attempt at a task left, None where a sandbox failed.
    """

    policy: TokenPolicy
    open_environment: Callable[[], AgentEnvironment]
    talk: LedgerTalk
    finish: Callable[[AgentEnvironment, str], Any] = finish
