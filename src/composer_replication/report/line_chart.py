"""Line charts as inline SVG: no script, no style attribute, no external resource.

Colours are CSS classes of the page, so that a chart follows the reader's light or dark
setting. Positions are plain presentation attributes in the units of the ``viewBox``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    has_line: bool = True


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line that a curve should stay below."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a step."""

    label: str
    x: float


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart; ``key`` makes its element ids unique in the page.

    The x axis spans the points and marks; the y axis spans them, the limits, zero and
    ``y_span``, rounded outwards to whole ticks.
    """

    key: str
    title: str
    description: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    limits: Sequence[Limit] = ()
    marks: Sequence[Mark] = ()
    y_span: tuple[float, float] | None = None
    width: int = 340
    height: int = 240
    whole_y_ticks: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """The mapping from data to view box."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: float
    height: float

    def x(self, value: float) -> float:
        """Left + (value - low) / (high - low) * plot width."""
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return LEFT + share * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Top + (high - value) / (high - low) * plot height; upwards is smaller."""
        share = (self.y_high - value) / (self.y_high - self.y_low)
        return TOP + share * (self.height - TOP - BOTTOM)


def tick_step(span: float, max_ticks: int, *, whole: bool = False) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts ``span`` at most ``max_ticks`` times.

    Raises:
        ValueError: the span is not above zero.
    """
    if not span > 0 or max_ticks < 1:
        raise ValueError(f"a span above 0 and at least one tick are needed, got {span!r} and {max_ticks!r}")
    power = 10.0 ** math.floor(math.log10(span / max_ticks))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * max_ticks >= span * (1 - 1e-9))
    return max(1.0, step) if whole else step


def axes_of(chart: Chart) -> Axes:
    """The axes that hold everything the chart draws."""
    xs = [x for series in chart.series for x, _ in series.points] + [mark.x for mark in chart.marks]
    ys = [y for series in chart.series for _, y in series.points if y is not None]
    ys += [limit.value for limit in chart.limits] + [0.0] + list(chart.y_span or ())
    x_low, x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    y_low, y_high = min(ys), max(ys)
    if y_low == y_high:
        y_high = y_low + 1
    step = tick_step(y_high - y_low, 5, whole=chart.whole_y_ticks)
    return Axes(
        x_low=x_low,
        x_high=x_high,
        y_low=math.floor(y_low / step + 1e-9) * step,
        y_high=math.ceil(y_high / step - 1e-9) * step,
        width=chart.width,
        height=chart.height,
    )


def path_data(points: Iterable[Point], axes: Axes) -> str:
    """The ``d`` of a path through the points, lifted where y is None."""
    parts, is_down = [], False
    for x, y in points:
        if y is None:
            is_down = False
            continue
        parts.append(f"{'L' if is_down else 'M'}{axes.x(x):.1f} {axes.y(y):.1f}")
        is_down = True
    return " ".join(parts)


def thinned(points: Sequence[Point], axes: Axes) -> list[Point]:
    """At most first, lowest, highest and last of the points that share a unit of width.

    A break stays a break; a run of ten thousand steps stays a small file.
    """
    kept: list[Point] = []
    bucket: list[tuple[float, float]] = []

    def flush() -> None:
        if bucket:
            low, high = min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])
            kept.extend(sorted({bucket[0], low, high, bucket[-1]}))
            bucket.clear()

    for x, y in points:
        if y is None:
            flush()
            if kept and kept[-1][1] is not None:
                kept.append((x, None))
            continue
        if bucket and int(axes.x(bucket[0][0])) != int(axes.x(x)):
            flush()
        bucket.append((x, y))
    flush()
    return kept


