"""Trees and commands that nobody should give: one sentence with its code or an ordinary result, and no survivor."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import uuid
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import CommandError, SandboxFailure, SandboxFileError, UsageError
from composer_replication.interfaces import Sandbox, SandboxBackend
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox.conformance.programs import LONG_SECONDS, MIB, living, python, run

NUM_FOLDERS, NUM_FILES_EACH = 100, 1000
SPARSE_BYTES = 4 << 30


def test_a_device_file_in_the_tree_is_refused(backend: SandboxBackend, tree: Path) -> None:
    (tree / "deep").mkdir()
    try:
        os.mknod(tree / "deep" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root can make a device file")
    owner = tree.stat().st_uid
    with pytest.raises(SandboxFailure, match=r"deep/null is a device") as caught:
        backend.open(SandboxSpec(tree))
    assert caught.value.code == "CR0304"
    assert {tree.stat().st_uid, (tree / "deep").stat().st_uid} == {owner}


def test_a_socket_in_the_tree_is_refused(backend: SandboxBackend, tree: Path) -> None:
    """Behind it may be a process outside, which no wall around the network would stop."""
    folder = os.open(tree, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/door")  # a path may be longer than a socket's name
        listener.listen()
        with pytest.raises(SandboxFailure, match=r"door is a socket") as caught:
            backend.open(SandboxSpec(tree))
    os.close(folder)
    assert caught.value.code == "CR0304"


def test_a_socket_that_a_command_leaves_does_not_close_the_tree(backend: SandboxBackend, tree: Path) -> None:
    """Otherwise a policy could make every later sandbox of its tree fail, whenever it suits it."""
    with backend.open(SandboxSpec(tree)) as sandbox:
        run(sandbox, python("import socket; socket.socket(1).bind('left')"))
    with backend.open(SandboxSpec(tree)) as sandbox:
        assert run(sandbox, ["echo", "on"]).stdout == "on\n"


def test_set_user_id_bits_give_nothing_and_do_not_stay(backend: SandboxBackend, tree: Path) -> None:
    program = shutil.which("id")
    assert program is not None
    shutil.copy(program, tree / "given")
    (tree / "given").chmod(0o6755)
    with backend.open(SandboxSpec(tree)) as sandbox:
        plain = run(sandbox, ["id", "-u"])
        given = run(sandbox, ["./given", "-u"])
        made = run(sandbox, "cp given made; chmod 6755 made; ./made -u")
    assert plain.exit_code == 0
    assert (given.stdout, made.stdout) == (plain.stdout, plain.stdout)
    assert [(tree / name).stat().st_mode & 0o6000 for name in ("given", "made")] == [0, 0]


def test_folders_too_deep_to_be_removed_do_not_stay(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import os\n"
        "for place in (os.getcwd(), os.environ['HOME']):\n"
        " os.chdir(place)\n"
        " for _ in range(1500): os.mkdir('d'); os.chdir('d')"
    )
    (tree / "kept" / "below").mkdir(parents=True)
    with backend.open(SandboxSpec(tree)) as sandbox:
        home = run(sandbox, "echo $HOME").stdout.strip()
        run(sandbox, python(code))
    assert (tree / "kept" / "below").is_dir()
    shutil.rmtree(tree)  # a RecursionError if they were there
    assert not Path(home).exists()


@pytest.mark.long
def test_a_hundred_thousand_files(backend: SandboxBackend, tree: Path) -> None:
    for number in range(NUM_FOLDERS):
        folder = tree / f"{number}"
        folder.mkdir()
        for name in range(NUM_FILES_EACH):
            os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
    with backend.open(SandboxSpec(tree)) as sandbox:
        found = run(sandbox, "find . -type f | wc -l; echo x > 0/0")
    assert (found.exit_code, found.stdout.strip()) == (0, str(NUM_FOLDERS * NUM_FILES_EACH))
    assert (tree / "0" / "0").read_text() == "x\n"
    assert (tree / "99" / "999").stat().st_uid == os.geteuid()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_file_of_four_gigabytes_of_nothing(
    backend: SandboxBackend, tree: Path, tmp_path: Path, is_linked: bool
) -> None:
    """It is free of charge, for it was there, and it is not filled on the way, hard-linked or in a snapshot."""
    big = tree / "big"
    with big.open("wb") as handle:
        handle.truncate(SPARSE_BYTES)
    if is_linked:
        os.link(big, tmp_path / "outside")
    with backend.open(SandboxSpec(tree)) as sandbox:
        done = run(sandbox, "stat -c %s big; echo x > small")
        name = sandbox.snapshot()
        run(sandbox, "rm big")
        sandbox.restore(name)
    assert (done.exit_code, done.stdout) == (0, f"{SPARSE_BYTES}\n")
    assert (big.stat().st_size, big.stat().st_nlink) == (SPARSE_BYTES, 1)
    assert big.stat().st_blocks * 512 < 16 * MIB


def test_a_command_that_closes_its_descriptors(jail: Sandbox) -> None:
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


NO_COMMANDS: tuple[Any, ...] = (b"echo", ["echo", 1], [b"echo"], ["echo", None], None, 5, {"echo"})
NO_VARIABLES: tuple[Any, ...] = (
    {"": "x"}, {"A=B": "x"}, {"=": "x"}, {"A": 1}, {"A": None}, {"A": b"x"}, {1: "x"}, {b"A": "x"}, [("A", "x")],
)  # fmt: skip
NO_TIMES: tuple[Any, ...] = (0, 0.0, -1, float("nan"), float("inf"), float("-inf"), True, "5", None)
NO_LIMITS = tuple(
    {name: value}
    for name in ("memory_bytes", "num_processes", "disk_bytes", "output_bytes", "num_open_files")
    for value in (0, -1, 2.5, True, "5", None, 1 << 64)
)


def test_what_is_no_call_is_refused_before_anything_starts(jail: Sandbox, tree: Path) -> None:
    """By every backend in the same words: the caller's slip is neither a result nor a failure of the jail."""
    calls = [{"command": command} for command in NO_COMMANDS]
    calls += [{"env": env} for env in NO_VARIABLES]
    calls += [{"timeout_seconds": seconds} for seconds in NO_TIMES]
    calls += [{"stdin": stdin} for stdin in ("text", None, 5, ["x"])]
    for call in calls:
        given: dict[str, Any] = {"command": "touch started", "timeout_seconds": LONG_SECONDS, **call}
        with pytest.raises(CommandError) as caught:
            jail.exec(given.pop("command"), **given)
        assert caught.value.code == "CR0886", call
    assert not (tree / "started").exists()


