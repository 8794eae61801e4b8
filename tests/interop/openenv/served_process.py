"""A server process that was started by the command line, watched from outside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.rollouts.environment.openenv_client import FeatureDeletionClient

PATIENCE_SECONDS = 200.0  # nothing is measured: this ends a test that hangs; shorter than HANGING_SECONDS
HANGING_SECONDS = 290  # a call that is not ended takes so long


@dataclass
class Server:
    """A server process; ``temporary`` is its whole temporary folder, which must be empty when it has ended."""

    process: subprocess.Popen[str]
    temporary: Path
    url: str = ""
    said: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"at (http://\S+)", line):
                self.url = found[1]
                self.ready.set()
        self.ready.set()

    def client(self) -> Any:
        """A synchronous client of the library; it must be closed."""
        return FeatureDeletionClient(self.url).sync()

    def sandboxes(self) -> list[Path]:
        return [*self.temporary.glob("composer-rl-scratch-*/attempt-*")]

    def descendants(self) -> list[int]:
        """Every living process below the server's."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    text = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if text[0] != "Z":
                    parents[int(entry.name)] = int(text[1])
        found, new = [], [self.process.pid]
        while new:
            new = [pid for pid, parent in parents.items() if parent in new]
            found += new
        return found

    def end(self, number: int = signal.SIGTERM) -> tuple[int, dict[str, Any]]:
        """Exit code and result; nothing is left of it."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_SECONDS)
        assert self.process.stdout is not None
        text = self.process.stdout.read()
        assert [*self.temporary.iterdir()] == []
        return code, json.loads(text)
