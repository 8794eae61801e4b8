"""How the run ended, in one word and one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer_replication.records import StopReason
from composer_replication.report.run_data import GuardUpdate, RunData, number

Tone = Literal["good", "bad", "warn"]


@dataclass(frozen=True, slots=True)
class Banner:
    """The verdict on the page's top; ``tone`` names its colour."""

    tone: Tone
    title: str
    sentence: str


def banner_of(run: RunData) -> Banner:
    """The verdict, from what is on disk.

    A halt comes first, then a run that did not end, then an end that nobody judged. A
    run is called clean only where a guard had enough updates to be able to fire.
    """
    stop = str((run.summary or {}).get("stop_reason") or "")
    last = run.steps[-1].step
    if run.halt is not None:
        return _halted(run.halt)
    if stop == StopReason.GUARD:
        return Banner(
            "bad",
            "Halted by the guard",
            f"The guard halted the run by step {last}; its verdict was not recorded.",
        )
    if run.summary is None:
        return Banner(
            "warn",
            "Interrupted",
            f"There is no summary: the run ended early, or is still going; its last step is {last}.",
        )
    if stop == StopReason.INTERRUPTED:
        return Banner("warn", "Interrupted", f"The run was interrupted after step {last} and can be resumed.")
    if stop == StopReason.INFRASTRUCTURE:
        return Banner(
            "warn", "Stopped by a failure", f"The machinery around the model failed after step {last}."
        )
    return _finished(run, last)


def _halted(halt: GuardUpdate) -> Banner:
    reason = halt.reason or "the reason was not recorded"
    return Banner(
        "bad", "Halted by the guard", f"The guard halted the run at step {halt.step}: {reason.rstrip('.')}."
    )


def _finished(run: RunData, last: int) -> Banner:
    num_updates = len(run.guard_updates)
    if num_updates == 0:
        if run.recipe is None or run.guard_settings is not None:
            return Banner(
                "warn",
                "Finished, not judged",
                f"The run finished at step {last}, but no verdict of a guard was recorded.",
            )
        return Banner(
            "warn",
            "Finished, unguarded",
            f"The run finished at step {last}; no guard was configured, so nothing tells whether its reward was honest.",
        )
    min_steps = number((run.guard_settings or {}).get("min_steps"))
    if min_steps is not None and num_updates < min_steps:
        return Banner(
            "warn",
            "Finished, too little evidence",
            f"The run finished at step {last} with {num_updates} guard "
            f"{'update' if num_updates == 1 else 'updates'}; it needs {min_steps:.0f} before it may fire.",
        )
    return Banner(
        "good",
        "Clean",
        f"The run finished at step {last}; the guard judged it {num_updates} "
        f"{'time' if num_updates == 1 else 'times'} and never fired.",
    )
