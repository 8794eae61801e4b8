"""The picture of a replayed guard: proxy against truth, and each rule against its limit."""

from __future__ import annotations

import base64
import hashlib
import re
import textwrap
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from composer_replication.errors import InputError, UsageError
from composer_replication.report.curves import Figure, guard_margins, reward_figure
from composer_replication.report.page import visible
from composer_replication.report.run_data import GuardUpdate, RunData, StepMetrics
from composer_replication.run_folder import write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from composer_replication.interfaces import GuardStatus
    from composer_replication.report.guard_replay import Replay

PLOT_SUFFIXES = (".svg", ".html")

_WIDTH = 980
_GAP = 24
_LINE_HEIGHT = 18
_LINE_CHARACTERS = 120
_CLASS = re.compile(r'<svg class="\w+" ')
_VIEW_BOX = re.compile(r'viewBox="\S+ \S+ (\d+) (\d+)"')


def write_plot(
    path: Path, replayed: Replay, *, title: str, sentences: list[str], settings: Mapping[str, Any]
) -> None:
    """Write one SVG or one HTML file, atomically; neither loads anything or runs a script.

    Args:
        path: its suffix says which of the two.
        replayed: what the guard said; at least one update.
        title: one line.
        sentences: what a person should read beside the curves.
        settings: the guard's, for the limits.

    Raises:
        UsageError: another suffix (CR0640).
        InputError: the file cannot be written (CR0640).
    """
    check_plot_path(path)
    run = _as_run(path, replayed, settings)
    draw = draw_svg if path.suffix.lower() == ".svg" else _draw_html
    try:
        write_atomic(path, draw(run, title, sentences))
    except OSError as error:
        raise InputError(
            "CR0640",
            f"the plot cannot be written: {error.strerror or error}.",
            where=str(path),
            fix="choose a place that you may write to with --plot FILE.",
        ) from error


def draw_svg(run: RunData, title: str, sentences: list[str]) -> str:
    """Reward, held-out score and the guard's margins of a run as one SVG file that needs nothing else."""
    return visible(_svg(title, sentences, reward_figure(run), _margins_of(run)))


def _draw_html(run: RunData, title: str, sentences: list[str]) -> str:
    return visible(_html(title, sentences, reward_figure(run), _margins_of(run)))


def _margins_of(run: RunData) -> Margins:
    return [(margin.title, margin.figure, margin.note) for margin in guard_margins(run)]


