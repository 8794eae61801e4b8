"""Episodes end for a reason, close what they open, and depend on nothing but policy, seed and place."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import FAMILIES, TemplateTokenizer
from episode_parts import (
    ECHO,
    SUBMIT,
    TOOLS,
    Asked,
    FakeEnvironment,
    IdTalk,
    Lives,
    ScriptedPolicy,
    decode,
    encode,
    find_calls,
    limits,
    parts,
    say,
    summarising,
)

from composer_replication.config import AgentSection
from composer_replication.errors import InputError, UsageError
from composer_replication.records import Completion, StopReason, Turn
from composer_replication.rollouts.episodes import agent_loop
from composer_replication.rollouts.episodes.agent_loop import EpisodeParts, LedgerTalk, run_episodes
from composer_replication.rollouts.episodes.episode import Episode, TokenCounts, rollout_row
from composer_replication.rollouts.episodes.episode_player import figures_of
from composer_replication.rollouts.episodes.policies import run_anywhere

TIGHT = AgentSection(max_context_tokens=100, max_new_tokens=99)


def num_results(asked: Asked) -> int:
    return asked.text.count("|T:")


def echo_then_submit(asked: Asked) -> str:
    return ECHO if num_results(asked) < 2 else SUBMIT


def run(task_ids: list[str], made: EpisodeParts, **how: Any) -> list[Episode]:
    return asyncio.run(run_episodes(task_ids, made, **how))


def one(script: Any, options: AgentSection | None = None, **how: Any) -> tuple[Episode, Lives]:
    lives = Lives()
    policy = script if hasattr(script, "sample") else ScriptedPolicy(script)
    [episode] = run(["task"], parts(policy, lives, **how), options=options)
    assert lives.all_closed_once()
    return episode, lives


def test_an_episode_runs_to_its_submission() -> None:
    episode, lives = one(echo_then_submit)
    assert episode.stop_reason is StopReason.SUBMITTED
    assert (episode.reward, episode.num_tries, episode.num_calls, episode.num_invalid_calls) == (1.0, 1, 3, 0)
    assert [turn.results[0].text for turn in episode.turns] == ["hello", "hello", "submitted"]
    assert [call.name for call in lives.opened[0].calls] == ["echo", "echo", "submit"]
    assert episode.first_messages == ("do task",)
    assert episode.tools == TOOLS
    assert episode.turns[1].calls == find_calls(Turn((), say(ECHO)))


def test_tokens_are_counted_by_kind() -> None:
    episode, _ = one(echo_then_submit)
    added = len(encode("|T:hello|A:"))
    assert episode.tokens == TokenCounts(
        tool_call=2 * len(say(ECHO).token_ids) + len(say(SUBMIT).token_ids), tool_output=2 * added
    )
    told, _ = one(echo_then_submit, talk=IdTalk(num_thinking=lambda turn: 1))
    assert told.tokens == replace(episode.tokens, thinking=3, tool_call=episode.tokens.tool_call - 3)


@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        (lambda asked: "I am done.", AgentSection(), StopReason.FINISHED),
        (lambda asked: ECHO, AgentSection(max_turns=3), StopReason.TURNS),
        (lambda asked: "long " * 40, AgentSection(max_new_tokens=50), StopReason.LENGTH),
        (lambda asked: ECHO, TIGHT, StopReason.CONTEXT),
        (lambda asked: "long " * 40, TIGHT, StopReason.CONTEXT),
        (lambda asked: SUBMIT + "word " * 40, AgentSection(max_new_tokens=50), StopReason.SUBMITTED),
    ],
)
def test_every_way_to_stop_is_graded(script: Any, options: AgentSection, reason: StopReason) -> None:
    episode, _ = one(script, options, how={"pass_share": 0.5})
    assert episode.stop_reason is reason
    assert episode.reward == 0.5
    assert episode.score is not None


def test_a_reminder_goes_on_where_no_call_was_made() -> None:
    options = AgentSection(reminder="call a tool", max_turns=5)
    episode, _ = one(lambda asked: SUBMIT if "call a tool" in asked.text else "hm", options)
    assert [len(turn.calls) for turn in episode.turns] == [0, 1]
    assert episode.stop_reason is StopReason.SUBMITTED
    assert episode.turns[0].tokens == TokenCounts(final=3, tool_output=len(encode("|U:call a tool|A:")))


def test_no_answer_is_asked_for_beyond_the_context() -> None:
    policy = ScriptedPolicy(lambda asked: ECHO)
    episode, _ = one(policy, AgentSection(max_context_tokens=150, max_new_tokens=40, min_new_tokens=5))
    assert all(len(each.prompt_ids) + each.max_new_tokens <= 150 for each in policy.asked)
    assert policy.asked[-1].max_new_tokens < 40  # it shrank to what was left
    assert episode.stop_reason is StopReason.CONTEXT


@pytest.mark.parametrize(
    "answer",
    [
        Completion(encode("x" * 60), "x" * 60, StopReason.LENGTH),
        Completion(encode("x"), "x", StopReason.FINISHED, (float("-inf"),)),
    ],
)
def test_a_policy_that_breaks_its_word_is_infrastructure(answer: Completion) -> None:
    class Liar:
        async def sample(self, prompt_ids: Any, **how: Any) -> Completion:
            return answer

    with limits(MAX_TRIES=2):
        episode, _ = one(Liar(), AgentSection(max_new_tokens=50))
    assert (episode.stop_reason, episode.failure) == (StopReason.INFRASTRUCTURE, "CR0821")
    assert episode.reward is None
    assert episode.num_tries == 2


@pytest.mark.parametrize("where", ["reset", "call", "grade", "score"])
def test_a_broken_sandbox_is_tried_afresh_and_then_dropped(where: str) -> None:
    lives = Lives()
    broken = parts(ScriptedPolicy(echo_then_submit), lives, how={"fails": lambda what: what == where})
    [episode] = run(["task"], broken)
    assert episode.stop_reason is StopReason.INFRASTRUCTURE
    assert (episode.reward, episode.score, episode.num_tries) == (None, None, 3)
    assert episode.failure == "CR0302"
    assert len(lives.opened) == 3
    assert lives.all_closed_once()
    figures = figures_of([episode])
    assert figures["rollouts/infrastructure_failures"] == 3
    assert figures["rollouts/dropped"] == figures["rollouts/stopped_infrastructure"] == 1


def test_a_sandbox_that_recovers_gives_the_episode_that_it_would_have_given() -> None:
    lives, calls = Lives(), iter([True] + [False] * 20)
    policy = ScriptedPolicy(echo_then_submit)
    [episode] = run(
        ["task"], parts(policy, lives, how={"fails": lambda what: what == "call" and next(calls)})
    )
    whole, _ = one(echo_then_submit)
    assert episode.num_tries == 2
    assert figures_of([episode, whole])["rollouts/infrastructure_failures"] == 1
    assert len(lives.opened) == 2
    for turn, expected in zip(episode.turns, whole.turns, strict=True):
        assert replace(turn, policy_seconds=0, tool_seconds=0) == replace(
            expected, policy_seconds=0, tool_seconds=0
        )
    assert policy.asked[0].seed == policy.asked[1].seed  # the same answer is asked for again


def test_what_is_no_failure_of_the_sandbox_ends_the_run_and_closes_everything() -> None:
    lives = Lives()

    def break_one(arguments: str) -> str:
        raise UsageError("CR0818", "wrong.")

    made = parts(ScriptedPolicy(lambda asked: "<work>{}</work>"), lives, how={"acts": {"work": break_one}})
    with pytest.raises(UsageError, match="CR0818"):
        run(["a", "b", "c"], made)
    assert lives.opened
    assert lives.all_closed_once()


def test_calls_that_no_tool_can_take_are_counted_and_too_many_refused() -> None:
    """Invalid is what the environment says is: the call after submit too, and not the one that it never saw."""
    text = f"<nothing>{{}}</nothing>{ECHO}{ECHO}{ECHO}<nothing>{{}}</nothing>"
    script = lambda asked: text if not num_results(asked) else f"{SUBMIT}{ECHO}"  # noqa: E731
    lives = Lives()
    made = parts(ScriptedPolicy(script), lives)
    with limits(MAX_CALLS=4):
        [episode] = run(["task"], made)
    assert episode.num_invalid_calls == figures_of([episode])["rollouts/invalid_calls"] == 2
    last = episode.turns[0].results[4]
    assert (last.fault, last.text.startswith("Not run: at most 4")) == ("refused", True)
    assert len(lives.opened[0].calls) == 6  # four of the five, then two


def test_an_answer_that_comes_too_late_ends_the_episode() -> None:
    async def forever(asked: Asked) -> None:
        if num_results(asked) == 1:
            await asyncio.Event().wait()

    policy = ScriptedPolicy(echo_then_submit, forever)
    with limits(TURN_SECONDS=0.5):
        episode, _ = one(policy)
    assert episode.stop_reason is StopReason.DEADLINE
    assert len(episode.turns) == 1  # the late answer is not part of it
    assert episode.reward == 1.0


def test_a_time_out_of_the_policy_itself_is_no_deadline() -> None:
    async def own(asked: Asked) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        one(ScriptedPolicy(echo_then_submit, own))


def test_the_time_of_an_episode_ends_it_between_turns() -> None:
    with limits(EPISODE_SECONDS=0.05):
        episode, _ = one(lambda asked: ECHO, AgentSection(max_turns=10**6, max_context_tokens=10**9))
    assert episode.stop_reason is StopReason.DEADLINE
    assert episode.reward == 1.0


def test_a_command_that_runs_into_its_own_time_out_never_drops_the_episode() -> None:
    """It takes longer than its turn, and there is no grace: the next calls are not run, and the tree is graded."""
    acts = {"work": lambda arguments: f"timed out: {not threading.Event().wait(0.8)}"}
    how = {"acts": acts, "pass_share": 0.0}
    with limits(TURN_SECONDS=0.5, CALL_SECONDS=30.0, GRACE_SECONDS=0.0):
        episode, _ = one(lambda asked: "<work>{}</work>" * 3, how=how)
    assert (episode.stop_reason, episode.num_tries) == (StopReason.DEADLINE, 1)
    assert [result.text for result in episode.turns[0].results] == ["timed out: True"]
    assert episode.reward == 0.0


@pytest.mark.parametrize(("seconds", "closing_seconds", "num_closed"), [(1.0, 30, 1), (60.0, 0.02, 0)])
def test_an_environment_that_does_not_come_back_is_closed_when_it_does_and_not_waited_for_in_vain(
    seconds: float, closing_seconds: float, num_closed: int
) -> None:
    lives, gate = Lives(), threading.Event()
    acts = {"work": lambda arguments: str(gate.wait(seconds))}
    made = parts(ScriptedPolicy(lambda asked: "<work>{}</work>"), lives, how={"acts": acts})
    short = {"TURN_SECONDS": 0.5, "CALL_SECONDS": 0, "GRACE_SECONDS": 0, "MAX_TRIES": 1}
    with limits(**short, CLOSING_SECONDS=closing_seconds):
        [episode] = run(["task"], made)
    assert (episode.stop_reason, episode.failure) == (StopReason.INFRASTRUCTURE, "CR0302")
    assert [each.num_closed for each in lives.opened] == [num_closed]
    gate.set()


def test_a_grading_is_waited_for_however_long_it_takes() -> None:
    class Slow(FakeEnvironment):
        def finish(self) -> Any:
            threading.Event().wait(0.5)
            return super().finish()

    made = EpisodeParts(ScriptedPolicy(lambda asked: SUBMIT), Slow, IdTalk())
    with limits(TURN_SECONDS=0.2, EPISODE_SECONDS=0.2, CALL_SECONDS=0, GRACE_SECONDS=0, MAX_TRIES=1):
        assert [each.reward for each in run(["a", "b"], made)] == [1.0, 1.0]


def test_a_close_that_fails_changes_no_reward() -> None:
    class Stubborn(FakeEnvironment):
        def close(self) -> None:
            super().close()
            raise OSError("no")

    made = EpisodeParts(ScriptedPolicy(echo_then_submit), Stubborn, IdTalk())
    [episode] = run(["task"], made)
    assert (episode.reward, episode.num_tries) == (1.0, 1)


def test_no_more_than_so_many_run_at_a_time() -> None:
    lives, seen = Lives(), []

    def look(asked: Asked) -> str:
        seen.append(sum(not each.num_closed for each in lives.opened))
        return echo_then_submit(asked)

    task_ids = [f"task-{n}" for n in range(12)]
    ordered = run(task_ids, parts(ScriptedPolicy(look), lives), options=AgentSection(max_concurrent=3))
    assert [episode.task_id for episode in ordered] == task_ids
    assert max(seen) == 3
    assert len(lives.opened) == 12


@pytest.mark.parametrize("how", ["raise", "cancel"])
def test_whoever_leaves_early_leaves_nothing_open(how: str) -> None:
    lives = Lives()

    async def most_wait(asked: Asked) -> None:
        if "task-0" not in asked.text:
            await asyncio.Event().wait()

    made = parts(ScriptedPolicy(echo_then_submit, most_wait), lives)

    async def play() -> None:
        me = asyncio.current_task()

        def leave(num_ended: int) -> None:
            if how == "raise":
                raise ValueError("enough")
            asyncio.get_running_loop().call_soon(me.cancel)

        await run_episodes([f"task-{n}" for n in range(6)], made, on_ended=leave)

    with pytest.raises(asyncio.CancelledError if how == "cancel" else ValueError):
        asyncio.run(play())
    assert len(lives.opened) == 6
    assert lives.all_closed_once()


SUMMARY = AgentSection(summary_tokens=120, max_context_tokens=260, max_new_tokens=259)


def test_a_summary_begins_a_segment_that_shares_the_reward() -> None:
    policy = ScriptedPolicy(summarising)
    episode, lives = one(policy, SUMMARY, how={"pass_share": 0.75})
    assert len(lives.opened) == 1  # the tree goes on
    assert episode.first_messages == ("do task", "do task\n\nbefore:\nso far: hello")
    assert (episode.reward, episode.stop_reason) == (0.75, StopReason.SUBMITTED)
    *first, second = episode.turns
    assert [turn.is_summary for turn in first] == [False] * (len(first) - 1) + [True]
    assert [turn.segment_idx for turn in episode.turns] == [0] * len(first) + [1]
    assert first[-1].completion == say("so far: hello")
    row = rollout_row(episode, filler_id=0)
    [start] = row.segment_starts
    begun = "U:do task\n\nbefore:\nso far: hello|A:"
    assert decode(row.completion_ids[start:]) == begun + SUBMIT
    assert decode(second.added_ids) == decode(episode.prompt_ids(len(first))) == begun
    assert sum(row.mask[:start]) == sum(len(turn.completion.token_ids) for turn in first)
    assert episode.tokens.thinking == len(say("so far: hello").token_ids)
    assert all(len(each.prompt_ids) + each.max_new_tokens <= 260 for each in policy.asked)


def test_summaries_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_loop, "MAX_SUMMARIES", 2)
    script = lambda asked: "s" if asked.text.endswith("|U:sum up|A:") else ECHO  # noqa: E731
    episode, _ = one(script, SUMMARY)
    assert len(episode.first_messages) == 3
    assert episode.stop_reason is StopReason.CONTEXT


def test_a_summary_that_has_no_room_or_no_end_ends_the_episode() -> None:
    narrow = AgentSection(summary_tokens=120, max_context_tokens=130, max_new_tokens=129)
    no_room, _ = one(lambda asked: ECHO, narrow)
    assert no_room.stop_reason is StopReason.CONTEXT
    assert len(no_room.first_messages) == 1
    short = SUMMARY.model_copy(update={"max_new_tokens": 60})
    cut, _ = one(lambda asked: "s" * 300 if "sum up" in asked.text else ECHO, short)
    assert cut.stop_reason is StopReason.LENGTH
    assert cut.turns[-1].is_summary


def test_a_summary_that_cannot_begin_a_conversation_ends_its_episode_alone() -> None:
    def opened(message: str, tools: Any) -> Any:
        if "so far" in message:
            raise InputError("CR0816", "a text holds a control token.")
        return IdTalk().open(message, tools)

    unfit, _ = one(summarising, SUMMARY, talk=IdTalk(open=opened))
    assert (unfit.stop_reason, len(unfit.first_messages)) == (StopReason.FINISHED, 1)


@pytest.mark.parametrize("end", ["<|return|>", "<|end|>", "<|call|>"])
def test_an_end_that_the_template_writes_nowhere_after_a_call_ends_that_episode_alone(end: str) -> None:
    """GPT-OSS ends a call with <|call|>. What a policy samples in its place is graded, and the others go on."""
    tokenizer = TemplateTokenizer(next(family for family in FAMILIES if family.name == "gptoss"))
    texts = {
        True: f' to=functions.echo<|channel|>commentary json<|message|>{{"text": "x"}}{end}',
        False: "<|channel|>final<|message|>Done.<|return|>",
    }

    class Policy:
        async def sample(self, prompt_ids: Any, **_: Any) -> Completion:
            ids = tokenizer.encode(texts[is_first(prompt_ids)], add_special_tokens=False)
            return Completion(tuple(ids), texts[True], StopReason.FINISHED)

    def is_first(prompt_ids: Any) -> bool:
        text = tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return "functions.echo to=assistant" not in text

    lives, talk = Lives(), LedgerTalk(tokenizer)
    made = EpisodeParts(Policy(), lives.open, talk)
    episodes = run(["a", "b"], made)
    assert [each.stop_reason for each in episodes] == [StopReason.FINISHED] * 2
    assert all(each.score is not None and each.reward is not None for each in episodes)
    assert [len(each.turns) for each in episodes] == [2 if end == "<|call|>" else 1] * 2


def test_episodes_are_played_where_a_loop_runs_already() -> None:
    """As in a notebook."""

    async def cell() -> list[Episode]:
        made = parts(ScriptedPolicy(echo_then_submit), Lives())
        return run_anywhere(run_episodes(["a", "b"], made))

    assert [episode.reward for episode in asyncio.run(cell())] == [1.0, 1.0]


def test_a_template_that_goes_on_after_no_call_is_refused_before_the_first_answer() -> None:
    tokenizer = TemplateTokenizer(next(family for family in FAMILIES if family.name == "zephyr"))
    policy = ScriptedPolicy(echo_then_submit)
    tokenizer.chat_template += "{# <tool_call> #}"  # as if it knew tools
    talk = LedgerTalk(tokenizer)
    with pytest.raises(InputError, match="CR0810"):
        run(["task"], EpisodeParts(policy, Lives().open, talk))
    assert not policy.asked
