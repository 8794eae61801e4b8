"""What a command is given, and what comes back of it."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import CommandError
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox.conformance.programs import (
    LONG_SECONDS,
    MIB,
    living,
    python,
    run,
    run_limited,
)

# By name: the command, its input, the exit code, what it prints, and what is in its errors.
ANSWERS: dict[str, tuple[Any, Any, int, str, str]] = {
    "nothing": ("exit 0", b"", 0, "", ""),
    "an exit code": ("exit 3", b"", 3, "", ""),
    "SIGKILL": ("kill -9 $$", b"", 137, "", ""),
    "SIGTERM": ("kill -15 $$", b"", 143, "", ""),
    "no such command for a shell": ("no-such-command-x", b"", 127, "", "no-such-command-x"),
    "no such program": (["no-such-command-x"], b"", 127, "", "no-such-command-x"),
    "no input has an end": (["cat"], b"", 0, "", ""),
    "input that nobody reads": (["true"], b"x" * (8 * MIB), 0, "", ""),
    "input of every byte": (["cksum"], bytes(range(256)) * 3, 0, "794916923 768\n", ""),
    "input in an array": (["cat"], bytearray(b"in"), 0, "in", ""),
    "input in a view": (["cat"], memoryview(b"in"), 0, "in", ""),
    "output that is no text": (python(r"import os; os.write(1, b'a\xff\x00b')"), b"", 0, "a\ufffd\x00b", ""),
    "errors that are no text": (
        python(r"import os; os.write(2, b'a\xff\x00b\x1b[2J')"), b"", 0, "", "a\ufffd\x00b\x1b[2J",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_comes_back(jail: Sandbox, name: str) -> None:
    command, stdin, code, stdout, in_stderr = ANSWERS[name]
    result = run(jail, command, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, stdout)
    assert in_stderr in result.stderr
    assert (result.stderr == "") == (in_stderr == "")
    assert not (result.timed_out or result.out_of_memory or result.truncated)


def test_arguments_arrive_as_given(jail: Sandbox) -> None:
    words = ["a b", "$HOME", "", "-n", "'\"", "é\n"]
    result = run(jail, [*python("import sys, json; print(json.dumps(sys.argv[1:]))"), *words])
    assert json.loads(result.stdout) == words


@pytest.mark.parametrize(
    "name", ["/etc/debian_version", "/etc/os-release", "/etc/lsb-release", "/etc/localtime"]
)
def test_what_programs_ask_the_system_is_readable_or_absent(jail: Sandbox, name: str) -> None:
    """An installer that finds such a file closed gives up."""
    code = f"import contextlib\nwith contextlib.suppress(FileNotFoundError): open({name!r}, 'rb').read()"
    assert run(jail, python(code)).exit_code == 0


@pytest.mark.parametrize("command", [[], [""], ["", "x"], "", "  \n"])
def test_a_command_must_not_be_empty(jail: Sandbox, command: list[str] | str) -> None:
    with pytest.raises(CommandError, match="command is empty"):
        run(jail, command)


def test_one_text_is_for_the_shell(jail: Sandbox) -> None:
    result = run(jail, "printf %s a; printf %s b >&2; exit 5")
    assert (result.exit_code, result.stdout, result.stderr) == (5, "a", "b")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_the_time_out_must_be_above_zero(jail: Sandbox, seconds: float) -> None:
    with pytest.raises(CommandError, match="timeout_seconds"):
        jail.exec(["true"], timeout_seconds=seconds)


def test_large_stdin_and_stdout_do_not_block_each_other(jail: Sandbox) -> None:
    data = os.urandom(3 * MIB // 2).hex().encode()
    result = run(jail, ["cat"], stdin=data)
    assert hashlib.sha256(result.stdout.encode()).digest() == hashlib.sha256(data).digest()
    assert not result.truncated


def test_streams_can_be_opened_by_name(jail: Sandbox) -> None:
    done = run(jail, "echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin", stdin=b"in")
    assert (done.stdout, done.stderr) == ("out\nin", "err\n")


def test_environment_holds_what_env_names_and_nothing_of_ours(
    jail: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_TEST_SECRET", "hush")
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    seen = json.loads(run(jail, python(code), env={"GIVEN": "a=b c", "LANG": "C"}).stdout)
    assert "COMPOSER_TEST_SECRET" not in seen
    assert (seen["GIVEN"], seen["LANG"]) == ("a=b c", "C")
    # Where git could not open the files of the system that it looks for.
    of_git = {"GIT_CONFIG_NOSYSTEM", "GIT_ATTR_NOSYSTEM", "GIT_CEILING_DIRECTORIES"}
    assert set(seen) - {"PWD", "SHLVL", "_", "OLDPWD", "LC_CTYPE", *of_git} == {
        "GIVEN", "LANG", "PATH", "HOME", "TMPDIR", "USER", "LOGNAME", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE",
    }  # fmt: skip


def test_home_and_temporary_folder_are_private_and_writable(jail: Sandbox) -> None:
    code = "import os, tempfile; print(os.environ['HOME']); open(os.environ['HOME'] + '/x', 'w'); tempfile.mkdtemp()"
    result = run(jail, python(code))
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()) != Path.home()


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("num_bytes", [1000, 5000])
def test_each_stream_is_cut(backend: SandboxBackend, tree: Path, stream: int, num_bytes: int) -> None:
    code = f"import os; os.write({stream}, b'x' * {num_bytes})"
    result = run_limited(backend, tree, python(code), output_bytes=1000)
    assert result.truncated == (num_bytes > 1000)
    assert (result.stdout, result.stderr)[stream - 1] == "x" * 1000
    assert (result.stdout, result.stderr)[2 - stream] == ""


def test_a_gigabyte_of_output_is_drained_and_not_kept(jail: Sandbox) -> None:
    result = jail.exec(["head", "-c", str(1 << 30), "/dev/zero"], timeout_seconds=5 * LONG_SECONDS)
    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, Limits().output_bytes)


def test_time_out_kills_daemons(jail: Sandbox) -> None:
    token = uuid.uuid4().hex
    inner = f"if os.fork() == 0:\n  time.sleep(99)  # {token}\n os._exit(0)"
    daemon = f"import os, time\nif os.fork() == 0:\n os.setsid()\n {inner}\ntime.sleep(99)"
    result = jail.exec(python(daemon), timeout_seconds=1.0)
    assert result.timed_out
    assert result.exit_code != 0
    assert result.seconds >= 0.5
    assert living(token) == []


def test_a_child_that_keeps_the_output_open_does_not_hold_us(jail: Sandbox) -> None:
    token = uuid.uuid4().hex
    result = run(jail, f"sh -c 'sleep 99; : {token}' & echo done")
    assert (result.stdout, result.exit_code, result.timed_out) == ("done\n", 0, False)
    assert living(token) == []


def test_several_commands_in_one_sandbox_at_once(jail: Sandbox) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: run(jail, f"exit {n}"), range(6)))
    assert [result.exit_code for result in results] == list(range(6))


def test_eight_sandboxes_at_once(backend: SandboxBackend, tmp_path: Path) -> None:
    def one(number: int) -> tuple[str, str]:
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        with backend.open(SandboxSpec(tree)) as sandbox:
            done = run(sandbox, f"echo {number} > mine; sleep 0.2; cat mine; ls")
            return done.stdout, (tree / "mine").read_text()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    assert answers == [(f"{number}\nmine\n", f"{number}\n") for number in range(8)]
