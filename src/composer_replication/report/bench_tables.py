"""The benchmark's figures as tables, for a terminal and for a Markdown page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

HOLDS = {True: "holds", False: "DOES NOT HOLD", None: "open"}


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a sentence, and cells; the first column is text, the others are figures."""

    title: str
    sentence: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def all_tables(result: Row) -> list[Table]:
    """Everything that was measured."""
    return [
        detectors_table(result),
        _family_table(result, "null", "False alarms on honest runs", _rate_cell),
        _family_table(result, "hacked", "Delays on hacked runs", _delay_cell),
        _family_table(
            result, "invalid", "False alarms where a condition of the guarantee is broken", _rate_cell
        ),
        _calibration_table(result),
        _heldout_table(result),
        *_recorded_tables(result),
        claims_table(result),
    ]


def detectors_table(result: Row) -> Table:
    """One row a detector and threshold: the worst null family, and the delay after a jump."""
    rows = [
        (
            row["name"],
            _figure(row["threshold"], "none"),
            "–"
            if row["false_alarm_rate"] is None
            else _rate({"rate": row["false_alarm_rate"], "ci95": row["ci95"]}),
            row["worst_family"] or "–",
            _figure(row["median_delay"], "–"),
            _figure(row["p90_delay"], "–"),
            "–" if row["missed"] is None else f"{row['missed']:.1%}",
            "–" if row["halted_before"] is None else f"{row['halted_before']:.1%}",
            _microseconds(row["microseconds_per_update"]),
        )
        for row in result["detectors"]
    ]
    return Table(
        "Detectors",
        "False alarms in the null family where they are most frequent, with the exact 95% interval; delay in "
        "evaluations after a jump of the gap from .03 to .20, of the runs not halted before. Matched: the "
        f"threshold that {result['settings']['matched_rate']:.0%} of runs at the edge reach (at-g0; the "
        "cusum-clean ones: clean).",
        (
            "detector",
            "threshold",
            "false alarms, worst null family",
            "which",
            "median",
            "P90",
            "missed",
            "before",
            "µs/update",
        ),
        tuple(rows),
    )


def claims_table(result: Row) -> Table:
    """What must hold, and whether it does."""
    rows = tuple(
        (one["name"], one["limit"], one["measured"], HOLDS[one["holds"]]) for one in result["claims"]
    )
    return Table(
        "What must hold",
        "Open: these runs cannot decide it.",
        ("claim", "limit", "measured", "verdict"),
        rows,
    )


def _family_table(result: Row, kind: str, title: str, cell: Callable[[Row, str], str]) -> Table:
    families = [family for family in result["families"] if family["kind"] == kind]
    sentence = "; ".join(f"{family['name']}: {family['sentence']}" for family in families)
    counts = {family["runs"] for family in families}
    runs = f" {max(counts):,} runs each." if counts else ""
    how = (
        " Cells: median / P90 delay, then the shares missed and halted before the onset."
        if kind == "hacked"
        else ""
    )
    return Table(
        title,
        f"{sentence}.{runs}{how}" if families else "Not simulated.",
        ("detector", *(family["name"] for family in families)),
        tuple(
            (row["name"], *(cell(row, family["name"]) for family in families)) for row in result["detectors"]
        ),
    )


def _rate_cell(row: Row, family: str) -> str:
    found = row["false_alarms"].get(family)
    return "–" if found is None else _percent(found["rate"])


def _delay_cell(row: Row, family: str) -> str:
    found = row["delays"].get(family)
    if found is None or found["missed"] is None:
        return "–" if found is None else f"all halted before ({found['halted_before']:.0%})"
    shares = [
        f"{share:.1%} {name}"
        for name, share in (("missed", found["missed"]), ("before", found["halted_before"]))
        if share > 0.0
    ]
    delay = f"{_figure(found['median'], 'never')} / {_figure(found['p90'], 'never')}"
    return f"{delay} ({', '.join(shares)})" if shares else delay


def _calibration_table(result: Row) -> Table:
    rows = result["calibration"]
    levels = sorted({row["nominal"] for row in rows})
    names = list(dict.fromkeys((row["detector"], row["family"]) for row in rows))
    by_key = {(row["detector"], row["family"], row["nominal"]): row for row in rows}
    return Table(
        "Calibration",
        "Share of runs with a false alarm, by nominal error.",
        ("detector, family", *(f"{level:.1%}" for level in levels)),
        tuple(
            (f"{name}, {family}", *(_percent(by_key[name, family, level]["rate"]) for level in levels))
            for name, family in names
        ),
    )


