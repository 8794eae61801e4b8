from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.cli import sandbox_verb
from composer_replication.cli.main import build_parser
from composer_replication.errors import InputError, MissingError, UsageError
from composer_replication.records import Check
from composer_replication.sandbox import acceptance, choose_backend, selftest
from composer_replication.sandbox.bubblewrap import Bubblewrap


def parse(*words: str) -> argparse.Namespace:
    return build_parser("sandbox").parse_args(["sandbox", *words])


@pytest.fixture
def works_here() -> None:
    try:
        choose_backend()
    except MissingError as error:
        pytest.skip(f"no sandbox here: {error}")


def test_arguments() -> None:
    args = parse("exec", "--timeout", "2.5", "--backend", "sandlock", "--json", "--", "ls", "-la", "--json")
    assert args.command == ["ls", "-la", "--json"]
    assert (args.timeout, args.backend, args.json) == (2.5, "sandlock", True)
    assert args.run == "composer_replication.cli.sandbox_verb:run_exec"
    assert parse("selftest").run == "composer_replication.cli.sandbox_verb:run_selftest"


@pytest.mark.parametrize(
    "words", [["exec"], ["exec", "--timeout", "0", "--", "ls"], ["exec", "--timeout", "inf", "--", "ls"], []]
)
def test_bad_arguments(words: list[str]) -> None:
    with pytest.raises(UsageError, match="CR0206"):
        parse(*words)


@pytest.mark.usefixtures("works_here")
def test_exec_gives_the_command_s_own_code_and_leaves_the_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    script = "cat link; echo new > file; touch more; echo err >&2; exit 5"
    result, code = sandbox_verb.run_exec(parse("exec", "--tree", str(tmp_path), "--", "sh", "-c", script))
    assert code == 0
    is_as_usual = {"timed_out": False, "out_of_memory": False, "truncated": False}
    assert result == {"exit_code": 5, "stdout": "text", "stderr": "err\n", **is_as_usual}
    assert (tmp_path / "file").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.usefixtures("works_here")
def test_a_tree_with_a_socket_is_refused_and_not_run_without_it(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/door")  # a path may be longer than a socket's name
    os.close(folder)
    with pytest.raises(InputError, match=f"{tmp_path}/door is a socket") as caught:
        sandbox_verb.run_exec(parse("exec", "--tree", str(tmp_path), "--", "true"))
    assert (caught.value.code, caught.value.exit_code) == ("CR0304", 4)


@pytest.mark.usefixtures("works_here")
def test_the_self_test_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = list(selftest.GUARDS)[:2]
    quick = {name: (lambda _: "", "held") for name in (first, second)}
    monkeypatch.setattr(selftest, "GUARDS", quick)
    sandbox_verb.run_selftest(parse("selftest"))
    said = capsys.readouterr().err
    assert second in said
    assert "1/" in said


@pytest.mark.usefixtures("works_here")
def test_a_tree_that_holds_the_temporary_folder_is_not_copied_into_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    code = "from composer_replication.cli.main import main; import sys; sys.exit(main())"
    words = ["sandbox", "exec", "--json", "--tree", str(tmp_path), "--", "find", "."]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stdout"].split() == [".", "./file"]


@pytest.mark.usefixtures("works_here")
def test_exec_without_a_tree_starts_in_an_empty_folder() -> None:
    result, _ = sandbox_verb.run_exec(parse("exec", "--", "ls", "-A"))
    assert (result["exit_code"], result["stdout"]) == (0, "")


@pytest.mark.usefixtures("works_here")
def test_exec_times_out() -> None:
    result, code = sandbox_verb.run_exec(parse("exec", "--timeout", "0.5", "--", "sleep", "60"))
    assert (result["timed_out"], code) == (True, 0)
    assert "timed out" in sandbox_verb.render_exec(result)


@pytest.mark.usefixtures("works_here")
def test_output_that_was_cut_is_said_to_be() -> None:
    result, _ = sandbox_verb.run_exec(parse("exec", "--", "sh", "-c", "head -c 4194305 /dev/zero; exit 4"))
    assert (result["exit_code"], result["truncated"], len(result["stdout"])) == (4, True, 4 << 20)
    assert sandbox_verb.render_exec(result).endswith("[exit code 4, output cut]")


@pytest.mark.usefixtures("works_here")
def test_a_tree_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CR0304"):
        sandbox_verb.run_exec(parse("exec", "--tree", str(tmp_path / "absent"), "--", "ls"))


def test_a_backend_that_does_not_work_here_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer_replication.sandbox.bwrap_program.find_bwrap", lambda: None)
    with pytest.raises(MissingError, match=r"CR0301.*bwrap is not installed"):
        sandbox_verb.run_selftest(parse("selftest", "--backend", "bubblewrap"))


@pytest.fixture
def says_that_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bubblewrap, "is_available", lambda self: Check(self.name, True, "yes"))


@pytest.mark.usefixtures("says_that_it_works")
@pytest.mark.parametrize(("is_ok", "exit_code", "word"), [(True, 0, "holds"), (False, 3, "NOT")])
def test_selftest_result(monkeypatch: pytest.MonkeyPatch, is_ok: bool, exit_code: int, word: str) -> None:
    checks = [Check("network", is_ok, "why", "" if is_ok else "do this")]
    monkeypatch.setattr("composer_replication.sandbox.run_selftest", lambda _backend, **_options: checks)
    result, code = sandbox_verb.run_selftest(parse("selftest", "--backend", "bubblewrap"))
    assert code == exit_code
    assert result == {
        "backend": "bubblewrap",
        "ok": is_ok,
        "checks": [{"name": "network", "ok": is_ok, "detail": "why", "fix": "" if is_ok else "do this"}],
    }
    assert word in sandbox_verb.render_selftest(result)
    assert "network: why" in sandbox_verb.render_selftest(result)


def test_guards_have_names_that_a_reader_can_rely_on() -> None:
    assert list(selftest.GUARDS) == [
        "network", "host_files", "masked", "environment", "writes", "signals", "privilege",
        "open_files", "processes", "memory", "disk", "output", "timeout", "leftovers",
    ]  # fmt: skip


def test_no_isolation_is_said_in_the_result(tmp_path: Path) -> None:
    try:
        words = ("exec", "--backend", "none", "--i-accept-no-isolation", "--tree", str(tmp_path))
        result, code = sandbox_verb.run_exec(parse(*words, "--", "echo", "on"))
    finally:
        acceptance.forget()
    assert (code, result["stdout"], result["accepted_no_isolation"]) == (0, "on\n", ["everything"])
    assert "Accepted to do without isolation: everything." in sandbox_verb.render_exec(result)


@pytest.mark.usefixtures("says_that_it_works")
def test_one_guard_may_be_given_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("network", True, "holds"), Check("disk", False, "why", "fix")]
    monkeypatch.setattr("composer_replication.sandbox.run_selftest", lambda _backend, **_options: checks)
    assert sandbox_verb.run_selftest(parse("selftest", "--backend", "bubblewrap"))[1] == 3
    try:
        words = ("--i-accept-no-isolation", "memory", "--i-accept-no-isolation", "disk")
        result, code = sandbox_verb.run_selftest(parse("selftest", "--backend", "bubblewrap", *words))
    finally:
        acceptance.forget()
    assert (code, result["ok"], result["accepted_no_isolation"]) == (0, True, ["memory", "disk"])
    text = sandbox_verb.render_selftest(result)
    assert "FAIL disk: why" in text
    assert "does NOT hold, as was accepted" in text
