"""``composer-rl guard bench`` as a person types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.cli import main as command
from composer_replication.cli.guard_bench_command import _QUICK_RUNS
from composer_replication.report.guard_bench import DEFAULT_RUNS

SOURCE = Path(__file__).parents[3] / "src"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "composer_replication.cli.main", "guard", "bench", *words]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_one_json_object_and_a_folder_with_everything(tmp_path: Path) -> None:
    out = tmp_path / "new" / "bench"
    words = ["--runs", "40", "--family", "clean", "--family", "jump", "--json", "--out", str(out)]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"name", "false_alarm_rate", "ci95", "median_delay", "missed"} <= set(result["detectors"][0])
    assert [family["runs"] for family in result["families"]] == [40, 20]
    assert {path.name for path in out.iterdir()} == {
        "summary.json", "guard-bench.md", "operating_curve.svg", "calibration.svg",
    }  # fmt: skip
    stored = json.loads((out / "summary.json").read_text())
    assert stored.pop("schema_version") == 1
    assert stored == result
    assert "# The guard's benchmark" in (out / "guard-bench.md").read_text()
    assert "step" in done.stderr  # the bar


@pytest.mark.long
def test_quick_and_quiet_print_the_tables_for_a_person() -> None:
    done = run("--quick", "--quiet", "--family", "clean", "--tasks", "8", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(f"{_QUICK_RUNS:,} runs a null family")
    assert "400 evaluations of 8 tasks; seed 3" in done.stdout
    assert "evidence (nominal)" in done.stdout
    assert "What must hold" in done.stdout


def test_the_command_line_and_the_report_agree_on_sizes() -> None:
    args = command.build_parser(only="guard").parse_args(["guard", "bench"])
    assert (args.runs, args.tasks, args.families, args.recorded) == (DEFAULT_RUNS, 32, [], None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runs", "0"], "'0' is not a whole number in 1 … 1000000"),
        (["--runs", "many"], "'many' is not a whole number"),
        (["--tasks", "1"], "'1' is not a whole number in 2 … 200"),
        (["--tasks", "201"], "'201' is not a whole number in 2 … 200"),
        (["--seed", "-1"], "'-1' is not a whole number"),
        (["--family", "jmp"], "did you mean jump?"),
        (["--detector", "cusum"], "unknown argument '--detector'"),
    ],
)
def test_bad_arguments_are_answered_by_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["guard", "bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("CR0206: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_recorded_runs_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["guard", "bench", "--quiet", "--recorded", str(tmp_path), "--json"]) == 4
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["code"] == "CR0650"
    assert "--recorded" in captured.err


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert command.main(["guard", "bench", "--out", str(tmp_path / "file" / "bench")]) == 2
    assert capsys.readouterr().err.startswith("CR0209: ")


def test_without_numpy_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from composer_replication.cli.main import main\n"
        "sys.exit(main(['guard', 'bench', '--quick', '--quiet']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("CR0101: the guard's benchmark needs numpy, which is not installed.")
    assert "composer-replication[bench]" in done.stderr
