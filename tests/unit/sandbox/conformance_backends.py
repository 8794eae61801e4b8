"""Backends for the tests of the conformance suite: one that miscounts, one that holds nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from composer_replication.records import ExecResult, SandboxSpec
from composer_replication.sandbox import LocalSandbox
from composer_replication.sandbox.bubblewrap import Bubblewrap, BubblewrapSandbox
from composer_replication.sandbox.keeper_process import NoIsolation


class _Miscounting(BubblewrapSandbox):
    def exec(self, *words: Any, **options: Any) -> ExecResult:
        done = super().exec(*words, **options)
        return dataclasses.replace(done, exit_code=done.exit_code + 1) if done.exit_code == 5 else done


class Wrong(Bubblewrap):
    """It holds, and tells 6 for an exit code of 5; that it cannot take a NUL byte is claimed and not so."""

    name = "wrong"
    known_failures = {  # noqa: RUF012  as the documentation shows it
        "test_one_text_is_for_the_shell": "an exit code of 5 becomes 6",
        "test_text_that_no_call_of_the_system_takes_is_refused": "a claim that does not come true",
    }

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        return _Miscounting(spec)


class Open(NoIsolation):
    """No jail under an innocent name."""

    name = "open"
