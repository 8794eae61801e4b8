"""Which charts a run has, one sentence for each, and all of them as one picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from composer_replication.report.charts import Chart, Point, Series, draw, swatch
from composer_replication.report.run_data import GuardUpdate, RunData, number
from composer_replication.report.templates import report_resource, template, visible

MAX_DOTS = 30
"""More measurements than this are drawn as a line only; dots would run together."""

Column = list[tuple[int, float | None]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its caption, or (``chart`` is None) the sentence why there is none."""

    title: str
    caption: str
    chart: Chart | None


def reward_chart(run: RunData) -> tuple[Chart, str]:
    """In-loop reward and held-out score by step, raw and as the guard smoothed them; and what to say of it."""
    updates = run.guard_updates
    reward, heldout = run.column("reward"), run.column("heldout/score")
    candidates = (
        Series("in-loop reward", "in-loop raw", reward),
        Series("in-loop reward, smoothed", "in-loop ema", _of(updates, lambda u: u.in_loop_ema)),
        Series("held-out score", "held-out raw", heldout, has_dots=len(heldout) <= MAX_DOTS),
        Series("held-out score, smoothed", "held-out ema", _of(updates, lambda u: u.heldout_ema)),
    )
    shown = tuple(s for s in candidates if any(y is not None for _, y in s.points))
    changes = (_change("in-loop reward", reward), _change("held-out score", heldout))
    summary = "; ".join(filter(None, changes))
    summary = summary[:1].upper() + summary[1:]
    sentences = [
        f"{summary}." if summary else "",
        "" if changes[0] else "No in-loop reward was recorded.",
        "" if changes[1] else "No held-out score was measured.",
        "Smoothed curves are the guard's own; without its updates only raw values are drawn."
        if shown and not updates
        else "",
        _chosen_note(run),
    ]
    values = [y for s in shown for _, y in s.points if y is not None]
    chart = Chart(
        key="rewards",
        title="In-loop reward and held-out score by step",
        description=summary or "Nothing was recorded.",
        x_label="step",
        y_label="score",
        series=shown,
        marks=_marks(run),
        y_span=(0.0, 1.0) if values and min(values) >= 0.0 and max(values) <= 1.0 else None,
        width=980,
        height=360,
    )
    return chart, " ".join(filter(None, sentences))


def _chosen_note(run: RunData) -> str:
    """Whose reward it is where a curriculum chose the tasks, and how its pool stands; else empty."""
    pool = [run.column(f"curriculum/num_{name}") for name in ("active", "retired")]
    newest = [value for column in pool if column and (value := column[-1][1]) is not None]
    if len(newest) < len(pool):
        return ""
    counts = "{:g} were active and {:g} retired".format(*newest)
    sentence = f"The curriculum chose the tasks, so the in-loop reward is theirs; at the end {counts}"
    rates = _change("the mean pass rate over all known tasks", run.column("curriculum/mean_pass_rate"))
    return f"{sentence}; {rates}." if rates else f"{sentence}."


def guard_margins(run: RunData) -> tuple[Figure, ...]:
    """The three rules of the guard, each against its limit; empty without an update."""
    if not run.guard_updates:
        return ()
    return (
        _margin(run, "Gap of proxy and truth", "max_proxy_real_gap", lambda u: u.proxy_real_gap),
        _margin(run, "KL to the initial policy, nats", "kl_hard_stop", lambda u: u.kl_ema),
        _margin(run, "Decline streak, updates", "decline_patience", lambda u: u.decline_streak),
    )


def _margin(run: RunData, title: str, setting: str, get: Callable[[GuardUpdate], float | None]) -> Figure:
    is_kl, is_count = setting == "kl_hard_stop", setting == "decline_patience"
    points = _of(run.guard_updates, get)
    values = [y for _, y in points if y is not None]
    if not values:
        return Figure(title, _no_kl(run.kl_path) if is_kl else "This value was not recorded.", None)
    limit = number((run.guard_settings or {}).get(setting))
    note = f" KL path: {run.kl_path.rstrip('.')}." if is_kl and run.kl_path else ""
    rule = "The limit was not recorded" if limit is None else f"{setting} = {limit:g}"
    is_crossed = limit is not None and (max(values) >= limit if is_count else max(values) > limit)
    caption = f"Highest {max(values):.3g}. {rule}{', crossed' if is_crossed else ''}.{note}"
    chart = Chart(
        key=f"margin-{setting}",
        title=f"{title} by step",
        description=caption,
        x_label="step",
        y_label="",
        series=(Series(title, f"margin {'over' if is_crossed else 'under'}", points),),
        limits=() if limit is None else ((f"limit {limit:g}", limit),),
        marks=_marks(run),
        whole_y_ticks=is_count,
    )
    return Figure(title, caption, chart)


def _no_kl(note: str) -> str:
    """Why there is no KL curve; a rule that cannot fire is never left unsaid."""
    reason = note.removeprefix("off").strip(" ():.")
    if note.startswith("off") and reason:
        return f"The KL path was off, so this rule could not fire: {reason}."
    told = f" KL path: {note}." if note and reason else ""
    return f"No KL reached the guard, so this rule could not fire.{told}"


def curves_svg(run: RunData) -> str:
    """Reward, held-out score and the guard's margins as one SVG file that needs nothing else."""
    (rewards, _), css = reward_chart(run), report_resource("report.css")
    picture = template("curves.svg.j2").render(
        rewards=rewards, margins=guard_margins(run), css=css, draw=draw, swatch=swatch
    )
    return visible(picture)


def _marks(run: RunData) -> tuple[tuple[str, float], ...]:
    return ((f"halted at step {run.halt.step}", run.halt.step),) if run.halt else ()


def _of(updates: tuple[GuardUpdate, ...], get: Callable[[GuardUpdate], float | None]) -> list[Point]:
    return [(float(update.step), get(update)) for update in updates]


def _change(name: str, column: Column) -> str:
    known = [(step, value) for step, value in column if value is not None]
    if not known:
        return ""
    (first, low), (last, high) = known[0], known[-1]
    if first == last:
        return f"{name} is {low:.2f} at step {first}"
    return f"{name} goes from {low:.2f} at step {first} to {high:.2f} at step {last}"
