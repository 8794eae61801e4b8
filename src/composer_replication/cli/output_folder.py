"""Refuse a folder that cannot be written before any work is done for it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from composer_replication.errors import UsageError


def refuse_unwritable(path: Path) -> None:
    """Look at ``path`` or its nearest parent that exists; what is made there to try is gone at once.

    Raises:
        UsageError: a file stands in the way, or it may not be written (CR0209).
    """
    nearest = path.absolute()
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        problem = f"{nearest} is not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"{nearest} may not be written"
    else:
        try:  # /proc says that it may be written
            with tempfile.TemporaryFile(dir=nearest):
                return
        except OSError as error:
            problem = f"{nearest}: {error.strerror or error}"
    raise UsageError(
        "CR0209",
        f"the output folder cannot be made or written: {problem}.",
        where=f"--out {path}",
        fix="choose another --out, in a folder that you may write.",
    )
