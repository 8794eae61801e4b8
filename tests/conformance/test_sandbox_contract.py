"""The contract that ships with the package, held up to every backend of this machine."""

from __future__ import annotations

import os

import pytest
from ordinary_user import as_ordinary_user

from composer_replication.sandbox.choice import BACKENDS, ONLY_BY_NAME
from composer_replication.sandbox.conformance.test_commands import *  # noqa: F403  the tests are the names
from composer_replication.sandbox.conformance.test_files import *  # noqa: F403
from composer_replication.sandbox.conformance.test_limits import *  # noqa: F403
from composer_replication.sandbox.conformance.test_walls import *  # noqa: F403


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("name", sorted(set(BACKENDS) - set(ONLY_BY_NAME)))
def test_every_guard_holds_for_an_ordinary_user(name: str) -> None:
    """The self-test again, without root: other code paths protect an ordinary user."""
    script = (
        "import json; from composer_replication.sandbox import choose_backend, run_selftest\n"
        f"backend = choose_backend({name!r}); check = backend.is_available()\n"
        "print(json.dumps({'skip': check.detail} if not check.ok else\n"
        "    {c.name: c.ok or c.detail for c in run_selftest(backend)}))"
    )
    checks = as_ordinary_user(script)
    assert set(checks.values()) == {True}, checks
    assert len(checks) >= 12
