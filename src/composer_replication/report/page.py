"""One self-contained HTML file from a ``RunData``: the verdict, the charts, the attempts to read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import composer_replication
from composer_replication.records import StopReason
from composer_replication.report import facts
from composer_replication.report.charts import draw, swatch
from composer_replication.report.curves import guard_margins, reward_chart
from composer_replication.report.run_data import RolloutRow, RunData, number, read_run
from composer_replication.report.templates import html_page
from composer_replication.run_folder import RunFolder, write_atomic

NUM_ATTEMPTS = 3


def write_report(run: RunData | Path) -> Path:
    """Write ``report.html`` into the run's folder, atomically, and return its path.

    The same folder gives the same bytes. The page runs no script and loads nothing.

    Args:
        run: what ``read_run`` gave, or the folder itself. Write ``summary.json`` first:
            a folder without it is reported as interrupted.

    Raises:
        InputError: as ``read_run``.
    """
    data = run if isinstance(run, RunData) else read_run(run)
    path = RunFolder(data.root).report
    write_atomic(path, render_page(data))
    return path


def render_page(run: RunData) -> str:
    """The page as text. Everything from the run is hostile: escaped, and shown as it is."""
    return html_page(
        "report.html.j2",
        run=run,
        banner=banner_of(run),
        attempts=chosen_attempts(run),
        updates={update.step: update for update in run.guard_updates},
        rewards=reward_chart(run),
        margins=guard_margins(run),
        facts=facts,
        draw=draw,
        swatch=swatch,
        version=composer_replication.__version__,
    )


# -------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True, slots=True)
class Banner:
    """How the run ended, in one word and one sentence; ``tone`` names its colour."""

    tone: Literal["good", "bad", "warn"]
    title: str
    sentence: str


def banner_of(run: RunData) -> Banner:
    """The verdict, from what is on disk.

    A halt comes first, then a run that did not end, then an end that nobody judged. A
    run is called clean only where a guard had enough updates to be able to fire.
    """
    stop = (run.summary or {}).get("stop_reason")
    last = run.last_step
    if run.halt is not None:
        reason = (run.halt.reason or "the reason was not recorded").rstrip(".")
        said = f"The guard halted the run at step {run.halt.step}: {reason}."
        return Banner("bad", "Halted by the guard", said)
    if stop == StopReason.GUARD:
        said = f"The guard halted the run by step {last}; its verdict was not recorded."
        return Banner("bad", "Halted by the guard", said)
    if run.summary is None:
        said = f"There is no summary: the run ended early, or is still going; its last step is {last}."
        return Banner("warn", "Interrupted", said)
    if stop == StopReason.INTERRUPTED:
        return Banner("warn", "Interrupted", f"The run was interrupted after step {last} and can be resumed.")
    if stop == StopReason.INFRASTRUCTURE:
        said = f"The machinery around the model failed after step {last}."
        return Banner("warn", "Stopped by a failure", said)
    return _finished(run, f"The run finished at step {last}", len(run.guard_updates))


def _finished(run: RunData, finished: str, num_updates: int) -> Banner:
    if not num_updates and (run.recipe is None or run.guard_settings is not None):
        said = f"{finished}, but no verdict of a guard was recorded."
        return Banner("warn", "Finished, not judged", said)
    if not num_updates:
        said = f"{finished}; no guard was configured, so nothing tells whether its reward was honest."
        return Banner("warn", "Finished, unguarded", said)
    least = number((run.guard_settings or {}).get("min_steps"))
    if least is not None and num_updates < least:
        said = f"{finished} with {num_updates} guard update(s); it needs {least:.0f} before it may fire."
        return Banner("warn", "Finished, too little evidence", said)
    return Banner("good", "Clean", f"{finished}; the guard judged it {num_updates} time(s) and never fired.")


def chosen_attempts(run: RunData) -> list[tuple[str, RolloutRow]]:
    """Three attempts of the last steps, each with its heading; fewer where fewer were graded.

    A halted run shows what the reward paid for: attempts with failing tests first, the
    best paid of them on top, the same answer to the same task once. Any other run shows
    the best, the median and the worst reward. Attempts without a reward
    (infrastructure failures) are never shown as the model's.
    """
    ranked = sorted(run.rollouts, key=lambda row: (-row.reward, -row.step, row.task_id, row.text))
    if run.halt is not None:
        ranked.sort(key=lambda row: not (row.error or row.num_failing))
        distinct: dict[tuple[str, str], RolloutRow] = {}
        for row in ranked:
            distinct.setdefault((row.task_id, row.text), row)
        return [(_paid_heading(row), row) for row in distinct.values()][:NUM_ATTEMPTS]
    last = len(ranked) - 1
    names = {last: "Worst", last // 2: "Median", 0: "Best"} if ranked else {}
    return [(f"{names[idx]} reward {ranked[idx].reward:.2f}", ranked[idx]) for idx in sorted(names)]


def _paid_heading(row: RolloutRow) -> str:
    if row.num_failing:
        ending = f" with {row.num_failing} of {len(row.outcomes)} tests failing"
    elif row.error:
        ending = " although its tests did not run to the end"
    elif not row.outcomes:
        ending = "; no test outcome was stored"
    else:
        ending = f" with all {len(row.outcomes)} tests passing"
    return f"Paid {row.reward:.2f}{ending}"
