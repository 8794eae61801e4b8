"""``composer-rl report RUN`` as the command line calls it."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli import guard_verb
from composer_replication.cli.main import build_parser, rendered
from composer_replication.errors import InputError, UsageError


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["report", *words])


def test_it_writes_the_report_and_names_it(make_run: Any) -> None:
    root = make_run(num_steps=3)
    args = parsed(str(root), "--json")
    module, function = args.run.split(":")
    result, exit_code = getattr(import_module(module), function)(args)
    assert exit_code == 0
    assert result == {"report": str(root / "report.html")}
    assert Path(result["report"]).is_absolute()
    assert "<!doctype html>" in Path(result["report"]).read_text()
    assert str(root / "report.html") in rendered(args.run, result)


def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CR0630"):
        guard_verb.run_report(parsed(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_run_must_be_named() -> None:
    with pytest.raises(UsageError, match=r"CR0206.*required: RUN"):
        parsed()
