"""What is the backend's own: every guard holds, nothing outlives its owner for long, and a failure is one sentence."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from conftest import NAME

from composer_replication.errors import ComposerError
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import SandboxBackend, choose_backend, run_selftest
from composer_replication.sandbox.conformance.plugin import start_ours


def containers() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("harbor-composer-rl-*"))


def test_every_guard_holds(backend: SandboxBackend) -> None:
    checks = run_selftest(backend)
    assert len(checks) == 14
    assert [(check.name, check.detail) for check in checks if not check.ok] == []


def test_what_a_killed_process_left_is_stopped_by_the_next(
    backend: SandboxBackend, tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    before = containers()
    code = (
        "from pathlib import Path\n"
        "from composer_replication.records import SandboxSpec\n"
        "from composer_replication.sandbox import choose_backend\n"
        f"sandbox = choose_backend({NAME!r}).open(SandboxSpec(Path({str(tmp_path / 'other')!r})))\n"
        "print('open', flush=True)\n"
        "input()\n"
    )
    with start_ours(code, Path(tempfile.gettempdir())) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        (left,) = containers() - before
        first = int((left / "pid").read_text())
        process.kill()
    assert Path(f"/proc/{first}").exists()
    with backend.open(SandboxSpec(tree)):
        assert not Path(f"/proc/{first}").exists()
        assert not left.exists()


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("broken_environments:NeverStarts", "CR0302", "does not start: no such host"),
        ("broken_environments:OpenNetwork", "CR0302", "no-network"),
        ("broken_environments:NoProgram", "CR0302", "no-such-python3"),
        ("broken_environments:NoSuchClass", "CR0302", "NoSuchClass"),
        ("no-such-engine", "CR0305", "no-such-engine"),
    ],
)
def test_what_does_not_start_is_one_sentence(
    tree: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: str, said: str
) -> None:
    monkeypatch.setenv("COMPOSER_RL_HARBOR_IMAGE", "registry.example/trainer:1")
    before = containers()
    with pytest.raises(ComposerError) as caught:
        choose_backend(f"harbor:{kind}").open(SandboxSpec(tree))
    assert caught.value.code == code
    assert said in caught.value.message
    assert containers() == before


def test_an_image_is_asked_for(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPOSER_RL_HARBOR_IMAGE", raising=False)
    with pytest.raises(ComposerError, match=r"CR0301.*no image"):
        choose_backend("harbor:docker").open(SandboxSpec(tree))
    assert not choose_backend("harbor:docker").is_available().ok


def test_a_command_that_is_lost_is_no_result(tree: Path) -> None:
    backend = choose_backend("harbor:broken_environments:LosesCommands")
    with backend.open(SandboxSpec(tree)) as sandbox, pytest.raises(ComposerError, match=r"CR0302.*hung up"):
        sandbox.exec(["true"], timeout_seconds=60)
