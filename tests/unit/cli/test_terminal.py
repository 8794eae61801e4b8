"""Text of others is shown so that it cannot act on the terminal, and the progress bar shows what is done."""

from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.cli.main import main
from composer_replication.cli.terminal import columns, progress_bar, visible
from composer_replication.errors import InputError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢\n\tx", "plain é 漢\n\tx"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J", "\\x9b2J"),
        ("FAIL\rok", "FAIL\\x0dok"),
        ("a\r\nb", "a\nb"),
        ("\x07\x08\x00\x7f", "\\x07\\x08\\x00\\x7f"),
        ("\u202eab\u2066c\u2069", "\\u202eab\\u2066c\\u2069"),
    ],
)
def test_what_acts_on_a_terminal_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_nothing_that_acts_is_left_and_nothing_else_is_touched(text: str) -> None:
    found = visible(text)
    assert not [c for c in found if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    if text.isprintable():
        assert found == text


def test_the_output_of_a_jailed_command_is_printed_so(capfd: pytest.CaptureFixture[str]) -> None:
    from composer_replication.cli import sandbox_verb

    printed = sandbox_verb.render_exec(
        {"exit_code": 0, "stdout": "\x1b]0;mine\x07", "stderr": "", "timed_out": False, "truncated": False}
    )
    assert "\x1b" in printed  # the verb itself hands it on: the frame is what guards
    code = (
        "import sys; from composer_replication.cli import main as m;"
        f"sys.exit(m._print_result({printed!r}, 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"\\x1b]0;mine\\x07\n[exit code 0]\n"


def test_an_error_that_quotes_a_hostile_name_is_printed_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from composer_replication.cli import doctor_verb

    def fail(_args: object) -> None:
        raise InputError("CR0401", "it is no file.", where="a\x1b[2Jb")

    monkeypatch.setattr(doctor_verb, "run_explain", fail)
    assert main(["explain", "CR0302"]) == 4
    assert "a\\x1b[2Jb" in capsys.readouterr().err


# ---- the progress bar of the command line


def test_it_shows_counts_rate_and_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(quiet=False) as report:
        assert report is not None
        report(0, 2, "repositories")
        report(2, 2, "repositories")
        report(0, 5, "candidates")
        report(5, 5, "candidates")
    out, err = capsys.readouterr()
    assert out == ""
    assert "repositories:   0%" in err
    assert "candidates: 100%" in err
    assert "5/5" in err
    assert "step/s" in err
    assert err.endswith("\n")


def test_work_that_fails_at_once_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="at once"), progress_bar(quiet=False):
        raise ValueError("at once")
    assert capsys.readouterr() == ("", "")


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(quiet=True) as report:
        assert report is None
    assert capsys.readouterr() == ("", "")


def test_a_result_has_a_line_for_each_value() -> None:
    result: dict[str, object] = {"page": "a.html", "num_rows": 0, "is_whole": False, "dropped": {}, "no": ""}
    counted = {"a call": 12, "nothing": 0}
    result |= {"sources": {"executed": 2, "siblings": 1}, "files": ["x", "y"], "became": counted}
    plain = "page       a.html/num rows   0/is whole   False/sources    executed 2, siblings 1/files      x"
    counts = ", y/became     a call 12, nothing 0"
    assert columns(result).splitlines() == (plain + counts).split("/")


def test_rows_stand_below_their_name_and_names_of_others_stay_as_they_are() -> None:
    result: dict[str, object] = {"failed": [{"task_id": "t_1", "gate": "golden", "fix": ""}], "leaks": []}
    result |= {
        "tests": {"a_b==1": {"used": 3, "first_reason": None}, "c==1": {}},
        "flaky": {"a_b==1": [], "c==1": None},
    }
    result |= {
        "rate": 1 / 3,
        "seconds": 12345.678,
        "ids": ["t_1", "t_2", "t_3", "t_4"],
        "strength": {"killed_all": 2},
    }
    said = "failed/  task_id t_1, gate golden/leaks      none/tests/  a_b==1: used 3/rate       0.3333/seconds    12346/ids        t_1, t_2, t_3, t_4/strength   killed_all 2"
    assert columns(result).splitlines() == said.split("/")


def test_texts_and_what_is_long_have_lines_of_their_own() -> None:
    why = "CR0407: it could not be fetched, in no way"
    result: dict[str, object] = {"unusable": {"a": why}, "long": {f"m.py::f{n}": why for n in range(4)}}
    result |= {"text": "one\n  two\n", "written": {"model": "m", "text": "one\ntwo\n"}}
    lines = [f"unusable   a {why}", "long", *(f"  m.py::f{n}: {why}" for n in range(4))]
    lines += ["", "text", "one", "  two", "written", "  model: m", "  text: one", "  two"]
    assert columns(result).split("\n") == lines
