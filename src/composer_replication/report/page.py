"""One self-contained HTML file from a ``RunData``: the verdict, the charts, the attempts to read; and one for several replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import composer_replication
from composer_replication.records import StopReason
from composer_replication.report import facts
from composer_replication.report.charts import draw, swatch
from composer_replication.report.curves import guard_margins, reward_chart
from composer_replication.report.run_data import RunData, number, read_run
from composer_replication.report.templates import html_page
from composer_replication.run_folder import RunFolder, read_json, read_jsonl, write_atomic

NUM_ATTEMPTS = 3


def write_report(run: RunData | Path) -> Path:
    """Write ``report.html`` into the run's folder, atomically, and return its path.

    The same folder gives the same bytes. The page runs no script and loads nothing. Everything from the run is hostile:
    escaped, and shown as it is.

    Args:
        run: what ``read_run`` gave, or the folder itself. Write ``summary.json`` first:
            a folder without it is reported as interrupted.

    Raises:
        InputError: as ``read_run``.
    """
    data = run if isinstance(run, RunData) else read_run(run)
    path = RunFolder(data.root).report
    page = html_page(
        "report.html.j2",
        run=data,
        banner=banner_of(data),
        attempts=chosen_attempts(data),
        updates={update.step: update for update in data.guard_updates},
        rewards=reward_chart(data),
        margins=guard_margins(data),
        facts=facts,
        draw=draw,
        swatch=swatch,
        version=composer_replication.__version__,
    )
    write_atomic(path, page)
    return path


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
    last, num_updates = max(run.metrics), len(run.guard_updates)
    least = number((run.guard_settings or {}).get("min_steps"))
    finished = f"The run finished at step {last}"
    if run.halt is not None:
        reason = (run.halt.reason or "the reason was not recorded").rstrip(".")
        said = f"The guard halted the run at step {run.halt.step}: {reason}."
        return Banner("bad", "Halted by the guard", said)
    if (run.summary or {}).get("stop_reason") == StopReason.GUARD:
        said = f"The guard halted the run by step {last}; its verdict was not recorded."
        return Banner("bad", "Halted by the guard", said)
    if run.summary is None:
        said = f"There is no summary: the run ended early, or is still going; its last step is {last}."
        return Banner("warn", "Interrupted", said)
    if not num_updates and (run.recipe is None or run.guard_settings is not None):
        return Banner("warn", "Finished, not judged", f"{finished}, but no verdict of a guard was recorded.")
    if not num_updates:
        said = f"{finished}; no guard was configured, so nothing tells whether its reward was honest."
        return Banner("warn", "Finished, unguarded", said)
    if least is not None and num_updates < least:
        said = f"{finished} with {num_updates} guard update(s); it needs {least:.0f} before it may fire."
        return Banner("warn", "Finished, too little evidence", said)
    return Banner("good", "Clean", f"{finished}; the guard judged it {num_updates} time(s) and never fired.")


def chosen_attempts(run: RunData) -> list[tuple[str, Mapping[str, Any]]]:
    """Three attempts of the last steps, each with its rank; fewer where fewer were graded.

    A halted run shows what the reward paid for: attempts with failing tests first, the
    best paid of them on top, the same answer to the same task once. Any other run shows
    the best, the median and the worst reward. Attempts without a reward
    (infrastructure failures) are never shown as the model's.
    """
    ranked = sorted(run.rollouts, key=lambda row: (-row["reward"], -row["step"], row["task_id"], row["text"]))
    if run.halt is not None:
        ranked.sort(key=lambda row: not (row["error"] or row["num_failing"]))
        distinct: dict[tuple[str, str], Mapping[str, Any]] = {}
        for row in ranked:
            distinct.setdefault((row["task_id"], row["text"]), row)
        return [("Paid", row) for row in distinct.values()][:NUM_ATTEMPTS]
    last = len(ranked) - 1
    names = {last: "Worst", last // 2: "Median", 0: "Best"} if ranked else {}
    return [(f"{names[idx]} reward", ranked[idx]) for idx in sorted(names)]


# -------------------------------------------------------------------------------- several replicas


def replica_folders(root: Path) -> list[Path]:
    """The run folders of replicas in a folder, by number; none where it is a run folder itself."""
    if RunFolder(root).recipe.is_file():
        return []
    found = [path for path in root.glob("replica-*") if RunFolder(path).recipe.is_file()]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def write_replicas_report(root: Path, folders: list[Path]) -> dict[str, Any]:
    """Write each replica's own report, and one page for all; what the page says, as a dict."""
    for folder in folders:
        if RunFolder(folder).metrics.is_file():
            write_report(folder)
    steps, replicas = merged_outer_steps(folders), [_replica(folder) for folder in folders]
    table = {"replicas": replicas, "outer_steps": steps, "curriculum": _curriculum(folders)}
    num_agreed = sum(step["agreed"] == "equal" for step in steps)
    path = root.resolve() / "report.html"
    note = f"After {num_agreed} of {len(steps)} outer steps all that had merged held equal outer weights, bit for bit."
    write_atomic(path, html_page("replicas.html.j2", name=root.resolve().name, note=note, **table))
    return {"report": str(path), **table}


def merged_outer_steps(folders: list[Path]) -> list[dict[str, Any]]:
    """One row an outer step; of a replica that took it twice (resumed) the newer counts."""
    by_step: dict[int, dict[str, dict[str, Any]]] = {}
    for folder in folders:
        for row in read_jsonl(RunFolder(folder).outer_steps):
            by_step.setdefault(row["outer_step"], {})[folder.name] = row
    steps = []
    for _, rows in sorted(by_step.items()):
        first, *_ = rows.values()
        is_equal = len({row["outer_sha256"] for row in rows.values()}) == 1
        stall = max(row["stall_seconds"] for row in rows.values())
        row = {key: first[key] for key in ("outer_step", "present", "tokens", "divergence")}
        steps.append(row | {"stall_seconds": stall, "agreed": "equal" if is_equal else "DIFFERENT"})
    return steps


def _curriculum(folders: list[Path]) -> dict[str, int]:
    """How many tasks have which status; no two replicas share a task, so that the sum is the merge of their states."""
    counts: Counter[str] = Counter()
    for folder in folders:
        rows = [row for row in read_jsonl(RunFolder(folder).metrics) if "curriculum/num_active" in row]
        for status in ("active", "retired") if rows else ():
            counts[status] += int(rows[-1][f"curriculum/num_{status}"])
    return dict(counts)


def _replica(folder: Path) -> dict[str, Any]:
    run = RunFolder(folder)
    rows = read_jsonl(run.outer_steps)
    summary = read_json(run.summary) if run.summary.is_file() else {}
    megabytes = {name: round(value / 1e6, 3) for name, value in rows[-1]["bytes"].items()} if rows else {}
    return {
        "name": folder.name,
        "steps": summary.get("steps", "not finished"),
        **{key: summary.get(key) for key in ("verdict", "reason", "reward_last", "heldout_last")},
        "merges": len({row["outer_step"] for row in rows}),
        "sent": megabytes.get("sent/outer", 0.0),
        "received": megabytes.get("received/outer", 0.0),
        "states": round(megabytes.get("sent/states", 0.0) + megabytes.get("received/states", 0.0), 3),
        "stalled": round(sum(row["stall_seconds"] for row in rows), 2),
        "weights": str(summary.get("parameter_sha256", ""))[:12],
    }
