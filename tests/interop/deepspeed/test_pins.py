"""The environment holds what it is pinned to, and nothing else than everybody else has."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
SHARED = ("accelerate", "peft", "pytest", "torch", "transformers", "trl")


def test_the_library_is_the_pinned_one_beside_the_pinned_set() -> None:
    lines = HERE.with_suffix(".txt").read_text().splitlines()
    everybody = (HERE.parents[2] / "constraints.txt").read_text().splitlines()
    assert f"deepspeed=={version('deepspeed')}" in lines
    for name in SHARED:
        pin = f"{name}=={version(name).partition('+')[0]}"
        assert pin in lines
        assert pin in everybody
