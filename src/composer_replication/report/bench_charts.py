"""Operating curve and calibration as SVG files that stand alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from composer_replication.report.line_chart import Chart, Series, draw, swatch

_WIDTH, _HEIGHT, _LEGEND_LINE = 980, 420, 20
_PER_LINE = 4
_COLOURS = (
    "#1559b7", "#b4540a", "#17683b", "#8a3ffc", "#b3261e", "#00748a", "#855600", "#c2188b", "#5d6068",
    "#4d7c0f", "#9f1239", "#334155", "#65a30d", "#7b4b94", "#0f766e", "#a16207",
)  # fmt: skip
_CHART = re.compile(r'<svg class="chart" viewBox="\S+ (\S+) (\S+) (\S+)"')
_MOST_PERCENT = 10.0
_MOST_DELAY = 60
"""Beyond them lies nothing that anybody would choose."""


def operating_curve(result: Mapping[str, Any]) -> str:
    """False alarms at the edge of what is tolerated, in percent, against the median delay after a jump."""
    series = []
    for index, curve in enumerate(result["operating_curves"]):
        tuned = [point for point in curve["points"] if not point["is_nominal"]]
        nominal = [point for point in curve["points"] if point["is_nominal"]]
        css = f"curve colour-{index}"
        if points := _points(tuned):
            series.append(Series(curve["detector"], css, points, has_dots=True))
        if points := _points(nominal):
            series.append(Series("", f"{css} nominal", points, has_dots=True, has_line=False))
    chart = Chart(
        key="operating-curve",
        title="Operating curve",
        description="Median delay against false alarms, by threshold; large dots are nominal thresholds.",
        x_label="runs of gap g0 with a false alarm in 400 evaluations, percent",
        y_label="median delay after a jump of the gap from .03 to .20, evaluations (large dot: nominal threshold)",
        series=tuple(series),
        width=_WIDTH,
        height=_HEIGHT,
    )
    return _standalone(chart)


def calibration(result: Mapping[str, Any]) -> str:
    """Nominal against empirical error, in percent, in the null family that is worst at each level."""
    rows = result["calibration"]
    series = [Series("nominal", "curve diagonal", ((0.0, 0.0), (10.0, 10.0)))]
    for index, name in enumerate(dict.fromkeys(row["detector"] for row in rows)):
        levels = sorted({row["nominal"] for row in rows if row["detector"] == name})
        worst = [
            (100 * level, min(_MOST_PERCENT, 100 * max(row["rate"] for row in _at(rows, name, level))))
            for level in levels
        ]
        series.append(Series(name, f"curve colour-{index}", worst, has_dots=True))
    chart = Chart(
        key="calibration",
        title="Calibration",
        description="Empirical error of the worst null family against the nominal one.",
        x_label="nominal false-alarm probability, percent",
        y_label=f"false alarms in the worst null family, percent (cut at {_MOST_PERCENT:g})",
        series=tuple(series),
        width=_WIDTH,
        height=_HEIGHT,
    )
    return _standalone(chart)


def _points(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, float | None]]:
    """Sorted by false alarms; those beyond the picture, or without a median delay, are left out."""
    found = [
        (100 * point["rate"], float(point["delay"]["median"]))
        for point in points
        if point["delay"]["median"] is not None
        and 100 * point["rate"] <= _MOST_PERCENT
        and point["delay"]["median"] <= _MOST_DELAY
    ]
    return sorted(found)


def _at(rows: Sequence[Mapping[str, Any]], name: str, level: float) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["detector"] == name and row["nominal"] == level]


def _standalone(chart: Chart) -> str:
    """The chart with its legend and style, as one file that needs nothing else."""
    named = [series for series in chart.series if series.label]
    legend = []
    for index, series in enumerate(named):
        x, y = 14 + (index % _PER_LINE) * 240, 12 + (index // _PER_LINE) * _LEGEND_LINE
        picture = swatch(series).replace(
            '<svg class="swatch"', f'<svg x="{x}" y="{y}" width="28" height="12"', 1
        )
        legend += [picture, f'<text x="{x + 34}" y="{y + 10}">{escape(series.label)}</text>']
    top = 12 + -(-len(named) // _PER_LINE) * _LEGEND_LINE + 8
    inner = _CHART.sub(rf'<svg y="{top}" width="\2" height="\3" viewBox="0 \1 \2 \3"', draw(chart), count=1)
    css = resources.files("composer_replication.report").joinpath("report.css").read_text(encoding="utf-8")
    colours = "".join(
        f"svg .colour-{index} {{ stroke: {colour}; fill: {colour}; }}\n"
        for index, colour in enumerate(_COLOURS)
    )
    own = (
        f"{colours}svg .curve path {{ stroke-width: 1.75; }}\nsvg .nominal {{ stroke-width: 6; }}\n"
        "svg .diagonal { stroke: var(--soft); stroke-dasharray: 5 4; fill: none; }\n"
    )
    height = top + _HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}">\n<style>{escape(css + own, quote=False)}</style>\n'
        f'<rect width="{_WIDTH}" height="{height}" style="fill: var(--page)"/>\n'
        + "\n".join(legend)
        + f"\n{inner}\n</svg>\n"
    )
