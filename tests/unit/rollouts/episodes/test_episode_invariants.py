"""Whatever the timing, the failures and the limits: each environment is closed once, and ids, seeds and order stay."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, replace

from episode_parts import Asked, Lives, ScriptedPolicy, decode, limits, parts
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.config import AgentSection
from composer_replication.records import StopReason, Turn
from composer_replication.rollouts.episodes.agent_loop import run_episodes, sampling_seed
from composer_replication.rollouts.episodes.episode import Episode, rollout_row

ANSWERS = (
    '<echo>{"text": "a"}</echo>',
    '<echo>{"text": "a long result that fills the context"}</echo>',
    "<echo>no json</echo>",
    "<nothing>{}</nothing>",
    '<echo>{"text": "a"}</echo>' * 3,
    "word " * 30,
    "",
    "<submit>{}</submit>",
)


@dataclass(frozen=True)
class Play:
    num_episodes: int
    seed: int
    timing_seed: int
    fail_share: float
    max_calls: int
    max_tries: int
    options: AgentSection


@st.composite
def plays(draw: st.DrawFn) -> Play:
    context = draw(st.integers(40, 400))
    options = AgentSection(
        max_turns=draw(st.integers(1, 6)),
        max_context_tokens=context,
        max_new_tokens=draw(st.integers(20, min(200, context - 1))),
        min_new_tokens=draw(st.integers(1, 20)),
        max_concurrent=draw(st.integers(1, 5)),
        reminder=draw(st.sampled_from(["", "go on"])),
        summary_tokens=draw(st.sampled_from([0, context // 2])),
    )
    return Play(
        draw(st.integers(0, 7)),
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 10**6)),
        draw(st.sampled_from([0.0, 0.0, 0.1, 0.6])),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        options,
    )


def script(asked: Asked) -> str:
    """A policy that depends on its seed and its prompt alone."""
    if asked.text.endswith("|U:sum up|A:"):
        return "short"
    return random.Random(f"{asked.seed}{asked.text}").choice(ANSWERS)


def echo(arguments: str) -> str:
    return arguments


def play_once(play: Play, timing_seed: int) -> tuple[list[Episode], ScriptedPolicy, Lives]:
    timing = random.Random(timing_seed)
    failing = random.Random(timing_seed + 1)

    async def pause(asked: Asked) -> None:
        for _ in range(timing.randrange(4)):
            await asyncio.sleep(0)

    policy, lives = ScriptedPolicy(script, pause), Lives()
    made = parts(
        policy, lives, how={"acts": {"echo": echo}, "fails": lambda what: failing.random() < play.fail_share}
    )
    task_ids = [f"task-{n // 2}" for n in range(play.num_episodes)]
    with limits(MAX_CALLS=play.max_calls, MAX_TRIES=play.max_tries):
        episodes = asyncio.run(run_episodes(task_ids, made, options=play.options, seed=play.seed))
    return episodes, policy, lives


def story(episode: Episode) -> object:
    """All that may not depend on timing."""
    return (
        episode.task_id,
        episode.index,
        episode.stop_reason,
        episode.reward,
        episode.first_messages,
        [
            (turn.added_ids, turn.completion, turn.calls, turn.segment_idx, turn.is_summary)
            for turn in episode.turns
        ],
    )


@settings(max_examples=40)
@given(plays())
def test_every_environment_is_closed_once_and_no_budget_is_exceeded(play: Play) -> None:
    episodes, policy, lives = play_once(play, play.timing_seed)
    assert [episode.index for episode in episodes] == list(range(play.num_episodes))
    assert lives.all_closed_once()
    assert len(lives.opened) == sum(episode.num_tries for episode in episodes)
    limit = play.options.max_context_tokens
    for asked in policy.asked:
        assert play.options.min_new_tokens <= asked.max_new_tokens <= play.options.max_new_tokens
        assert len(asked.prompt_ids) + asked.max_new_tokens <= limit
    for episode in episodes:
        assert episode.num_tries <= play.max_tries
        assert sum(not turn.is_summary for turn in episode.turns) <= play.options.max_turns
        assert (episode.reward is None) == (episode.stop_reason is StopReason.INFRASTRUCTURE)
        assert (episode.failure != "") == (episode.stop_reason is StopReason.INFRASTRUCTURE)


@settings(max_examples=25)
@given(plays(), st.integers(0, 10**6))
def test_without_failures_nothing_depends_on_timing(play: Play, other_timing: int) -> None:
    calm = replace(play, timing_seed=0, fail_share=0.0)
    first, policy, _ = play_once(calm, play.timing_seed)
    second, other_policy, _ = play_once(calm, other_timing)
    assert [story(episode) for episode in first] == [story(episode) for episode in second]
    asked = [sorted((each.seed, each.prompt_ids) for each in one.asked) for one in (policy, other_policy)]
    assert asked[0] == asked[1]
    wanted = {
        sampling_seed(play.seed, episode.index, number)
        for episode in first
        for number in range(len(episode.turns))
    }
    assert {each.seed for each in policy.asked} == wanted


@settings(max_examples=25)
@given(plays())
def test_masked_ids_are_the_sampled_ones_and_the_rest_is_what_came_between(play: Play) -> None:
    episodes, _, _ = play_once(replace(play, timing_seed=0, fail_share=0.0), 0)
    for episode in episodes:
        if not episode.turns:
            continue
        row = rollout_row(episode, filler_id=0)
        sampled = [number for turn in episode.turns for number in turn.completion.token_ids]
        assert [n for n, bit in zip(row.completion_ids, row.mask, strict=True) if bit] == sampled
        logp = [number for turn in episode.turns for number in turn.completion.token_logp]
        assert [n for n, bit in zip(row.sampled_logp, row.mask, strict=True) if bit] == logp
        assert not any(n for n, bit in zip(row.sampled_logp, row.mask, strict=True) if not bit)
        whole = (*row.prompt_ids, *row.completion_ids)
        kept = sum(len(turn.added_ids) + len(turn.completion.token_ids) for turn in episode.turns)
        assert kept == len(whole), "every id is kept once"
        starts = [0, *(len(row.prompt_ids) + start for start in row.segment_starts), len(whole)]
        by_segment = itertools.groupby(enumerate(episode.turns), lambda pair: pair[1].segment_idx)
        for (_, turns), (start, stop) in zip(by_segment, itertools.pairwise(starts), strict=True):
            prompts = [Turn(episode.prompt_ids(idx), turn.completion) for idx, turn in turns]
            assert whole[start:stop] == (*prompts[-1].prompt_ids, *prompts[-1].completion.token_ids)
            assert "|A:" in decode(prompts[0].prompt_ids)
            for before, turn in itertools.pairwise(prompts):
                seen = (*before.prompt_ids, *before.completion.token_ids)
                assert turn.prompt_ids[: len(seen)] == seen
        for turn, following in itertools.pairwise(episode.turns):
            if following.segment_idx == turn.segment_idx and not following.is_summary:
                assert turn.tokens.tool_output == len(following.added_ids)
        spent = sum(len(turn.completion.token_ids) for turn in episode.turns)
        counted = episode.tokens
        assert counted.thinking + counted.tool_call + counted.final == spent


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 10**4))
def test_seeds_fit_every_sampler_and_tell_places_apart(seed: int, episode: int, turn: int) -> None:
    found = sampling_seed(seed, episode, turn)
    assert 0 <= found < 2**31
    others = {
        sampling_seed(seed + 1, episode, turn),
        sampling_seed(seed, episode + 1, turn),
        sampling_seed(seed, episode, turn + 1),
    }
    assert found not in others
