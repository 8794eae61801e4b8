"""One episode: sample, call, append, until there is a reason to stop; then the grading. Begun again for infrastructure."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from composer_replication.errors import InputError, SandboxFailure, UsageError
from composer_replication.records import Completion, Score, StopReason, ToolCall, ToolResult, ToolSpec, Turn
from composer_replication.rollouts.episodes.conversation import (
    Conversation,
    QueueingPolicy,
    RefusedRequestError,
)
from composer_replication.rollouts.episodes.environment_lease import EnvironmentLease
from composer_replication.rollouts.episodes.episode import (
    Episode,
    EpisodeTurn,
    TokenCounts,
    refusal,
)
from composer_replication.rollouts.episodes.episode_options import EpisodeOptions, EpisodeParts
from composer_replication.rollouts.hints.hint_context import ObservedTurn
from composer_replication.rollouts.hints.hint_prompts import Chat


def sampling_seed(seed: int, episode_index: int, turn_index: int) -> int:
    """The seed of one answer, from 0 to 2**31 - 1; it depends on nothing else, least of all on who ended first."""
    digest = hashlib.sha256(f"{seed}/{episode_index}/{turn_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class EpisodePlace:
    """Which episode this is: its place among those asked for, its task, the step and seed of all of them."""

    index: int
    task_id: str
    step: int
    seed: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the policy said, what it was shown before, how long it took, and when its turn ends."""

    said: Turn
    chat: Chat | None
    seconds: float
    turn_end: float


