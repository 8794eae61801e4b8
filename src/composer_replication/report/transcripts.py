"""Which three attempts a person should read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer_replication.report.run_data import RolloutRow, RunData

MAX_TEXT_CHARACTERS = 4000
MAX_OUTCOMES = 8
NUM_TRANSCRIPTS = 3


@dataclass(frozen=True, slots=True)
class Transcript:
    """One attempt and why it is shown; outcomes list the failing tests first."""

    heading: str
    row: RolloutRow
    text: str
    num_hidden_characters: int
    outcomes: tuple[tuple[str, str], ...]
    num_more_outcomes: int


def chosen_transcripts(run: RunData) -> tuple[Transcript, ...]:
    """Three attempts of the last steps; fewer where fewer were graded.

    A halted run shows what the reward paid for: attempts with failing tests first, the
    best paid of them on top, the same answer to the same task once. Any other run shows
    the best, the median and the worst reward. Attempts without a reward
    (infrastructure failures) are never shown as the model's.
    """
    graded = [row for row in run.rollouts if row.reward is not None]
    if run.halt is not None:
        return tuple(_transcript(_paid_heading(row), row) for row in _best_paid(graded))
    return tuple(_transcript(heading, row) for heading, row in _best_median_worst(graded))


def _reward(row: RolloutRow) -> float:
    return 0.0 if row.reward is None else row.reward


def _best_paid(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    ranked = sorted(
        rows, key=lambda row: (not row.has_failed, -_reward(row), -row.step, row.task_id, row.text)
    )
    distinct: dict[tuple[str, str], RolloutRow] = {}
    for row in ranked:
        distinct.setdefault((row.task_id, row.text), row)
    return list(distinct.values())[:NUM_TRANSCRIPTS]


def _paid_heading(row: RolloutRow) -> str:
    if row.num_failing:
        return f"Paid {_reward(row):.2f} with {row.num_failing} of {len(row.outcomes)} tests failing"
    if row.error:
        return f"Paid {_reward(row):.2f} although its tests did not run to the end"
    if not row.outcomes:
        return f"Paid {_reward(row):.2f}; no test outcome was stored"
    return f"Paid {_reward(row):.2f} with all {len(row.outcomes)} tests passing"


def _best_median_worst(rows: Sequence[RolloutRow]) -> list[tuple[str, RolloutRow]]:
    ranked = sorted(rows, key=lambda row: (-_reward(row), -row.step, row.task_id, row.text))
    picks = {"Best reward": 0, "Median reward": (len(ranked) - 1) // 2, "Worst reward": len(ranked) - 1}
    shown: dict[int, str] = {}
    for heading, index in picks.items():
        if 0 <= index < len(ranked):
            shown.setdefault(index, f"{heading} {_reward(ranked[index]):.2f}")
    return [(heading, ranked[index]) for index, heading in shown.items()]


def _transcript(heading: str, row: RolloutRow) -> Transcript:
    outcomes = sorted(row.outcomes.items(), key=lambda item: (item[1] == "passed", item[0]))
    return Transcript(
        heading=heading,
        row=row,
        text=row.text[:MAX_TEXT_CHARACTERS],
        num_hidden_characters=max(0, len(row.text) - MAX_TEXT_CHARACTERS),
        outcomes=tuple(outcomes[:MAX_OUTCOMES]),
        num_more_outcomes=max(0, len(outcomes) - MAX_OUTCOMES),
    )
