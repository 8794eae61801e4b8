"""What a run says of itself: lines of metrics.jsonl, rows of verdicts.jsonl, trackers, standard error."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, append_jsonl, read_jsonl
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.metrics_log import StepLines, cut_back, json_row
from composer_replication.trainer.processes import InterruptOnce
from composer_replication.trainer.run_setup import ProgressLines


def lines_in(folder: Path) -> Any:
    lines = StepLines(None, InterruptOnce(), is_halted=lambda: False)
    lines.folder = RunFolder(folder)
    return lines


def test_what_was_noted_is_in_the_line_of_its_step_alone(tmp_path: Path) -> None:
    log = lines_in(tmp_path)
    log.noted |= {"killswitch/round_idx": 0, "heldout/score": 0.5}
    log.finish_step(1, {"reward": 0.25, "loss": 0.1})
    log.finish_step(2, {"reward": 0.5, "loss": 0.2})
    assert read_jsonl(log.folder.metrics) == [
        {"step": 1, "reward": 0.25, "loss": 0.1, "killswitch/round_idx": 0, "heldout/score": 0.5},
        {"step": 2, "reward": 0.5, "loss": 0.2},
    ]


def test_numbers_that_are_not_finite_become_null() -> None:
    row = json_row(
        {"a": math.nan, "b": -math.inf, "c": torch.tensor(1.5), "d": True, "e": None, "f": "x", "g": [1]}
    )
    assert row == {"a": None, "b": None, "c": 1.5, "d": True, "e": None, "f": "x", "g": "[1]"}
    assert "NaN" not in json.dumps(row)


def test_cutting_back_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    log = lines_in(tmp_path)
    log.folder.rollouts.mkdir(parents=True)
    for step in range(1, 6):
        log.finish_step(step, {})
        append_jsonl(log.folder.verdicts, {"round_idx": step - 1})
        (log.folder.rollouts / f"step-{step:06d}.jsonl").write_text("{}\n")
    (log.folder.rollouts / "notes.txt").write_text("mine")
    with log.folder.metrics.open("a") as handle:
        handle.write('{"step": 6, "rew')  # a torn last line
    cut_back(RunFolder(tmp_path), 3, 2)
    assert [row["step"] for row in read_jsonl(log.folder.metrics)] == [1, 2, 3]
    assert [row["round_idx"] for row in read_jsonl(log.folder.verdicts)] == [0, 1, 2]
    assert sorted(path.name for path in log.folder.rollouts.iterdir()) == [
        "notes.txt",
        "step-000001.jsonl",
        "step-000002.jsonl",
        "step-000003.jsonl",
    ]
    assert log.folder.metrics.read_text().count("\n") == 3


@pytest.mark.parametrize("line", ['{"stepp": 1}', '{"step": "1"}', "5"])
def test_a_log_with_rows_that_are_not_ours_is_refused_and_left_alone(tmp_path: Path, line: str) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(f'{line}\n{{"step": 2}}\n')
    with pytest.raises(InputError, match=r"CR0401.*no whole number as step"):
        cut_back(folder, 1, None)
    assert folder.metrics.read_text().startswith(line)


# ---- trackers, by names that stay; through transformers' own integration for TensorBoard

NAMES = {
    "killswitch/fire",
    "killswitch/in_loop_ema",
    "killswitch/heldout_ema",
    "killswitch/proxy_real_gap",
    "heldout/score",
    "reward",
    "grad_norm",
}
DOCS = Path(__file__).parents[3] / "docs" / "engines.md"


def test_the_guards_margins_and_readings_reach_the_tracker(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(
        max_steps=2,
        heldout_guard=HeldOutGuard(min_steps=9),
        heldout_eval_fn=lambda: 0.25,
        report_to=["tensorboard"],
    )
    trainer.train()
    [events] = tmp_path.rglob("events.out.tfevents*")
    seen = EventAccumulator(str(events.parent))
    seen.Reload()
    told = {name.removeprefix("train/"): name for name in seen.Tags()["scalars"]}
    assert told.keys() >= NAMES
    assert [each.value for each in seen.Scalars(told["heldout/score"])] == [0.25, 0.25]
    page = DOCS.read_text()
    assert all(f"`{name}`" in page for name in NAMES if name.startswith(("killswitch/", "heldout/")))


# ---- the lines of a run on standard error


def begun() -> tuple[ProgressLines, SimpleNamespace]:
    lines, state = ProgressLines(), SimpleNamespace(max_steps=3, global_step=0)
    lines.on_train_begin(None, state, None)
    return lines, state


def test_a_line_now_and_then_and_at_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines, state = begun()
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
    assert last.endswith("reward 0.750, held out 0.125, gap 0.300, KL 0.020, groups without signal 0.500")


def test_a_reader_that_goes_away_takes_no_run_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        num_refused = 0

        def write(self, text: str) -> int:
            self.num_refused += 1
            raise BrokenPipeError

    gone = Gone()
    monkeypatch.setattr("sys.stderr", gone)
    lines, state = begun()
    lines.on_log(None, state, None, logs={"reward": 1.0})
    assert gone.num_refused == 1
