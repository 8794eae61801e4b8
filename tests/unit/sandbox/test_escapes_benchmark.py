"""The findings of escape attempts: kept as they are made, not made twice, put together from parts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.escapes import __main__ as escapes  # noqa: E402
from benchmarks.escapes import journal  # noqa: E402
from benchmarks.escapes.journal import Journal, latest  # noqa: E402

ROW = {"backend": "bubblewrap", "user": "root", "family": "f", "name": "n", "state": "held"}
ONE = ("--backend", "control", "--as-we-are", "--family", "host files", "--name", "by path")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["escapes", *words])
    return escapes.main()


def states(path: Path) -> list[str]:
    return [row["state"] for row in Journal.at(path).rows()]


def test_what_was_found_is_not_tried_again_until_the_code_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.jsonl"
    for _ in range(2):
        assert run(monkeypatch, *ONE, "--json", str(found)) == 0
        assert states(found) == ["ESCAPED"]
    monkeypatch.setattr(journal, "sources", lambda: "changed")
    run(monkeypatch, *ONE, "--json", str(found))
    assert states(found) == ["ESCAPED"] * 2
    assert "several versions" not in capsys.readouterr().out  # the last finding about each attempt counts


def test_an_attempt_for_which_there_was_no_time_is_tried_again(tmp_path: Path) -> None:
    kept = Journal.at(tmp_path / "found.jsonl")
    kept.add({**ROW, "state": "COULD NOT BE TRIED"})
    assert kept.done("bubblewrap", "root") == set()
    kept.add(ROW)
    assert kept.done("bubblewrap", "root") == {("f", "n")}
    assert kept.done("bubblewrap", "user") == kept.done("sandlock", "root") == set()
    assert [row["state"] for row in latest(kept.rows())] == ["held"]


def test_a_line_that_a_kill_has_cut_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    Journal.at(path).add(ROW)
    path.write_bytes(path.read_bytes() + b'\n{"backend": "bubbl')
    Journal.at(path).add({**ROW, "name": "m"})
    assert [row["name"] for row in Journal.at(path).rows()] == ["n", "m"]


def test_parts_are_all_attempts_and_none_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(*words: str) -> list[str]:
        assert run(monkeypatch, "--list", *words) == 0
        return capsys.readouterr().out.splitlines()[:-1]

    parts = [line for number in range(1, 8) for line in listed("--part", f"{number}/7")]
    assert sorted(parts) == sorted(listed())
    with pytest.raises(SystemExit):
        run(monkeypatch, "--part", "8/7")


def test_the_table_of_several_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    Journal.at(one).add(ROW)
    Journal.at(two).add({**ROW, "name": "m", "state": "ESCAPED"})
    Journal.at(two).add({**ROW, "user": "user", "state": "COULD NOT BE TRIED"})
    assert run(monkeypatch, "--table", str(one)) == 0
    assert "| bubblewrap | root | 1 of 388 | 1 | 0 |" in capsys.readouterr().out
    assert run(monkeypatch, "--table", str(one), str(two)) == 1
    said = capsys.readouterr().out
    assert "| bubblewrap | root | 2 of 388 | 1 | 1: f: m |" in said
    assert "| bubblewrap | ordinary | 0 of 373 | 0 | 0 |" in said


def test_every_row_of_the_table_says_of_how_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of jails, of plain processes, and of a backend that is not among ours."""
    found = Journal.at(tmp_path / "found")
    kinds = [(name, user) for name in (*escapes._ALL, "docker") for user in ("root", "user")]
    for backend, user in kinds:
        found.add({**ROW, "backend": backend, "user": user})
    assert run(monkeypatch, "--table", str(tmp_path / "found")) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row[1].strip() for row in rows] == [backend for backend, _ in kinds]
    tried = [re.fullmatch(r" 1 of (\d+) ", row[3]) for row in rows]
    assert all(tried)
    there = [int(match[1]) for match in tried if match]
    assert there[0] > there[6] > 200  # none: those that would hurt the machine are not counted
    found.add({**ROW, "backend": "docker", "state": "ESCAPED"})
    assert run(monkeypatch, "--table", str(tmp_path / "found")) == 1
    assert "docker as root did not hold: f: n" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_no_empty_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--table", str(tmp_path / "typo")) == 2
    assert "typo" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
