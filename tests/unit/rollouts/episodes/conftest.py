"""A server that speaks as vLLM does, in a thread, and goes wrong when it is told to; summaries of a few letters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from episode_parts import limits
from policy_server import PolicyServer


@pytest.fixture(scope="module", autouse=True)
def short_summaries() -> Iterator[None]:
    with limits(SUMMARY_REQUEST="sum up", SUMMARY_INTRODUCTION="before:"):
        yield


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    with PolicyServer.running() as server:
        yield server
