"""The table of a run in a terminal, and the lines in its place elsewhere."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from composer_replication.trainer.live_view import LiveView

CEILINGS = {"killswitch/proxy_real_gap": 0.65}


class Screen(io.StringIO):
    """A terminal that says in which letters it can be written to."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding


def shown(view: LiveView, screen: io.StringIO) -> str:
    """What a run of three steps draws last."""
    state = SimpleNamespace(max_steps=3, global_step=0)
    view.on_train_begin(None, state, None)
    for step in (1, 2, 3):
        view.show_episodes(step, 4)
        state.global_step = step
        view.on_step_end(None, state, None)
        view.on_log(None, state, None, logs={"reward": 0.25 * step, "frac_reward_zero_std": 0.5, "loss": 1.0})
        view.on_log(
            None,
            state,
            None,
            logs={
                "killswitch/heldout_ema": 0.125,
                "killswitch/proxy_real_gap": 0.1 * step,
                "killswitch/kl_ema": 0.02,
                "num_tokens": 30.0,
            },
        )
    screen.seek(0)
    screen.truncate()
    view.on_train_end(None, state, None)
    return screen.getvalue()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_of_forty_columns_without_colour(encoding: str) -> None:
    screen = Screen(encoding)
    console = Console(file=screen, force_terminal=True, width=40, no_color=True)
    said = shown(LiveView(ceilings=CEILINGS, console=console), screen)
    for text in (
        "3 of 3",
        "0.750",
        "0.125",
        "0.300 of 0.65",
        "0.020",
        " a second",
        "50% without signal",
        "3 of 4 ended",
        "00:00",
    ):
        assert text in said
    assert "…" not in said and "\x1b[3" not in said  # nothing is cut, nothing coloured
    said.encode(encoding)


def test_a_log_file_gets_whole_lines() -> None:
    screen = io.StringIO()
    said = shown(LiveView(console=Console(file=screen, soft_wrap=True)), screen)
    (line,) = said.splitlines()
    assert line.startswith("train: step 3 of 3, left 00:00") and "reward 0.750" in line
    assert "held out 0.125" in line and "gap 0.300, KL 0.020, groups 50%" in line  # no guard, no ceiling


def test_quiet_says_nothing() -> None:
    screen = io.StringIO()
    assert shown(LiveView(quiet=True, console=Console(file=screen)), screen) == ""


def test_a_run_that_is_cut_off_gives_the_cursor_back() -> None:
    screen = Screen("utf-8")
    view = LiveView(console=Console(file=screen, force_terminal=True))
    view.on_train_begin(None, SimpleNamespace(max_steps=3, global_step=0), None)
    assert screen.getvalue().count("\x1b[?25l") == 1 and "\x1b[?25h" not in screen.getvalue()
    view.close()
    view.close()
    assert screen.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_reader_that_goes_away_takes_no_run_with_it(is_terminal: bool) -> None:
    class Gone(Screen):
        is_gone = False
        num_refused = 0

        def write(self, text: str) -> int:
            if self.is_gone:
                self.num_refused += 1
                raise BrokenPipeError
            return super().write(text)

    screen, state = Gone("utf-8"), SimpleNamespace(max_steps=3, global_step=0)
    view = LiveView(console=Console(file=screen, force_terminal=is_terminal))
    view.on_train_begin(None, state, None)
    screen.is_gone = True
    view._drawn = 0.0
    view.on_step_end(None, state, None)
    assert screen.num_refused > 0
    num_refused = screen.num_refused
    view.on_log(None, state, None, logs={"reward": 1.0})
    assert screen.num_refused == num_refused  # it is asked no more
    view.close()
