"""Environments that fail: at their start, under a command, or for want of a way to close the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bubblewrap_environment import BubblewrapEnvironment
from harbor.environments.capabilities import EnvironmentCapabilities

if TYPE_CHECKING:
    from harbor.environments.base import ExecResult


class NeverStarts(BubblewrapEnvironment):
    async def start(self, force_build: bool) -> None:
        raise RuntimeError("the image cannot be pulled\nno such host")


class OpenNetwork(BubblewrapEnvironment):
    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()


class LosesCommands(BubblewrapEnvironment):
    async def exec(self, command: str, **words: object) -> ExecResult:
        if "start.py run" in command:
            raise ConnectionResetError("the service hung up")
        return await super().exec(command, **words)


class NoProgram(BubblewrapEnvironment):
    """Its image lacks what ours is run by."""

    async def exec(self, command: str, **words: object) -> ExecResult:
        return await super().exec(command.replace("python3", "no-such-python3"), **words)
