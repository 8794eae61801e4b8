"""What ends a verb and is nobody's mistake: no space, no permission, an interruption, and faults of our own.

For a fault of ours a crash bundle is written: versions, arguments, traceback; no secret. Environment variables are never
written: the values of those whose name speaks of a secret are struck out of the text, as are words that look like one.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import shlex
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from composer_replication import __version__
from composer_replication.errors import INTERRUPTED_EXIT_CODE, ComposerError, MissingError, UsageError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR}
# Rust and C++ libraries that write weights give the system's words instead of its number
_NO_SPACE_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")
_LOST_PROCESS_WORDS = ("Connection closed by peer", "Connection reset by peer")  # gloo's
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "pydantic", "sandlock")

STRUCK_OUT = "[struck out]"
_KINDS = "token|secret|passw|api[_-]?key|access[_-]?key|private[_-]?key|credential|auth"
_SECRET_NAME = rf"[\w.-]*(?:{_KINDS})[\w.-]*"
_PATTERNS = (
    re.compile(rf"(?i)(--{_SECRET_NAME}\s+)\S+"),
    re.compile(rf"(?i)({_SECRET_NAME}['\"]?\s*[=:]\s*)['\"]?[^\s'\"]+['\"]?"),
    re.compile(r"(://)[^/\s@]+(?=@)"),
    re.compile(r"()\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_-]{8,}"),
)
_SHORTEST_SECRET = 6  # a shorter value would strike ordinary words out of the traceback


def known_error(error: BaseException, words: Sequence[str]) -> ComposerError:
    """What a user is told: an interruption, a trouble of the machine, an error with a code, or a bug, with a crash bundle."""
    if isinstance(error, KeyboardInterrupt):
        stopped = ComposerError("CR0103", "interrupted.", fix=how_to_go_on(words))
        stopped.exit_code = INTERRUPTED_EXIT_CODE
        return stopped
    known = machine_error(error, words) or error
    if isinstance(known, ComposerError):
        return known
    path = write_crash_bundle(error, words)
    fix = "read that file and report it; it holds versions, arguments and the traceback."
    if path is None:
        fix = "report it; no folder could be written for the crash bundle."
    return ComposerError("CR0100", f"a bug of ours: {type(error).__name__}.", where=str(path or ""), fix=fix)


def machine_error(error: BaseException, words: Sequence[str]) -> ComposerError | None:
    """The sentence for a full disk, a forbidden path or a lost process behind ``error`` or its causes; else None.

    ``words`` are the command's arguments, which say how to go on.
    """
    for cause in _causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        where, text = str(getattr(cause, "filename", None) or ""), str(cause)
        reason = getattr(cause, "strerror", None) or text
        says_no_space = not isinstance(cause, ComposerError) and any(w in text for w in _NO_SPACE_WORDS)
        has_nul = isinstance(cause, ValueError) and text.startswith("embedded null")  # Python's own words
        if number in _NO_SPACE or says_no_space:
            problem = "there is no space left for a file that must be written."
            fix = f"free some space; then {how_to_go_on(words)}"
            return MissingError("CR0104", problem, where=where or "the disk", fix=fix)
        if isinstance(cause, RuntimeError) and any(w in text for w in _LOST_PROCESS_WORDS):
            problem = "another process of this run is gone, and this one cannot go on without it."
            fix = f"read what that process said last; then {how_to_go_on(words)}"
            return MissingError("CR0106", problem, where="the processes of the run", fix=fix)
        if isinstance(error, ComposerError):
            continue  # it says more of a path than we can
        if number == errno.ENAMETOOLONG or has_nul:
            fix = "give another path: a name has at most 255 bytes, the whole at most 4095."
            return UsageError("CR0206", f"a path cannot be used: {reason}.", where=where[:200], fix=fix)
        if number in _NOT_ALLOWED:
            move = "--out for a run, COMPOSER_RL_CACHE for the cache."
            fix = f"give yourself the right to it, or move it: {move}"
            return MissingError("CR0209", f"a path may not be used: {reason}.", where=where, fix=fix)
    return None


def how_to_go_on(words: Sequence[str]) -> str:
    """What to type after an interruption, by the verb that was interrupted."""
    plain = [word for word in words if not word.startswith("-")]
    if plain[:1] == ["train"]:
        again = ["composer-rl", *words, *([] if "--resume" in words else ["--resume"])]
        return f"{shlex.join(again)} goes on at the last whole checkpoint."
    if plain[:1] == ["quickstart"] or plain[:2] == ["tasks", "build"]:
        return "the same command goes on where it stopped."
    return "type the same command again."


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it came from, each once."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    return causes


def write_crash_bundle(error: BaseException, argv: Sequence[str]) -> Path | None:
    """Write one text file into the temporary folder, readable by its owner alone; None when it cannot be written."""
    versions = [f"{name} {version}" for name in _PACKAGES if (version := package_version(name))]
    head = f"composer-replication {__version__}\npython {platform.python_version()}, {platform.platform()}"
    lines = [head, *versions, f"arguments {' '.join(argv)}", "", *traceback.format_exception(error)]
    text = redact("\n".join(lines)).encode(errors="backslashreplace")
    try:
        descriptor, name = tempfile.mkstemp(".txt", time.strftime("composer-rl-crash-%Y%m%dT%H%M%S-"))
        with open(descriptor, "wb") as handle:
            handle.write(text)
    except OSError:
        return None
    return Path(name)


def redact(text: str) -> str:
    """Strike out what looks like a secret: ``key=value``, URL credentials, known token shapes, known values."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and re.fullmatch(f"(?i){_SECRET_NAME}", name):
            text = text.replace(value, STRUCK_OUT)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{STRUCK_OUT}", text)
    return text


def package_version(name: str) -> str:
    """Of an installed distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
