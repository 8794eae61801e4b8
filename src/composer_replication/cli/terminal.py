"""What a person sees: a progress bar, notes, a result, and no live control characters of others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

Report = Callable[[int, int, str], None]
"""Takes (done, total, what is done now)."""

_LONG = 150  # characters of what stands beside its name; the parts of what is longer have lines of their own below it
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)  # of a file name that is not UTF-8; no stream can be given them
_SHOWN = {number: f"\\x{number:02x}" for number in _CONTROLS}
_SHOWN |= {number: f"\\u{number:04x}" for number in (*_DIRECTIONS, *_SURROGATES)}


def visible(text: str) -> str:
    r"""The text with control characters, changes of direction and lone surrogates written out, as ``\x1b`` or ``\u202e``.

    The output of hostile code could otherwise rename the window, write into the clipboard, or move the cursor over a line that
    says what the code really did. New lines and tabs stay; a carriage return before a new line is dropped.
    Reference: ECMA-48 (C0 and C1 sets), Unicode Bidirectional Algorithm (explicit formatting characters).
    """
    return text.replace("\r\n", "\n").translate(_SHOWN)


def note(text: str) -> None:
    """A line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def columns(result: Mapping[str, Any]) -> str:
    """A line for each name and value; rows, long values and texts of several lines below it. What is empty is left out."""
    width, lines = max([10, *map(len, result)]), []
    for name, value in result.items():
        if text := words(value) or ("none" if isinstance(value, list | tuple) else ""):
            below = _below(value, text)
            lines += [""] if below and isinstance(value, str) else []
            lines += [f"{name.replace('_', ' '):<{width}} {'' if below else text}".rstrip(), *below]
    return "\n".join(lines)


def _below(value: Any, text: str) -> list[str]:
    """The lines of a value that does not fit the one of its name: a text as it stands, else one for each part."""
    if isinstance(value, str):
        return text.rstrip("\n").split("\n") if "\n" in text else []
    if not isinstance(value, Mapping | list | tuple):
        return []
    parts: Sequence[Any] = list(value.values()) if isinstance(value, Mapping) else value
    are_rows = any(isinstance(part, Mapping | list | tuple) for part in parts)
    if not are_rows and "\n" not in text and len(text) <= _LONG:
        return []
    if isinstance(value, Mapping):
        parts = [f"{name}: {said}" for name, part in value.items() if (said := words(part))]
    return [f"  {line}" for part in parts for line in words(part).rstrip("\n").split("\n")]


def words(value: Any) -> str:
    """A value of a result in one line; empty where there is nothing in it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, each in value.items() if (text := words(each)))
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value)


def counted(items: Sequence[Any], report: Report | None, what: str) -> Iterator[Any]:
    """Each item; that it is done is told when the next one is asked for."""
    for done, item in enumerate(items, start=1):
        yield item
        if report is not None:
            report(done, len(items), what)


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Report | None]:
    """A bar with rate and time left that appears with the first report; None when nobody wants one.

    Fewer done than before is a new stretch of work, with a rate of its own; another total alone is a better estimate. The
    same count again only draws the bar, so that the clock goes on and waiting is not taken for work.
    """
    bar: tqdm[Any] | None = None

    def report(done: int, total: int, what: str) -> None:
        nonlocal bar
        if bar is None:
            from tqdm import tqdm

            bar = tqdm(total=total, desc=what, unit="step", file=sys.stderr, dynamic_ncols=True)
        bar.set_description(what, refresh=False)
        if done < bar.n:
            bar.reset(total=total)
        bar.total = total
        if done > bar.n:
            bar.update(done - bar.n)
        else:
            bar.refresh()

    try:
        yield None if quiet else report
    finally:
        if bar is not None:
            bar.refresh()
            bar.close()
