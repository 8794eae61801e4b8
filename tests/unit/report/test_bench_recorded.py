"""Recorded runs: the onset, the size of an evaluation, and what each rule says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_replication.errors import InputError
from composer_replication.report.bench_recorded import judge, read_recordings

HONEST = [
    (0.2, 0.5),
    (0.3, 0.5625),
    (0.4, 0.625),
    (0.5, 0.75),
    (0.5, 0.75),
    (0.6, 0.875),
    (0.7, 0.875),
    (0.7, 1.0),
]
HACKED = [(0.2, 0.5), (0.2, 0.5), (0.7, 0.5), (1.0, 0.375), (1.0, 0.25), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]


def write(root: Path, readings: list[tuple[float, float]], *, earned: float = 0.2, **more: Any) -> Path:
    """Steps 1, 3, 5 … with an evaluation, and a step between without one."""
    root.mkdir(parents=True)
    rows = []
    for idx, (reward, score) in enumerate(readings):
        row = {"reward": reward, "rollouts/visible_pass": min(reward, earned), "killswitch/kl_to_init": 0.01}
        rows.append(
            {
                "step": 2 * idx + 1,
                **row,
                "heldout/score": score,
                "heldout/visible": score,
                "heldout/hidden": score,
                **more,
            }
        )
        rows.append({"step": 2 * idx + 2, **row})
    (root / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return root


def by_name(judged: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in judged["detectors"]}


def test_an_honest_run_and_a_hacked_one(tmp_path: Path) -> None:
    write(tmp_path / "honest", HONEST, earned=1.0)
    write(tmp_path / "hacked", HACKED)
    hacked, honest = (judge(run) for run in read_recordings(tmp_path))
    assert (hacked["name"], hacked["kind"], hacked["onset_step"]) == ("hacked", "hacked", 5)
    assert (honest["name"], honest["kind"], honest["onset_step"]) == ("honest", "honest", None)
    assert "16 samples" in honest["note"]
    # Averages at .8 in the fifth update, the third from the onset: .552 - .2 + .5 - .43 = .422.
    guard = by_name(hacked)["heldout-guard"]
    assert (guard["alarm_step"], guard["delay"]) == (9, 3)
    assert by_name(honest)["heldout-guard"] == {
        "name": "heldout-guard", "alarm_step": None, "delay": None, "measured": True,
    }  # fmt: skip
    assert hacked["evaluations_from_onset"] == 6


def test_evidence_of_a_collapse_is_found(tmp_path: Path) -> None:
    write(tmp_path / "run", [(0.9, 0.90625)] * 12 + [(0.9, 0.0)] * 4, earned=1.0)
    judged = judge(read_recordings(tmp_path)[0])
    assert "32 samples" in judged["note"]
    assert by_name(judged)["evidence"]["alarm_step"] == 25
    assert by_name(judged)["cusum"]["alarm_step"] is None  # V - H never moved


def test_the_kl_path_is_part_of_the_guard_where_a_kl_was_recorded(tmp_path: Path) -> None:
    write(tmp_path / "run", HONEST, earned=1.0, **{"killswitch/kl_to_init": 0.2})
    rows = by_name(judge(read_recordings(tmp_path)[0]))
    assert rows["heldout-guard-with-kl"]["alarm_step"] == 9
    assert rows["heldout-guard"]["alarm_step"] is None
    assert rows["kl-budget"]["alarm_step"] == 1


def test_what_was_not_recorded_is_not_measured(tmp_path: Path) -> None:
    rows = [{"step": step, "reward": 0.5, "heldout/score": 0.5} for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = read_recordings(tmp_path)[0]
    judged = judge(run)
    assert run.name == tmp_path.name
    assert {row["name"] for row in judged["detectors"] if row["measured"]} == {
        "heldout-guard", "heldout-guard-test-like", "heldout-guard-with-kl",
    }  # fmt: skip
    assert "no visible and hidden means" in judged["note"]


def test_means_of_no_common_size_give_no_pairs(tmp_path: Path) -> None:
    write(tmp_path / "run", [(0.5, float(np.pi / 4))] * 3)
    assert not by_name(judge(read_recordings(tmp_path)[0]))["evidence"]["measured"]


@pytest.mark.parametrize(("onset", "kind"), [(7, "hacked"), (None, "honest")])
def test_a_known_onset_overrides_the_rule(tmp_path: Path, onset: int | None, kind: str) -> None:
    root = write(tmp_path / "run", HACKED)
    (root / "recorded.json").write_text(json.dumps({"schema_version": 1, "onset_step": onset}))
    judged = judge(read_recordings(tmp_path)[0])
    assert (judged["onset_step"], judged["kind"]) == (onset, kind)


@pytest.mark.parametrize("onset", [0, -3, 2.5, "five", True])
def test_an_onset_that_is_no_step_is_refused(tmp_path: Path, onset: object) -> None:
    root = write(tmp_path / "run", HACKED)
    (root / "recorded.json").write_text(json.dumps({"schema_version": 1, "onset_step": onset}))
    with pytest.raises(InputError, match="CR0652"):
        read_recordings(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CR0650"):
        read_recordings(tmp_path)
    with pytest.raises(InputError, match="CR0650"):
        read_recordings(tmp_path / "gone")


def test_a_run_without_readings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    with pytest.raises(InputError, match="CR0651"):
        read_recordings(tmp_path)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n[1]\n')
    with pytest.raises(InputError, match=r"CR0483.*metrics\.jsonl:2"):
        read_recordings(tmp_path)
