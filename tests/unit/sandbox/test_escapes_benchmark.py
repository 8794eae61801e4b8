"""The findings of escape attempts: kept as they are made, not made twice, put together from parts."""

from __future__ import annotations

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
