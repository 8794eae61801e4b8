"""One progress bar on standard error, with rate and time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

Report = Callable[[int, int, str], None]
"""Takes (done, total, what is done now)."""


@contextmanager
def progress_bar(*, quiet: bool, after_seconds: float = 0.0) -> Iterator[Report | None]:
    """A bar that appears with the first report, or the first one after some seconds; None when nobody wants one.

    Work that fails before it reports anything leaves no empty bar behind.
    """
    if quiet:
        yield None
        return
    shown = _Shown(after_seconds)
    try:
        yield shown.report
    finally:
        shown.close()


class _Shown:
    """The bar of one ``progress_bar``.

    Fewer done than before is a new stretch of work, with a rate of its own. Another total alone is a better
    estimate: what is done stays done, and the rate what it was. The same count again only draws the bar, so that
    the clock goes on and waiting is not taken for work.
    """

    def __init__(self, after_seconds: float) -> None:
        self._bar: tqdm[Any] | None = None
        self._start = time.monotonic() + after_seconds

    def report(self, done: int, total: int, what: str) -> None:
        if self._bar is None:
            if time.monotonic() < self._start:
                return
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit="step", file=sys.stderr, dynamic_ncols=True)
        self._bar.set_description(what, refresh=False)
        if done < self._bar.n:
            self._bar.reset(total=total)
        self._bar.total = total
        if done > self._bar.n:
            self._bar.update(done - self._bar.n)
        else:
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
