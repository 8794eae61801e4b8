"""Ten thousand recipes and command lines that nobody would write: one sentence each, with a code and a cure, and no traceback."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli import training_run
from composer_replication.cli.main import _parse, build_parser, main
from composer_replication.errors import UsageError

RECIPES = sorted(Path(__file__).parents[2].glob("recipes/*/*.toml"))
NUM_RECIPES, NUM_LINES = 5_000, 5_000
ODD = (
    " '' nan -inf -1 0 1e400 9999999999999999999999 true [] [[]] {} {a=1} '\\u0000' '../..' '/dev/null' "
    "1979-05-27 'gpt' [1,'a'] \x00 'x'=1 0.5 'file:///'"
).split(" ")  # the first is empty
# What starts servers, clusters, long tests of the machine or removes files is parsed and not run.
RUN_FOR_REAL = (
    *(f"tasks {verb}" for verb in "show stats validate leakscan split export import".split()),
    *("guard scan", "report", "explain", "eval", "recipe new", "traces"),
)


class Reached(BaseException):
    """All checks let it pass."""


def mutated(text: str, draw: random.Random) -> str:
    """A recipe with one to three things wrong, most of them."""
    for _ in range(draw.randint(1, 3)):
        lines = text.split("\n")
        at = draw.randrange(len(lines))
        kind = draw.randrange(8)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, draw.choice(lines))
        elif kind == 2:
            lines[at] = re.sub(r"=.*", lambda _: "= " + draw.choice(ODD), lines[at])
        elif kind == 3:
            lines[at] = re.sub(r"\w", draw.choice("abz_9"), lines[at], count=1)
        elif kind == 4:
            lines.insert(
                at, draw.choice(("[trl]", "[nobody]", "[model.lora]", "[[tasks]]", "[agent.reward]", "[x"))
            )
        elif kind == 5:
            lines.insert(
                at, f"{draw.choice(('seed', 'max_steps', 'backend', 'weight', 'é'))} = {draw.choice(ODD)}"
            )
        elif kind == 6:
            lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
        else:
            lines[at] = re.sub(r"\d+", lambda _: str(draw.choice((-1, 0, 10**12))), lines[at])
        text = "\n".join(lines)
    return text


def verbs(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command that runs something, with its parser."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield words, parser
    for action in below:
        for name, inner in action.choices.items():
            yield from verbs(inner, (*words, name))


def line_of(parser: Any, values: list[str], draw: random.Random) -> list[str]:
    """Some of the flags of a command, some twice or misspelt, each with a value that may be none."""
    words: list[str] = []
    for action in draw.sample(parser._actions, draw.randint(0, min(6, len(parser._actions)))):
        if isinstance(action, argparse._HelpAction):
            continue
        if action.option_strings:
            words.append(draw.choice(action.option_strings) + draw.choice(("", "", "", "x", "=")))
        if action.nargs != 0 or draw.random() < 0.1:
            words.append(draw.choice(values))
    return words + draw.sample(values, draw.randint(0, 2))


def judge(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run it with ``--json``; what it says must be one object, and an error that is known."""
    try:
        code = main(["--json", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    assert "Traceback" not in said.err, (words, said.err)
    if code != 0:
        error = json.loads(said.out)["error"] if said.out.strip().startswith('{"error"') else None
        assert error is not None or code in (5, 6), (words, code, said.out[:300], said.err[-300:])
        if error is not None:
            assert error["code"] != "CR0100" and all(error[key] for key in ("message", "where", "fix")), (
                words,
                error,
            )
            assert "\n" not in error["message"], (words, error)
    return code


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(*_: Any, **__: Any) -> Any:
        raise Reached

    monkeypatch.setattr(training_run.TrainingRun, "go", reach)
    draw, num_passed = random.Random(0), 0
    for number in range(NUM_RECIPES):
        recipe = tmp_path / "run.toml"
        recipe.write_text(mutated(draw.choice(RECIPES).read_text(), draw))
        try:
            assert judge(["train", str(recipe), "--out", str(tmp_path / f"run-{number}")], capsys) != 0
        except Reached:
            num_passed += 1
    assert num_passed < NUM_RECIPES / 2  # most were wrong, and were told so


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_command_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in {
        "empty": b"",
        "binary": bytes(range(256)),
        "list": b"[1, 2]",
        "rows": b'{"a": 1}\n{"a"',
    }.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    values = " empty binary list rows folder gone - -- 0 -1 1e9 nan a=b = é\x1b CR0204 CR9999".split(" ")
    draw, commands = random.Random(0), list(verbs(build_parser()))
    num_failed, refused = 0, []
    for _ in range(NUM_LINES):
        verb, parser = draw.choice(commands)
        words = [*verb, *line_of(parser, values, draw)]
        if " ".join(verb).startswith(RUN_FOR_REAL):
            num_failed += judge(words, capsys) != 0
            continue
        try:
            _parse(words)
        except SystemExit:
            capsys.readouterr()
        except UsageError as error:
            refused.append((words, error.message, error.where, error.fix))
    assert [words for words, *said in refused if not all(said)] == []
    assert num_failed + len(refused) > NUM_LINES / 2
