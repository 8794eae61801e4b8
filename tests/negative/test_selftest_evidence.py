"""A guard whose probe never began, or could not take its first step, was not tried, and does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox import LocalSandbox, run_selftest
from composer_replication.sandbox.bubblewrap import Bubblewrap, BubblewrapSandbox

IN_THE_WAY = {
    "open_files": "real = os.open\ndef no(path, *rest):\n if path == '/dev/null': raise PermissionError(13, '')\n"
    " return real(path, *rest)\nos.open = no",
    "processes": "def no(): raise PermissionError(1, '')\nos.fork = no",
    "disk": "real = os.open\ndef no(path, flags, *rest):\n if flags & os.O_CREAT: raise PermissionError(13, '')\n"
    " return real(path, flags, *rest)\nos.open = no",
    "output": "real = os.write\nos.write = lambda to, data: real(to, data) if to == 2 else sys.exit(0)",
}
"""What may keep a probe from its first step on somebody's machine, said in Python."""


class Answering:
    """A backend that starts nothing and gives one and the same answer."""

    name = "answering"

    def __init__(self, answer: ExecResult) -> None:
        self._answer = answer

    def is_available(self) -> Check:
        return Check(self.name, True, "it answers")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        return _AnsweringSandbox(spec, self._answer)


class _AnsweringSandbox(LocalSandbox):
    def __init__(self, spec: SandboxSpec, answer: ExecResult) -> None:
        super().__init__(spec, None)
        self._answer = answer

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        del argv, environment, stdin, timeout_seconds
        (self.tree / "beat").write_text("...")  # as a daemon that has died would leave
        return self._answer


class Hindering(Bubblewrap):
    """A jail in which something is in the probes' way."""

    name = "hindering"

    def __init__(self, prelude: str) -> None:
        self._prelude = prelude

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        return _HinderingSandbox(spec, self._prelude)


class _HinderingSandbox(BubblewrapSandbox):
    def __init__(self, spec: SandboxSpec, prelude: str) -> None:
        super().__init__(spec)
        self._prelude = prelude

    def exec(self, command: Sequence[str] | str, **how: Any) -> ExecResult:
        *words, code = list(command)
        hindered = code.replace("import ctypes\n", f"import ctypes, os, sys\n{self._prelude}\n", 1)
        return super().exec([*words, hindered], **how)


@pytest.mark.parametrize(
    "answer",
    [
        ExecResult(0, "", "", False, False, False, 0.0),
        ExecResult(0, "", "", True, False, False, 0.0),
        ExecResult(0, "{}", "", False, False, False, 0.0),
        ExecResult(1, "", "bash: fork: Resource temporarily unavailable\n", False, False, False, 0.0),
        ExecResult(137, "", "", False, False, True, 0.0),
        ExecResult(137, "", "[sandbox] stopped: more memory than the limit\n", True, False, True, 0.0),
        ExecResult(137, "", "", False, True, False, 0.0),
    ],
    ids=["nothing", "cut", "an empty object", "no process", "killed", "stopped", "timed out"],
)
def test_a_probe_that_never_began_shows_nothing(answer: ExecResult) -> None:
    checks = run_selftest(Answering(answer))
    assert [check.name for check in checks if check.ok] == []
    assert {check.detail.partition(":")[0] for check in checks} == {"could not be tried"}


@pytest.mark.parametrize("guard", sorted(IN_THE_WAY))
def test_a_probe_that_could_not_take_its_first_step_shows_nothing(guard: str) -> None:
    check = Bubblewrap().is_available()
    if not check.ok:
        pytest.skip(check.detail)
    (tried,) = run_selftest(Hindering(IN_THE_WAY[guard]), names=[guard])
    assert not tried.ok
    assert tried.detail.startswith("could not be tried: ")


class Failing(Bubblewrap):
    """Somebody's backend that raises what it likes."""

    name = "failing"

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        raise KeyError(str(spec.tree))


def test_a_backend_that_raises_what_it_likes_is_a_check_that_fails() -> None:
    checks = run_selftest(Failing(), names=["network", "disk"])
    assert [(check.name, check.ok) for check in checks] == [("network", False), ("disk", False)]
    assert "KeyError" in checks[0].detail


def test_without_a_folder_for_secrets_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/missing")  # a long path would be left for /tmp
    with pytest.raises(SandboxFailure, match="CR0302"):
        run_selftest(Bubblewrap(), names=["network"])
