"""What every sandbox does with a call before it is sent and with its end: one check and one record for all backends.

Without the check each kind of jail answers a slip of the caller in its own way, and some take it for a failure of theirs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import resource
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from composer_replication.errors import CommandError, SandboxFailure, UsageError
from composer_replication.records import ExecResult, Limits
from composer_replication.sandbox.supervised_run import Ended, Verdict

_MOST_BYTES = 1 << 62
_MOST = {"num_processes": 1 << 22, "num_open_files": 1 << 20}
"""What Linux can count at all; of bytes ``_MOST_BYTES``."""
# With its last NUL, of a program's arguments or variables (Linux: execve(2)).
_LONGEST_WORD = 32 * os.sysconf("SC_PAGE_SIZE")
_WORD_COST = 9  # each word has a NUL and a pointer
_MOST_WORDS_BYTES = 3 * min(os.sysconf("SC_ARG_MAX"), 1 << 21) // 4  # of all; a jail adds words of its own

STARTER = 'printf %s "$1" >&2; shift; exec "$@"'

# This one waits, too, for a line on its input: without the process that would write it nothing is started.
HELD_STARTER = 'printf %s "$1" >&2; shift; read -r _ || exit 125; exec "$@"'


def new_marker() -> str:
    """For a starter: it tells the command's own exit from a failure of what leads to it."""
    return f"<{random.randbytes(16).hex()}>"  # noqa: S311  tells lines apart, guards nothing


def failure(code: str, message: str, where: str = "") -> SandboxFailure:
    """A failure of the jail, whose next step is always the self-test."""
    return SandboxFailure(code, message, where=where, fix="composer-rl sandbox selftest")


def check_limits(limits: Limits) -> None:
    """Refuse limits that no jail can hold."""
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


def resource_limits(limits: Limits) -> list[tuple[int, int]]:
    """What the kernel holds of each single process."""
    return [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.num_open_files),
    ]


def checked_call(
    command: Any, timeout_seconds: Any, stdin: Any, env: Any
) -> tuple[list[str], bytes, dict[str, str]]:
    """The program with its arguments, its input and its variables, of whatever a caller gave for them."""
    if not isinstance(command, str | Sequence) or isinstance(command, bytes | bytearray):
        raise CommandError(f"the command is no text and no list of words, but {type(command).__name__}")
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    # Without a name a shell and a kernel disagree about what is wrong.
    if not argv or argv[0] == "" or (isinstance(command, str) and not command.strip()):
        raise CommandError("the command is empty")
    for word in argv:
        _check_text(word, "the command")
    is_number = isinstance(timeout_seconds, Real) and not isinstance(timeout_seconds, bool)
    if not is_number or not 0 < timeout_seconds < math.inf:
        raise CommandError(f"timeout_seconds must be above 0 and finite, not {timeout_seconds!r}")
    if not isinstance(stdin, bytes | bytearray | memoryview):
        raise CommandError(f"stdin must be bytes, not {type(stdin).__name__}")
    if not isinstance(env, Mapping | None):
        raise CommandError(f"env must map names to values, and is {type(env).__name__}")
    for name, value in (env or {}).items():
        _check_text(name, "the name of a variable")
        if not name or "=" in name:
            raise CommandError(f"a variable cannot be called {name!r}")
        _check_text(value, f"the variable {name}")
    return argv, bytes(stdin), dict(env or {})


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


def to_result(ended: Ended, marker: bytes, limits: Limits, *, backend: str) -> ExecResult:
    """Turn the end of a run into the record, without our marker in front of its errors."""
    before, found, stderr = ended.stderr.partition(marker)
    if not found and ended.verdict is Verdict.ENDED:
        # The last line alone: before it may stand where in our code it happened.
        said = (before.decode(errors="replace").strip() or f"exit code {ended.exit_code}").splitlines()[-1]
        raise failure("CR0302", f"{backend} did not start the command: {said[-500:]}.")
    return as_record(ended, stderr, limits)


def as_record(ended: Ended, stderr: bytes, limits: Limits, *, stopped: str = "") -> ExecResult:
    """The record of a run; ``stopped`` is said in its last line when no limit is named there."""
    stdout = ended.stdout[: limits.output_bytes]
    truncated = ended.truncated or len(stdout) < len(ended.stdout) or len(stderr) > limits.output_bytes
    text = stderr[: limits.output_bytes].decode(errors="replace")
    if ended.verdict not in (Verdict.ENDED, Verdict.TIMED_OUT):
        stopped = ended.verdict.value
    if stopped:
        text = f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}[sandbox] stopped: {stopped}\n"
    return ExecResult(
        exit_code=ended.exit_code,
        stdout=stdout.decode(errors="replace"),
        stderr=text,
        truncated=truncated,
        timed_out=ended.verdict is Verdict.TIMED_OUT,
        out_of_memory=ended.verdict is Verdict.OVER_MEMORY,
        seconds=ended.seconds,
        stopped=stopped,
    )
