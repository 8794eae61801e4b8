"""The one loop over turns: many episodes at once, over any policy and any environment.

An episode samples, calls and appends until there is a reason to stop, and is graded then; for infrastructure it is begun
again. From ``EpisodePlayer.play`` to the model it is four calls: ``run_episodes``, ``OneEpisode.run``, its ``_take_turn``,
``policy.sample``. The limits are those of ``[agent]`` (``AgentSection``) and the constants here; all seconds are of the
wall clock.

An answer that takes longer than ``TURN_SECONDS`` is thrown away; a call that began in time may run to its own time-out,
however late in its turn it began: that is what the policy did, and no failure of the sandbox. Then the episode ends
(``DEADLINE``) and is graded. The answers of a ``BatchingPolicy`` count neither there nor for ``EPISODE_SECONDS``:
``max_new_tokens`` bounds them. An environment that does not come back ``GRACE_SECONDS`` after ``TURN_SECONDS`` and
``CALL_SECONDS`` are both over has broken: its episode is tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_replication.config import AgentSection
from composer_replication.errors import InputError, SandboxFailure
from composer_replication.records import Completion, StopReason, ToolCall, ToolResult, ToolSpec, Turn
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.hosted_attempt import EnvironmentLease
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn, TokenCounts
from composer_replication.rollouts.episodes.policies import BatchingPolicy, RefusedRequestError, TokenPolicy
from composer_replication.rollouts.tokens.call_dialects import dialect_of, num_thinking_ids, read_completion
from composer_replication.rollouts.tokens.token_ledger import Chat, Tokenizer, TokenLedger
from composer_replication.rollouts.tools.tool_context import function_schema

TURN_SECONDS = 600.0  # for an answer and its calls
EPISODE_SECONDS = 3600.0  # for one try; gradings are not counted: each has limits of its own
CALL_SECONDS = 300.0  # the longest time-out of a call within the environment
GRACE_SECONDS = 120.0
CLOSING_SECONDS = 120.0  # how long the end of a try, and of the loop, waits for environments to close
MAX_CALLS = 16  # of one answer; those beyond are refused and not run
MAX_SUMMARIES = 4  # of one episode
MAX_TRIES = 3  # until an episode is dropped, for failures of sandbox or server only
SUMMARY_REQUEST = """\
The conversation will soon be longer than you can read. Write a summary for yourself, from which you will go on without
it: what was asked, what you found out, what you changed and where, what is left to do. Do not call a tool."""
SUMMARY_INTRODUCTION = "You worked on this already. Your own summary of what happened so far:"
SHELL_RULES = """\
Act by one code block an answer: a shell command in a block that begins with ```bash, or, when you are done, an empty block
that begins with ```submit. What the command prints is shown to you."""
"""What a model is told whose template knows no tools."""


@dataclass(eq=False, slots=True)
class LedgerTalk:
    """A loop's conversations over a chat template: opens them, finds the calls in an answer, and counts its thoughts.

    A template without tools gets none: the policy acts by code blocks (``SHELL_RULES`` in its first message), and
    results come back as the user's words.

    Args:
        options: for ``template_options``, further variables of the template (``enable_thinking``).
        num_ids: as ``TokenLedger``.

    Raises (from ``open`` on):
        InputError: there is no template, or it never goes on after a call, which is tried out before the first episode
            (CR0810); its way of calls is not known (CR0818); as ``TokenLedger``.
    """

    tokenizer: Tokenizer
    options: AgentSection = field(default_factory=AgentSection)
    num_ids: int | None = field(default=None, kw_only=True)
    _has_fit: bool = field(default=False, init=False)

    def open(self, message: str, tools: tuple[ToolSpec, ...]) -> TokenLedger:
        """Begin a conversation."""
        is_fenced = self._dialect == "fenced"
        first = f"{message}\n\n{SHELL_RULES}" if is_fenced and tools else message
        schemas = [function_schema(tool) for tool in tools] if tools and not is_fenced else None
        chat = Chat([{"role": "user", "content": first}], schemas, self.options.template_options)
        ledger = TokenLedger(self.tokenizer, chat, has_tool_messages=not is_fenced, num_ids=self.num_ids)
        if tools and not self._has_fit:
            ledger.require_results(ToolCall(tools[0].name, "{}"))
            self._has_fit = True
        return ledger

    def find_calls(self, turn: Turn, tools: tuple[ToolSpec, ...]) -> tuple[ToolCall, ...]:
        """The calls of an answer; its prompt says whether it began as a thought, the tools how arguments are read that are no JSON."""
        sampled = turn.completion.token_ids
        return read_completion(self.tokenizer, turn.prompt_ids, sampled, self._dialect, tools=tools)

    def num_thinking(self, turn: Turn) -> int:
        """How many of the sampled ids are thoughts."""
        return num_thinking_ids(self.tokenizer, turn.prompt_ids, turn.completion.token_ids)

    @property
    def _dialect(self) -> str:
        return dialect_of(getattr(self.tokenizer, "chat_template", None), self.tokenizer)


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """Who takes part in every episode.

    ``open_environment`` makes a fresh environment for each try; ``talk`` opens its conversations and finds the calls in an answer;
    ``finish`` judges what an attempt at a task left, None where a sandbox failed. The policy samples at ``temperature``.
    """

    policy: TokenPolicy
    open_environment: Callable[[], FeatureDeletionEnv]
    talk: LedgerTalk
    finish: Callable[[FeatureDeletionEnv, str], Any] = lambda environment, _: environment.finish()
    temperature: float = 1.0


async def run_episodes(
    task_ids: Sequence[str],
    parts: EpisodeParts,
    *,
    options: AgentSection | None = None,
    seed: int = 0,
    step: int = 0,
    on_ended: Callable[[int], None] = lambda _: None,
) -> list[Episode]:
    """One episode for each task id, in their order, within the limits of ``options``; ``on_ended`` is told how many have ended.

    The seeds of an episode's answers come from ``seed``, its place in ``task_ids`` and the number of the answer, so that the same
    policy gives the same episodes whatever ends first. When this is cancelled, or one episode raises, those that still run are
    cancelled, and every environment is closed. A call of an environment that runs at that moment is waited for, at most
    ``CLOSING_SECONDS``. ``step`` of the trainer is for the records. Whatever environment, conversation or policy raise is
    raised, but for a ``SandboxFailure``.
    """
    options = options or AgentSection()
    leases: list[EnvironmentLease] = []
    shared = (leases, asyncio.Semaphore(options.max_concurrent), itertools.count(1), on_ended)
    blanks = [Episode(task_id, index, step, seed) for index, task_id in enumerate(task_ids)]
    running = [asyncio.create_task(OneEpisode(blank, parts, options, *shared).run()) for blank in blanks]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        for lease in leases:  # now, not in the tasks: a second Ctrl-C may leave them no time
            lease.release()
        await asyncio.gather(*running, return_exceptions=True)
        if leases:
            closing = [asyncio.wrap_future(lease.closed) for lease in leases]
            await asyncio.wait(closing, timeout=CLOSING_SECONDS)


def sampling_seed(seed: int, episode_index: int, turn_index: int) -> int:
    """The seed of one answer, from 0 to 2**31 - 1; it depends on nothing else, least of all on who ended first."""
    digest = hashlib.sha256(f"{seed}/{episode_index}/{turn_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(eq=False)
class OneEpisode:
    """Drives one episode and knows at any time what it has so far.

    ``blank`` is its task and its place among those that were asked for. The lease of every environment is added to ``leases``
    when it is made. It begins when one of the ``places`` is free, and ``on_ended`` is told the next of ``num_ended``.
    """

    blank: Episode
    parts: EpisodeParts
    options: AgentSection
    leases: list[EnvironmentLease]
    places: asyncio.Semaphore
    num_ended: Iterator[int]
    on_ended: Callable[[int], None]

    async def run(self) -> Episode:
        """The whole episode; a cancelled one leaves its environment to be closed. Never raises a ``SandboxFailure``."""
        async with self.places:
            failure_code = ""
            for number in range(1, MAX_TRIES + 1):
                ended: Episode | None = None
                try:
                    await self._begin_try(number)
                    while (reason := await self._take_turn()) is None:
                        pass
                    ended = await self._graded(reason)
                except SandboxFailure as failure:
                    failure_code = failure.code
                finally:
                    self._lease.release()
                closed = asyncio.wrap_future(self._lease.closed)
                try:
                    await asyncio.wait({closed}, timeout=CLOSING_SECONDS)
                except asyncio.CancelledError:
                    if ended is None:
                        raise
                if ended is not None:
                    break
            else:  # each try failed: what there is of the last one, as infrastructure
                seconds = self._clock() - self._try_started
                ended = replace(self._so_far, seconds=seconds, failure=failure_code)
            self.on_ended(next(self.num_ended))  # before another one begins
        return ended

    async def _begin_try(self, number: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self._try_started = self._clock()
        self._deadline = self._try_started + EPISODE_SECONDS
        self._so_far = replace(self.blank, num_tries=number)  # what there is of this try
        self._lease = EnvironmentLease(self.parts.open_environment)
        self.leases.append(self._lease)
        task_id, limit = self.blank.task_id, TURN_SECONDS + GRACE_SECONDS
        task_message, tools = await self._lease.do(lambda env: (env.reset(task_id), env.tools), seconds=limit)
        self._so_far = replace(self._so_far, tools=tools)
        self._open_conversation(task_message)

    def _open_conversation(self, message: str) -> None:
        self._conversation = self.parts.talk.open(message, self._so_far.tools)
        self._so_far = replace(self._so_far, first_messages=(*self._so_far.first_messages, message))
        self._num_kept = 0  # ids of the conversation up to its last answer

    async def _graded(self, reason: StopReason) -> Episode:
        started = self._clock()
        task_id, finish = self.blank.task_id, self.parts.finish
        judgement = await self._lease.do(lambda env: finish(env, task_id), seconds=None)
        if judgement is None:
            raise SandboxFailure("CR0302", "the sandbox failed while an episode was graded.")
        return replace(
            self._so_far,
            stop_reason=reason,
            seconds=self._clock() - self._try_started,
            score=judgement.score,
            reward=judgement.reward,
            grading_seconds=self._clock() - started,
            judgement=judgement,
        )

    async def _take_turn(self) -> StopReason | None:
        """One answer with its calls; why the episode ends with it, or before it, or None."""
        options, policy, conversation = self.options, self.parts.policy, self._conversation
        if sum(not turn.is_summary for turn in self._so_far.turns) >= options.max_turns:
            return StopReason.TURNS
        if self._clock() >= self._deadline:
            return StopReason.DEADLINE
        is_long = 0 < options.summary_tokens <= conversation.num_tokens and self._num_kept > 0
        is_summary = is_long and len(self._so_far.first_messages) <= MAX_SUMMARIES
        if is_summary and not self._is_told(conversation.add_message, SUMMARY_REQUEST):
            return StopReason.FINISHED
        asked, chat, prompt_ids = self._clock(), conversation.chat(), conversation.prompt_ids()
        room = min(options.max_new_tokens, options.max_context_tokens - len(prompt_ids))
        if room < options.min_new_tokens:
            return StopReason.CONTEXT
        end, is_batched = min(self._deadline, asked + TURN_SECONDS), isinstance(policy, BatchingPolicy)
        seed = sampling_seed(self.blank.seed, self.blank.index, len(self._so_far.turns))
        try:
            async with asyncio.timeout_at(None if is_batched else end) as limit:
                completion = await policy.sample(
                    prompt_ids, max_new_tokens=room, temperature=self.parts.temperature, seed=seed
                )
        except TimeoutError:
            if not limit.expired():
                raise
            return StopReason.DEADLINE
        except RefusedRequestError:
            if not self._so_far.turns:
                raise
            return StopReason.CONTEXT  # the server took shorter ones of this episode
        seconds = self._clock() - asked
        if is_batched:
            # The seconds of an answer that is sampled together with others' put the deadlines off: who waits for a round has
            # done nothing yet, and others' tools and gradings, which have limits of their own, must not cut him short.
            self._deadline += seconds
            end += seconds
        self._keep(completion, room)
        turn = EpisodeTurn(
            prompt_ids[self._num_kept :],
            completion,
            chat=chat,
            segment_idx=len(self._so_far.first_messages) - 1,
            is_summary=is_summary,
            policy_seconds=seconds,
        )
        self._num_kept = conversation.num_tokens
        turn, is_done = await self._make_calls(turn, prompt_ids, end)
        self._so_far = replace(self._so_far, turns=(*self._so_far.turns, turn))
        return self._go_on(turn, is_done=is_done)

    def _keep(self, completion: Completion, room: int) -> None:
        """Add an answer to the conversation; one whose numbers do not fit is the policy's failure."""
        problem = ""
        if len(completion.token_ids) > room:
            problem = f"{len(completion.token_ids)} ids where at most {room} were asked for"
        elif not all(map(math.isfinite, completion.token_logp)):
            problem = "a log-probability that is no finite number"
        if problem:
            raise SandboxFailure("CR0821", f"the policy answered with {problem}.")
        try:
            self._conversation.add_completion(completion)
        except InputError as error:
            raise SandboxFailure("CR0821", f"the policy's answer cannot be kept: {error.message}") from error

    async def _make_calls(
        self, turn: EpisodeTurn, prompt_ids: tuple[int, ...], end: float
    ) -> tuple[EpisodeTurn, bool]:
        """The turn with its calls and their results in order, fewer when the time was over; whether the episode was submitted."""
        talk, said = self.parts.talk, Turn(prompt_ids, turn.completion)
        calls = () if turn.is_summary else talk.find_calls(said, self._so_far.tools)
        results, is_done, started = list[ToolResult](), False, self._clock()
        for number, call in enumerate(calls):
            if number >= MAX_CALLS:
                text = f"Not run: at most {MAX_CALLS} calls are taken from one answer."
                results.append(ToolResult(text, is_error=True, fault="refused"))
                continue
            if self._clock() >= end:
                break
            result, is_done = await self._lease.do(
                lambda env, call=call: (env.call(call), env.is_done),  # type: ignore[misc]
                seconds=max(end - self._clock(), CALL_SECONDS) + GRACE_SECONDS,
            )
            results.append(result)
        seconds, num_ids = self._clock() - started, len(turn.completion.token_ids)
        thinking = num_ids if turn.is_summary else talk.num_thinking(said)
        others = num_ids - thinking
        tokens = TokenCounts(thinking, tool_call=others if calls else 0, final=0 if calls else others)
        turn = replace(turn, calls=calls, results=tuple(results), tool_seconds=seconds, tokens=tokens)
        return turn, is_done

    def _go_on(self, turn: EpisodeTurn, *, is_done: bool) -> StopReason | None:
        """Tell the policy what came back, or begin the next conversation from its summary; why the episode ends, or None."""
        options, conversation = self.options, self._conversation
        is_cut = turn.completion.stop_reason is StopReason.LENGTH
        if turn.is_summary and not is_cut:
            summary = f"{SUMMARY_INTRODUCTION}\n{turn.completion.text.strip()}"
            first = f"{self._so_far.first_messages[0]}\n\n{summary}"
            return None if self._is_told(self._open_conversation, first) else StopReason.FINISHED
        if is_done:
            return StopReason.SUBMITTED
        if len(turn.results) < len(turn.calls):
            return StopReason.DEADLINE
        if is_cut:  # an answer without its end is never continued: no template writes a next message after it
            return StopReason.CONTEXT if self._num_kept >= options.max_context_tokens else StopReason.LENGTH
        if turn.calls:
            is_told = self._is_told(conversation.add_results, turn.calls, turn.results)
        else:
            is_told = bool(options.reminder) and self._is_told(conversation.add_message, options.reminder)
        added = TokenCounts(tool_output=conversation.num_tokens - self._num_kept)
        told = replace(turn, tokens=turn.tokens + added)
        self._so_far = replace(self._so_far, turns=(*self._so_far.turns[:-1], told))
        return None if is_told else StopReason.FINISHED

    def _is_told(self, tell: Callable[..., None], *said: Any) -> bool:
        """Whether the conversation goes on with what is told it.

        That hangs on what was sampled (an end token that a template never writes in this place) and on what a tool
        printed. So it ends this one episode, which is graded; ``LedgerTalk`` has seen that the template itself is fit.
        """
        try:
            tell(*said)
        except InputError:
            return False
        return True
