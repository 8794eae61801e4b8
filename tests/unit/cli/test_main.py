from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import composer_replication
from composer_replication.cli import flags
from composer_replication.cli import main as frame
from composer_replication.cli.main import main
from composer_replication.errors import (
    CollapseStopError,
    ComposerError,
    InputError,
    MissingError,
    NothingToDoError,
    SandboxFailure,
    UsageError,
)

Act = Callable[[argparse.Namespace], tuple[dict[str, Any], int]]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Act], None]:
    """Registers a verb called ``fake`` that does what it is given."""

    def register(act: Act) -> None:
        module = ModuleType("composer_replication.cli.fake_verb")

        arguments = [["words WORD", "", {"nargs": "*"}], ["--size N", "", {"type": "int", "choices": [1, 2]}]]
        table: dict[str, Any] = {"help": "does what it is told", "arguments": arguments}
        vars(module).update(run=act, render=lambda result: f"rendered {result}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(frame, "VERBS", ("explain", "fake"))
        monkeypatch.setattr(frame, "verb_helps", lambda: {"explain": "", "fake": table["help"]})
        declared = flags._declared
        monkeypatch.setattr(flags, "_declared", lambda name: table if name == "fake" else declared(name))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    return register


def raising(error: BaseException) -> Act:
    def act(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
        raise error

    return act


def test_a_person_reads_the_rendered_result(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(lambda args: ({"words": args.words}, 0))
    assert main(["fake", "a", "b"]) == 0
    assert capsys.readouterr() == ("rendered {'words': ['a', 'b']}\n", "")


def test_what_renders_a_result_is_named_as_what_makes_it() -> None:
    """Another name would be passed over, and the result printed as plain columns."""
    for file in Path(str(frame.__file__)).parent.glob("*_verb.py"):
        module = import_module(f"composer_replication.cli.{file.stem}")
        own = [
            name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__
        ]
        assert {name.replace("render", "run", 1) for name in own if name.startswith("render")} <= {*own}, file


@pytest.mark.parametrize(
    "words", [["fake", "--json"], ["--json", "fake"], ["fake", "a", "--json", "--quiet"]]
)
def test_json_is_exactly_one_object(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    def chatty(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
        print("a library prints")
        return {"quiet": args.quiet}, 6

    verb(chatty)
    assert main(words) == 6
    out, err = capsys.readouterr()
    assert json.loads(out) == {"quiet": "--quiet" in words}
    assert err == "a library prints\n"


def test_a_word_after_two_dashes_is_no_flag(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(lambda args: ({"words": args.words}, 0))
    assert main(["fake", "--", "--json"]) == 0
    assert capsys.readouterr().out == "rendered {'words': ['--json']}\n"
    verb(raising(UsageError("CR0204", "wrong.")))
    assert main(["fake", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UsageError("CR0204", "a key is wrong.", where="run.toml:3", fix="type that"), 2),
        (MissingError("CR0301", "no jail."), 3),
        (SandboxFailure("CR0302", "the jail broke."), 3),
        (InputError("CR0401", "not JSON.", where="a.json"), 4),
        (CollapseStopError(None), 5),
        (NothingToDoError("CR0604", "nothing."), 6),
    ],
)
def test_an_error_is_one_sentence_and_its_exit_code(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str], error: ComposerError, exit_code: int
) -> None:
    verb(raising(error))
    assert main(["fake"]) == exit_code
    assert capsys.readouterr() == ("", f"{error}\n")
    assert main(["fake", "--json"]) == exit_code
    out, err = capsys.readouterr()
    known = {"code": error.code, "message": error.message, "where": error.where, "fix": error.fix}
    assert json.loads(out) == {"error": known}
    assert err == f"{error}\n"


def test_an_interruption_is_130_and_one_sentence(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(raising(KeyboardInterrupt()))
    assert main(["fake", "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == "CR0103"
    assert err.count("\n") == 1
    assert "Next: type the same command again." in err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_bug_is_written_down_and_named(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str], tmp_path: Path, *, as_json: bool
) -> None:
    verb(raising(ZeroDivisionError("deep inside")))
    assert main(["fake", *(["--json"] if as_json else [])]) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert err.count("\n") == 1
    (bundle,) = tmp_path.glob("composer-rl-crash-*")
    assert str(bundle) in err
    assert "ZeroDivisionError: deep inside" in bundle.read_text()
    assert "arguments fake" in bundle.read_text()
    if as_json:
        assert json.loads(out)["error"]["where"] == str(bundle)


@pytest.mark.parametrize("value", [float("nan"), Path("x"), object()])
def test_a_result_that_json_does_not_know_is_a_bug(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str], value: object
) -> None:
    verb(lambda args: ({"value": value}, 0))
    assert main(["fake", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "CR0100"


def test_a_broken_pipe_inside_a_verb_is_a_bug_and_not_quiet(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(raising(BrokenPipeError("a child died")))
    assert main(["fake"]) == 1
    assert "CR0100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fak"], "did you mean fake?"),
        (["xyz"], "is none of explain, fake"),
        ([], "the following arguments are required: VERB"),
        (["fake", "--jsn"], "did you mean --json?"),
        (["fake", "--zzz"], "unknown argument '--zzz'"),
        (["fake", "--size", "3"], "invalid choice"),
        (["fake", "--size", "x"], "invalid int value"),
        (["fake", "--size"], "expected one argument"),
    ],
)
def test_a_wrong_command_line_has_a_code_and_the_nearest_word(
    verb: Callable[[Act], None], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    verb(lambda args: ({}, 0))
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("CR0206: ")
    assert err.count("\n") == 1
    assert said in err or "is none of 1, 2" in err
    assert "composer-rl" in err.rpartition("Next:")[2]


def test_a_wrong_command_line_with_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explian", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "CR0206"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"composer-rl {composer_replication.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["explain", "CR0204", "--json"]])
def test_a_reader_that_has_gone_is_no_error(words: list[str]) -> None:
    command = [sys.executable, "-u", "-m", "composer_replication.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_the_installed_command_is_this_one() -> None:
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="console_scripts", name="composer-rl")
    assert entry.load() is main


def test_paths_of_a_result_are_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = Path(__file__).parents[2] / "data" / "traces" / "atif"
    monkeypatch.chdir(tmp_path)
    assert main(["traces", "ingest", str(sessions), "--out", "sessions", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["traces", "show", "sessions", "--out", "page.html", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == str(tmp_path / "page.html")
