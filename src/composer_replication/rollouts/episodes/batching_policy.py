"""A policy over a blocking sampler: requests that wait at the same time are sampled as one batch, in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from composer_replication.errors import UsageError
from composer_replication.records import Completion


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How one prompt of a batch is to be continued; its answer may depend on nothing else of the batch."""

    max_new_tokens: int
    temperature: float
    seed: int


SampleBatch = Callable[[list[tuple[int, ...]], list[SampleOptions]], Sequence[Completion]]
"""Blocking; one completion for each prompt, in order. ``options[i]`` belongs to ``prompts[i]``."""


class _Request(NamedTuple):
    prompt_ids: tuple[int, ...]
    options: SampleOptions
    answer: asyncio.Future[Completion]


class BatchingPolicy:
    """A ``TokenPolicy`` that collects requests and samples them together; no deadline of an episode runs meanwhile.

    ``sample_batch`` is called in one thread, never twice at a time, with at most ``max_batch`` prompts. A first request waits
    ``window_seconds`` for others; while a batch is sampled the next one gathers. ``num_expected`` says how many may ask, and
    sampling waits until that many do: so the batches, and with them the last bits of the answers, do not depend on who is slow.
    What waits at a moment is batched in the order of the seeds. A request that was cancelled while it waited is not sampled.
    Whatever the sampler raises reaches every request of its batch.
    """

    def __init__(
        self,
        sample_batch: SampleBatch,
        *,
        max_batch: int = 32,
        window_seconds: float = 0.005,
        num_expected: Callable[[], int] = lambda: 1,
    ) -> None:
        self._sample_batch, self._max_batch, self._window_seconds = sample_batch, max_batch, window_seconds
        self._num_expected = num_expected
        self._waiting: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "sampler")

    async def sample(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Completion:
        loop = asyncio.get_running_loop()
        if self._worker is None or self._worker.done() or self._worker.get_loop() is not loop:
            self._waiting = []  # what an earlier loop left is nobody's
            self._worker = loop.create_task(self._work())
        options = SampleOptions(max_new_tokens, temperature, seed)
        request = _Request(tuple(prompt_ids), options, loop.create_future())
        self._waiting.append(request)
        return await request.answer

    def close(self) -> None:
        """Let the thread go; a batch that is being sampled ends first."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        """Sample whenever as many wait as may ask, until nobody does."""
        await asyncio.sleep(self._window_seconds)
        while self._waiting:
            self._waiting = [request for request in self._waiting if not request.answer.done()]
            if len(self._waiting) < self._num_expected():
                await asyncio.sleep(max(self._window_seconds, 0.001))
                continue
            everybody, self._waiting = sorted(self._waiting, key=lambda each: each.options.seed), []
            for start in range(0, len(everybody), self._max_batch):
                await self._sample(everybody[start : start + self._max_batch])

    async def _sample(self, batch: list[_Request]) -> None:
        prompts, options, answers = (list(column) for column in zip(*batch, strict=True))
        loop = asyncio.get_running_loop()
        try:
            found = list(await loop.run_in_executor(self._thread, self._sample_batch, prompts, options) or ())
            if len(found) != len(batch) or not all(isinstance(each, Completion) for each in found):
                raise UsageError(
                    "CR0821",
                    f"the sampler gave {len(found)} answers for {len(batch)} prompts, or something else than completions.",
                    where="BatchingPolicy",
                    fix="make it return one Completion for each prompt, in order.",
                )
        except Exception as error:  # noqa: BLE001  everybody who waits gets it
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
            return
        for answer, completion in zip(answers, found, strict=True):
            if not answer.done():
                answer.set_result(completion)
