"""A command that is run to its end, with what it said as text; how it ended is for the test to judge."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any


def finished(words: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run``, to which ``options`` go."""
    given = [str(word) for word in words]
    return subprocess.run(given, capture_output=True, text=True, check=False, **options)
