"""Requests that wait together are sampled together, each with its own answer."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from episode_parts import Lives, decode, limits, parts, say

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.agent_loop import run_episodes
from composer_replication.rollouts.episodes.policies import BatchingPolicy, SampleOptions


def answer(prompt: tuple[int, ...], options: SampleOptions) -> Completion:
    return say(f"{sum(prompt)}/{options.seed}", options.max_new_tokens)


class Sampler:
    def __init__(self) -> None:
        self.batches: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> list[Completion]:
        self.batches.append(len(prompts))
        self.threads.add(threading.get_ident())
        return [answer(*row) for row in zip(prompts, options, strict=True)]


async def ask(policy: BatchingPolicy, number: int) -> Completion:
    return await policy.sample((number, 7), max_new_tokens=20, temperature=1.0, seed=number)


async def ask_all(policy: BatchingPolicy, numbers: range) -> list[Any]:
    return await asyncio.gather(*(ask(policy, number) for number in numbers), return_exceptions=True)


def test_everybody_gets_his_own_answer_from_full_batches() -> None:
    sampler = Sampler()
    policy = BatchingPolicy(sampler, max_batch=4)
    found = asyncio.run(ask_all(policy, range(12)))
    assert found == [answer((number, 7), SampleOptions(20, 1.0, number)) for number in range(12)]
    assert sampler.batches == [4, 4, 4]
    assert len(sampler.threads) == 1
    assert threading.get_ident() not in sampler.threads
    policy.close()


def test_a_few_are_not_kept_waiting_for_more() -> None:
    sampler = Sampler()
    policy = BatchingPolicy(sampler, max_batch=4, window_seconds=0.01)
    assert len(asyncio.run(ask_all(policy, range(3)))) == 3
    assert sampler.batches == [3]
    assert len(asyncio.run(ask_all(policy, range(2)))) == 2  # a second event loop
    assert sampler.batches == [3, 2]
    policy.close()


def test_while_a_batch_is_sampled_the_next_one_gathers() -> None:
    may_go, begun, batches = threading.Event(), threading.Event(), []

    def sampler(prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> list[Completion]:
        batches.append(len(prompts))
        begun.set()
        assert may_go.wait(30)
        return [answer(*row) for row in zip(prompts, options, strict=True)]

    async def play() -> None:
        policy = BatchingPolicy(sampler, max_batch=8, window_seconds=0)
        first = asyncio.create_task(ask(policy, 1))
        assert await asyncio.to_thread(begun.wait, 30)
        others = [asyncio.create_task(ask(policy, number)) for number in range(5)]
        await asyncio.sleep(0)
        others[2].cancel()
        await asyncio.sleep(0)
        may_go.set()
        await asyncio.gather(first, *others, return_exceptions=True)
        policy.close()

    asyncio.run(play())
    assert batches == [1, 4]


@pytest.mark.parametrize(
    "wrong", [lambda prompts: [], lambda prompts: [say("a")], lambda prompts: ["text"] * len(prompts)]
)
def test_a_sampler_that_loses_answers_is_refused(wrong: Any) -> None:
    policy = BatchingPolicy(lambda prompts, options: wrong(prompts), window_seconds=0.01)
    found = asyncio.run(ask_all(policy, range(3)))
    assert len(found) == 3
    for error in found:
        assert isinstance(error, UsageError)
        assert error.code == "CR0821"
    policy.close()


def test_a_failure_reaches_all_and_the_next_batch_goes_on() -> None:
    sampler, fails = Sampler(), [True, False]

    def failing(prompts: Any, options: Any) -> list[Completion]:
        if fails.pop(0):
            raise SandboxFailure("CR0824", "the device is gone.")
        return sampler(prompts, options)

    async def play() -> list[Any]:
        policy = BatchingPolicy(failing, window_seconds=0.01)
        first = await ask_all(policy, range(2))
        second = await ask_all(policy, range(2))
        policy.close()
        return [*first, *second]

    found = asyncio.run(play())
    assert [isinstance(each, SandboxFailure) for each in found] == [True, True, False, False]


def test_waiting_for_the_slow_tool_of_another_is_charged_to_nobody() -> None:
    """Both deadlines are shorter than the tool of the first episode, for which the second has to wait."""

    def script(prompt: str) -> str:
        if "|T:" in prompt:
            return "<submit>{}</submit>"
        return '<work>{"n": 1}</work>' if "slow" in prompt else '<echo>{"text": "a"}</echo>'

    num_prompts = 0

    def sampler(prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> list[Completion]:
        nonlocal num_prompts
        num_prompts += len(prompts)
        return [
            say(script(decode(prompt)), each.max_new_tokens)
            for prompt, each in zip(prompts, options, strict=True)
        ]

    def work(_: str) -> str:
        time.sleep(2.5)
        return "worked"

    lives, num_left = Lives(), [2]
    policy = BatchingPolicy(sampler, num_expected=lambda: num_left[0])
    made = parts(policy, lives, how={"acts": {"work": work}})

    def note(num_ended: int) -> None:
        num_left[0] = 2 - num_ended

    with limits(TURN_SECONDS=1.0, EPISODE_SECONDS=1.0, GRACE_SECONDS=60.0):
        played = asyncio.run(run_episodes(["slow", "quick"], made, on_ended=note))
    policy.close()
    # The slow one has used up its own time; the quick one has waited for it, and goes on.
    assert [episode.stop_reason for episode in played] == [StopReason.DEADLINE, StopReason.SUBMITTED]
    assert num_prompts == 3