class OneEpisode:
    """Drives one episode and knows at any time what it has so far.

    Args:
        place: which episode.
        parts: policy, environment, conversation, calls, reward.
        options: the limits.
        threads: where the environment's calls run.
        counts: ``tries``, ``infrastructure_failures`` and ``failed_CODE`` are counted here.
        leased: told of every environment's lease when it is made.
    """

    def __init__(
        self,
        place: EpisodePlace,
        *,
        parts: EpisodeParts,
        options: EpisodeOptions,
        threads: Executor,
        counts: Counter[str],
        leased: Callable[[EnvironmentLease], None],
    ) -> None:
        self.place, self.parts, self.options = place, parts, options
        self.started = asyncio.get_running_loop().time()
        self._clock = asyncio.get_running_loop().time
        self._threads, self._counts, self._leased = threads, counts, leased
        self._failure = ""
        self._num_tries = 0
        self._forget()

    async def run(self) -> Episode:
        """The whole episode; a cancelled one leaves its environment to be closed.

        Raises:
            ComposerError: whatever is wrong on the user's side; never a ``SandboxFailure``.
        """
        for _ in range(self.options.max_tries):
            self._begin_try()
            ended: Episode | None = None
            try:
                ended = await self._attempt()
            except SandboxFailure as failure:
                self._failure = failure.code
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
        return self.ended(StopReason.INFRASTRUCTURE)

    def ended(
        self, reason: StopReason, *, score: Score | None = None, grading_seconds: float = 0.0
    ) -> Episode:
        """What there is of the current try, without a reward."""
        return Episode(
            task_id=self.place.task_id,
            index=self.place.index,
            step=self.place.step,
            seed=self.place.seed,
            turns=tuple(self._turns),
            first_messages=tuple(self._first_messages),
            tools=self._tools,
            stop_reason=reason,
            score=score,
            reward=None,
            seconds=self._clock() - self._try_started,
            grading_seconds=grading_seconds,
            num_tries=self._num_tries,
            failure=self._failure if reason is StopReason.INFRASTRUCTURE else "",
        )

    def _forget(self) -> None:
        self._try_started = self._clock()
        self._deadline = self._try_started + self.options.episode_seconds
        self._turns: list[EpisodeTurn] = []
        self._first_messages: list[str] = []
        self._tools: tuple[ToolSpec, ...] = ()

    def _begin_try(self) -> None:
        self._forget()
        self._num_tries += 1
        self._counts["tries"] += 1
        self._lease = EnvironmentLease(self.parts.open_environment, self._threads)
        self._leased(self._lease)

    async def _attempt(self) -> Episode:
        limit = self.options.turn_seconds + self.options.grace_seconds
        task_id = self.place.task_id
        message, self._tools = await self._lease.do(
            lambda env: (env.reset(task_id), env.tools), seconds=limit
        )
        self._open_conversation(message)
        reason = await self._until_stopped(message)
        started = self._clock()
        score = await self._lease.do(lambda env: env.grade(), seconds=self.options.grading_seconds)
        if score is None:
            raise SandboxFailure("CR0823", "the sandbox failed while an episode was graded.")
        episode = self.ended(reason, score=score, grading_seconds=self._clock() - started)
        return replace(episode, reward=_worth(self.parts.reward, episode))

    def _open_conversation(self, message: str) -> None:
        self._conversation: Conversation = self.parts.open_conversation(message, self._tools)
        self._first_messages.append(message)

    async def _until_stopped(self, message: str) -> StopReason:
        num_answers = 0
        while True:
            if num_answers >= self.options.max_turns:
                return StopReason.TURNS
            if self._clock() >= self._deadline:
                return StopReason.DEADLINE
            if self._is_summary_due():
                reason = await self._summarise(message)
            else:
                reason = await self._take_turn()
                num_answers += 1
            if reason is not None:
                return reason

    async def _answer(self) -> _Answer | StopReason:
        """The policy's next answer, kept in the conversation, or why there is none."""
        room, end = self._room(), self._turn_end()
        if room < self.options.min_new_tokens:
            return StopReason.CONTEXT
        started = self._clock()
        chat = self._conversation.chat()
        try:
            completion, seconds_waited = await self._sample(room, end)
        except RefusedRequestError:
            if not self._turns:
                raise
            self._counts["refused_requests"] += 1  # the server took shorter ones of this episode
            return StopReason.CONTEXT
        self._deadline += seconds_waited
        if completion is None:
            return StopReason.DEADLINE
        seconds = self._clock() - started
        try:
            self._conversation.add_completion(completion)
        except InputError as error:
            raise SandboxFailure("CR0821", f"the policy's answer cannot be kept: {error.message}") from error
        return _Answer(self._conversation.turns()[-1], chat, seconds, end + seconds_waited)

    async def _take_turn(self) -> StopReason | None:
        answer = await self._answer()
        if isinstance(answer, StopReason):
            return answer
        calls = self.parts.find_calls(answer.said)
        started = self._clock()
        results, is_done = await self._call_all(calls, answer.turn_end)
        turn = EpisodeTurn(
            ObservedTurn(answer.said, calls, results, answer.chat),
            segment_idx=len(self._first_messages) - 1,
            policy_seconds=answer.seconds,
            tool_seconds=self._clock() - started,
            tokens=self._count(answer.said, calls),
        )
        self._turns.append(turn)
        reason = self._reason_to_stop(turn, is_done)
        if reason is None and not self._append_answers(turn):
            reason = StopReason.FINISHED
        return reason

    def _reason_to_stop(self, turn: EpisodeTurn, is_done: bool) -> StopReason | None:  # noqa: FBT001
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
        """Tell the policy what came back; False where its template does not go on from there.

        That hangs on what was sampled (an end token that a template never writes in this place) and on what a tool
        printed. So it ends this one episode, which is graded; ``LedgerTalk`` has seen that the template itself is fit.
        """
        prompt_ids = turn.observed.turn.prompt_ids
        try:
            if turn.observed.calls:
                self._conversation.add_results(turn.observed.calls, turn.observed.results)
            else:
                self._conversation.add_message(self.options.reminder)
        except InputError as error:
            self._counts[f"not_continued_{error.code}"] += 1
            return False
        if prompt_ids:
            before = len(prompt_ids) + len(turn.observed.turn.completion.token_ids)
            added = TokenCounts(tool_output=max(0, self._conversation.num_tokens - before))
            self._turns[-1] = replace(turn, tokens=turn.tokens + added)
        return True

    def _is_summary_due(self) -> bool:
        options = self.options
        segment_idx = len(self._first_messages) - 1
        has_turns = bool(self._turns) and self._turns[-1].segment_idx == segment_idx
        is_long = 0 < options.summary_tokens <= self._conversation.num_tokens
        return is_long and has_turns and segment_idx < options.max_summaries

    async def _summarise(self, message: str) -> StopReason | None:
        """Ask for a summary and begin the next segment with it."""
        try:
            self._conversation.add_message(self.options.summary_request)
        except InputError as error:
            self._counts[f"not_continued_{error.code}"] += 1
            return StopReason.FINISHED
        answer = await self._answer()
        if isinstance(answer, StopReason):
            return answer
        completion = answer.said.completion
        turn = EpisodeTurn(
            ObservedTurn(answer.said, chat=answer.chat),
            segment_idx=len(self._first_messages) - 1,
            is_summary=True,
            policy_seconds=answer.seconds,
            tokens=TokenCounts(thinking=len(completion.token_ids)),
        )
        self._turns.append(turn)
        if completion.stop_reason is StopReason.LENGTH:
            return self._reason_to_stop(turn, False)
        introduction = self.options.summary_introduction
        self._open_conversation(f"{message}\n\n{introduction}\n{completion.text.strip()}")
        return None

    async def _sample(self, room: int, end: float) -> tuple[Completion | None, float]:
        """An answer of at most ``room`` ids, None when ``end`` came first, and the seconds that it only waited for others.

        Those seconds put ``end`` off: who waits for a round has done nothing yet, and others' tools and gradings, which
        have limits of their own, must not cut him short.
        """
        asked, seconds_waited = self._clock(), 0.0
        try:
            async with asyncio.timeout_at(None) as limit:

                def begin() -> None:
                    nonlocal seconds_waited
                    seconds_waited = self._clock() - asked
                    limit.reschedule(end + seconds_waited)

                completion = await self._ask(room, begin)
        except TimeoutError:
            if not limit.expired():
                raise
            return None, seconds_waited
        _check_answer(completion, room)
        return completion, seconds_waited

    async def _ask(self, room: int, begin: Callable[[], None]) -> Completion:
        """The policy's answer; ``begin`` is called when the policy begins with it."""
        policy, temperature = self.parts.policy, self.options.temperature
        seed = sampling_seed(self.place.seed, self.place.index, len(self._turns))
        if not isinstance(policy, QueueingPolicy):
            begin()
        prompt_ids = self._conversation.prompt_ids()
        if isinstance(policy, QueueingPolicy):
            return await policy.sample_in_turn(
                prompt_ids, max_new_tokens=room, temperature=temperature, seed=seed, on_begun=begin
            )
        return await policy.sample(prompt_ids, max_new_tokens=room, temperature=temperature, seed=seed)

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

    def _count(self, said: Turn, calls: tuple[ToolCall, ...]) -> TokenCounts:
        if self.parts.count_kinds is not None:
            return replace(self.parts.count_kinds(said, calls), tool_output=0)
        num_ids = len(said.completion.token_ids)
        return TokenCounts(tool_call=num_ids) if calls else TokenCounts(final=num_ids)

    def _room(self) -> int:
        left = self.options.max_context_tokens - self._conversation.num_tokens
        return min(self.options.max_new_tokens, left)

    def _turn_end(self) -> float:
        return min(self._deadline, self._clock() + self.options.turn_seconds)


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


def _worth(reward: Callable[[Episode], float], episode: Episode) -> float:
    try:
        number = float(reward(episode))
    except Exception as error:  # the user's function may raise anything
        raise _bad_reward(f"raised {type(error).__name__}: {error}") from error
    if not math.isfinite(number):
        raise _bad_reward(f"returned {number}, which is not a finite number")
    return number


def _bad_reward(problem: str) -> UsageError:
    return UsageError(
        "CR0214",
        f"the reward function of the episodes {problem}.",
        where="EpisodeParts.reward",
        fix="make it return a number for every episode.",
    )
