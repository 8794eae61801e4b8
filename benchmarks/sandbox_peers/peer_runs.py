"""Runs commands as two agents do, in an interpreter that has them; asked and answering in lines of JSON.

Each line of standard input is ``{"who": name, "num": count, "action": text}``; the answer is a list
of seconds, one a command. ``mini`` is mini-swe-agent's bubblewrap environment with its defaults.
``rex-execute`` and ``rex-session`` are swe-rex's local runtime, which has no jail: its single
command, and the action in a shell session that its agents use.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_PATIENCE_SECONDS = 300.0  # a busy machine must not end the run


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _expect(exit_code: int | None) -> None:
    if exit_code != 0:
        raise SystemExit(f"the command ended with {exit_code}")


class Peers:
    """The three, made once; a session stays open as it does for an agent."""

    def __init__(self) -> None:
        os.environ.update({"MSWEA_SILENT_STARTUP": "1", "SWE_REX_LOG_STREAM_LEVEL": "ERROR"})
        logging.disable(logging.WARNING)
        from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
        from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
        from swerex.runtime.local import LocalRuntime

        self.mini = BubblewrapEnvironment()
        self.runtime = LocalRuntime()
        self.loop = asyncio.new_event_loop()
        self.action, self.command = BashAction, Command
        self.loop.run_until_complete(
            self.runtime.create_session(CreateBashSessionRequest(startup_timeout=_PATIENCE_SECONDS))
        )

    def run(self, who: str, action: str) -> None:
        """One command."""
        if who == "mini":
            _expect(self.mini.execute({"command": action})["returncode"])
        elif who == "rex-execute":
            asked = self.runtime.execute(self.command(command=action, shell=True))
            _expect(self.loop.run_until_complete(asked).exit_code)
        else:
            said = self.loop.run_until_complete(
                self.runtime.run_in_session(self.action(command=action, timeout=_PATIENCE_SECONDS))
            )
            _expect(said.exit_code)

    def close(self) -> None:
        """End the session."""
        self.loop.run_until_complete(self.runtime.close())
        self.mini.cleanup()


def main() -> None:
    """Answer until there is nothing more to answer."""
    peers = Peers()
    answers = os.fdopen(os.dup(1), "w")  # whatever they print goes elsewhere
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        seconds = [
            _timed(lambda: peers.run(order["who"], order["action"]))  # noqa: B023  called at once
            for _ in range(order["num"])
        ]
        print(json.dumps(seconds), file=answers, flush=True)
    peers.close()


if __name__ == "__main__":
    main()
