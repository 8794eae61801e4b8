"""What a person sees while training runs: a small table that stays in its place, or plain lines where that cannot be."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from tqdm import tqdm
from transformers import TrainerCallback

from composer_replication.trainer.processes import process_rank

_FIGURES = {
    "reward": "reward",
    "held out": "killswitch/heldout_ema",
    "gap": "killswitch/proxy_real_gap",
    "KL": "killswitch/kl_ema",
}
_SECONDS_BETWEEN = {True: 0.2, False: 10.0}  # in a terminal, and in a log file, which needs no animation


class LiveView(TrainerCallback):
    """Reward and held-out score, the guard's margins, groups without signal, episodes, speed, time left.

    ``ceilings`` are what the guard halts above, by the key of its figure in a step's row. ``console`` is standard error by
    default; where it is no terminal there is a line every ten seconds and at the end.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        ceilings: Mapping[str, float] | None = None,
        console: Console | None = None,
    ) -> None:
        self._quiet = quiet
        self._ceilings = dict(ceilings or {})
        self._given = console
        self._console: Console | None = None
        self._live: Live | None = None
        self._row: dict[str, float] = {}
        self._episodes = ""
        self._steps = (0, 0, 0)  # at the start, now, in all
        self._began = self._drawn = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._quiet or process_rank() != 0:
            return
        is_screen = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._console = self._given or Console(
            stderr=True, highlight=False, force_terminal=is_screen, soft_wrap=not is_screen
        )
        self._steps = (state.global_step, state.global_step, state.max_steps)
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._draw()

    def show_episodes(self, num_ended: int, num_all: int) -> None:
        """Within a step: how many of its episodes have ended."""
        self._episodes = f"{num_ended} of {num_all} ended"
        self._draw()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = (self._steps[0], state.global_step, self._steps[2])
        self._draw()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._row |= {key: value for key, value in (logs or {}).items() if isinstance(value, (int, float))}
        self._draw()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Draw once more and give the terminal back; may be called again."""
        self._draw(is_last=True)
        live, self._live, self._console = self._live, None, None
        if live is not None:
            with suppress(OSError, SystemExit):
                live.stop()

    def lines(self) -> list[tuple[str, str]]:
        """What is known by now, by name."""
        first, now, last = self._steps
        each = (time.monotonic() - self._began) / (now - first) if now > first else None
        found = [("step", f"{now} of {last}")]
        if each is not None:
            found.append(("left", f"{tqdm.format_interval(each * (last - now))}, {each:.3g} s a step"))
        for name, key in _FIGURES.items():
            if key in self._row:
                most = f" of {self._ceilings[key]:g}" if key in self._ceilings else ""
                found.append((name, f"{self._row[key]:.3f}{most}"))
        if "frac_reward_zero_std" in self._row:
            found.append(("groups", f"{self._row['frac_reward_zero_std']:.0%} without signal"))
        if self._episodes:
            found.append(("episodes", self._episodes))
        if each is not None and "num_tokens" in self._row:
            found.append(("tokens", f"{self._row['num_tokens'] / (each * now):.0f} a second"))
        return found

    def _draw(self, *, is_last: bool = False) -> None:
        now = time.monotonic()
        is_due = is_last or now - self._drawn >= _SECONDS_BETWEEN[self._live is not None]
        if self._console is None or not is_due:
            return
        self._drawn = now
        table = Table.grid(padding=(0, 2))
        for name, text in self.lines():
            table.add_row(name, text)
        try:
            if self._live is not None:
                self._live.update(table, refresh=True)
            else:
                self._console.print("train: " + ", ".join(f"{name} {text}" for name, text in self.lines()))
        except (OSError, SystemExit):
            self._console = None  # its reader has gone, which rich takes for the end; the run goes on
