"""The environment holds what it is pinned to."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path


def test_the_library_is_the_pinned_one() -> None:
    lines = (Path(__file__).parents[1] / "harbor.txt").read_text().splitlines()
    assert f"harbor=={version('harbor')}" in lines
    assert f"pytest=={version('pytest')}" in lines