def _heldout_table(result: Row) -> Table:
    rows = []
    for entry in result["heldout_guard"]:
        for row in entry["runs"]:
            is_honest = "rate" in row
            found = row.get("found")
            halted = _rate(row) if is_honest else f"before the onset {row['halted_before']:.1%}"
            rows.append(
                (
                    f"{entry['name']}, {row['run']}",
                    halted,
                    "–" if found is None else f"{found:.1%}",
                    "–" if is_honest else _figure(row["median"], "never"),
                )
            )
    settings = "; ".join(
        f"{entry['name']}: " + ", ".join(f"{key} {value:g}" for key, value in entry["settings"].items())
        for entry in result["heldout_guard"]
    )
    return Table(
        "HeldOutGuard",
        f"400 updates, 128 in-loop and 32 held-out passes; hacked: proxy +.3, truth -.3. {settings}.",
        ("settings, runs", "halted honestly", "found within 20", "median delay"),
        tuple(rows),
    )


def _recorded_tables(result: Row) -> list[Table]:
    if not result["recorded"]:
        return []
    names = [row["name"] for row in result["recorded"][0]["detectors"]]
    rows = []
    for run in result["recorded"]:
        by_name = {row["name"]: row for row in run["detectors"]}
        what = "honest" if run["kind"] == "honest" else f"hacked from step {run['onset_step']}"
        rows.append(
            (
                f"{run['name']}, {what}, {run['evaluations']} evaluations",
                *(_recorded_cell(by_name[n]) for n in names),
            )
        )
    named: dict[str, list[str]] = {}
    for run in result["recorded"]:
        named.setdefault(run["note"], []).append(run["name"])
    notes = "; ".join(f"{', '.join(runs)}: {note}" for note, runs in named.items())
    return [
        Table(
            "Recorded runs",
            "The step of the alarm at the nominal threshold, with its delay in evaluations from the onset. The same "
            f"few tasks are evaluated every time, so that no guarantee covers these runs. {notes}.",
            ("run", *names),
            tuple(rows),
        )
    ]


def _recorded_cell(row: Row) -> str:
    if not row["measured"]:
        return "–"
    if row["alarm_step"] is None:
        return "silent"
    return f"step {row['alarm_step']}" + (f" (delay {row['delay']})" if row["delay"] else "")


def markdown(result: Row) -> str:
    """All tables as one Markdown page."""
    parts = ["# The guard's benchmark", _preamble(result)]
    for table in all_tables(result):
        head = "| " + " | ".join(table.head) + " |"
        rule = "|---" * len(table.head) + "|"
        lines = ["| " + " | ".join(row) + " |" for row in table.rows]
        parts += [f"## {table.title}", table.sentence, "\n".join([head, rule, *lines])]
    return "\n\n".join(parts) + "\n"


def plain(result: Row) -> str:
    """What a terminal shows: the detectors, the honest and hacked families of ours, and the claims."""
    parts = [_preamble(result)]
    for table in (detectors_table(result), claims_table(result)):
        cells = (table.head, *table.rows)
        widths = [max(len(row[place]) for row in cells) for place in range(len(table.head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        parts.append("\n".join([table.title, table.sentence, "", *lines]))
    return "\n\n".join(parts)


def _preamble(result: Row) -> str:
    settings = result["settings"]
    recorded = ", ".join(settings["recorded_runs"]) or "none"
    return (
        f"{settings['runs']:,} runs a null family, half of it elsewhere; {settings['evaluations']} evaluations of "
        f"{settings['tasks_per_evaluation']} tasks; seed {settings['seed']}; recorded runs: {recorded}; "
        f"{result['seconds']:g} seconds."
    )


def _rate(row: Row) -> str:
    low, high = row["ci95"]
    return f"{_percent(row['rate'])} ({_percent(low)} to {_percent(high)})"


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def _microseconds(value: float) -> str:
    if value < 0.001:
        return "< 0.001"
    return f"{value:,.0f}" if value >= 10.0 else f"{value:.2g}"


def _figure(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.4g}"
