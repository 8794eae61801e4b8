"""What every sandbox refuses before anything is started or sent: one check for all backends.

Without it each kind of jail answers such a call in its own way, and some take the caller's slip for a failure of theirs.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from composer_replication.errors import CommandError, UsageError
from composer_replication.records import Limits

_MOST_BYTES = 1 << 62
_MOST = {"num_processes": 1 << 22, "num_open_files": 1 << 20}
"""What Linux can count at all; of bytes ``_MOST_BYTES``."""
_LONGEST_WORD = 32 * os.sysconf(
    "SC_PAGE_SIZE"
)  # with its last NUL, of a program's arguments or variables (Linux: execve(2))
_WORD_COST = 9  # each word has a NUL and a pointer
_MOST_WORDS_BYTES = 3 * min(os.sysconf("SC_ARG_MAX"), 1 << 21) // 4  # of all; a jail adds words of its own


def check_limits(limits: Limits) -> None:
    """Refuse limits that no jail can hold.

    Raises:
        UsageError: one of them is no whole number above 0, or more than Linux counts (CR0886).
    """
    for each in dataclasses.fields(limits):
        value: Any = getattr(limits, each.name)
        most = _MOST.get(each.name, _MOST_BYTES)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UsageError(
                "CR0886",
                f"a sandbox cannot hold {each.name} = {value!r}: a whole number from 1 to {most} is needed.",
                where=f"Limits.{each.name}",
                fix="leave it out for the default, or give such a number",
            )


def checked_command(command: Any) -> list[str]:
    """The program with its arguments, of whatever a caller gave for them.

    Raises:
        CommandError: it is empty, has no program, or is no text (CR0886).
    """
    if not isinstance(command, str) and (
        isinstance(command, bytes | bytearray) or not isinstance(command, Sequence)
    ):
        raise CommandError(f"the command is no text and no list of words, but {type(command).__name__}")
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    # Without a name a shell and a kernel disagree about what is wrong.
    if not argv or argv[0] == "" or (isinstance(command, str) and not command.strip()):
        raise CommandError("the command is empty")
    for word in argv:
        _check_text(word, "the command")
    return argv


def check_timeout(timeout_seconds: Any) -> None:
    """Refuse what is no time.

    Raises:
        CommandError: no number, not above 0, or without end (CR0886).
    """
    is_number = isinstance(timeout_seconds, Real) and not isinstance(timeout_seconds, bool)
    if not is_number or not 0 < timeout_seconds < math.inf:
        raise CommandError(f"timeout_seconds must be above 0 and finite, not {timeout_seconds!r}")


def checked_input(stdin: Any) -> bytes:
    """The input of a command.

    Raises:
        CommandError: it is not bytes (CR0886).
    """
    if not isinstance(stdin, bytes | bytearray | memoryview):
        raise CommandError(f"stdin must be bytes, not {type(stdin).__name__}")
    return bytes(stdin)


def checked_variables(env: Any) -> dict[str, str]:
    """The variables of a command that its caller names.

    Raises:
        CommandError: a name that is empty or has an equals sign, a NUL byte, or what is no text (CR0886).
    """
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise CommandError(f"env must map names to values, and is {type(env).__name__}")
    for name, value in env.items():
        _check_text(name, "the name of a variable")
        if not name or "=" in name:
            raise CommandError(f"a variable cannot be called {name!r}")
        _check_text(value, f"the variable {name}")
    return dict(env)


def are_too_long(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the kernel would refuse to start a program with these: an ordinary result, as a shell gives it."""
    words = [*argv, *(f"{name}={value}" for name, value in environment.items())]
    lengths = [len(os.fsencode(word)) for word in words]
    return max(lengths) >= _LONGEST_WORD or sum(lengths) + _WORD_COST * len(lengths) >= _MOST_WORDS_BYTES


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise CommandError(f"{what} is no text, but {type(text).__name__}")
    if "\0" in text:
        raise CommandError(f"a NUL byte in {what}")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise CommandError(f"text that has no bytes in {what}: {error}") from error
