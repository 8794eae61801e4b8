"""Every launch that docs/scale.md shows is one that can be rendered, and its table of options is theirs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.launch.targets import TARGETS, TargetOptions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scale.md").read_text()
LAUNCHES = re.findall(r"^composer-rl (launch \S+run\.toml .*?)\s*(?:#.*)?$", PAGE, re.MULTILINE)


def test_all_targets_are_shown() -> None:
    assert {re.search(r"--to (\S+)", line)[1] for line in LAUNCHES} == set(TARGETS)  # type: ignore[index]


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_of_the_page_renders(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*shlex.split(line), "--dry-run"]) == 0, capsys.readouterr().err
    assert "# ---- " in capsys.readouterr().out


@pytest.mark.parametrize("name", TARGETS)
def test_the_options_of_a_target_are_those_of_the_page(name: str) -> None:
    from importlib import import_module

    module, _, kind = TARGETS[name].partition(":")
    options = getattr(import_module(f"composer_replication.launch.{module}"), kind).Options
    row = re.search(rf"^\| {name} \| (.*) \|$", PAGE, re.MULTILINE)
    assert row
    own = set(options.model_fields) - set(TargetOptions.model_fields)
    own -= set(page_options("kubernetes")) if row[1].startswith("as kubernetes") else set()
    assert {word for word in page_options(name) if word in own} == own
    required = {key for key, field in options.model_fields.items() if field.is_required()}
    bold = set(re.findall(r"\*\*`(\w+)`\*\*", row[1])) | ({"image"} if "as kubernetes" in row[1] else set())
    assert bold == required


def page_options(name: str) -> list[str]:
    row = re.search(rf"^\| {name} \| (.*) \|$", PAGE, re.MULTILINE)
    return re.findall(r"`(\w+)`", row[1]) if row else []
