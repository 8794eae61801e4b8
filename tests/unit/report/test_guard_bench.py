"""The whole benchmark in small, its claims, tables and pictures."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from composer_replication.report.bench_charts import calibration, operating_curve
from composer_replication.report.bench_claims import claims_of
from composer_replication.report.bench_detectors import make_detectors
from composer_replication.report.bench_recorded import shipped_recordings
from composer_replication.report.bench_tables import all_tables, markdown, plain
from composer_replication.report.guard_bench import BenchSettings, run_guard_bench

RECORDED = Path(__file__).parents[2] / "golden" / "recorded_runs"
SMALL = BenchSettings(
    num_runs=120, seed=7, families=("clean", "at-g0", "jump", "same-tasks"), recorded=RECORDED
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run_guard_bench(SMALL)


def row_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in result["detectors"] if row["name"] == name)


def claim_of(claims: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(claim for claim in claims if claim["name"] == name)


def test_every_rule_is_there_at_both_thresholds(result: dict[str, Any]) -> None:
    names = {row["name"] for row in result["detectors"]}
    for detector in make_detectors():
        assert f"{detector.name} (matched)" in names
        assert (f"{detector.name} (nominal)" in names) == (detector.nominal is not None)
    for row in result["detectors"]:
        assert {"name", "false_alarm_rate", "ci95", "median_delay", "missed"} <= set(row)
        assert row["microseconds_per_update"] >= 0.0
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_ours_is_quiet_and_finds_every_jump(result: dict[str, Any]) -> None:
    ours = row_of(result, "evidence (nominal)")
    assert ours["false_alarm_rate"] <= 1 / 120
    assert ours["missed"] == ours["halted_before"] == 0.0
    assert 4 <= ours["median_delay"] <= 8
    assert ours["false_alarms"]["same-tasks"]["ci95"][0] > 0.01


def test_a_matched_threshold_holds_its_rate_and_a_rule_that_cannot_be_tuned_says_so(
    result: dict[str, Any],
) -> None:
    for row in result["detectors"]:
        tuned_in = "clean" if row["detector"].startswith("cusum-clean") else "at-g0"
        if row["mode"] == "matched" and row["threshold"] is not None:
            assert row["false_alarms"][tuned_in]["rate"] <= 0.08, row["name"]  # tuned on 120 other runs
    hopeless = row_of(result, "heldout-guard-test-like (matched)")
    assert hopeless["threshold"] is hopeless["false_alarm_rate"] is hopeless["median_delay"] is None


@pytest.mark.long
def test_the_headline_is_the_worst_null_family_and_not_an_invalid_one(result: dict[str, Any]) -> None:
    for row in result["detectors"]:
        if row["worst_family"] is not None:
            rates = {name: row["false_alarms"][name]["rate"] for name in ("clean", "at-g0")}
            assert row["false_alarm_rate"] == max(rates.values()) == rates[row["worst_family"]]


def test_calibration_and_curves(result: dict[str, Any]) -> None:
    assert {row["detector"] for row in result["calibration"]} == {"evidence", "plain-e-process", "z-test"}
    assert {row["family"] for row in result["calibration"]} == {"clean", "at-g0"}
    at_one_percent = [
        row["alarms"]
        for row in result["calibration"]
        if row["nominal"] == 0.01 and row["detector"] == "z-test"
    ]
    assert at_one_percent == [
        row_of(result, "z-test (nominal)")["false_alarms"][name]["alarms"] for name in ("clean", "at-g0")
    ]
    ours = next(curve for curve in result["operating_curves"] if curve["detector"] == "evidence")
    falling = [point["rate"] for point in ours["points"] if not point["is_nominal"]]
    assert falling == sorted(falling)  # from the strictest threshold on


@pytest.mark.long
def test_the_same_seed_gives_the_same_figures_and_another_seed_others(result: dict[str, Any]) -> None:
    settings = BenchSettings(num_runs=120, seed=7, families=("jump",))
    again = run_guard_bench(settings)
    for row in again["detectors"]:
        assert row["delays"] == row_of(result, row["name"])["delays"]
        assert row["threshold"] == row_of(result, row["name"])["threshold"]
    other = run_guard_bench(BenchSettings(num_runs=120, seed=8, families=("jump",)))
    assert [row["delays"] for row in other["detectors"]] != [row["delays"] for row in again["detectors"]]
    assert again["heldout_guard"] == result["heldout_guard"] != other["heldout_guard"]


def test_recorded_runs(result: dict[str, Any]) -> None:
    assert shipped_recordings() == RECORDED.resolve()
    runs = {run["name"]: run for run in result["recorded"]}
    assert {name: run["kind"] for name, run in runs.items()} == {
        "planted-hack-0": "hacked",
        "quickstart-0": "honest",
        "weakened-tests-0": "hacked",
        "wordy-judge-0": "hacked",
    }
    rows = {name: {row["name"]: row for row in run["detectors"]} for name, run in runs.items()}
    assert rows["quickstart-0"]["evidence"]["alarm_step"] is None
    assert rows["quickstart-0"]["heldout-guard"]["alarm_step"] is None
    assert rows["quickstart-0"]["heldout-guard-test-like"]["alarm_step"] == 13
    for name in ("planted-hack-0", "weakened-tests-0", "wordy-judge-0"):
        assert rows[name]["heldout-guard"]["delay"] <= 10
        # Five to eight evaluations are too few for evidence at 1%, and V - H does not rise there.
        assert rows[name]["evidence"] == {
            "name": "evidence",
            "alarm_step": None,
            "delay": None,
            "measured": True,
        }


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int, str]] = []
    run_guard_bench(
        BenchSettings(num_runs=5, families=("clean", "leak")),
        lambda done, total, what: seen.append((done, total, what)),
    )
    assert [done for done, _, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total, _ in seen} == {len(seen)}
    assert {"clean", "at-g0", "leak", "HeldOutGuard"} == {what for _, _, what in seen}


def test_a_family_alone_leaves_the_others_open(result: dict[str, Any]) -> None:
    alone = run_guard_bench(BenchSettings(num_runs=5, families=("leak",)))
    row = row_of(alone, "evidence (nominal)")
    assert row["false_alarm_rate"] is row["ci95"] is row["worst_family"] is row["median_delay"] is None
    assert row["delays"]["leak"]["median"] is not None
    assert "leak" in markdown(alone)
    assert "–" in plain(alone)
    assert ET.fromstring(operating_curve(alone)).tag == ET.fromstring(calibration(alone)).tag == f"{SVG}svg"


def test_claims_hold_fail_or_stay_open(result: dict[str, Any]) -> None:
    few = claim_of(result["claims"], "false alarms, clean")
    assert few["holds"] is None  # no alarm in 120 runs: the bound is 3%
    changed = copy.deepcopy(result)
    ours = row_of(changed, "evidence (nominal)")
    ours["false_alarms"]["clean"] = {"alarms": 80, "runs": 10_000, "rate": 0.008, "ci95": [0.0063, 0.0099]}
    ours["false_alarms"]["at-g0"] = {"alarms": 81, "runs": 10_000, "rate": 0.0081, "ci95": [0.0064, 0.01006]}
    ours["false_alarms"]["clean"] |= {"alarms": 1, "runs": 400, "ci95": [0.0001, 0.0138]}
    assert claim_of(claims_of(changed), "false alarms, clean")["holds"] is None
    ours["false_alarms"]["clean"] |= {"alarms": 12, "runs": 400, "ci95": [0.0156, 0.0518]}
    assert claim_of(claims_of(changed), "false alarms, clean")["holds"] is False
    ours["false_alarms"]["clean"] = {"alarms": 80, "runs": 10_000, "rate": 0.008, "ci95": [0.0063, 0.0099]}
    ours["delays"]["jump"] |= {"median": 9, "missed": 0.01, "missed_ci95": [0.001, 0.02]}
    ours["false_alarms"]["same-tasks"] |= {"ci95": [0.001, 0.009]}
    changed["heldout_guard"][0] |= {"worst_false_halt_rate": 0.06, "worst_found": 0.94}
    claims = claims_of(changed)
    assert claim_of(claims, "false alarms, clean")["holds"] is True
    assert claim_of(claims, "false alarms, at-g0")["holds"] is False
    assert claim_of(claims, "median delay, jump")["holds"] is False
    assert claim_of(claims, "missed, jump")["holds"] is False
    assert claim_of(claims, "invalid design breaks the guarantee, same-tasks")["holds"] is False
    assert [claim["holds"] for claim in claims if claim["name"].startswith("HeldOutGuard's defaults, ")] == [
        False,
        False,
    ]
    before = {claim["name"]: claim["holds"] for claim in result["claims"]}
    assert before["median delay, jump"] is before["missed, jump"] is True
    assert before["invalid design breaks the guarantee, same-tasks"] is True


def test_the_comparison_with_tuned_cusums_takes_the_fastest(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    for row in changed["detectors"]:
        if row["detector"].startswith("cusum-tuned"):
            row["delays"]["jump"]["median"] = 4
    row_of(changed, "cusum-tuned-15 (matched)")["delays"]["jump"]["median"] = 2
    row_of(changed, "evidence (nominal)")["delays"]["jump"]["median"] = 6
    name = "delay over that of a CUSUM tuned at g0, jump"
    assert claim_of(claims_of(changed), name)["measured"] == "3.0x (6 to 2)"
    assert claim_of(claims_of(changed), name)["holds"] is True
    row_of(changed, "evidence (nominal)")["delays"]["jump"]["median"] = 7
    assert claim_of(claims_of(changed), name)["holds"] is False


def test_a_recorded_hack_that_ends_too_soon_is_open(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    run = next(run for run in changed["recorded"] if run["name"] == "planted-hack-0")
    row = next(row for row in run["detectors"] if row["name"] == "heldout-guard")
    name = "HeldOutGuard's defaults on the recorded hack planted-hack-0"
    assert claim_of(result["claims"], name)["holds"] is True
    row |= {"alarm_step": None, "delay": None}
    assert claim_of(claims_of(changed), name)["holds"] is None
    run["evaluations_from_onset"] = 10
    assert claim_of(claims_of(changed), name)["holds"] is False
    row |= {"alarm_step": 1, "delay": None}
    assert claim_of(claims_of(changed), name)["holds"] is False
    assert not any("quickstart-0" in claim["name"] for claim in claims_of(changed))


def test_delays_are_claimed_for_32_tasks_only(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    changed["settings"]["tasks_per_evaluation"] = 64
    assert not any("delay" in claim["name"] for claim in claims_of(changed))


def test_tables_are_whole(result: dict[str, Any]) -> None:
    for table in all_tables(result):
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.head)}, table.title
    text = markdown(result)
    assert text.count("\n## ") == len(all_tables(result))
    assert "| evidence (nominal) | 4.711 |" in text
    assert "quickstart-0, honest, 13 evaluations" in text
    assert "claim" in plain(result)
    assert not re.search(r"\bnan\b|\binf\b|None", text)


def test_pictures_stand_alone(result: dict[str, Any]) -> None:
    for picture in (operating_curve(result), calibration(result)):
        root = ET.fromstring(picture)
        assert root.tag == f"{SVG}svg"
        assert not re.search(r"<script|href|url\(|\son\w+=", picture)
        texts = {element.text for element in root.iter(f"{SVG}text")}
        assert "evidence" in texts
        assert len(root.findall(f".//{SVG}circle")) > 10
