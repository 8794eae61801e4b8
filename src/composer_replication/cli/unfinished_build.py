"""Say that the build of a store was cut off: its tasks can be used, and more of them are missing."""

from __future__ import annotations

import sys
from pathlib import Path


def unfinished(folder: Path) -> str:
    """One sentence with the command that finishes the build; empty where it came to its end, or nobody noted it.

    Raises:
        InputError: the manifest is damaged (CR0411).
    """
    from composer_replication.tasks.store_manifest import NAME, read_manifest

    if not (folder / NAME).is_file():
        return ""
    mark = read_manifest(folder).build
    if mark is None or mark.is_complete:
        return ""
    what = mark.command or "the same command that began it"
    return f"The build of this store was cut off, its tasks are whole but not all there; to finish it: {what}"


def warn_unfinished(folder: Path, *, quiet: bool) -> None:
    """Print the sentence, if there is one, on standard error."""
    sentence = "" if quiet else unfinished(folder)
    if sentence:
        sys.stderr.write(f"{sentence}\n")
