"""What is known of a rollout when a hint is written: typed, and without any golden code or hidden test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from composer_replication.records import Rollout, ToolSpec
from composer_replication.rollouts.grading import FORGED
from composer_replication.rollouts.tokens.chat import ObservedTurn


@dataclass(frozen=True, slots=True)
class FailedTest:
    """A visible test that failed: its node id, and its assertions as they stand in its source."""

    node_id: str
    assertion: str = ""


@dataclass(frozen=True, slots=True)
class ObservedRollout:
    """A rollout with everything that a hint may be made of.

    ``tools`` are those the policy could call. ``path`` and ``answered_text`` are the file that a single-turn answer was
    spliced into and its text with the answer, ``answer`` the spliced span, ``indent`` the indentation of the body,
    ``function_start`` where in the prompt's text its function begins. ``failed_tests`` are visible tests only.
    ``is_leak`` tells whether a text shows what must stay hidden: it is asked about every hint, and it is
    all that this side knows of the golden code.
    """

    rollout: Rollout
    turns: tuple[ObservedTurn, ...]
    tools: tuple[ToolSpec, ...] = ()
    path: str = ""
    answered_text: str | None = None
    answer: str | None = None
    indent: str = ""
    function_start: int = 0
    failed_tests: tuple[FailedTest, ...] = ()
    is_leak: Callable[[str], bool] = field(default=lambda _: False, repr=False, compare=False)

    @property
    def run_error(self) -> str:
        """Why the test run itself failed; empty where that tells of a forgery, or names a test that the policy cannot read."""
        score = self.rollout.score
        if score is None or score.error.startswith(FORGED):
            return ""
        paid = (test.partition("[")[0].rpartition("::")[2] for test in score.paid)
        return "" if any(name in score.error for name in paid) else score.error


@dataclass(frozen=True, slots=True)
class Fault:
    """A turn that went wrong, and why.

    ``kind`` is one of docs/hints.md; ``evidence`` quotes what shows it; ``subject`` is what it is about: the
    tool, the argument, the path, the test; ``call_idx`` is the call of the turn, None for the turn as a whole.
    """

    turn_idx: int
    kind: str
    evidence: str
    subject: str = ""
    call_idx: int | None = None
