"""A check of the machine that is made once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SECONDS = 60.0


class RememberedCheck:
    """What was found is remembered; a problem only for a minute, as it may be the moment's: no memory, no process.

    Args:
        look: empty, or what is wrong; takes long.
    """

    def __init__(self, look: Callable[[], str]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._found: str | None = None
        self._looked = 0.0

    def __call__(self) -> str:
        with self._lock:
            is_old = bool(self._found) and time.monotonic() - self._looked > _SECONDS
            if self._found is None or is_old:
                self._found = self._look()
                self._looked = time.monotonic()
            return self._found

    def forget(self) -> None:
        """Look again when asked next."""
        with self._lock:
            self._found = None
