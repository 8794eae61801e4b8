"""Line charts as SVG: no script, no style attribute, no external resource.

Colours are CSS classes of the page, so that a chart follows the reader's light or dark
setting. Positions are plain presentation attributes in the units of the ``viewBox``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from operator import itemgetter

from composer_replication.report.templates import template

LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 42.0, 44.0
"""Margins around the plot, in units of the view box."""

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """A curve; a point whose y is None breaks it. ``css`` names its colour and dash."""

    label: str
    css: str
    points: Sequence[Point]
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart by step; ``key`` makes its element ids unique in the page.

    The x axis spans the points and marks; the y axis spans them, the limits, zero and
    ``y_span``, rounded outwards to whole ticks.

    Attributes:
        title: what is drawn; "by step" is added.
        description: one sentence, which also says why there is no chart where there are no series.
        limits: (label, y) of horizontal lines that a curve should stay below.
        marks: (label, x) of vertical lines.
    """

    key: str
    title: str
    description: str
    series: Sequence[Series]
    limits: Sequence[tuple[str, float]] = ()
    marks: Sequence[tuple[str, float]] = ()
    y_label: str = ""
    y_span: tuple[float, float] | None = None
    width: int = 340
    height: int = 240
    whole_y_ticks: bool = False


class Axes:
    """The mapping from data to view box, wide and high enough for everything the chart draws."""

    def __init__(self, chart: Chart) -> None:
        self.left, self.right = LEFT, chart.width - RIGHT
        self.top, self.bottom = TOP, chart.height - BOTTOM
        xs = [x for series in chart.series for x, _ in series.points] + [x for _, x in chart.marks]
        ys = [y for series in chart.series for _, y in series.points if y is not None]
        ys += [y for _, y in chart.limits] + [0.0] + list(chart.y_span or ())
        low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
        self.x_low, self.x_high = (low, high) if low < high else (low - 1, high + 1)
        low, high = min(ys), max(ys)
        high = high if low < high else low + 1
        step = tick_step(high - low, 5, whole=chart.whole_y_ticks)
        self.y_low, self.y_high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step

    def x(self, value: float) -> float:
        """Left + (value - low) / (high - low) * plot width."""
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Top + (high - value) / (high - low) * plot height; upwards is smaller."""
        return self.top + (self.y_high - value) / (self.y_high - self.y_low) * (self.bottom - self.top)


def tick_step(span: float, max_ticks: int, *, whole: bool = False) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts ``span`` (above 0) at most ``max_ticks`` times."""
    power = 10.0 ** math.floor(math.log10(span / max_ticks))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * max_ticks >= span * (1 - 1e-9))
    return max(1.0, step) if whole else step


def thinned(points: Sequence[Point], axes: Axes) -> list[Point]:
    """At most first, lowest, highest and last of the points that share a unit of width.

    A break stays a break; a run of ten thousand steps stays a small file.
    """
    kept: list[Point] = []
    for (_, is_break), group in groupby(points, lambda point: (int(axes.x(point[0])), point[1] is None)):
        bucket = list(group)
        extremes = () if is_break else (min(bucket, key=itemgetter(1)), max(bucket, key=itemgetter(1)))
        kept += sorted({bucket[0], *extremes, bucket[-1]}, key=itemgetter(0))
    return kept


def draw(chart: Chart, place: tuple[int, int, int, int] | None = None) -> str:
    """The chart as one ``<svg>`` element; every text is escaped.

    Args:
        chart: what to draw.
        place: x, y, width and height within an outer picture; None: as wide as the page lets it be.
    """
    axes = Axes(chart)
    return template("chart.svg.j2").render(
        chart=chart,
        place=place,
        axes=axes,
        y_ticks=_ticks(axes.y_low, axes.y_high, 5, whole=chart.whole_y_ticks),
        x_ticks=_ticks(axes.x_low, axes.x_high, max(2, chart.width // 80), whole=True),
        curves=[_curve(series, axes) for series in chart.series],
    )


def swatch(series: Series, place: str = 'class="swatch"') -> str:
    """The line of a series as a small picture for the legend."""
    dot = '<circle cx="14" cy="6" r="3"/>' if series.has_dots else ""
    line = f'<g class="{escape(series.css)}"><path d="M1 6 L27 6"/>{dot}</g>'
    return f'<svg {place} viewBox="0 0 28 12" aria-hidden="true">{line}</svg>'


def _ticks(low: float, high: float, max_ticks: int, *, whole: bool) -> list[tuple[float, str]]:
    step = tick_step(high - low, max_ticks, whole=whole)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    form = f".{decimals}f" if decimals <= 4 else ".1e"
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(index * step, format(index * step + 0.0, form)) for index in range(first, last + 1)]


def _curve(series: Series, axes: Axes) -> tuple[str, str, list[tuple[float, float]]]:
    """The class of a series, its path, which a missing value breaks, and its dots."""
    points = thinned(series.points, axes)
    ys = [None, *(y for _, y in points), None]
    path, dots = [], []
    for (x, y), before, after in zip(points, ys, ys[2:], strict=False):
        if y is None:
            continue
        place = axes.x(x), axes.y(y)
        path.append(f"{'M' if before is None else 'L'}{place[0]:.1f} {place[1]:.1f}")
        if series.has_dots or (before is None and after is None):  # a lone point has no line to show it
            dots.append(place)
    return series.css, " ".join(path), dots
