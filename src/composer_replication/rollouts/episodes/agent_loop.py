"""Many episodes at once, over any policy and any environment; each is given out as soon as it has ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from typing import Any, TypeVar

from composer_replication.rollouts.episodes.environment_lease import EnvironmentLease
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.episode_options import EpisodeOptions, EpisodeParts
from composer_replication.rollouts.episodes.one_episode import EpisodePlace, OneEpisode

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
        parts: policy, environment, conversation, calls and reward.
        options: the limits.
        seed: of all sampling.
        step: of the trainer, for the records.
        counts: what happened is added here: ``ended_REASON``, ``dropped``, ``tries``,
            ``infrastructure_failures``, ``failed_CODE``,
            ``invalid_calls``, ``not_continued_CODE`` (a template that does not go on after an answer), ``opened``, ``closed``, ``close_failures``, ``not_closed`` (in time).

    Raises:
        UsageError: the reward function gave no finite number (CR0214).
        ComposerError: what environment, conversation or policy raise, but for a ``SandboxFailure``.
    """
    crowd = _Crowd(task_ids, parts, options or EpisodeOptions(), seed=seed, step=step)
    try:
        while crowd.has_more:
            for episode in await crowd.next_ended():
                yield episode
    finally:
        try:
            await crowd.close()
        finally:
            if counts is not None:
                counts.update(crowd.counts)


async def episodes_in_order(
    task_ids: Sequence[str],
    parts: EpisodeParts,
    *,
    options: EpisodeOptions | None = None,
    seed: int = 0,
    step: int = 0,
    counts: Counter[str] | None = None,
) -> list[Episode]:
    """All episodes, in the order of ``task_ids``. Arguments and errors are those of ``run_episodes``."""
    found: dict[int, Episode] = {}
    stream = run_episodes(task_ids, parts, options=options, seed=seed, step=step, counts=counts)
    async with aclosing(stream) as episodes:
        async for episode in episodes:
            found[episode.index] = episode
    return [found[index] for index in range(len(task_ids))]


class _Crowd:
    """The episodes that wait, those that run, and every environment that may be open."""

    def __init__(
        self,
        task_ids: Sequence[str],
        parts: EpisodeParts,
        options: EpisodeOptions,
        *,
        seed: int,
        step: int,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._parts, self._options = parts, options
        self._places = [EpisodePlace(index, task, step, seed) for index, task in enumerate(task_ids)]
        self._threads = ThreadPoolExecutor(options.num_threads or options.max_concurrent, "environment")
        self._num_begun = 0
        self._running: dict[asyncio.Task[Episode], OneEpisode] = {}
        self._leases: set[EnvironmentLease] = set()

    @property
    def has_more(self) -> bool:
        return bool(self._running) or self._num_begun < len(self._places)

    async def next_ended(self) -> list[Episode]:
        """Begin what there is room for, and wait until an episode has ended."""
        while self._num_begun < len(self._places) and len(self._running) < self._options.max_concurrent:
            place = self._places[self._num_begun]
            self._num_begun += 1
            one = OneEpisode(
                place,
                parts=self._parts,
                options=self._options,
                threads=self._threads,
                counts=self.counts,
                leased=self._leases.add,
            )
            self._running[asyncio.create_task(one.run())] = one
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda task: self._running[task].place.index):
            if (error := task.exception()) is not None:
                raise error
        return [self._take(task) for task in sorted(done, key=lambda task: self._running[task].place.index)]

    async def close(self) -> None:
        """Cancel what runs, and wait until every environment is closed, at most ``closing_seconds``."""
        for task in self._running:
            task.cancel()
        for lease in self._leases:  # now, not in the tasks: a second Ctrl-C may leave them no time
            lease.release()
        try:
            await asyncio.gather(*self._running, return_exceptions=True)
            closing = [asyncio.wrap_future(lease.closed) for lease in self._leases]
            if closing:
                await asyncio.wait(closing, timeout=self._options.closing_seconds)
        finally:
            self._threads.shutdown(wait=False)
            self._tally()

    def _take(self, task: asyncio.Task[Episode]) -> Episode:
        self._running.pop(task)
        episode = task.result()
        self.counts[f"ended_{episode.stop_reason}"] += 1
        self.counts["dropped"] += episode.reward is None
        self.counts["invalid_calls"] += episode.num_invalid_calls
        return episode

    def _tally(self) -> None:
        opened = [lease for lease in self._leases if lease.was_opened]
        closed = [lease for lease in opened if lease.closed.done()]
        self.counts["opened"] += len(opened)
        self.counts["closed"] += len(closed)
        self.counts["close_failures"] += sum(bool(lease.close_failure) for lease in closed)
        self.counts["not_closed"] += sum(not lease.closed.done() for lease in self._leases)


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, in a thread of its own where this one has a running loop: a notebook's has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "episodes") as threads:
        return threads.submit(copy_context().run, asyncio.run, work).result()
