"""Several replicas' run folders as one page: outer steps, who took part, how far they had parted, bytes and stalls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from composer_replication.report.page import write_report
from composer_replication.report.templates import html_page
from composer_replication.run_folder import RunFolder, read_json, read_jsonl, write_atomic


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
        "verdict": summary.get("verdict", ""),
        "reason": summary.get("reason", ""),
        "merges": len({row["outer_step"] for row in rows}),
        "sent": megabytes.get("sent/outer", 0.0),
        "received": megabytes.get("received/outer", 0.0),
        "states": round(megabytes.get("sent/states", 0.0) + megabytes.get("received/states", 0.0), 3),
        "stalled": round(sum(row["stall_seconds"] for row in rows), 2),
        "weights": str(summary.get("parameter_sha256", ""))[:12],
    }
