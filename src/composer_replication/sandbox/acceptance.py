"""What a person has accepted to do without: a guard by name, or isolation altogether.

An acceptance is spoken once, at the command line or in a recipe, and holds for this process. It is
recorded with the run and shown in its report, because a reward that was earned without a guard is
worth what the policy's honesty is worth.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable

from composer_replication.errors import UsageError

EVERYTHING = "everything"
"""No guard is needed; the only word that opens the backend ``none``."""

WITHOUT_ISOLATION = "none"
"""The backend that is no jail."""

GUARD_NAMES = (
    "network", "host_files", "masked", "environment", "writes", "signals", "privilege",
    "open_files", "processes", "memory", "disk", "output", "timeout", "leftovers",
)  # fmt: skip
"""The guards of the self-test, in its order; here, so that a recipe is checked without loading it."""

_accepted: set[str] = set()
_lock = threading.Lock()


def checked(names: Iterable[str], *, where: str = "--i-accept-no-isolation") -> tuple[str, ...]:
    """The names, each once, in the order of the self-test."""
    known = (*GUARD_NAMES, EVERYTHING)
    found = set(names)
    for name in sorted(found):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            guess = f"did you mean {near[0]}?" if near else f"choose of {', '.join(known)}."
            raise UsageError("CR0340", f"the self-test has no guard called {name!r}.", where=where, fix=guess)
    return tuple(name for name in known if name in found)


def accept(names: Iterable[str], *, where: str = "--i-accept-no-isolation") -> tuple[str, ...]:
    """From now on this process does without these guards, or ``everything``; all that it does without now.

    Raises:
        UsageError: no guard of that name (CR0340); ``where`` it was said.
    """
    found = checked(names, where=where)
    with _lock:
        _accepted.update(found)
    return accepted()


def accepted() -> tuple[str, ...]:
    """What this process does without, in the order of the self-test."""
    with _lock:
        return checked(_accepted)


def forget() -> None:
    """Take every acceptance back."""
    with _lock:
        _accepted.clear()


def require_accepted(backend: str) -> None:
    """Refuse a backend without isolation that nobody has accepted."""
    if EVERYTHING not in accepted():
        raise UsageError(
            "CR0340",
            f"the sandbox backend {backend!r} isolates nothing: the policy's code can do whatever you can.",
            where="backend",
            fix="use another backend, or say --i-accept-no-isolation (in a recipe: accept_no_isolation = "
            '["everything"] under [sandbox])',
        )
