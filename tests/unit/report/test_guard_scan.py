"""Columns chosen, truth and proxy aligned, the guard replayed: against hand-made numbers and pandas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError, UsageError
from composer_replication.report.guard_scan import choose_columns, columns_sentence, readings_of, replay
from composer_replication.report.run_logs import Column, RunLog, read_log
from composer_replication.safety import HeldOutGuard


def log_of(**columns: dict[int, float]) -> RunLog:
    """A log of columns, each a mapping from step to value."""
    made = {
        name.replace("__", "/"): Column([(step, value, "log:1") for step, value in cells.items()])
        for name, cells in columns.items()
    }
    return RunLog(Path("log"), "step", made, ())


def aligned(log: RunLog, **names: str) -> tuple[list[Any], list[str]]:
    return readings_of(log, choose_columns(log, **names))


# ------------------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("names", "proxy", "truth", "kl"),
    [
        (("reward", "heldout/score", "killswitch/kl_to_init", "kl"), "reward", "heldout/score", "killswitch/kl_to_init"),
        (("reward", "rewards/f/mean", "eval_reward", "eval_loss", "kl"), "reward", "eval_reward", "kl"),
        (("train/reward", "eval/reward", "train/kl"), "train/reward", "eval/reward", "train/kl"),
        (("run 7 - train/reward", "run 7 - eval/reward"), "run 7 - train/reward", "run 7 - eval/reward", ""),
        (("rewards/margins", "eval_rewards/margins", "eval_runtime"), "rewards/margins", "eval_rewards/margins", ""),
        (("actor/ppo_kl", "reward", "val/reward"), "reward", "val/reward", ""),
    ],
)  # fmt: skip
def test_guesses(names: tuple[str, ...], proxy: str, truth: str, kl: str) -> None:
    chosen = choose_columns(log_of(**{name: {1: 0.5} for name in names}))
    assert chosen == {"proxy": proxy, "truth": truth, "kl": kl}


def test_the_sentence_says_what_was_guessed() -> None:
    log = log_of(reward={1: 1.0}, truth={1: 1.0}, loss={1: 2.0})
    for proxy, said in (("", "reward (guessed)"), ("-loss", "-loss")):
        named = {"proxy": proxy, "truth": "truth", "kl": ""}
        assert columns_sentence(log, choose_columns(log, **named), named) == (
            f"Columns: proxy {said}; truth truth; KL none, so the KL path is off; steps step."
        )


def test_a_column_whose_name_begins_with_a_minus_is_itself() -> None:
    log = log_of(**{"-loss": {1: 1.0}, "loss": {1: 2.0}, "t": {1: 0.0}})
    assert aligned(log, proxy="-loss", truth="t") == ([(1, 1.0, 0.0, None)], [])


def test_names_may_leave_out_the_wrapper() -> None:
    log = log_of(
        **{"data/critic/score/mean": {1: 1.0}, "data/val-core/a": {1: 1.0}, "data/val-core/b": {1: 1.0}}
    )
    assert choose_columns(log, truth="val-core/b")["truth"] == "data/val-core/b"
    assert choose_columns(log, truth="-val-core/b")["truth"] == "-data/val-core/b"


def test_a_misspelled_column_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        choose_columns(log_of(reward={1: 1.0}, eval_reward={1: 1.0}), truth="eval_rewrad")
    assert (caught.value.code, caught.value.fix) == ("CR0633", "did you mean eval_reward or reward?")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("reward", "loss"), "no column is known to be the truth; the columns with numbers are reward, loss."),
        (("loss", "eval_reward"), "no column is known to be the proxy"),
        (("text",), "no column is known to be the proxy; the columns with numbers are text."),
    ],
)  # fmt: skip
def test_what_cannot_be_guessed(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError) as caught:
        choose_columns(log_of(**{name: {1: 0.5} for name in names}))
    assert caught.value.code == "CR0633"
    assert words in caught.value.message


def test_a_column_of_text_alone_is_never_guessed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"step": 1, "reward": "high", "train_reward": 0.5, "eval_reward": 0.5}\n')
    log = read_log(tmp_path / "log")
    assert choose_columns(log)["proxy"] == "train_reward"
    with pytest.raises(InputError, match="CR0633: 1 of 1 values of the column 'reward'"):
        readings_of(log, choose_columns(log, proxy="reward"))


# ----------------------------------------------------------------------------- alignment


def test_each_truth_gets_the_newest_proxy_at_or_before_it() -> None:
    log = log_of(
        reward={10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4},
        eval_reward={0: 0.9, 20: 0.5, 35: 0.6, 36: 0.7},
        kl={20: 0.02},
    )
    readings, notes = aligned(log)
    assert readings == [(20, 0.2, 0.5, 0.02), (35, 0.3, 0.6, 0.02), (36, 0.3, 0.7, 0.02)]
    assert "1 value(s) of the truth before the first proxy were left out." in notes
    assert "1 value(s) of the truth had no new proxy and were paired with an older one." in notes


def test_a_minus_turns_the_numbers_round() -> None:
    log = log_of(loss={1: 2.0}, eval_loss={1: 3.0})
    assert aligned(log, proxy="-loss", truth="-eval_loss") == ([(1, -2.0, -3.0, None)], [])


steps = st.lists(st.integers(0, 60), min_size=1, max_size=25, unique=True).map(sorted)


@pytest.mark.long
@settings(deadline=None)  # the machine may be busy
@given(proxy=steps, truth=steps, kl=steps)
def test_alignment_is_pandas_merge_asof(proxy: list[int], truth: list[int], kl: list[int]) -> None:
    log = log_of(
        reward={step: step + 0.25 for step in proxy},
        eval_reward={step: step + 0.5 for step in truth},
        kl={step: step + 0.75 for step in kl},
    )
    found, _ = aligned(log)
    frames = [
        pd.DataFrame({"step": part, name: [step + offset for step in part]})
        for part, name, offset in ((truth, "truth", 0.5), (proxy, "proxy", 0.25), (kl, "kl", 0.75))
    ]
    joined = pd.merge_asof(pd.merge_asof(frames[0], frames[1], on="step"), frames[2], on="step")
    joined = joined.dropna(subset=["proxy"])
    assert [(step, p, t) for step, p, t, _ in found] == list(
        zip(joined["step"], joined["proxy"], joined["truth"], strict=True)
    )
    assert [k for *_, k in found] == [None if pd.isna(k) else k for k in joined["kl"]]


@pytest.mark.parametrize(
    ("order", "words"),
    [([1, 2, 2], "step 2 has a second value"), ([1, 3, 2], "step 2 stands after step 3"), ([5, 1], "after step 5")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["reward", "eval_reward", "kl"])
def test_steps_out_of_order(name: str, order: list[int], words: str) -> None:
    columns = {other: Column([(1, 0.5, "log:1")]) for other in ("reward", "eval_reward", "kl")}
    columns[name] = Column([(step, 0.5, f"log:{line}") for line, step in enumerate(order, start=1)])
    log = RunLog(Path("log"), "step", columns, ())
    with pytest.raises(InputError) as caught:
        aligned(log)
    assert (caught.value.code, caught.value.where) == ("CR0633", f"log:{len(order)}")
    assert words in caught.value.message
    assert "--resumed" in caught.value.fix


@pytest.mark.parametrize(
    ("num_bad", "num_all", "is_refused"),
    [(1, 12, False), (2, 12, False), (3, 12, True), (12, 12, True), (10, 100, False), (11, 100, True)],
)
def test_too_many_nans(num_bad: int, num_all: int, is_refused: bool) -> None:
    good = dict.fromkeys(range(num_bad, num_all), 0.5)
    log = log_of(reward={0: 0.5}, eval_reward=good)
    log.columns["eval_reward"].num_bad = num_bad
    if is_refused:
        match = f"CR0633: {num_bad} of {num_all} values of the column 'eval_reward'"
        with pytest.raises(InputError, match=match):
            aligned(log, truth="eval_reward")
        return
    readings, notes = aligned(log)
    assert len(readings) == num_all - num_bad
    assert f"{num_bad} value(s) of eval_reward were no finite numbers and were left out." in notes


# -------------------------------------------------------------------------------- replay


def test_the_replay_by_hand() -> None:
    """alpha .5: the averages are (0, 0), (.5, 0), (.75, 0); the gap passes .6 at the third update, step 30."""
    readings = [(step, proxy, 0.0, None) for step, proxy in ((10, 0.0), (20, 1.0), (30, 1.0), (40, 1.0))]
    done = replay(HeldOutGuard(min_steps=1, ema_alpha=0.5, max_proxy_real_gap=0.6), readings)
    assert [status.in_loop_ema for status in done] == [0.0, 0.5, 0.75, 0.875]
    assert [status.proxy_real_gap for status in done] == [0.0, 0.5, 0.75, 0.875]
    assert [status.fire for status in done] == [False, False, True, True]
    assert not any(status.fire for status in replay(HeldOutGuard(), readings))
