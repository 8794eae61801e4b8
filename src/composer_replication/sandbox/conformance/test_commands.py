"""What a command is given, and what comes back of it."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composer_replication.errors import CommandError
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox.conformance.programs import LONG_SECONDS, MIB, living, python


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143), ("no-such-command-x", 127)],
)
def test_exit_code(jail: Sandbox, script: str, code: int) -> None:
    result = jail.exec(["sh", "-c", script], timeout_seconds=LONG_SECONDS)
    assert (result.exit_code, result.timed_out, result.out_of_memory) == (code, False, False)


def test_a_command_that_does_not_exist_is_an_ordinary_result(jail: Sandbox) -> None:
    result = jail.exec(["no-such-command-x"], timeout_seconds=LONG_SECONDS)
    assert result.exit_code == 127
    assert "no-such-command-x" in result.stderr


def test_arguments_arrive_as_given(jail: Sandbox) -> None:
    words = ["a b", "$HOME", "", "-n", "'\"", "é\n"]
    result = jail.exec(
        [*python("import sys, json; print(json.dumps(sys.argv[1:]))"), *words], timeout_seconds=LONG_SECONDS
    )
    assert json.loads(result.stdout) == words


@pytest.mark.parametrize(
    "name", ["/etc/debian_version", "/etc/os-release", "/etc/lsb-release", "/etc/localtime"]
)
def test_what_programs_ask_the_system_is_readable_or_absent(jail: Sandbox, name: str) -> None:
    """An installer that finds such a file closed gives up."""
    code = f"import contextlib\nwith contextlib.suppress(FileNotFoundError): open({name!r}, 'rb').read()"
    assert jail.exec(python(code), timeout_seconds=LONG_SECONDS).exit_code == 0


@pytest.mark.parametrize("command", [[], [""], ["", "x"], "", "  \n"])
def test_a_command_must_not_be_empty(jail: Sandbox, command: list[str] | str) -> None:
    with pytest.raises(CommandError, match="command is empty"):
        jail.exec(command, timeout_seconds=LONG_SECONDS)


def test_one_text_is_for_the_shell(jail: Sandbox) -> None:
    result = jail.exec("printf %s a; printf %s b >&2; exit 5", timeout_seconds=LONG_SECONDS)
    assert (result.exit_code, result.stdout, result.stderr) == (5, "a", "b")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_the_time_out_must_be_above_zero(jail: Sandbox, seconds: float) -> None:
    with pytest.raises(CommandError, match="timeout_seconds"):
        jail.exec(["true"], timeout_seconds=seconds)


def test_large_stdin_and_stdout_do_not_block_each_other(jail: Sandbox) -> None:
    data = os.urandom(3 * MIB // 2).hex().encode()
    result = jail.exec(["cat"], timeout_seconds=LONG_SECONDS, stdin=data)
    assert hashlib.sha256(result.stdout.encode()).digest() == hashlib.sha256(data).digest()
    assert not result.truncated


def test_stdin_that_nobody_reads(jail: Sandbox) -> None:
    assert jail.exec(["true"], timeout_seconds=LONG_SECONDS, stdin=b"x" * (8 * MIB)).exit_code == 0


def test_streams_can_be_opened_by_name(jail: Sandbox) -> None:
    script = "echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin"
    done = jail.exec(script, timeout_seconds=LONG_SECONDS, stdin=b"in")
    assert (done.stdout, done.stderr) == ("out\nin", "err\n")


def test_without_stdin_there_is_an_end_of_file(jail: Sandbox) -> None:
    result = jail.exec(["cat"], timeout_seconds=LONG_SECONDS)
    assert (result.exit_code, result.stdout) == (0, "")


def test_environment_holds_what_env_names_and_nothing_of_ours(
    jail: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_TEST_SECRET", "hush")
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    result = jail.exec(python(code), timeout_seconds=LONG_SECONDS, env={"GIVEN": "a=b c", "LANG": "C"})
    seen = json.loads(result.stdout)
    assert "COMPOSER_TEST_SECRET" not in seen
    assert (seen["GIVEN"], seen["LANG"]) == ("a=b c", "C")
    # Where git could not open the files of the system that it looks for.
    of_git = {"GIT_CONFIG_NOSYSTEM", "GIT_ATTR_NOSYSTEM", "GIT_CEILING_DIRECTORIES"}
    assert set(seen) - {"PWD", "SHLVL", "_", "OLDPWD", "LC_CTYPE", *of_git} == {
        "GIVEN", "LANG", "PATH", "HOME", "TMPDIR", "USER", "LOGNAME", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE",
    }  # fmt: skip


def test_home_and_temporary_folder_are_private_and_writable(jail: Sandbox) -> None:
    code = "import os, tempfile; print(os.environ['HOME']); open(os.environ['HOME'] + '/x', 'w'); tempfile.mkdtemp()"
    result = jail.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()) != Path.home()


def test_binary_output_is_decoded_with_replacement(jail: Sandbox) -> None:
    result = jail.exec(python(r"import os; os.write(1, b'a\xff\x00b')"), timeout_seconds=LONG_SECONDS)
    assert result.stdout == "a\ufffd\x00b"


@pytest.mark.parametrize("stream", [1, 2])
def test_each_stream_is_cut(backend: SandboxBackend, tree: Path, stream: int) -> None:
    with backend.open(SandboxSpec(tree, limits=Limits(output_bytes=1000))) as sandbox:
        result = sandbox.exec(
            python(f"import os; os.write({stream}, b'x' * 5000)"), timeout_seconds=LONG_SECONDS
        )
        kept = sandbox.exec(
            python(f"import os; os.write({stream}, b'x' * 1000)"), timeout_seconds=LONG_SECONDS
        )
    assert result.truncated
    assert (result.stdout, result.stderr)[stream - 1] == "x" * 1000
    assert (result.stdout, result.stderr)[2 - stream] == ""
    assert not kept.truncated
    assert (kept.stdout, kept.stderr)[stream - 1] == "x" * 1000


def test_a_gigabyte_of_output_is_drained_and_not_kept(jail: Sandbox) -> None:
    result = jail.exec(["head", "-c", str(1 << 30), "/dev/zero"], timeout_seconds=5 * LONG_SECONDS)
    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, Limits().output_bytes)


def test_time_out_kills_daemons(jail: Sandbox) -> None:
    token = uuid.uuid4().hex
    daemon = (
        f"import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(99)  # {token}"
    )
    daemon += "\n os._exit(0)\ntime.sleep(99)"
    result = jail.exec(python(daemon), timeout_seconds=1.0)
    assert result.timed_out
    assert result.exit_code != 0
    assert result.seconds >= 0.5
    assert living(token) == []


def test_a_child_that_keeps_the_output_open_does_not_hold_us(jail: Sandbox) -> None:
    token = uuid.uuid4().hex
    result = jail.exec(["sh", "-c", f"sh -c 'sleep 99; : {token}' & echo done"], timeout_seconds=LONG_SECONDS)
    assert (result.stdout, result.exit_code, result.timed_out) == ("done\n", 0, False)
    assert living(token) == []


def test_several_commands_in_one_sandbox_at_once(jail: Sandbox) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda n: jail.exec(["sh", "-c", f"exit {n}"], timeout_seconds=LONG_SECONDS), range(6))
        )
    assert [result.exit_code for result in results] == list(range(6))


def test_eight_sandboxes_at_once(backend: SandboxBackend, tmp_path: Path) -> None:
    def one(number: int) -> tuple[str, str]:
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        with backend.open(SandboxSpec(tree)) as sandbox:
            script = f"echo {number} > mine; sleep 0.2; cat mine; ls"
            return sandbox.exec(["sh", "-c", script], timeout_seconds=LONG_SECONDS).stdout, (
                tree / "mine"
            ).read_text()

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    assert answers == [(f"{number}\nmine\n", f"{number}\n") for number in range(8)]
