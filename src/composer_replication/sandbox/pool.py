"""Sandboxes that are already started, lent for one rollout each and made new in between.

    with SandboxPool(8, read_only=(environment,)) as pool:
        with pool.take(tree) as sandbox:
            sandbox.exec(["python3", "-m", "pytest", "-q"], timeout_seconds=60)

Each sandbox has a tree of its own, which ``take`` fills. What is given back is reset and
looked at in the background; where something survived, that jail is destroyed, another one
takes its place, and ``replaced`` says why.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox.folder_removal import remove_folder
from composer_replication.sandbox.jailed_tree import failure
from composer_replication.sandbox.lent_sandbox import AsyncSandbox, PooledSandbox
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.sandbox.warm_bubblewrap import WarmBubblewrap, WarmBubblewrapSandbox

_T = TypeVar("_T")


class _Line:
    """Who waits for a sandbox, first come first served, and those that are free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Future[WarmBubblewrapSandbox]] = deque()
        self._free: deque[WarmBubblewrapSandbox | SandboxFailure] = deque()
        self._end: SandboxFailure | None = None

    def enter(self) -> Future[WarmBubblewrapSandbox]:
        """Wait for the next one: the result of a future."""
        future: Future[WarmBubblewrapSandbox] = Future()
        with self._lock:
            self._waiting.append(future)
        self._serve()
        return future

    def put(self, found: WarmBubblewrapSandbox | SandboxFailure) -> None:
        """One is free, or why one less will be."""
        with self._lock:
            self._free.append(found)
        self._serve()

    def end(self, problem: SandboxFailure) -> None:
        """From now on everybody who waits, or comes, is told this."""
        with self._lock:
            self._end = problem
        self._serve()

    def _serve(self) -> None:
        with self._lock:
            while self._waiting and (self._end is not None or self._free):
                future = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                found = self._end or self._free.popleft()
                if isinstance(found, SandboxFailure):
                    future.set_exception(found)
                else:
                    future.set_result(found)


