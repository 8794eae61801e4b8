"""An environment in somebody's event loop: a thread of its own, and its end whatever happens; the address of a server.

Nothing of another library is needed for it: so a server's address is taken before OpenEnv is looked for.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, Field

from composer_replication.config import AgentRewardSection
from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import MonitorMode
from composer_replication.rollouts.environment.feature_deletion_env import (
    FeatureDeletionEnv,
    Judgement,
    no_attempt,
)
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore

T = TypeVar("T")


class EnvironmentLease:
    """An environment with a thread of its own, which opens it for the first job and closes it after the last one.

    ``closed`` is done when nothing is open any more.
    """

    def __init__(self, open_environment: Callable[[], FeatureDeletionEnv]) -> None:
        self.closed: Future[None] = Future()
        self._open = open_environment
        self._thread = ThreadPoolExecutor(1, "environment")
        self._environment: FeatureDeletionEnv | None = None
        self._is_released, self._lock = False, threading.Lock()

    async def do(self, act: Callable[[FeatureDeletionEnv], T], *, seconds: float | None = None) -> T:
        """Run ``act`` on the environment, after whatever runs there. None waits for as long as it takes.

        Raises:
            UsageError: after ``release`` (CR0800).
            SandboxFailure: it did not come back in time (CR0302), and only ``release`` may follow; or its own.
        """
        self._require_lease()
        job: asyncio.Future[T] = asyncio.wrap_future(self._thread.submit(self._work, act))
        job.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked
        done, _ = await asyncio.wait({job}, timeout=None if seconds is None else max(0.0, seconds))
        if not done:
            raise SandboxFailure(
                "CR0302",
                f"an environment did not come back within {seconds:.0f} s.",
                fix="give each of its tools a time-out of at most agent_loop.CALL_SECONDS.",
            )
        return job.result()

    def release(self) -> None:
        """End the lease without waiting, from any thread, any number of times: the environment is closed as soon as the job
        that runs there has ended. A job that has not begun is not begun any more.
        """
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        try:
            self._thread.submit(self._close)
        except RuntimeError:  # the interpreter ends, and takes no more
            self._close()
        self._thread.shutdown(wait=False)

    def _work(self, act: Callable[[FeatureDeletionEnv], T]) -> T:
        self._require_lease()
        if self._environment is None:
            self._environment = self._open()
        return act(self._environment)

    def _require_lease(self) -> None:
        if self._is_released:
            raise no_attempt("EnvironmentLease")

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        try:
            with suppress(Exception):  # the attempt is over, whatever its close says
                if environment is not None:
                    environment.close()
        finally:
            self.closed.set_result(None)


class HostOptions(AgentRewardSection):
    """What attempts are made of; the reward as in ``[agent.reward]``. Command lines of libraries give texts for numbers."""

    model_config = ConfigDict(strict=False)

    store: Path = Path("tasks")
    """Folder of the task store, with at least one task."""
    backend: str = ""
    """Sandbox backend; empty for the best of this machine."""
    num_jobs: int = Field(2, ge=1)
    """Test runs at the same time, in one process."""
    with_hidden: bool = False
    """Run the hidden tests too, as the figure hidden_pass_share: for evaluation, never for training."""
    monitor: MonitorMode = "mask"
    """Of dishonest moves: mask pays nothing for them, report tells, off does not look."""


class AttemptHost:
    """Opens attempts over one store; the grader and what is known of the original code are shared.

    Raises:
        InputError: no such store (CR0411), or it has no task (CR0604).
    """

    def __init__(self, options: HostOptions) -> None:
        self.store = TaskStore.open(options.store)
        self.store.require_task_ids()
        self._options = options
        self._grader = Grader(self.store, backend=options.backend, num_jobs=options.num_jobs)

    def lease(self) -> EnvironmentLease:
        """A fresh environment, for any number of tasks of an event loop.

        Calls are made one after the other. Who stops waiting, because of a limit or a cancellation, stops nothing in the
        sandbox: the next call waits until the one before it has ended.
        """
        options = self._options
        return EnvironmentLease(
            partial(FeatureDeletionEnv, self._grader, reward=options, monitor=options.monitor)
        )

    def judged(self, environment: FeatureDeletionEnv) -> Judgement:
        """End the attempt and grade its tree as it stands; asked again, the same answer.

        Raises:
            SandboxFailure: infrastructure failed (CR0302): drop the attempt, and score it never.
        """
        judgement, with_hidden = environment.finish(), self._options.with_hidden
        hidden = environment.grade("hidden") if judgement is not None and with_hidden else None
        if judgement is None or (with_hidden and hidden is None):
            raise SandboxFailure("CR0302", "the sandbox failed while an attempt was graded.")
        return replace(judgement, hidden=hidden)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; clients wait in its queue until they are served. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError, UnicodeError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        raise UsageError(
            "CR0850",
            f"nothing can listen on port {port} of {host}: {why.lower().removesuffix('.')}.",
            where="--host, --port",
            fix="take --port 0 for a free port, 127.0.0.1 for clients on this machine, 0.0.0.0 for those on others too.",
        ) from error


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
