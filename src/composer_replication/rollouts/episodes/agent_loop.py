"""The one loop over turns: many episodes at once, over any policy and any environment.

An episode samples, calls and appends until there is a reason to stop, and is graded then; for infrastructure it is begun
again. From ``run_episodes`` to the model it is four calls: ``OneEpisode.run``, its ``_take_turn`` and ``_answer``, ``policy.sample``.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from composer_replication.errors import InputError, SandboxFailure
from composer_replication.interfaces import AgentEnvironment, Tokenizer, TokenPolicy
from composer_replication.records import Completion, StopReason, ToolCall, ToolResult, ToolSpec, Turn
from composer_replication.rollouts.environment.hosted_attempt import EnvironmentLease
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn, TokenCounts
from composer_replication.rollouts.episodes.policies import BatchingPolicy, RefusedRequestError
from composer_replication.rollouts.tokens.call_dialects import dialect_of, num_thinking_ids, read_completion
from composer_replication.rollouts.tokens.token_ledger import Chat, TokenLedger
from composer_replication.rollouts.tools.tool_context import function_schema

SUMMARY_REQUEST = """\
The conversation will soon be longer than you can read. Write a summary for yourself, from which you will go on without
it: what was asked, what you found out, what you changed and where, what is left to do. Do not call a tool."""
SUMMARY_INTRODUCTION = "You worked on this already. Your own summary of what happened so far:"
SHELL_RULES = """\
Act by one code block an answer: a shell command in a block that begins with ```bash, or, when you are done, an empty block
that begins with ```submit. What the command prints is shown to you."""
"""What a model is told whose template knows no tools."""


@dataclass(frozen=True, slots=True)
class LedgerTalk:
    """A loop's conversations over a chat template: opens them, finds the calls in an answer, and counts its thoughts.

    A template without tools gets none: the policy acts by code blocks (``SHELL_RULES`` in its first message), and
    results come back as the user's words.

    Args:
        system: text of a system message; empty: none.
        template_options: further variables of the template (``enable_thinking``).
        num_ids: as ``TokenLedger``.

    Raises (from ``open`` on):
        InputError: there is no template, or it never goes on after a call, which is tried out before the first episode
            (CR0810); its way of calls is not known (CR0818); as ``TokenLedger``.
    """

    tokenizer: Tokenizer
    _: KW_ONLY
    system: str = ""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    num_ids: int | None = None
    _has_fit: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def open(self, message: str, tools: tuple[ToolSpec, ...]) -> TokenLedger:
        """Begin a conversation."""
        is_fenced = self._dialect == "fenced"
        first = f"{message}\n\n{SHELL_RULES}" if is_fenced and tools else message
        system = [{"role": "system", "content": self.system}] if self.system else []
        schemas = [function_schema(tool) for tool in tools] if tools and not is_fenced else None
        chat = Chat([*system, {"role": "user", "content": first}], schemas, self.template_options)
        ledger = TokenLedger(self.tokenizer, chat, has_tool_messages=not is_fenced, num_ids=self.num_ids)
        if tools and not self._has_fit:
            ledger.require_results(ToolCall(tools[0].name, "{}"))
            self._has_fit.append(True)
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
class EpisodeOptions:
    """The limits of episodes; all seconds are of the wall clock.

    An answer that takes longer than ``turn_seconds`` is thrown away; a call that began in time may run to its own time-out,
    however late in its turn it began: that is what the policy did, and no failure of the sandbox. Then the episode ends
    (``DEADLINE``) and is graded. The answers of a ``BatchingPolicy`` count neither there nor for ``episode_seconds``:
    ``max_new_tokens`` bounds them. An environment that does not come back ``grace_seconds`` after ``turn_seconds`` and
    ``call_seconds`` are both over has broken: its episode is tried again.
    """

    max_turns: int = 50  # answers of the policy, summaries not counted
    max_context_tokens: int = 32768  # prompt and answer together, in each segment; never more is sampled
    max_new_tokens: int = 4096  # of one answer; less where the context has less room
    min_new_tokens: int = 16  # with less room than this the episode ends (CONTEXT)
    temperature: float = 1.0
    turn_seconds: float = 600.0  # for an answer and its calls
    episode_seconds: float = 3600.0  # for one try; gradings are not counted: each has limits of its own
    call_seconds: float = 300.0  # the longest time-out of a call within the environment
    grace_seconds: float = 120.0
    closing_seconds: float = 120.0  # how long the end of the loop waits for environments to close
    max_calls: int = 16  # of one answer; those beyond are refused and not run
    max_tries: int = 3  # until an episode is dropped, for failures of sandbox or server only
    max_concurrent: int = 32  # episodes at a time; each has an environment
    reminder: str = ""  # told after an answer without a call; empty: the episode ends (FINISHED)
    # From this prompt length on the policy is asked for a summary and goes on from it; 0 never. Leave room below
    # max_context_tokens for one tool result, the request and the summary.
    summary_tokens: int = 0
    max_summaries: int = 4  # of one episode
    summary_request: str = SUMMARY_REQUEST
    summary_introduction: str = SUMMARY_INTRODUCTION


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """Who takes part in every episode.

    ``open_environment`` makes a fresh environment for each try; ``talk`` opens its conversations and finds the calls in an answer;
    ``finish`` judges what an attempt at a task left, None where a sandbox failed.
    """

    policy: TokenPolicy
    open_environment: Callable[[], AgentEnvironment]
    talk: LedgerTalk
    finish: Callable[[AgentEnvironment, str], Any] = lambda environment, _: environment.finish()


async def run_episodes(
    task_ids: Sequence[str],
    parts: EpisodeParts,
    *,
    options: EpisodeOptions | None = None,
    seed: int = 0,
    step: int = 0,
    on_ended: Callable[[int], None] = lambda _: None,
) -> list[Episode]:
    """One episode for each task id, in their order; ``on_ended`` is told how many have ended.

    The seeds of an episode's answers come from ``seed``, its place in ``task_ids`` and the number of the answer, so that the same
    policy gives the same episodes whatever ends first. When this is cancelled, or one episode raises, those that still run are
    cancelled, and every environment is closed. A call of an environment that runs at that moment is waited for, at most
    ``options.closing_seconds``. ``step`` of the trainer is for the records. Whatever environment, conversation or policy raise is
    raised, but for a ``SandboxFailure``.
    """
    options = options or EpisodeOptions()
    leases: list[EnvironmentLease[AgentEnvironment]] = []
    places, num_ended = asyncio.Semaphore(options.max_concurrent), itertools.count(1)

    async def play(index: int, task_id: str) -> Episode:
        async with places:
            episode = await OneEpisode(Episode(task_id, index, step, seed), parts, options, leases).run()
            on_ended(next(num_ended))  # before another one begins
        return episode

    running = [asyncio.create_task(play(*each)) for each in enumerate(task_ids)]
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
            await asyncio.wait(closing, timeout=options.closing_seconds)


def sampling_seed(seed: int, episode_index: int, turn_index: int) -> int:
    """The seed of one answer, from 0 to 2**31 - 1; it depends on nothing else, least of all on who ended first."""
    digest = hashlib.sha256(f"{seed}/{episode_index}/{turn_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(eq=False)
class OneEpisode:
    """Drives one episode and knows at any time what it has so far.

    ``blank`` is its task and its place among those that were asked for. The lease of every environment is added to ``leases``
    when it is made.
    """

    blank: Episode
    parts: EpisodeParts
    options: EpisodeOptions
    leases: list[EnvironmentLease[AgentEnvironment]]

    async def run(self) -> Episode:
        """The whole episode; a cancelled one leaves its environment to be closed. Never raises a ``SandboxFailure``."""
        failure_code = ""
        for number in range(1, self.options.max_tries + 1):
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
                await asyncio.wait({closed}, timeout=self.options.closing_seconds)
            except asyncio.CancelledError:
                if ended is None:
                    raise
            if ended is not None:
                return ended
        seconds = self._clock() - self._try_started
        return replace(
            self._so_far, stop_reason=StopReason.INFRASTRUCTURE, seconds=seconds, failure=failure_code
        )

    async def _begin_try(self, number: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self._try_started = self._clock()
        self._deadline = self._try_started + self.options.episode_seconds
        self._so_far = replace(self.blank, num_tries=number)  # what there is of this try
        self._lease = EnvironmentLease(self.parts.open_environment)
        self.leases.append(self._lease)
        task_id, limit = self.blank.task_id, self.options.turn_seconds + self.options.grace_seconds
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
        options, conversation, talk = self.options, self._conversation, self.parts.talk
        num_conversations = len(self._so_far.first_messages)
        if sum(not turn.is_summary for turn in self._so_far.turns) >= options.max_turns:
            return StopReason.TURNS
        if self._clock() >= self._deadline:
            return StopReason.DEADLINE
        is_long = 0 < options.summary_tokens <= conversation.num_tokens
        is_summary = is_long and self._num_kept > 0 and num_conversations <= options.max_summaries
        if is_summary and not self._is_told(lambda: conversation.add_message(options.summary_request)):
            return StopReason.FINISHED
        asked, chat, prompt_ids = self._clock(), conversation.chat(), conversation.prompt_ids()
        completion = await self._answer(prompt_ids)
        if isinstance(completion, StopReason):
            return completion
        seconds = self._clock() - asked
        end = min(self._deadline, asked + options.turn_seconds)
        if isinstance(self.parts.policy, BatchingPolicy):
            # The seconds of an answer that is sampled together with others' put the deadlines off: who waits for a round has
            # done nothing yet, and others' tools and gradings, which have limits of their own, must not cut him short.
            self._deadline += seconds
            end += seconds
        try:
            conversation.add_completion(completion)
        except InputError as error:
            raise SandboxFailure("CR0821", f"the policy's answer cannot be kept: {error.message}") from error
        said = Turn(prompt_ids, completion)
        calls = () if is_summary else talk.find_calls(said, self._so_far.tools)
        called = self._clock()
        results, is_done = await self._call_all(calls, end)
        thinking = len(completion.token_ids) if is_summary else talk.num_thinking(said)
        others = len(completion.token_ids) - thinking
        turn = EpisodeTurn(
            prompt_ids[self._num_kept :],
            completion,
            calls,
            results,
            chat,
            segment_idx=num_conversations - 1,
            is_summary=is_summary,
            policy_seconds=seconds,
            tool_seconds=self._clock() - called,
            tokens=TokenCounts(thinking, tool_call=others if calls else 0, final=0 if calls else others),
        )
        self._num_kept = conversation.num_tokens
        self._so_far = replace(self._so_far, turns=(*self._so_far.turns, turn))
        return self._go_on(turn, is_done=is_done)

    async def _answer(self, prompt_ids: tuple[int, ...]) -> Completion | StopReason:
        """The policy's next answer, or why there is none."""
        options, policy = self.options, self.parts.policy
        room = min(options.max_new_tokens, options.max_context_tokens - len(prompt_ids))
        if room < options.min_new_tokens:
            return StopReason.CONTEXT
        end = min(self._deadline, self._clock() + options.turn_seconds)
        seed = sampling_seed(self.blank.seed, self.blank.index, len(self._so_far.turns))
        try:
            async with asyncio.timeout_at(None if isinstance(policy, BatchingPolicy) else end) as limit:
                completion = await policy.sample(
                    prompt_ids, max_new_tokens=room, temperature=options.temperature, seed=seed
                )
        except TimeoutError:
            if not limit.expired():
                raise
            return StopReason.DEADLINE
        except RefusedRequestError:
            if not self._so_far.turns:
                raise
            return StopReason.CONTEXT  # the server took shorter ones of this episode
        if len(completion.token_ids) > room:
            problem = f"{len(completion.token_ids)} ids where at most {room} were asked for"
        elif not all(map(math.isfinite, completion.token_logp)):
            problem = "a log-probability that is no finite number"
        else:
            return completion
        raise SandboxFailure("CR0821", f"the policy answered with {problem}.")

    def _go_on(self, turn: EpisodeTurn, *, is_done: bool) -> StopReason | None:
        """Tell the policy what came back, or begin the next conversation from its summary; why the episode ends, or None."""
        options, conversation = self.options, self._conversation
        is_cut = turn.completion.stop_reason is StopReason.LENGTH
        if turn.is_summary and not is_cut:
            summary = f"{options.summary_introduction}\n{turn.completion.text.strip()}"
            first = f"{self._so_far.first_messages[0]}\n\n{summary}"
            return None if self._is_told(lambda: self._open_conversation(first)) else StopReason.FINISHED
        if is_done:
            return StopReason.SUBMITTED
        if len(turn.results) < len(turn.calls):
            return StopReason.DEADLINE
        if is_cut:  # an answer without its end is never continued: no template writes a next message after it
            return StopReason.CONTEXT if self._num_kept >= options.max_context_tokens else StopReason.LENGTH
        if turn.calls:
            is_told = self._is_told(lambda: conversation.add_results(turn.calls, turn.results))
        else:
            is_told = bool(options.reminder) and self._is_told(
                lambda: conversation.add_message(options.reminder)
            )
        added = TokenCounts(tool_output=conversation.num_tokens - self._num_kept)
        told = replace(turn, tokens=turn.tokens + added)
        self._so_far = replace(self._so_far, turns=(*self._so_far.turns[:-1], told))
        return None if is_told else StopReason.FINISHED

    def _is_told(self, tell: Callable[[], None]) -> bool:
        """Whether the conversation goes on with what is told.

        That hangs on what was sampled (an end token that a template never writes in this place) and on what a tool
        printed. So it ends this one episode, which is graded; ``LedgerTalk`` has seen that the template itself is fit.
        """
        try:
            tell()
        except InputError:
            return False
        return True

    async def _call_all(self, calls: tuple[ToolCall, ...], end: float) -> tuple[tuple[ToolResult, ...], bool]:
        """The results in order, fewer when the time was over, and whether the episode was submitted."""
        results: list[ToolResult] = []
        is_done, most = False, self.options.max_calls
        for number, call in enumerate(calls):
            if number >= most:
                text = f"Not run: at most {most} calls are taken from one answer."
                results.append(ToolResult(text, is_error=True, fault="refused"))
                continue
            if self._clock() >= end:
                break
            result, is_done = await self._lease.do(
                lambda env, call=call: (env.call(call), env.is_done),  # type: ignore[misc]
                seconds=max(end - self._clock(), self.options.call_seconds) + self.options.grace_seconds,
            )
            results.append(result)
        return tuple(results), is_done
