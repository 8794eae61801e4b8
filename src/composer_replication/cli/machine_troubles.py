"""Troubles of the machine that can come up anywhere: no space, no permission, an interruption."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from composer_replication.errors import ComposerError, MissingError, UsageError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR}
_SHOWN_CHARACTERS = 200
_NO_SPACE_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")
"""Rust and C++ libraries that write weights give the system's words instead of its number."""
_LOST_PROCESS_WORDS = ("Connection closed by peer", "Connection reset by peer")  # gloo's


def machine_error(error: BaseException, words: Sequence[str]) -> ComposerError | None:
    """The sentence for a full disk, a forbidden path or a lost process behind ``error``; None when it is neither.

    Args:
        error: whatever ended the verb; its causes are looked at too, so that a full disk is
            named as such even where a library or a part of ours took it for something else.
        words: the command's arguments, which say how to go on.

    Returns:
        ``MissingError`` CR0104 (no space), CR0105 (not allowed) or CR0106 (a process of the same run is gone),
        ``UsageError`` CR0206 (no path can be so).
    """
    for cause in _causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        place = str(getattr(cause, "filename", None) or "")
        if number in _NO_SPACE or (
            not isinstance(cause, ComposerError) and any(text in str(cause) for text in _NO_SPACE_WORDS)
        ):
            return MissingError(
                "CR0104",
                "there is no space left for a file that must be written.",
                where=place or _fullest_folder(words),
                fix=f"free some space; then {how_to_go_on(words)}",
            )
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _LOST_PROCESS_WORDS):
            problem = "another process of this run is gone, and this one cannot go on without it."
            fix = f"read what that process said last; then {how_to_go_on(words)}"
            return MissingError("CR0106", problem, where="the processes of the run", fix=fix)
        if not isinstance(error, ComposerError) and (number == errno.ENAMETOOLONG or _has_nul(cause)):
            return UsageError(
                "CR0206",
                f"a path cannot be used: {getattr(cause, 'strerror', None) or 'it holds a NUL character'}.",
                where=place if len(place) <= _SHOWN_CHARACTERS else f"{place[:_SHOWN_CHARACTERS]}…",
                fix="give another path: a name has at most 255 bytes, the whole at most 4095.",
            )
        if number in _NOT_ALLOWED and not isinstance(error, ComposerError):
            return MissingError(
                "CR0105",
                f"a path may not be used: {getattr(cause, 'strerror', None) or cause}.",
                where=place,
                fix="give yourself the right to it, or move it: --out for a run, COMPOSER_RL_CACHE for the cache.",
            )
    return None


def _has_nul(error: BaseException) -> bool:
    """Python's own words for a path or an argument that the system cannot be given."""
    return isinstance(error, ValueError) and str(error).startswith("embedded null")


def how_to_go_on(words: Sequence[str]) -> str:
    """What to type after an interruption, by the verb that was interrupted."""
    plain = [word for word in words if not word.startswith("-")]
    if plain[:1] == ["train"]:
        again = shlex.join(("composer-rl", *words, *(() if "--resume" in words else ("--resume",))))
        return f"{again} goes on at the last whole checkpoint."
    if ["tasks", "validate"] in map(list, pairwise(plain)):
        again = shlex.join(("composer-rl", *words, *(() if "--resume" in words else ("--resume",))))
        return f"{again} tries only the tasks that have not passed."
    if plain[:1] == ["quickstart"] or ["tasks", "build"] in map(list, pairwise(plain)):
        return "the same command goes on where it stopped."
    return "type the same command again."


def _fullest_folder(words: Sequence[str]) -> str:
    """Of the folders that are written, the one with the least space: a failed write does not say its file."""
    after_out = [Path(following) for word, following in pairwise(words) if word == "--out"]
    cache = Path(os.environ.get("COMPOSER_RL_CACHE") or "~").expanduser()
    folders = (*after_out, cache, Path(tempfile.gettempdir()))
    free = {folder: shutil.disk_usage(folder).free for folder in folders if folder.is_dir()}
    if not free:
        return ""
    fullest = min(free, key=lambda folder: free[folder])
    return f"{fullest}, {free[fullest] // 10**6} MB free"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
