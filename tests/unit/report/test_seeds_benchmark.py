"""The tables of a study count by hand what its journal holds, and what is in the journal is not run again."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from composer_replication.config import load_config, parse_override

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import seeds

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


def test_the_bootstrap_is_over_tasks_not_samples() -> None:
    """One task that gets all the gain says little of others, however often it was sampled."""
    before = dict.fromkeys(HELD, (0, 1000))
    change = seeds.Change(before, {**before, HELD[0]: (1000, 1000)})
    assert change.is_apart()
    low, high = change.over_tasks()
    assert low == 0.0
    assert high >= 0.5
