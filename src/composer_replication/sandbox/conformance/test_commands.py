"""What a command is given, and what comes back of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import CommandError, SandboxFileError, UsageError
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import LocalSandbox, SandboxBackend
from composer_replication.sandbox.conformance.plugin import (
    LONG_SECONDS,
    MIB,
    living,
    python,
    run,
    run_limited,
)

WORDS = ["a b", "$HOME", "", "-n", "'\"", "é\n"]
# An installer that finds such a file closed gives up.
OPEN_OR_ABSENT = """
import contextlib
for name in ("debian_version", "os-release", "lsb-release", "localtime"):
    with contextlib.suppress(FileNotFoundError): open(f"/etc/{name}", "rb").read()
"""
# By name: the command, its input, the exit code, what it prints, and a pattern of its errors.
ANSWERS: dict[str, tuple[Any, Any, int, str, str]] = {
    "nothing": ("exit 0", b"", 0, "", ""),
    "an exit code": ("exit 3", b"", 3, "", ""),
    "SIGKILL": ("kill -9 $$", b"", 137, "", ""),
    "SIGTERM": ("kill -15 $$", b"", 143, "", ""),
    "no such command for a shell": ("no-such-command-x", b"", 127, "", ".*no-such-command-x.*"),
    "no such program": (["no-such-command-x"], b"", 127, "", ".*no-such-command-x.*"),
    "no input has an end": (["cat"], b"", 0, "", ""),
    "input that nobody reads": (["true"], b"x" * (8 * MIB), 0, "", ""),
    "input of every byte": (["cksum"], bytes(range(256)) * 3, 0, "794916923 768\n", ""),
    "input in an array": (["cat"], bytearray(b"in"), 0, "in", ""),
    "input in a view": (["cat"], memoryview(b"in"), 0, "in", ""),
    "output that is no text": (python(r"import os; os.write(1, b'a\xff\x00b')"), b"", 0, "a\ufffd\x00b", ""),
    "errors that are no text": (
        python(r"import os; os.write(2, b'a\xff\x00b\x1b[2J')"), b"", 0, "", re.escape("a\ufffd\x00b\x1b[2J"),
    ),
    "arguments as given": (
        [*python("import sys, json; print(json.dumps(sys.argv[1:]))"), *WORDS], b"", 0, f"{json.dumps(WORDS)}\n", "",
    ),
    "streams that are opened by name": (
        "echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin", b"in", 0, "out\nin", "err\n",
    ),
    "what programs ask the system": (python(OPEN_OR_ABSENT), b"", 0, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_comes_back(jail: LocalSandbox, name: str) -> None:
    command, stdin, code, stdout, stderr = ANSWERS[name]
    result = run(jail, command, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, stdout), result.stderr
    assert re.fullmatch(stderr, result.stderr, re.DOTALL), result.stderr
    assert not (result.timed_out or result.out_of_memory or result.truncated)


def test_one_text_is_for_the_shell(jail: LocalSandbox) -> None:
    result = run(jail, "printf %s a; printf %s b >&2; exit 5")
    assert (result.exit_code, result.stdout, result.stderr) == (5, "a", "b")


def test_large_stdin_and_stdout_do_not_block_each_other(jail: LocalSandbox) -> None:
    data = os.urandom(3 * MIB // 2).hex().encode()
    result = run(jail, ["cat"], stdin=data)
    assert hashlib.sha256(result.stdout.encode()).digest() == hashlib.sha256(data).digest()
    assert not result.truncated


def test_environment_holds_what_env_names_and_nothing_of_ours(
    jail: LocalSandbox, monkeypatch: pytest.MonkeyPatch
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


def test_home_and_temporary_folder_are_private_and_writable(jail: LocalSandbox) -> None:
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


def test_a_flood_of_output_is_drained_and_not_kept(jail: LocalSandbox) -> None:
    result = jail.exec(["head", "-c", str(200 * MIB), "/dev/zero"], timeout_seconds=5 * LONG_SECONDS)
    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, Limits().output_bytes)


def test_time_out_kills_daemons(jail: LocalSandbox) -> None:
    token = uuid.uuid4().hex
    inner = f"if os.fork() == 0:\n  time.sleep(99)  # {token}\n os._exit(0)"
    daemon = f"import os, time\nif os.fork() == 0:\n os.setsid()\n {inner}\ntime.sleep(99)"
    result = jail.exec(python(daemon), timeout_seconds=1.0)
    assert result.timed_out
    assert result.exit_code != 0
    assert result.seconds >= 0.5
    assert living(token) == []


def test_a_child_that_keeps_the_output_open_does_not_hold_us(jail: LocalSandbox) -> None:
    token = uuid.uuid4().hex
    result = run(jail, f"sh -c 'sleep 99; : {token}' & echo done")
    assert (result.stdout, result.exit_code, result.timed_out) == ("done\n", 0, False)
    assert living(token) == []


def test_several_commands_in_one_sandbox_at_once(jail: LocalSandbox) -> None:
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


def test_a_command_that_closes_its_descriptors(jail: LocalSandbox) -> None:
    token = uuid.uuid4().hex
    code = (
        "import os, time\n"
        f"if os.fork() == 0:\n os.setsid(); os.closerange(0, 256); time.sleep(99)  # {token}\n"
        "os.closerange(0, 256); time.sleep(0.3); os._exit(5)"
    )
    done = run(jail, python(code), stdin=b"x" * 100_000)
    assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (5, "", "", False)
    assert living(token) == []
    assert run(jail, ["echo", "on"]).stdout == "on\n"


NO_NUMBERS = (float("nan"), float("inf"), float("-inf"))
# What is wrong, in words of the refusal; which argument; and values of it.
NO_CALLS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("command is empty", "command", ([], [""], ["", "x"], "", "  \n")),
    ("is no text", "command", (b"echo", ["echo", 1], [b"echo"], ["echo", None], None, 5, {"echo"})),
    ("cannot be called", "env", ({"": "x"}, {"A=B": "x"}, {"=": "x"})),
    ("is no text|must map", "env", ({"A": 1}, {"A": None}, {"A": b"x"}, {1: "x"}, {b"A": "x"}, [("A", "x")])),
    ("timeout_seconds must be", "timeout_seconds", (0, 0.0, -1, *NO_NUMBERS, True, "5", None)),
    ("stdin must be", "stdin", ("text", None, 5, ["x"])),
)


NO_LIMITS = tuple(
    {name: value}
    for name in ("memory_bytes", "num_processes", "disk_bytes", "output_bytes", "num_open_files")
    for value in (0, -1, 2.5, True, "5", None, 1 << 64)
)


def test_what_is_no_call_is_refused_before_anything_starts(jail: LocalSandbox, tree: Path) -> None:
    """By every backend in the same words: the caller's slip is neither a result nor a failure of the jail."""
    for why, name, values in NO_CALLS:
        for value in values:
            given: dict[str, Any] = {"command": "touch started", "timeout_seconds": LONG_SECONDS, name: value}
            with pytest.raises(CommandError, match=why) as caught:
                jail.exec(given.pop("command"), **given)
            assert caught.value.code == "CR0886"
    assert not (tree / "started").exists()


