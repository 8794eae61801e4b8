"""The lines of a run on standard error."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from composer_replication.trainer.run_setup import ProgressLines, show_own_progress

if TYPE_CHECKING:
    import pytest


def begun(ceilings: dict[str, float]) -> tuple[ProgressLines, SimpleNamespace]:
    lines, state = ProgressLines(ceilings), SimpleNamespace(max_steps=3, global_step=0)
    lines.on_train_begin(None, state, None)
    return lines, state


def test_a_line_now_and_then_and_at_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines, state = begun({"killswitch/proxy_real_gap": 0.65})
    lines.show_episodes(2, 4)
    for step in (1, 2, 3):
        state.global_step = step
        figures = {"reward": 0.25 * step, "frac_reward_zero_std": 0.5, "loss": 1.0}
        figures |= {"killswitch/heldout_ema": 0.125, "killswitch/proxy_real_gap": 0.1 * step}
        lines.on_log(None, state, None, logs=figures | {"killswitch/kl_ema": 0.02})
    lines.on_log(None, state, None, logs={"train_runtime": 7.0})
    first, last = capsys.readouterr().err.splitlines()
    assert first == "train: 2 of 4 episodes of the step have ended"
    assert last.startswith("train: step 3 of 3, left 0:00:00, ")
    assert last.endswith(
        "reward 0.750, held out 0.125, gap 0.300 of 0.65, KL 0.020, groups 50% without signal"
    )


def test_quiet_says_nothing() -> None:
    added: list[Any] = []
    trainer = SimpleNamespace(remove_callback=lambda _: None, add_callback=added.append)
    show_own_progress(trainer, quiet=True)
    assert added == []
    show_own_progress(trainer, quiet=False)
    assert len(added) == 1


def test_a_reader_that_goes_away_takes_no_run_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        num_refused = 0

        def write(self, text: str) -> int:
            self.num_refused += 1
            raise BrokenPipeError

    gone = Gone()
    monkeypatch.setattr("sys.stderr", gone)
    lines, state = begun({})
    lines.on_log(None, state, None, logs={"reward": 1.0})
    assert gone.num_refused == 1
