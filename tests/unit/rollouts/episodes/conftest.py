"""A server that speaks as vLLM does, in a thread, and goes wrong when it is told to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from policy_server import PolicyServer


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    with PolicyServer.running() as server:
        yield server