def test_limits_that_nothing_can_hold_are_refused(backend: SandboxBackend, tree: Path) -> None:
    owner = tree.stat().st_uid
    for wrong in NO_LIMITS:
        with pytest.raises(UsageError) as caught:
            backend.open(SandboxSpec(tree, limits=Limits(**wrong)))  # type: ignore[arg-type]
        assert caught.value.code == "CR0886", wrong
        assert next(iter(wrong)) in caught.value.message
    assert tree.stat().st_uid == owner


def test_a_tree_that_is_gone_is_a_failure_of_the_sandbox(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree)) as sandbox:
        tree.rmdir()
        with pytest.raises(SandboxFailure, match="the tree of the sandbox is gone") as caught:
            run(sandbox, ["true"])
    assert caught.value.code == "CR0302"


@pytest.mark.parametrize(
    ("why", "text"), [("NUL", "\0"), ("NUL", "a\0b"), ("no bytes", "\ud800"), ("no bytes", "a/\udfff\ud800")]
)
def test_text_that_no_call_of_the_system_takes_is_refused(jail: Sandbox, why: str, text: str) -> None:
    """Half of a surrogate pair can stand in JSON, and so in what a model says: no fault of ours."""
    commands: list[tuple[Any, dict[str, str]]] = [
        (f"echo {text}", {}),
        (["echo", text], {}),
        ([f"tr{text}"], {}),
    ]
    for command, env in [*commands, (["true"], {"A": text}), (["true"], {f"A{text}": "x"})]:
        with pytest.raises(CommandError, match=why) as refused:
            run(jail, command, env=env)
        assert refused.value.code == "CR0886"
    for ask in (jail.read_file, lambda path: jail.write_file(path, b""), jail.list_files):
        with pytest.raises(SandboxFileError, match=why) as caught:
            ask(text)
        assert caught.value.code == "CR0309"
        str(caught.value).encode()
    assert jail.list_files() == []


def test_a_command_that_is_too_long_is_an_ordinary_result(jail: Sandbox) -> None:
    long = "x" * 200_000
    many = {f"A{number}": "x" * 100_000 for number in range(30)}
    calls: list[tuple[Any, dict[str, str]]] = [(f"echo {long}", {}), (["true", long], {})]
    calls += [(["true", *many.values()], {}), (["true"], {"A": long}), (["true"], many)]
    for command, env in calls:
        done = run(jail, command, env=env)
        assert (done.exit_code, "rgument list too long" in done.stderr) == (126, True)


def test_a_command_that_is_nearly_too_long_runs(jail: Sandbox) -> None:
    done = run(jail, "echo ${#A11}", env={f"A{number}": "x" * 100_000 for number in range(12)})
    assert (done.exit_code, done.stdout) == (0, "100000\n")
