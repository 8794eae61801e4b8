"""The tables of a study count by hand what its journal holds, and what is in the journal is not run again."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.training_run import rates_of
from composer_replication.config import load_config, parse_override
from composer_replication.rollouts.heldout_evaluation import TaskResult
from composer_replication.run_folder import read_jsonl, write_json

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import seeds

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
NUM_SAMPLES = 40
HELD = ("one-1.0--a.f--1234", "one-1.0--a.g--1235", "two-2.0--b.f--1236", "two-2.0--b.g--1237")


def marked(study: str, arm: str, *more: str) -> str:
    return seeds.fingerprint(seeds.RECIPES / study / "run.toml", [*more, *seeds.STUDIES[study][arm]])


def ablated(arm: str, seed: int, after: float, **more: Any) -> dict[str, Any]:
    """A run over two tasks of ten samples each, of which one passes always and the other never before training."""
    passed = round(20 * after)
    counts = {
        "before": {"a": [10, 10], "b": [0, 10]},
        "after": {"a": [passed - passed // 2, 10], "b": [passed // 2, 10]},
    }
    own = {"heldout": counts, "trained": counts, "reward": after / 2, "verdict": "clean", "steps": 16}
    return {
        "arm": arm,
        "seed": seed,
        "settings": marked("ablation", arm),
        "tasks": "x",
        "minutes": 6.0,
        **own,
        **more,
    }


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


def generalised(folder: Path, kind: str, seed: int, before: int, after: int, **more: Any) -> dict[str, Any]:
    read = seeds.read_run(finished_run(folder / "runs" / f"{kind}-{seed}", before, after))
    return {"kind": kind, "seed": seed, "settings": marked("generalise", kind), **read, **more}


def said(
    study: str, path: Path, capsys: pytest.CaptureFixture[str], *lines: dict[str, Any], torn: str = ""
) -> str:
    journal = path / "journal.jsonl"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    assert seeds.main([study, "--table", "--journal", str(journal)]) == 0
    return capsys.readouterr().out


def test_the_interval_of_a_mean_by_hand() -> None:
    """Two tasks of which one has fewer samples count as twice that many: 0.5 of 8, not of 16."""
    assert seeds.mean_interval([(12, 12), (0, 4)]) == seeds.wilson(4, 8)
    assert seeds.mean_interval([(3, 10)]) == seeds.wilson(3, 10)
    assert seeds.mean_interval([(0, 2), (0, 2)])[0] == 0.0
    assert seeds.mean_interval([(2, 2), (2, 2)])[1] == 1.0


def test_students_t_is_that_of_the_printed_tables() -> None:
    printed = [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622]
    assert list(seeds.STUDENT) == pytest.approx(printed, abs=6e-5)
    for half_of_seeds, factor in ((1, 12.7062), (2, 3.1824), (5, 2.2622), (20, 2.2622)):
        _, high = seeds.over_seeds([-1.0, 1.0] * half_of_seeds)
        assert high * (2 * half_of_seeds - 1) ** 0.5 == pytest.approx(factor, abs=6e-5)


def test_three_seeds_of_each_arm_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [ablated("grpo", seed, after) for seed, after in enumerate((0.6, 0.7, 0.8))]
    lines += [ablated("right-hints", seed, after) for seed, after in enumerate((0.7, 0.9, 0.8))]
    text = said("ablation", tmp_path, capsys, *lines)
    # 0.7 +- 4.3027 x 0.1 / sqrt(3), and half of it for the rewards
    row = "| grpo | 3 | 0.500 (0.500 to 0.500) | 0.700 (0.452 to 0.948) | 0.500 (0.500 to 0.500) | 0.700 (0.452 to 0.948)"
    assert f"{row} | 0.350 (0.226 to 0.474) | 6.0 |" in text
    # seed by seed +0.1, +0.2, 0: 0.1 +- 4.3027 x 0.1 / sqrt(3)
    row = "| right-hints less grpo | 3 | +0.100 (-0.148 to +0.348) | +0.100 (-0.148 to +0.348) | +0.050"
    assert row in text
    assert f"| siblings | 0 | {' | '.join([seeds.DASH] * 6)} |" in text
    assert f"| siblings less grpo | 0 | {' | '.join([seeds.DASH] * 3)} |" in text
    assert "left out" not in text


def test_differences_pair_seeds_and_figures_are_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [ablated("grpo", 0, 0.6), ablated("grpo", 1, 0.2)]
    lines += [ablated("siblings", seed, after, **{"replay/pairs": pairs}) for seed, after, pairs in ((0, 0.8, 3.0), (7, 0.1, 5.0))]  # fmt: skip
    text = said("ablation", tmp_path, capsys, *lines)
    assert "| siblings less grpo | 1 | +0.200 | +0.200 | +0.100 |" in text  # one seed in common: no interval
    # 4 +- 12.7062 x sqrt(2) / sqrt(2)
    assert "| pairs a step | \N{EN DASH} | \N{EN DASH} | 4.000 (-8.706 to 16.706) |" in text


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [ablated("grpo", 0, 0.6), ablated("grpo", 0, 0.9), ablated("grpo", 1, 0.6, tasks="y")]
    lines += [ablated("siblings", 0, 0.1, verdict="halted", steps=9)]
    lines += [ablated("siblings", 1, 0.9, settings="older")]
    text = said("ablation", tmp_path, capsys, *lines, torn='{"arm": "grpo", "se')  # by a crash
    row = "| grpo | 2 | 0.500 (0.500 to 0.500) | 0.600 (0.600 to 0.600) |"
    assert row in text  # the first of a seed counts
    assert "| siblings | 1 | 0.500 | 0.100 |" in text
    assert "| siblings-0 | 9 | halted |" in text
    assert "different sets of tasks: their rates cannot be compared" in text
    assert "2 lines of other settings, or of a seed that has one, are left out." in text


def test_a_table_of_runs_says_what_they_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        generalised(tmp_path, "seed", 0, 4, 20),
        generalised(tmp_path, "seed", 1, 4, 5),
        generalised(tmp_path, "control", 0, 4, 4),
        generalised(tmp_path, "seed", 2, 4, 39, settings=marked("generalise", "seed", "trl.max_steps=9")),
    ]
    text = said("generalise", tmp_path, capsys, *lines)
    seed = next(row for row in text.splitlines() if row.startswith("| seed-0"))
    assert seed.startswith(
        "| seed-0 | 26 | clean | 0.100 (0.062 to 0.156) | 0.500 (0.423 to 0.577) | 5.00 | yes |"
    )
    assert seed.endswith("| 0.125 (0.082 to 0.185) | 0.525 (0.448 to 0.601) | 2 |")
    assert "| control-0 | 26 | clean | 0.100 (0.062 to 0.156) | 0.100 (0.062 to 0.156) | 1.00 | no |" in text
    assert "| seed-2 " not in text
    assert "met together, met by 1 of 2 alone" in text
    assert "seed, all seeds: 0.100" in text
    assert "80 samples at least one passed in 1.000 of the tasks before and 1.000 after" in text
    control = "control, all seeds: 0.100 (0.062 to 0.156) before, 0.100 (0.062 to 0.156) after. Difference over tasks: +0.000"
    assert control in text
    assert "| one-1.0 | 2 | 0.100 | 0.312 |" in text
    assert "cannot be compared" not in text


@pytest.mark.parametrize("study", seeds.STUDIES)
def test_the_journal_that_is_kept_fills_every_arm(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe that was changed since would leave its lines out, and the pages' figures without a source."""
    assert seeds.main([study, "--table"]) == 0
    text = capsys.readouterr().out
    for number, arm in enumerate(seeds.STUDIES[study]):
        assert f"| {arm} | {1 if number and study == 'generalise' else 3} |" in text