def test_limits_that_nothing_can_hold_are_refused(backend: SandboxBackend, tree: Path) -> None:
    owner = tree.stat().st_uid
    for wrong in NO_LIMITS:
        with pytest.raises(UsageError) as caught:
            backend.open(SandboxSpec(tree, limits=Limits(**wrong)))  # type: ignore[arg-type]
        assert caught.value.code == "CR0886", wrong
        assert next(iter(wrong)) in caught.value.message
    assert tree.stat().st_uid == owner


@pytest.mark.parametrize(
    ("why", "text"), [("NUL", "\0"), ("NUL", "a\0b"), ("no bytes", "\ud800"), ("no bytes", "a/\udfff\ud800")]
)
def test_text_that_no_call_of_the_system_takes_is_refused(jail: LocalSandbox, why: str, text: str) -> None:
    """Half of a surrogate pair can stand in JSON, and so in what a model says: no fault of ours."""
    calls: list[tuple[Any, dict[str, str]]] = [
        (f"echo {text}", {}),
        (["echo", text], {}),
        ([f"tr{text}"], {}),
    ]
    for command, env in [*calls, (["true"], {"A": text}), (["true"], {f"A{text}": "x"})]:
        with pytest.raises(CommandError, match=why) as refused:
            run(jail, command, env=env)
        assert refused.value.code == "CR0886"
    for ask in (jail.read_file, lambda path: jail.write_file(path, b""), jail.list_files):
        with pytest.raises(SandboxFileError, match=why) as caught:
            ask(text)
        assert caught.value.code == "CR0309"
        str(caught.value).encode()
    assert jail.list_files() == []


def test_a_command_that_is_too_long_is_an_ordinary_result(jail: LocalSandbox) -> None:
    long = "x" * 200_000
    many = {f"A{number}": "x" * 100_000 for number in range(30)}
    calls: list[tuple[Any, dict[str, str]]] = [(f"echo {long}", {}), (["true", long], {})]
    calls += [(["true", *many.values()], {}), (["true"], {"A": long}), (["true"], many)]
    for command, env in calls:
        done = run(jail, command, env=env)
        assert (done.exit_code, "rgument list too long" in done.stderr) == (126, True)
    nearly = run(jail, "echo ${#A11}", env={f"A{number}": "x" * 100_000 for number in range(12)})
    assert (nearly.exit_code, nearly.stdout) == (0, "100000\n")
