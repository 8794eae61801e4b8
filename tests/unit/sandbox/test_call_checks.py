"""Services are asked nothing about a call that no sandbox takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import CommandError, UsageError
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import choose_backend
from composer_replication.sandbox.call_checks import are_too_long

WRONG: tuple[dict[str, Any], ...] = (
    {"timeout_seconds": float("inf")},
    {"timeout_seconds": True},
    {"env": {"A=B": "x"}},
    {"env": {"A": 1}},
    {"stdin": "text"},
    {"command": ["echo", 1]},
)


@pytest.mark.parametrize("name", ["docker", "podman", "kubernetes"])
def test_limits_are_looked_at_before_the_service_is(
    monkeypatch: pytest.MonkeyPatch, tree: Path, tmp_path: Path, name: str
) -> None:
    """There is none: to ask it would be another error."""
    nowhere = f"unix://{tmp_path}/none.sock"
    for variable, value in (("DOCKER_HOST", nowhere), ("CONTAINER_HOST", nowhere), ("KUBECONFIG", "/none")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("COMPOSER_RL_POD_IMAGE", "registry.example/trainer:1")
    with pytest.raises(UsageError) as caught:
        choose_backend(name).open(SandboxSpec(tree, limits=Limits(num_processes=0)))
    assert caught.value.code == "CR0882"


@pytest.mark.parametrize(("service", "name"), [("engine", "docker"), ("cluster", "kubernetes")])
def test_a_wrong_call_sends_nothing(
    request: pytest.FixtureRequest, tree: Path, service: str, name: str
) -> None:
    seen = request.getfixturevalue(service).seen
    with choose_backend(name).open(SandboxSpec(tree)) as sandbox:
        before = len(seen)
        for wrong in WRONG:
            given = {"command": ["true"], "timeout_seconds": 60.0, **wrong}
            with pytest.raises(CommandError):
                sandbox.exec(given.pop("command"), **given)
        assert len(seen) == before
        sandbox.exec(["true"], timeout_seconds=60.0)
        assert len(seen) > before  # a right call is seen


def test_words_are_too_long_one_by_one_or_together() -> None:
    assert not are_too_long(["true"], {})
    assert not are_too_long(["true", "x" * 131_000], {"A": "x" * 131_000})
    assert are_too_long(["true", "x" * 131_072], {})
    assert are_too_long(["true"], {"A": "x" * 131_070})
    assert are_too_long(["true", *["é"] * 700_000], {})
