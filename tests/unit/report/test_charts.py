"""SVG positions against numbers worked out by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

from composer_replication.report.charts import Axes, Chart, Series, draw, swatch, thinned

SVG = "{http://www.w3.org/2000/svg}"

# Plot of this chart: x from 46 to 346 (300 wide), y from 42 to 242 (200 high).
CHART = Chart(
    key="c",
    title="Reward",
    description="It rises.",
    series=(Series("reward", "in-loop raw", ((0, 0.0), (5, 0.5), (10, 1.0))),),
    y_label="score",
    width=360,
    height=286,
)


def parsed(chart: Chart) -> ET.Element:
    return ET.fromstring(draw(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def texts(root: ET.Element) -> list[str | None]:
    return [element.text for element in root.iter(f"{SVG}text")]


def lines(chart: Chart) -> list[str | None]:
    return [path.get("d") for path in parsed(chart).findall(f"{SVG}g/{SVG}path")]


def test_points_stand_where_the_formula_says() -> None:
    assert lines(CHART) == ["M46.0 242.0 L196.0 142.0 L346.0 42.0"]


def test_a_missing_value_breaks_the_line() -> None:
    series = Series("reward", "in-loop raw", ((0, 0.0), (2, 1.0), (4, None), (8, 0.5), (10, 0.0)))
    assert lines(replace(CHART, series=(series,))) == ["M46.0 242.0 L106.0 42.0 M286.0 142.0 L346.0 242.0"]


def test_limit_and_mark_stand_where_they_belong() -> None:
    root = parsed(replace(CHART, limits=(("limit 0.5", 0.5),), marks=(("halted", 5),)))
    paths = {
        p.get("class"): p.get("d") for p in root.iter(f"{SVG}path") if p.get("class") in {"limit", "mark"}
    }
    assert paths == {"limit": "M46.0 142.0 L346.0 142.0", "mark": "M196.0 32.0 L196.0 242.0"}
    assert {"limit 0.5", "halted"} <= set(texts(root))


def test_it_has_a_title_and_a_description_for_those_who_do_not_see_it() -> None:
    root = parsed(CHART)
    assert root.get("role") == "img"
    named = {element.get("id"): element.text for element in root if element.get("id")}
    assert named == {"c-title": "Reward by step", "c-desc": "It rises."}
    assert (root.get("aria-labelledby") or "").split() == list(named)
    assert {"step", "score"} <= set(texts(root))


def test_every_text_is_escaped() -> None:
    hostile = '"><script>alert(1)</script>'
    series = Series(hostile, hostile, ((0, 0.0), (1, 1.0)))
    chart = Chart(hostile, hostile, hostile, (series,), ((hostile, 1.0),), ((hostile, 1),), y_label=hostile)
    root = parsed(chart)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg",
        "title",
        "desc",
        "path",
        "text",
        "g",
    }
    assert "<script" not in swatch(series)
    assert root.find(f"{SVG}title").text == f"{hostile} by step"  # type: ignore[union-attr]


def test_ten_thousand_steps_stay_small_and_keep_their_extremes() -> None:
    points = [(float(n), 1.0 if n == 5003 else 0.25 + (n % 7) / 20) for n in range(10_000)]
    axes = Axes(replace(CHART, series=(Series("reward", "raw", points),)))
    kept = thinned(points, axes)
    assert len(kept) <= 4 * 301
    assert (5003.0, 1.0) in kept
    assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_thinning_keeps_breaks_and_short_runs_as_they_are() -> None:
    points = [(0.0, 1.0), (1.0, None), (2.0, None), (3.0, 0.5), (10.0, 0.0)]
    assert thinned(points, Axes(CHART)) == points