class SandboxPool:
    """``size`` warm sandboxes, started at once in the background. For any number of threads.

    Args:
        size: how many there are; also how many commands ``take_async`` runs at once. Two for each
            processor keep it busy while the others are reset; memory is some 4 MiB each.
        read_only, masked, limits: as in ``SandboxSpec``.

    Raises:
        ValueError: ``size`` is below 1.
        MissingError: there is no warm jail on this machine (CR0301).
    """

    def __init__(
        self,
        size: int,
        *,
        read_only: Sequence[Path] = (),
        masked: Sequence[Path] = (),
        limits: Limits | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"the size of a pool must be at least 1, not {size}")
        check = WarmBubblewrap().is_available()
        if not check.ok:
            raise MissingError("CR0301", check.detail, fix=check.fix)
        self.size = size
        self.replaced: list[str] = []
        self._spec = (tuple(read_only), tuple(masked), limits or Limits())
        self._folder = Path(tempfile.mkdtemp(prefix="pool-", dir=process_folder()))
        self._folder.chmod(0o755)
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_made = 0
        self._all: set[WarmBubblewrapSandbox] = set()
        self._line = _Line()
        self._keepers = ThreadPoolExecutor(min(size, 8), thread_name_prefix="sandbox-pool")
        self._callers = ThreadPoolExecutor(size, thread_name_prefix="sandbox-call")
        for _ in range(size):
            self._keepers.submit(self._add)

    def take(
        self,
        tree: Path | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> PooledSandbox:
        """Lend a sandbox whose tree holds a copy of the folder ``tree``, then ``files``; give it back by ``close``.

        Waits until one is free.

        Args:
            tree: a folder; by default the tree is empty.
            files: content by path in the tree.
            timeout_seconds: how long to wait for that (default: as long as it takes).

        Raises:
            SandboxFailure: none came free in time (CR0312), no jail starts (CR0302), the tree
                cannot be copied (CR0304), the pool is closed (CR0303).
            SandboxFileError: a path of ``files`` leads out of the tree (CR0309).
        """
        future = self._line.enter()
        try:
            sandbox = future.result(timeout_seconds)
        except TimeoutError as error:
            if future.cancel():
                raise failure(
                    "CR0312", f"none of the {self.size} sandboxes of the pool came free in time."
                ) from error
            sandbox = future.result()  # it came at this very moment
        except BaseException:
            self._leave(future)
            raise
        return self._filled(sandbox, tree, files)

    def _leave(self, future: Future[WarmBubblewrapSandbox]) -> None:
        """Stop waiting; what came all the same is put back, and what does not start is tried again."""
        if future.cancel() or self._is_closed:
            return
        if future.exception() is None:
            self._line.put(future.result())
        else:
            self._in_background(self._add)

    def _filled(
        self, sandbox: WarmBubblewrapSandbox, tree: Path | None, files: Mapping[str, bytes] | None
    ) -> PooledSandbox:
        try:
            if tree is not None or files:
                sandbox.fill(tree, files)
        except BaseException:
            self._keep(sandbox)
            raise
        return PooledSandbox(sandbox, self._keep)

    def _in_background(self, function: Callable[..., None], *args: Any) -> None:
        with self._lock:
            if not self._is_closed:
                self._keepers.submit(function, *args)

    def _add(self) -> None:
        """Start one more sandbox and put it, or why it does not start, among the free ones."""
        with self._lock:
            if self._is_closed:
                return
            self._num_made += 1
            tree = self._folder / f"{self._num_made}" / "tree"
        sandbox = None
        try:
            tree.mkdir(parents=True, mode=0o755)
            sandbox = WarmBubblewrapSandbox(SandboxSpec(tree, *self._spec))
            sandbox.prepare()
        except (SandboxFailure, OSError) as error:
            if sandbox is not None:
                sandbox.close()
            problem = error if isinstance(error, SandboxFailure) else failure("CR0304", f"no tree: {error}.")
            self._line.put(problem)
            return
        with self._lock:
            self._all.add(sandbox)  # ``close`` waits for us before it closes all of them
        self._line.put(sandbox)

    def _keep(self, sandbox: WarmBubblewrapSandbox) -> None:
        """Take a sandbox back; the rest happens in the background."""
        self._in_background(self._renew, sandbox)

    def _renew(self, sandbox: WarmBubblewrapSandbox) -> None:
        try:
            sandbox.reset()
        except Exception as error:  # noqa: BLE001  whatever it is: of one that is lost nobody would ever hear
            self._replace(sandbox, error.message if isinstance(error, SandboxFailure) else repr(error))
        else:
            self._line.put(sandbox)

    def _replace(self, sandbox: WarmBubblewrapSandbox, why: str) -> None:
        """Put another one in the place of a sandbox that cannot be made new."""
        with self._lock:
            if self._is_closed:
                return  # ``close`` ends it
            self._all.discard(sandbox)
            self.replaced.append(why)
        with suppress(Exception):  # another one is needed all the same
            sandbox.close()
        remove_folder(sandbox.tree.parent)
        self._add()

    async def take_async(
        self, tree: Path | None = None, files: Mapping[str, bytes] | None = None
    ) -> AsyncSandbox:
        """As ``take``, without holding the event loop; what it gives is used with ``async with`` and ``await``."""
        future = self._line.enter()
        try:
            sandbox = await asyncio.wrap_future(future)
        except BaseException:
            self._leave(future)
            raise
        filled = self._callers.submit(self._filled, sandbox, tree, files)
        try:
            lent = await asyncio.shield(asyncio.wrap_future(filled))
        except asyncio.CancelledError:
            filled.add_done_callback(_close_unwanted)
            raise
        return AsyncSandbox(lent, self.call)

    async def call(self, function: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """Run a function in one of the pool's own ``size`` threads.

        ``asyncio.to_thread`` has as many threads as the machine has processors and four: too few
        for many sandboxes that wait.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._callers, lambda: function(*args, **options))

    def close(self) -> None:
        """End every sandbox, lent ones too, once their command has ended; idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._line.end(failure("CR0303", "the pool of sandboxes is closed."))
        self._keepers.shutdown(wait=True, cancel_futures=True)
        for sandbox in self._all:
            sandbox.close()
        self._callers.shutdown(wait=False)
        remove_folder(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close_unwanted(filled: Future[PooledSandbox]) -> None:
    """Who had asked for it was cancelled meanwhile."""
    if not filled.cancelled() and filled.exception() is None:
        filled.result().close()
