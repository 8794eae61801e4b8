"""How a candidate that is no task is told from a sandbox that broke."""

from __future__ import annotations


class GateFailed(Exception):
    """A candidate that is no task; ``gate`` is the short name that is counted."""

    def __init__(self, gate: str, detail: str) -> None:
        super().__init__(gate, detail)  # as they came, so that it can be pickled
        self.gate = gate
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.gate}: {self.detail}"