def check_plot_path(path: Path) -> None:
    """Refuse a suffix that is neither of the two (CR0640), before any work is done."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(
            "CR0640",
            f"a plot is an SVG or an HTML file, not {path.suffix or 'a file without suffix'}.",
            where="--plot",
            fix="--plot scan.svg",
        )


def _as_run(path: Path, replayed: Replay, settings: Mapping[str, Any]) -> RunData:
    """The replay as the run that the charts of a report are drawn from."""
    pairs = list(zip(replayed.readings, replayed.statuses, strict=True))
    has_kl = any(one.kl is not None for one in replayed.readings)
    return RunData(
        root=path,
        recipe={"guard": dict(settings)},
        environment=None,
        summary=None,
        steps=tuple(
            StepMetrics(one.step, {"reward": one.proxy, "heldout/score": one.truth}) for one, _ in pairs
        ),
        guard_updates=tuple(_update(one.step, status) for one, status in pairs),
        rollouts=(),
        before=None,
        after=None,
        kl_path="" if has_kl else "off (the log has no KL column, or none was chosen)",
    )


def _update(step: int, status: GuardStatus) -> GuardUpdate:
    return GuardUpdate(
        step=step,
        round_idx=step,
        fire=status.fire,
        reason=status.reason,
        in_loop_ema=status.in_loop_ema,
        heldout_ema=status.heldout_ema,
        kl_ema=status.kl_ema,
        proxy_real_gap=status.proxy_real_gap,
        decline_streak=getattr(status, "decline_streak", None),
    )


Margins = list[tuple[str, Figure | None, str]]


def _css() -> str:
    return resources.files("composer_replication.report").joinpath("report.css").read_text(encoding="utf-8")


def _html(title: str, sentences: list[str], rewards: Figure, margins: Margins) -> str:
    css = _css()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    legend = "".join(f"<li>{picture} {escape(label)}</li>" for picture, label in rewards.legend)
    figures = "".join(
        f"<figure><h3>{escape(name)}</h3>"
        + (
            f'<p class="missing">{escape(note)}</p>'
            if figure is None
            else f"{figure.wide}<figcaption>{escape(figure.caption)}</figcaption>"
        )
        + "</figure>"
        for name, figure, note in margins
    )
    texts = "".join(f'<p class="caption">{escape(sentence)}</p>' for sentence in sentences)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{css}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>{texts}</header>\n<main>\n"
        f'<section><h2>{escape(rewards.title)}</h2><ul class="legend">{legend}</ul>'
        f'<div class="wide">{rewards.wide}</div><div class="narrow">{rewards.narrow}</div></section>\n'
        f'<section><h2>Guard margins</h2><div class="margins">{figures}</div></section>\n'
        f"</main>\n</body>\n</html>\n"
    )


def _svg(title: str, sentences: list[str], rewards: Figure, margins: Margins) -> str:
    """Header, the large chart with its legend, and the margins side by side."""
    parts, y = [], 34
    parts.append(f'<text class="head" x="14" y="{y}">{escape(title)}</text>')
    for line in (line for text in sentences for line in textwrap.wrap(text, _LINE_CHARACTERS)):
        y += _LINE_HEIGHT
        parts.append(f'<text x="14" y="{y}">{escape(line)}</text>')
    y += _LINE_HEIGHT
    for index, (picture, label) in enumerate(rewards.legend):
        x = 14 + index * 240
        parts.append(_placed(picture, x, y, 28, 12))
        parts.append(f'<text x="{x + 34}" y="{y + 10}">{escape(label)}</text>')
    y += _GAP
    parts.append(_placed(rewards.wide, 0, y, _WIDTH, _height(rewards.wide, _WIDTH)))
    y += _height(rewards.wide, _WIDTH) + _GAP
    parts += _margin_parts(margins, y)
    heights = [_height(figure.wide, _margin_width(margins)) for _, figure, _ in margins if figure is not None]
    height = y + _LINE_HEIGHT + max(heights, default=0) + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{escape(_css(), quote=False)}\n.head {{ font-size: 18px; font-weight: 600; }}</style>\n"
        f'<rect x="0" y="0" width="{_WIDTH}" height="{height}" style="fill: var(--page)"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _margin_parts(margins: Margins, y: int) -> list[str]:
    parts = []
    width = _margin_width(margins)
    for index, (name, figure, note) in enumerate(margins):
        x = index * (width + _GAP)
        parts.append(f'<text x="{x + 14}" y="{y}">{escape(name)}</text>')
        if figure is not None:
            parts.append(_placed(figure.wide, x, y + _LINE_HEIGHT, width, _height(figure.wide, width)))
            continue
        for number, line in enumerate(textwrap.wrap(note, width // 7), start=1):
            parts.append(f'<text x="{x + 14}" y="{y + number * _LINE_HEIGHT}">{escape(line)}</text>')
    return parts


def _margin_width(margins: Margins) -> int:
    return (_WIDTH - (len(margins) - 1) * _GAP) // max(len(margins), 1)


def _placed(picture: str, x: int, y: int, width: int, height: int) -> str:
    """An ``<svg>`` of a chart or legend at a place of the outer picture.

    Its class is left out: the page's rules for it would stretch it to the whole picture.
    """
    return _CLASS.sub(f'<svg x="{x}" y="{y}" width="{width}" height="{height}" ', picture, count=1)


def _height(picture: str, width: int) -> int:
    box = _VIEW_BOX.search(picture)
    if box is None:
        raise ValueError("a chart without a view box")
    return round(width * int(box[2]) / int(box[1]))
