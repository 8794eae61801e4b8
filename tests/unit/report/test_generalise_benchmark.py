"""The table of trained repositories against others counts what runs left behind, and calls a target met only where it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.training_run import rates_of
from composer_replication.rollouts.pass_rates import TaskResult
from composer_replication.run_folder import read_jsonl, write_json

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import generalise
import seed_journal

NUM_SAMPLES = 40
HELD = ("one-1.0--a.f--1234", "one-1.0--a.g--1235", "two-2.0--b.f--1236", "two-2.0--b.g--1237")


def test_the_interval_of_a_mean_by_hand() -> None:
    """Two tasks of which one has fewer samples count as twice that many: 0.5 of 8, not of 16."""
    assert generalise.mean_interval([(12, 12), (0, 4)]) == generalise.wilson(4, 8)
    assert generalise.mean_interval([(3, 10)]) == generalise.wilson(3, 10)
    assert generalise.mean_interval([(0, 2), (0, 2)])[0] == 0.0
    assert generalise.mean_interval([(2, 2), (2, 2)])[1] == 1.0


def results(passed: int) -> list[TaskResult]:
    """Each task passes so many of its samples by hidden tests, one more by visible ones."""
    return [
        TaskResult(
            name,
            tuple(n <= passed for n in range(NUM_SAMPLES)),
            tuple(n < passed for n in range(NUM_SAMPLES)),
        )
        for name in HELD
    ]


def finished_run(folder: Path, before: int, after: int) -> Path:
    """A run folder as ``train`` leaves it, as far as it is read."""
    rates = {
        when: {"heldout": rates_of(results(n), dropped=0), "train": rates_of(results(n), dropped=0)}
        for when, n in (("before", before), ("after", after))
    }
    folder.mkdir(parents=True)
    summary = {"steps": 26, "verdict": "clean", "seconds": 120.0, "parameter_sha256": "p", **rates}
    write_json(folder / "summary.json", summary)
    write_json(folder / "environment.json", {"tasks_fingerprint": "t", "git_revision": "r"})
    return folder


def marked(kind: str, *more: str) -> str:
    settings = [*more, *(generalise.CONTROL if kind == "control" else ())]
    return seed_journal.fingerprint(generalise.RECIPE, settings)


def line(tmp_path: Path, kind: str, seed: int, before: int, after: int, **more: Any) -> dict[str, Any]:
    read = seed_journal.read_run(finished_run(tmp_path / "runs" / f"{kind}-{seed}", before, after))
    return {"kind": kind, "seed": seed, "settings": marked(kind), **read, **more}


def journal_of(tmp_path: Path, *lines: dict[str, Any]) -> str:
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(path)


def test_a_table_of_runs_says_what_they_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line(tmp_path, "seed", 0, 4, 20),
        line(tmp_path, "seed", 1, 4, 5),
        line(tmp_path, "control", 0, 4, 4),
    ]
    words = ["--journal", journal_of(tmp_path, *lines), "--table", "--seeds", "0", "1", "7"]
    assert generalise.main(words) == 0
    said = capsys.readouterr().out
    seed = next(row for row in said.splitlines() if row.startswith("| seed-0"))
    assert seed.startswith(
        "| seed-0 | 26 | clean | 0.100 (0.062 to 0.156) | 0.500 (0.423 to 0.577) | 5.00 | yes |"
    )
    assert seed.endswith("| 0.125 (0.082 to 0.185) | 0.525 (0.448 to 0.601) | 2 |")
    assert "| control-0 | 26 | clean | 0.100 (0.062 to 0.156) | 0.100 (0.062 to 0.156) | 1.00 | no |" in said
    assert "met together, met by 1 of 2 alone" in said
    assert "All seeds: 0.100" in said
    assert "80 samples at least one passed in 1.000 of the tasks before and 1.000 after" in said
    assert (
        "Control: 0.100 (0.062 to 0.156) before, 0.100 (0.062 to 0.156) after. Difference over tasks: +0.000"
        in said
    )
    assert "| one-1.0 | 2 | 0.100 | 0.312 |" in said
    assert "cannot be compared" not in said


def test_lines_of_other_settings_and_of_other_tasks_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = line(tmp_path, "seed", 0, 4, 39, settings=marked("seed", "trl.max_steps=9"))
    lines = [other, line(tmp_path, "seed", 1, 4, 20), line(tmp_path, "seed", 2, 4, 20, tasks="u")]
    assert generalise.main(["--journal", journal_of(tmp_path, *lines), "--table"]) == 0
    said = capsys.readouterr().out
    assert "| seed-0 " not in said
    assert "| seed-1 | 26 |" in said
    assert "different sets of tasks: their rates cannot be compared" in said


def test_a_finished_run_becomes_one_line_and_is_not_made_again(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "out" / f"seed-3-{marked('seed')[:8]}", 4, 20)
    journal = tmp_path / "journal.jsonl"
    words = ["--out", str(tmp_path / "out"), "--journal", str(journal), "--seeds", "3", "--control"]
    for _ in range(2):
        assert generalise.main(words) == 0
        (kept,) = read_jsonl(journal)
        assert (kept["kind"], kept["seed"], kept["tasks"], kept["revision"]) == ("seed", 3, "t", "r")
        assert kept["heldout"]["after"][HELD[0]] == [20, NUM_SAMPLES]
        assert kept["trained"]["before"][HELD[0]] == [5, NUM_SAMPLES]
        (folder / "summary.json").unlink(missing_ok=True)  # the second time there is the journal alone


@pytest.mark.parametrize(
    ("before", "after", "is_met"),
    [(4, 20, True), (20, 29, False), (4, 5, False), (20, 20, False), (20, 4, False)],
    ids=["far-above", "under-half-again", "within-the-intervals", "same", "worse"],
)
def test_the_target_needs_half_again_and_intervals_apart(
    tmp_path: Path, before: int, after: int, is_met: bool
) -> None:
    run = generalise.run_of(line(tmp_path, "seed", 0, before, after))
    assert run.heldout.meets_goal() is is_met


def test_the_bootstrap_is_over_tasks_not_samples() -> None:
    """One task that gets all the gain says little of others, however often it was sampled."""
    before = dict.fromkeys(HELD, (0, 1000))
    after = {**before, HELD[0]: (1000, 1000)}
    change = generalise.Change(before, after)
    assert change.is_apart()
    low, high = change.over_tasks()
    assert low == 0.0
    assert high >= 0.5


def test_samples_of_seeds_are_put_together_by_task() -> None:
    change = generalise.Change
    together = generalise.pooled(
        [change({"a": (1, 8), "b": (2, 8)}, {"a": (3, 8), "b": (4, 8)}), change({"a": (1, 8)}, {"a": (8, 8)})]
    )
    assert together == change({"a": (2, 16)}, {"a": (11, 16)})


def test_a_run_that_fails_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "journal.jsonl"
    own = ["--out", str(tmp_path), "--journal", str(journal), "--set", "no.such_key=1"]
    assert generalise.main([*own, "--seeds", "0", "--control"]) == 1
    assert "failed: seed-0" in capsys.readouterr().err
    assert not journal.exists()


def test_a_task_that_never_passed_is_no_task_that_ever_passed() -> None:
    assert generalise.ever_passed({"a": (0, 8), "b": (1, 8), "c": (8, 8), "d": (0, 8)}) == 0.5