def draw(chart: Chart) -> str:
    """The chart as one ``<svg>`` element; every text is escaped."""
    axes = axes_of(chart)
    key = escape(chart.key)
    top = 0 if chart.y_label or chart.marks else 22  # nothing stands above the plot: leave no empty band
    box = f"0 {top} {chart.width} {chart.height - top}"
    parts = [
        f'<svg class="chart" viewBox="{box}" role="img" aria-labelledby="{key}-title {key}-desc">',
        f'<title id="{key}-title">{escape(chart.title)}</title>',
        f'<desc id="{key}-desc">{escape(chart.description)}</desc>',
        *_grid(chart, axes),
        *(_mark(mark, axes) for mark in chart.marks),
        *(_limit(limit, axes) for limit in chart.limits),
        *(part for series in chart.series for part in _curve(series, axes)),
        "</svg>",
    ]
    return "\n".join(parts)


def swatch(series: Series) -> str:
    """The line of a series as a small picture for the legend."""
    line = '<path d="M1 6 L27 6"/>' if series.has_line else ""
    dot = '<circle cx="14" cy="6" r="3"/>' if series.has_dots else ""
    css = escape(series.css)
    return (
        f'<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true"><g class="{css}">{line}{dot}</g></svg>'
    )


def _ticks(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _label(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value + 0.0:.{decimals}f}" if decimals <= 4 else f"{value:.1e}"


def _grid(chart: Chart, axes: Axes) -> list[str]:
    right, bottom = chart.width - RIGHT, chart.height - BOTTOM
    parts = []
    y_step = tick_step(axes.y_high - axes.y_low, 5, whole=chart.whole_y_ticks)
    for value in _ticks(axes.y_low, axes.y_high, y_step):
        y = axes.y(value)
        parts.append(f'<path class="grid" d="M{LEFT:.1f} {y:.1f} L{right:.1f} {y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{_label(value, y_step)}</text>'
        )
    x_step = tick_step(axes.x_high - axes.x_low, max(2, chart.width // 80), whole=True)
    for value in _ticks(axes.x_low, axes.x_high, x_step):
        x = axes.x(value)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f} L{x:.1f} {bottom + 4:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{_label(value, x_step)}</text>'
        )
    middle = (LEFT + right) / 2
    parts.append(f'<path class="axis" d="M{LEFT:.1f} {bottom:.1f} L{right:.1f} {bottom:.1f}"/>')
    parts.append(
        f'<text class="label" x="{middle:.1f}" y="{chart.height - 7}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    parts.append(f'<text class="label" x="{4:.1f}" y="{12:.1f}">{escape(chart.y_label)}</text>')
    return parts


def _curve(series: Series, axes: Axes) -> list[str]:
    points = thinned(series.points, axes)
    parts = [f'<g class="{escape(series.css)}">']
    if series.has_line:
        parts.append(f'<path d="{path_data(points, axes)}"/>')
    for index, (x, y) in enumerate(points):
        if y is None:
            continue
        before = points[index - 1][1] if index else None
        after = points[index + 1][1] if index + 1 < len(points) else None
        if series.has_dots or (before is None and after is None):  # a lone point has no line to show it
            parts.append(f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="2.6"/>')
    return [*parts, "</g>"]


def _limit(limit: Limit, axes: Axes) -> str:
    y = axes.y(limit.value)
    return (
        f'<path class="limit" d="M{LEFT:.1f} {y:.1f} L{axes.width - RIGHT:.1f} {y:.1f}"/>'
        f'<text class="limit-label" x="{LEFT + 5:.1f}" y="{y - 5:.1f}">{escape(limit.label)}</text>'
    )


def _mark(mark: Mark, axes: Axes) -> str:
    x = axes.x(mark.x)
    is_left = x < axes.width / 2
    anchor, text_x = ("start", x - 4) if is_left else ("end", x + 4)
    return (
        f'<path class="mark" d="M{x:.1f} {TOP - 10:.1f} L{x:.1f} {axes.height - BOTTOM:.1f}"/>'
        f'<text class="mark-label" x="{text_x:.1f}" y="{TOP - 14:.1f}" text-anchor="{anchor}">{escape(mark.label)}</text>'
    )
