"""The one loop over turns: many episodes at once, over any policy and any environment.

An episode samples, calls and appends until there is a reason to stop, and is graded then; for infrastructure it is begun
again. From ``run_episodes`` to the model it is three calls: ``OneEpisode.run``, its ``_answer``, ``policy.sample``.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from dataclasses import replace
from typing import Any, TypeVar

from composer_replication.errors import InputError, SandboxFailure
from composer_replication.interfaces import AgentEnvironment
from composer_replication.records import Completion, StopReason, ToolCall, ToolResult, ToolSpec
from composer_replication.rollouts.environment.lease import EnvironmentLease
from composer_replication.rollouts.episodes.batching_policy import BatchingPolicy
from composer_replication.rollouts.episodes.episode import (
    Episode,
    EpisodeTurn,
    ObservedTurn,
    TokenCounts,
    refusal,
)
from composer_replication.rollouts.episodes.episode_options import (
    EpisodeOptions,
    EpisodeParts,
    RefusedRequestError,
)
from composer_replication.rollouts.tokens.chat import Chat

T = TypeVar("T")


async def run_episodes(
    task_ids: Sequence[str],
    parts: EpisodeParts,
    *,
    options: EpisodeOptions | None = None,
    seed: int = 0,
    step: int = 0,
    counts: Counter[str] | None = None,
) -> AsyncGenerator[Episode, None]:
    """One episode for each task id, in the order in which they end.

    The seeds of an episode's answers come from ``seed``, its place in ``task_ids`` and the number of the answer, so
    that the same policy gives the same episodes whatever ends first. While a caller holds an episode no further one is
    begun; those that run go on. Leave the iterator by ``aclosing`` or to its end: an episode that still runs then is
    cancelled, and every environment is closed. A call of an environment that runs at that moment is waited for,
    at most ``options.closing_seconds``.

    Args:
        task_ids: a task for each episode; those of a group are repeated.
        parts: policy, environment, conversation and calls.
        options: the limits.
        seed: of all sampling.
        step: of the trainer, for the records.
        counts: what happened is added here: ``ended_REASON``, ``dropped``, ``tries``,
            ``infrastructure_failures``, ``failed_CODE``,
            ``invalid_calls``, ``not_continued_CODE`` (a template that does not go on after an answer), ``opened``, ``closed``, ``close_failures``, ``not_closed`` (in time).

    Whatever environment, conversation or policy raise is raised, but for a ``SandboxFailure``.
    """
    options = options or EpisodeOptions()
    counted: Counter[str] = Counter()
    waiting = deque(enumerate(task_ids))
    running: dict[asyncio.Task[Episode], int] = {}
    leases: list[EnvironmentLease[AgentEnvironment]] = []
    try:
        while waiting or running:
            while waiting and len(running) < options.max_concurrent:
                index, task_id = waiting.popleft()
                blank = Episode(task_id, index, step, seed)
                one = OneEpisode(blank, parts=parts, options=options, counts=counted, leases=leases)
                running[asyncio.create_task(one.run())] = index
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = [task.result() for task in sorted(done, key=running.__getitem__)]
            for task in done:
                del running[task]
            for episode in ended:
                counted[f"ended_{episode.stop_reason}"] += 1
                counted["dropped"] += episode.reward is None
                counted["invalid_calls"] += episode.num_invalid_calls
                yield episode
    finally:
        try:
            await _close(running, leases, options.closing_seconds)
        finally:
            if counts is not None:
                counts.update(counted + _closings(leases))


async def episodes_in_order(
    task_ids: Sequence[str],
    parts: EpisodeParts,
    *,
    on_ended: Callable[[int], None] = lambda _: None,
    **how: Any,
) -> list[Episode]:
    """All episodes, in the order of ``task_ids``; ``on_ended`` is told how many have ended. ``how`` is as in ``run_episodes``."""
    found: dict[int, Episode] = {}
    async with aclosing(run_episodes(task_ids, parts, **how)) as episodes:
        async for episode in episodes:
            found[episode.index] = episode
            on_ended(len(found))
    return [found[index] for index in range(len(task_ids))]


async def _close(
    running: Iterable[asyncio.Task[Episode]],
    leases: Sequence[EnvironmentLease[AgentEnvironment]],
    seconds: float,
) -> None:
    """Cancel what runs, and wait until every environment is closed, at most so long."""
    for task in running:
        task.cancel()
    for lease in leases:  # now, not in the tasks: a second Ctrl-C may leave them no time
        lease.release()
    await asyncio.gather(*running, return_exceptions=True)
    closing = [asyncio.wrap_future(lease.closed) for lease in leases]
    if closing:
        await asyncio.wait(closing, timeout=seconds)


def _closings(leases: Sequence[EnvironmentLease[AgentEnvironment]]) -> Counter[str]:
    opened = [lease for lease in leases if lease.was_opened]
    closed = [lease for lease in opened if lease.closed.done()]
    return Counter(
        opened=len(opened),
        closed=len(closed),
        close_failures=sum(bool(lease.close_failure) for lease in closed),
        not_closed=sum(not lease.closed.done() for lease in leases),
    )


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, in a thread of its own where this one has a running loop: a notebook's has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "episodes") as threads:
        return threads.submit(copy_context().run, asyncio.run, work).result()


def sampling_seed(seed: int, episode_index: int, turn_index: int) -> int:
    """The seed of one answer, from 0 to 2**31 - 1; it depends on nothing else, least of all on who ended first."""
    digest = hashlib.sha256(f"{seed}/{episode_index}/{turn_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class OneEpisode:
    """Drives one episode and knows at any time what it has so far.

    Args:
        blank: its task and its place among those that were asked for; nothing has happened in it.
        parts: policy, environment, conversation, calls.
        options: the limits.
        counts: ``tries``, ``infrastructure_failures`` and ``failed_CODE`` are counted here.
        leases: every environment's lease is put here when it is made.
    """

    def __init__(
        self,
        blank: Episode,
        *,
        parts: EpisodeParts,
        options: EpisodeOptions,
        counts: Counter[str],
        leases: list[EnvironmentLease[AgentEnvironment]],
    ) -> None:
        self.blank, self.parts, self.options = blank, parts, options
        self._clock = asyncio.get_running_loop().time
        self._counts, self._leases = counts, leases

    async def run(self) -> Episode:
        """The whole episode; a cancelled one leaves its environment to be closed. Never raises a ``SandboxFailure``."""
        failure_code = ""
        for number in range(1, self.options.max_tries + 1):
            self._begin_try(number)
            ended: Episode | None = None
            try:
                await self._open()
                while (reason := await self._take_turn()) is None:
                    pass
                ended = await self._graded(reason)
            except SandboxFailure as failure:
                failure_code = failure.code
                self._counts["infrastructure_failures"] += 1
                self._counts[f"failed_{failure.code}"] += 1
            finally:
                self._lease.release()
            closed = asyncio.wrap_future(self._lease.closed)
            try:
                await asyncio.wait({closed}, timeout=self.options.closing_seconds)
            except asyncio.CancelledError:
                if ended is None:
                    raise
            if ended is not None:
                return ended
        return replace(self._so_far(StopReason.INFRASTRUCTURE), failure=failure_code)

    def _begin_try(self, number: int) -> None:
        self._num_tries = number
        self._try_started = self._clock()
        self._deadline = self._try_started + self.options.episode_seconds
        self._turns: list[EpisodeTurn] = []
        self._first_messages: list[str] = []
        self._tools: tuple[ToolSpec, ...] = ()
        self._counts["tries"] += 1
        self._lease = EnvironmentLease(self.parts.open_environment)
        self._leases.append(self._lease)

    def _so_far(self, reason: StopReason) -> Episode:
        """What there is of the current try, not graded yet."""
        return replace(
            self.blank,
            turns=tuple(self._turns),
            first_messages=tuple(self._first_messages),
            tools=self._tools,
            stop_reason=reason,
            seconds=self._clock() - self._try_started,
            num_tries=self._num_tries,
        )

    async def _open(self) -> None:
        task_id, limit = self.blank.task_id, self.options.turn_seconds + self.options.grace_seconds
        self._task_message, self._tools = await self._lease.do(
            lambda env: (env.reset(task_id), env.tools), seconds=limit
        )
        self._open_conversation(self._task_message)

    def _open_conversation(self, message: str) -> None:
        self._conversation = self.parts.talk.open(message, self._tools)
        self._first_messages.append(message)

    async def _graded(self, reason: StopReason) -> Episode:
        started = self._clock()
        task_id, finish = self.blank.task_id, self.parts.finish
        judgement = await self._lease.do(lambda env: finish(env, task_id), seconds=None)
        if judgement is None:
            raise SandboxFailure("CR0302", "the sandbox failed while an episode was graded.")
        return replace(
            self._so_far(reason),
            score=judgement.score,
            reward=judgement.reward,
            grading_seconds=self._clock() - started,
            judgement=judgement,
        )

    async def _take_turn(self) -> StopReason | None:
        """One answer with its calls; why the episode ends with it, or before it, or None."""
        if sum(not turn.is_summary for turn in self._turns) >= self.options.max_turns:
            return StopReason.TURNS
        if self._clock() >= self._deadline:
            return StopReason.DEADLINE
        conversation, is_summary = self._conversation, self._is_summary_due()
        if is_summary and not self._is_told(lambda: conversation.add_message(self.options.summary_request)):
            return StopReason.FINISHED
        asked, chat = self._clock(), conversation.chat()
        answer = await self._answer()
        if isinstance(answer, StopReason):
            return answer
        seconds = self._clock() - asked
        end = min(self._deadline, asked + self.options.turn_seconds)
        if isinstance(self.parts.policy, BatchingPolicy):
            # The seconds of an answer that is sampled together with others' put the deadlines off: who waits for a round has
            # done nothing yet, and others' tools and gradings, which have limits of their own, must not cut him short.
            self._deadline += seconds
            end += seconds
        return await self._act(answer, chat, is_summary=is_summary, seconds=seconds, end=end)

    async def _answer(self) -> Completion | StopReason:
        """The policy's next answer, or why there is none."""
        conversation, options, policy = self._conversation, self.options, self.parts.policy
        room = min(options.max_new_tokens, options.max_context_tokens - conversation.num_tokens)
        if room < options.min_new_tokens:
            return StopReason.CONTEXT
        end = min(self._deadline, self._clock() + options.turn_seconds)
        seed = sampling_seed(self.blank.seed, self.blank.index, len(self._turns))
        try:
            async with asyncio.timeout_at(None if isinstance(policy, BatchingPolicy) else end) as limit:
                completion = await policy.sample(
                    conversation.prompt_ids(), max_new_tokens=room, temperature=options.temperature, seed=seed
                )
        except TimeoutError:
            if not limit.expired():
                raise
            return StopReason.DEADLINE
        except RefusedRequestError:
            if not self._turns:
                raise
            self._counts["refused_requests"] += 1  # the server took shorter ones of this episode
            return StopReason.CONTEXT
        _check_answer(completion, room)
        return completion

    async def _act(
        self, completion: Completion, chat: Chat | None, *, is_summary: bool, seconds: float, end: float
    ) -> StopReason | None:
        """Keep an answer and make its calls; why the episode ends with it, or None.

        A summary is an answer without calls, from which the next conversation begins.
        """
        conversation, talk = self._conversation, self.parts.talk
        try:
            conversation.add_completion(completion)
        except InputError as error:
            raise SandboxFailure("CR0821", f"the policy's answer cannot be kept: {error.message}") from error
        said = conversation.turns()[-1]
        calls = () if is_summary else talk.find_calls(said)
        tokens = TokenCounts(thinking=len(completion.token_ids))  # a summary
        started = self._clock()
        results, is_done = await self._call_all(calls, end)
        turn = EpisodeTurn(
            ObservedTurn(said, calls, results, chat),
            segment_idx=len(self._first_messages) - 1,
            is_summary=is_summary,
            policy_seconds=seconds,
            tool_seconds=self._clock() - started,
            tokens=tokens if is_summary else talk.count_kinds(said, calls),
        )
        self._turns.append(turn)
        if is_summary and completion.stop_reason is not StopReason.LENGTH:
            summary = f"{self.options.summary_introduction}\n{completion.text.strip()}"
            self._open_conversation(f"{self._task_message}\n\n{summary}")
            return None
        reason = self._reason_to_stop(turn, is_done=is_done)
        if reason is None and not self._append_answers(turn):
            reason = StopReason.FINISHED
        return reason

    def _reason_to_stop(self, turn: EpisodeTurn, *, is_done: bool) -> StopReason | None:
        calls, completion = turn.observed.calls, turn.observed.turn.completion
        if is_done:
            return StopReason.SUBMITTED
        if len(turn.observed.results) < len(calls):
            return StopReason.DEADLINE
        if completion.stop_reason is StopReason.LENGTH:
            # An answer without its end is never continued: no template writes a next message after it.
            used = len(turn.observed.turn.prompt_ids) + len(completion.token_ids)
            return StopReason.CONTEXT if used >= self.options.max_context_tokens else StopReason.LENGTH
        if not calls and not self.options.reminder:
            return StopReason.FINISHED
        return None

    def _append_answers(self, turn: EpisodeTurn) -> bool:
        """Tell the policy what came back; False where its template does not go on from there."""
        seen, conversation = turn.observed, self._conversation
        if seen.calls:
            is_told = self._is_told(lambda: conversation.add_results(seen.calls, seen.results))
        else:
            is_told = self._is_told(lambda: conversation.add_message(self.options.reminder))
        if is_told and seen.turn.prompt_ids:
            before = len(seen.turn.prompt_ids) + len(seen.turn.completion.token_ids)
            added = TokenCounts(tool_output=max(0, conversation.num_tokens - before))
            self._turns[-1] = replace(turn, tokens=turn.tokens + added)
        return is_told

    def _is_told(self, tell: Callable[[], None]) -> bool:
        """Whether the conversation goes on with what is told.

        That hangs on what was sampled (an end token that a template never writes in this place) and on what a tool
        printed. So it ends this one episode, which is graded; ``LedgerTalk`` has seen that the template itself is fit.
        """
        try:
            tell()
        except InputError as error:
            self._counts[f"not_continued_{error.code}"] += 1
            return False
        return True

    def _is_summary_due(self) -> bool:
        options = self.options
        segment_idx = len(self._first_messages) - 1
        has_turns = bool(self._turns) and self._turns[-1].segment_idx == segment_idx
        is_long = 0 < options.summary_tokens <= self._conversation.num_tokens
        return is_long and has_turns and segment_idx < options.max_summaries

    async def _call_all(self, calls: tuple[ToolCall, ...], end: float) -> tuple[tuple[ToolResult, ...], bool]:
        """The results in order, fewer when the time was over, and whether the episode was submitted."""
        results: list[ToolResult] = []
        is_done = False
        for number, call in enumerate(calls):
            if number >= self.options.max_calls:
                results.append(refusal(self.options.max_calls))
                continue
            if self._clock() >= end:
                break
            result, is_done = await self._lease.do(
                lambda env, call=call: (env.call(call), env.is_done),  # type: ignore[misc]
                seconds=max(end - self._clock(), self.options.call_seconds) + self.options.grace_seconds,
            )
            results.append(result)
        return tuple(results), is_done


def _check_answer(completion: Completion, room: int) -> None:
    num_ids, num_logp = len(completion.token_ids), len(completion.token_logp)
    if num_ids > room:
        problem = f"{num_ids} ids where at most {room} were asked for"
    elif num_logp not in (0, num_ids):
        problem = f"{num_logp} log-probabilities for {num_ids} ids"
    elif not all(map(math.isfinite, completion.token_logp)):
        problem = "a log-probability that is no finite number"
    else:
        return
    raise SandboxFailure("CR0821", f"the policy answered with {problem}.")
