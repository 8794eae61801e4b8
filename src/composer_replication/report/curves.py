"""Which charts a run has, one sentence for each, and all of them as one picture."""

from __future__ import annotations

from composer_replication.report.charts import Chart, Point, Series, draw, swatch
from composer_replication.report.run_data import RunData, number
from composer_replication.report.templates import report_resource, template, visible

MAX_DOTS = 30
"""More measurements than this are drawn as a line only; dots would run together."""

_RULES = (
    ("Gap of proxy and truth", "max_proxy_real_gap", "proxy_real_gap"),
    ("KL to the initial policy, nats", "kl_hard_stop", "kl_ema"),
    ("Decline streak, updates", "decline_patience", "decline_streak"),
)
"""The rules of the guard: a title, the name of the limit, the name of the value in a verdict."""


def reward_chart(run: RunData) -> Chart:
    """In-loop reward and held-out score by step, raw and as the guard smoothed them."""
    reward, heldout = run.column("reward"), run.column("heldout/score")
    candidates = (
        Series("in-loop reward", "in-loop raw", reward),
        Series("in-loop reward, smoothed", "in-loop ema", _of_updates(run, "in_loop_ema")),
        Series("held-out score", "held-out raw", heldout, has_dots=len(heldout) <= MAX_DOTS),
        Series("held-out score, smoothed", "held-out ema", _of_updates(run, "heldout_ema")),
    )
    shown = tuple(s for s in candidates if any(y is not None for _, y in s.points))
    values = [y for s in shown for _, y in s.points if y is not None]
    return Chart(
        key="rewards",
        title="In-loop reward and held-out score",
        description=f"{_change('in-loop reward', reward)} {_change('held-out score', heldout)}",
        series=shown,
        marks=_marks(run),
        y_label="score",
        y_span=(0.0, 1.0) if values and min(values) >= 0.0 and max(values) <= 1.0 else None,
        width=980,
        height=360,
    )


def guard_margins(run: RunData) -> list[Chart]:
    """The three rules of the guard, each against its limit; empty without an update."""
    return [_margin(run, *rule) for rule in _RULES] if run.guard_updates else []


def _margin(run: RunData, title: str, setting: str, name: str) -> Chart:
    points, key = _of_updates(run, name), f"margin-{setting}"
    values = [y for _, y in points if y is not None]
    is_kl, is_count = setting == "kl_hard_stop", setting == "decline_patience"
    note = f" KL path: {run.kl_path.rstrip('.')}." if is_kl and run.kl_path else ""
    if not values:  # a rule that cannot fire is never left unsaid
        why = "This value was not recorded."
        if is_kl:
            why = "No KL reached the guard, so this rule could not fire."
        return Chart(key, title, f"{why}{note}", series=())
    limit = number((run.guard_settings or {}).get(setting))
    rule = "The limit was not recorded" if limit is None else f"{setting} = {limit:g}"
    is_crossed = limit is not None and (max(values) >= limit if is_count else max(values) > limit)
    return Chart(
        key,
        title,
        f"Highest {max(values):.3g}. {rule}{', crossed' if is_crossed else ''}.{note}",
        series=(Series(title, f"margin {'over' if is_crossed else 'under'}", points),),
        limits=() if limit is None else ((f"limit {limit:g}", limit),),
        marks=_marks(run),
        whole_y_ticks=is_count,
    )


def curves_svg(run: RunData) -> str:
    """Reward, held-out score and the guard's margins as one SVG file that needs nothing else."""
    picture = template("curves.svg.j2").render(
        rewards=reward_chart(run),
        margins=guard_margins(run),
        css=report_resource("report.css"),
        draw=draw,
        swatch=swatch,
    )
    return visible(picture)


def _marks(run: RunData) -> tuple[tuple[str, float], ...]:
    return ((f"halted at step {run.halt.step}", run.halt.step),) if run.halt else ()


def _of_updates(run: RunData, name: str) -> list[Point]:
    return [(float(update.step), update.figures[name]) for update in run.guard_updates]


def _change(name: str, column: list[tuple[int, float | None]]) -> str:
    known = [(step, value) for step, value in column if value is not None]
    if not known:
        return f"No {name} was recorded."
    (first, low), (last, high) = known[0], known[-1]
    ending = "" if first == last else f", and {high:.2f} at step {last}"
    return f"The {name} is {low:.2f} at step {first}{ending}."