def test_arms_differ_by_their_channel_alone() -> None:
    recipe = seeds.RECIPES / "ablation" / "run.toml"
    plain = load_config(recipe).model_dump()
    for arm, settings in seeds.STUDIES["ablation"].items():
        own = load_config(recipe, dict(parse_override(setting) for setting in settings)).model_dump()
        changed = {key for key in plain if own[key] != plain[key]}
        assert changed <= {"trainer", "hints", "replay"}
        weights = {key for key in plain["trainer"] if own["trainer"][key] != plain["trainer"][key]}
        assert weights == {"grpo": set(), "siblings": {"beta_replay"}}.get(arm, {"alpha_sdpo"})
    marks = {seeds.fingerprint(recipe, settings) for settings in seeds.STUDIES["ablation"].values()}
    assert len(marks) == len(seeds.STUDIES["ablation"])


def test_the_seed_is_no_part_of_the_settings_and_all_else_is(tmp_path: Path) -> None:
    recipe, other = seeds.RECIPES / "ablation" / "run.toml", tmp_path / "run.toml"
    text, known = recipe.read_text(), seeds.fingerprint(recipe, ())
    other.write_text(text.replace("seed = 0", "seed = 5", 1))
    assert seeds.fingerprint(other, ()) == known
    other.write_text(text.replace("max_steps = ", "max_steps = 1"))
    assert tomllib.loads(other.read_text())["trl"]["max_steps"] > 100
    assert seeds.fingerprint(other, ()) != known


def test_a_finished_run_becomes_one_line_and_is_not_made_again(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "out" / f"seed-3-{marked('generalise', 'seed')[:8]}", 4, 20)
    journal = tmp_path / "journal.jsonl"
    words = ["generalise", "--out", str(tmp_path / "out"), "--journal", str(journal), "--seeds", "3"]
    for _ in range(2):
        assert seeds.main([*words, "--only", "seed"]) == 0
        (kept,) = read_jsonl(journal)
        assert (kept["arm"], kept["seed"], kept["tasks"], kept["revision"]) == ("seed", 3, "t", "r")
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
    line = generalised(tmp_path, "seed", 0, before, after)
    assert seeds.Change.of(line, "heldout").meets_goal() is is_met


def test_the_bootstrap_is_over_tasks_not_samples() -> None:
    """One task that gets all the gain says little of others, however often it was sampled."""
    before = dict.fromkeys(HELD, (0, 1000))
    change = seeds.Change(before, {**before, HELD[0]: (1000, 1000)})
    assert change.is_apart()
    low, high = change.over_tasks()
    assert low == 0.0
    assert high >= 0.5


def test_a_run_that_fails_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "journal.jsonl"
    words = ["generalise", "--out", str(tmp_path), "--journal", str(journal), "--set", "no.such_key=1"]
    assert seeds.main([*words, "--seeds", "0", "--only", "seed"]) == 1
    assert "failed: seed 0" in capsys.readouterr().err
    assert not journal.exists()
