"""Every error a user can meet, and nothing else.

    ComposerError                  code, message, where, fix, exit_code
    ├── UsageError          2      a recipe, a flag or an argument is wrong
    │   └── CommandError           a command that no sandbox can be given (a ValueError too)
    ├── MissingError        3      this machine lacks something (doctor tells)
    │   └── SandboxFailure  3      the sandbox broke: never a test result
    ├── InputError          4      repository, task, trace or checkpoint is unusable
    │   ├── SplitOverlapError      train and held-out share something (a ValueError too)
    │   └── EmptyMaskError         nothing is left to average a loss over
    ├── CollapseStopError   5      the guard halted the run; carries its status
    └── NothingToDoError    6      too little evidence, or nothing to do

The number is the exit code of ``composer-rl``. Exit code 1 is a bug of ours and
130 an interruption; neither has a class here. Standard library only.
"""

from __future__ import annotations

import copyreg
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HALTED_EXIT_CODE = 5
INTERRUPTED_EXIT_CODE = 130
_OWN = "composer_replication"


class ComposerError(Exception):
    """One sentence that says what is wrong.

    Args:
        code: stable short code, ``CR`` and four digits; ``composer-rl explain CODE``.
        where: file and line, or the key, that the sentence speaks of.
        fix: the next command or edit.
    """

    exit_code = 1

    def __init__(self, code: str, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(code, message, where, fix)
        self.code, self.message, self.where, self.fix = code, message, where, fix

    def __str__(self) -> str:
        place = f" [{self.where}]" if self.where else ""
        next_step = f" Next: {self.fix}" if self.fix else ""
        return f"{self.code}: {self.message}{place}{next_step}"

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle comes back without a call of a constructor that takes keywords, or other arguments."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(ComposerError):
    """The recipe, a flag or an argument is wrong."""

    exit_code = 2


class CommandError(UsageError, ValueError):
    """A command, variable or time-out that no sandbox can be given."""

    def __init__(self, why: str) -> None:
        fix = "give words without NUL, variables with names, input as bytes and a finite time-out above 0"
        super().__init__("CR0886", f"{why}.", where="sandbox exec", fix=fix)


class MissingError(ComposerError):
    """Something is missing on this machine."""

    exit_code = 3


class SandboxFailure(MissingError):
    """The sandbox itself failed; the rollout is dropped and counted, never scored."""


class InputError(ComposerError):
    """The repository, task, trace or checkpoint is not usable."""

    exit_code = 4


class SandboxFileError(InputError):
    """A file of a sandbox's tree that cannot be read or written as asked; often the policy's own doing."""


class EmptyMaskError(InputError):
    """A loss was asked for over no token or no pair; zero would hide a fault in the data."""


class SplitOverlapError(InputError, ValueError):
    """Train and held-out tasks overlap; ``pairs`` are ``(kind, train task id, held-out task id)``, one for each kind."""

    def __init__(self, pairs: list[tuple[str, str, str]]) -> None:
        kinds: dict[tuple[str, str], list[str]] = {}
        for kind, train, heldout in pairs:
            kinds.setdefault((train, heldout), []).append(kind)
        shown = [f"{' and '.join(found)}: {train} and {heldout}" for (train, heldout), found in kinds.items()]
        counts = Counter(kind for kind, _, _ in pairs)
        by_kind = ", ".join(f"{count} by {kind}" for kind, count in counts.items())
        more = f"; and {len(kinds) - 5} more" if len(kinds) > 5 else ""
        found = f"overlap in {len(kinds)} pair(s), {by_kind}: {'; '.join(shown[:5])}{more}."
        fix = "take those tasks out of one side, or use composer-rl tasks split."
        super().__init__("CR0501", f"train and held-out tasks {found}", fix=fix)
        self.pairs = pairs


class CollapseStopError(ComposerError, RuntimeError):
    """The guard halted the run; ``status`` is the very object that fired."""

    exit_code = HALTED_EXIT_CODE

    def __init__(self, status: Any) -> None:
        reason = getattr(status, "reason", "") or "the guard fired"
        fix = "open report.html in the run folder and read what the reward paid for."
        super().__init__("CR0601", f"the guard halted training: {reason}", fix=fix)
        self.status = status


class NothingToDoError(ComposerError):
    """Too little evidence for an answer, or nothing to do."""

    exit_code = 6


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Inside, an import that fails names the extra that brings the package (CR0101); ``purpose`` begins the sentence."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == _OWN:
            raise  # a module of ours that is gone is no missing extra
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:300]
        problem = f"{purpose} needs packages that cannot be imported here: {reason}"
        if isinstance(error, ModuleNotFoundError) and package:
            problem = f"{purpose} needs {package}, which is not installed"
        fix = f"pip install 'composer-replication[{extra}]'"
        raise MissingError("CR0101", f"{problem}.", where=package, fix=fix) from error
