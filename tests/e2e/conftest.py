"""The fakes and the chat templates of the unit tests are used here too."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "fakes"), str(TESTS / "unit" / "rollouts")]
