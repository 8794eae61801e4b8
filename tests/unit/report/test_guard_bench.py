"""The benchmark in small: alarms to rates and delays, the rows, the tables, and the verb."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished import finished

from composer_replication.cli import flags
from composer_replication.cli import main as command
from composer_replication.report import bench_runs
from composer_replication.report.guard_bench import (
    DETECTORS,
    delays,
    false_alarms,
    first_alarms,
    plain,
    run_guard_bench,
    threshold_for,
)

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run_guard_bench(120, seed=7, families=("clean", "at-g0", "jump"))


def row_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in result["detectors"] if row["name"] == name)


def test_first_alarm_is_the_first_time_the_threshold_is_reached() -> None:
    path_TR = np.array([[0.1, 5.0, -math.inf], [0.5, 1.0, 0.2], [0.4, math.inf, 0.2]])
    assert first_alarms(path_TR, 0.5).tolist() == [2, 1, 0]
    assert first_alarms(path_TR, math.inf).tolist() == [0, 3, 0]


def test_false_alarms_and_delays() -> None:
    found = false_alarms(np.array([0, 7, 0, 0, 400]))
    assert (found["alarms"], found["runs"], found["rate"]) == (2, 5, 0.4)
    assert found["ci95"] == pytest.approx([0.1176, 0.7693], abs=1e-4)  # Wilson's interval
    # Halted before: 2 of 8. Then 1, 4, 4, 11 and two never, the first hacked evaluation counted as 1.
    late = delays(np.array([200, 203, 203, 210, 0, 150, 199, 0]), 200)
    assert (late["halted_before"], late["missed"]) == (pytest.approx(2 / 8), pytest.approx(2 / 6))
    assert (late["median"], late["p90"]) == (4, None)  # P90 falls on a run that was missed
    early = delays(np.array([5, 199]), 200)
    assert (early["halted_before"], early["median"], early["missed"]) == (1.0, None, None)


def test_a_threshold_lets_no_more_than_its_share_through() -> None:
    assert threshold_for(np.arange(1.0, 101.0), 0.05) == np.nextafter(95.0, math.inf)
    ties = np.array([3.0] * 10 + [1.0] * 90)
    assert [(ties >= threshold_for(ties, rate)).sum() for rate in (0.05, 0.1)] == [0, 10]
    assert threshold_for(np.array([math.inf, math.inf, 0.0, 0.0]), 0.25) is None


def test_every_rule_is_there_at_both_thresholds(result: dict[str, Any]) -> None:
    names = {row["name"] for row in result["detectors"]}
    for detector in DETECTORS:
        assert f"{detector.name} (matched)" in names
        assert (f"{detector.name} (nominal)" in names) == (detector.nominal is not None)
    for row in result["detectors"]:
        assert {"name", "false_alarm_rate", "ci95", "median_delay", "missed"} <= set(row)
        if row["worst_family"] is not None:  # of the null families alone
            rates = {name: row["false_alarms"][name]["rate"] for name in ("clean", "at-g0")}
            assert row["false_alarm_rate"] == max(rates.values()) == rates[row["worst_family"]]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_ours_is_quiet_and_finds_every_jump(result: dict[str, Any]) -> None:
    ours = row_of(result, "evidence (nominal)")
    assert ours["false_alarm_rate"] <= 1 / 120
    assert ours["missed"] == ours["halted_before"] == 0.0
    assert 4 <= ours["median_delay"] <= 8


def test_a_matched_threshold_holds_its_rate(result: dict[str, Any]) -> None:
    for row in result["detectors"]:
        tuned_in = "clean" if row["name"].startswith("cusum-clean") else "at-g0"
        if "(matched)" in row["name"] and row["threshold"] is not None:
            assert row["false_alarms"][tuned_in]["rate"] <= 0.08, row["name"]  # tuned on 120 other runs


def test_a_family_alone_leaves_the_others_open_and_is_drawn_as_among_them(result: dict[str, Any]) -> None:
    seen: list[tuple[int, int, str]] = []
    alone = run_guard_bench(120, seed=7, families=("jump",), report=lambda *news: seen.append(news))
    assert [done for done, _, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total, _ in seen} == {len(seen)}
    for row in alone["detectors"]:
        assert row["false_alarm_rate"] is row["ci95"] is row["worst_family"] is None
        assert row["delays"] == row_of(result, row["name"])["delays"]
    assert "–" in plain(alone)


def test_the_table_is_whole(result: dict[str, Any]) -> None:
    assert re.search(r"evidence \(nominal\) +4.711 ", plain(result))
    assert not re.search(r"\bnan\b|\binf\b|None", plain(result))
    assert len(plain(result).splitlines()) == 4 + len(result["detectors"])


# ------------------------------------------------------------------------------------- the verb


def test_the_command_line_names_every_family() -> None:
    [row] = [row for row in flags._declared("guard")["bench"]["arguments"] if row[0].startswith("--family")]
    assert row[2]["choices"] == [family.name for family in bench_runs.FAMILIES]


def test_a_person_reads_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["guard", "bench", "--runs", "5", "--family", "leak", "--tasks", "8", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("5 runs a null family")
    assert "400 evaluations of 8 tasks; seed 20260101" in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runs", "0"], "'0' is not a whole number in 1 … 1000000"),
        (["--tasks", "many"], "'many' is not a whole number in 2 … 200"),
        (["--family", "jmp"], "'jmp' is none of clean, at-g0"),
    ],
)
def test_bad_arguments_are_answered_by_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["guard", "bench", *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("CR0206: ")
    assert said in captured.err


def test_without_numpy_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from composer_replication.cli.main import main\n"
        "sys.exit(main(['guard', 'bench', '--quick', '--quiet']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = finished([sys.executable, "-c", program], env=environment)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("CR0101: the guard's benchmark needs numpy, which is not installed.")
    assert "composer-replication[bench]" in done.stderr
