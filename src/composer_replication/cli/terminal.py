"""What a person sees while a verb runs, and of text that others wrote: a progress bar, notes, and no live control characters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

Report = Callable[[int, int, str], None]
"""Takes (done, total, what is done now)."""

_EMPTY: tuple[Any, ...] = (None, "", [], (), {})
_FEW = 3
"""So many counts still fit one line."""
_KEPT = "\n\t"
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_SURROGATES = range(0xD800, 0xE000)  # of a file name that is not UTF-8; no stream can be given them
_SHOWN = {number: f"\\x{number:02x}" for number in _CONTROLS if chr(number) not in _KEPT} | {
    number: f"\\u{number:04x}" for number in (*_DIRECTIONS, *_SURROGATES)
}


def visible(text: str) -> str:
    r"""The text with control characters, changes of direction and lone surrogates written out, as ``\x1b`` or ``\u202e``.

    The output of hostile code goes through here: it could otherwise rename the window, write into the
    clipboard, or move the cursor over a line that says what the code really did.
    New lines and tabs stay; a carriage return before a new line is dropped.
    Reference: ECMA-48 (C0 and C1 sets), Unicode Bidirectional Algorithm (explicit formatting characters).
    """
    return text.replace("\r\n", "\n").translate(_SHOWN)


def note(text: str) -> None:
    """A line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def columns(result: Mapping[str, Any]) -> str:
    """What a person reads of a result: a line for each name with its value, many counts below their name.

    What is empty is left out, and so is a count of 0 among many.
    """
    width, lines = max([10, *map(len, result)]), []
    for name, value in result.items():
        is_long = isinstance(value, Mapping) and len(value) > _FEW
        if value not in _EMPTY:
            lines.append(f"{name.replace('_', ' '):<{width}} {'' if is_long else words(value)}".rstrip())
        if is_long:
            lines += [f"{words(each):>9}  {what}" for what, each in value.items() if each]
    return "\n".join(lines)


def words(value: Any) -> str:
    """A value of a result in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {words(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Report | None]:
    """A bar with rate and time left that appears with the first report; None when nobody wants one.

    Fewer done than before is a new stretch of work, with a rate of its own. Another total alone is a better
    estimate: what is done stays done, and the rate what it was. The same count again only draws the bar, so that
    the clock goes on and waiting is not taken for work.
    """
    if quiet:
        yield None
        return
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
        yield report
    finally:
        if bar is not None:
            bar.refresh()
            bar.close()
