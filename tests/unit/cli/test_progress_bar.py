"""The progress bar of the command line."""

from __future__ import annotations

import pytest

from composer_replication.cli.terminal import progress_bar


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


def test_a_better_estimate_does_not_begin_anew(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(quiet=False) as report:
        assert report is not None
        report(0, 100, "0 tasks")
        report(10, 100, "3 tasks")
        capsys.readouterr()
        report(11, 40, "4 tasks")
        report(11, 40, "4 tasks")
    err = capsys.readouterr().err
    assert "11/40" in err
    assert "0/40" not in err
    assert "/100" not in err


def test_fewer_done_is_a_new_stretch(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(quiet=False) as report:
        assert report is not None
        report(0, 7, "repositories")
        report(7, 7, "repositories")
        capsys.readouterr()
        report(0, 7, "recording")
        assert "recording:   0%" in capsys.readouterr().err


def test_waiting_is_drawn_again(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(quiet=False) as report:
        assert report is not None
        report(0, 2, "sources")
        capsys.readouterr()
        report(0, 2, "sources")
        assert "0/2" in capsys.readouterr().err


def test_work_that_fails_at_once_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="at once"), progress_bar(quiet=False):
        raise ValueError("at once")
    assert capsys.readouterr() == ("", "")


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(quiet=True) as report:
        assert report is None
    assert capsys.readouterr() == ("", "")
