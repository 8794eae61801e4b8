"""Trees that are given, what is written and kept of them, and how they come back."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFailure, SandboxFileError
from composer_replication.records import FileEntry, SandboxSpec
from composer_replication.sandbox import LocalSandbox, SandboxBackend
from composer_replication.sandbox.conformance.plugin import MIB, python, run

NUM_FOLDERS, NUM_FILES_EACH = 100, 1000
SPARSE_BYTES = 4 << 30


def test_what_is_written_is_read_inside_and_outside(jail: LocalSandbox) -> None:
    data = bytes(range(256)) * 3
    jail.write_file("a/b c/é.bin", data)
    assert jail.read_file("a/b c/é.bin") == data
    assert run(jail, ["cksum", "a/b c/é.bin"]).stdout.split()[1] == "768"
    assert jail.read_file("a/b c/é.bin", max_bytes=4) == b"\0\1\2\3"


def test_a_written_file_belongs_to_the_user_inside(jail: LocalSandbox) -> None:
    jail.write_file("new/run", b"#!/bin/sh\necho it ran\n", is_executable=True)
    assert run(jail, "./new/run; echo x >> new/run; echo y > new/other").stdout == "it ran\n"
    assert jail.read_file("new/other") == b"y\n"
    assert jail.read_file("new/run").endswith(b"x\n")


def test_writing_replaces_files_alone_and_leaves_nothing_beside(jail: LocalSandbox) -> None:
    jail.write_file("f", b"one")
    jail.write_file(str(jail.tree / "f"), b"two")
    assert [(entry.path, entry.kind, entry.num_bytes) for entry in jail.list_files()] == [("f", "file", 3)]
    run(jail, "rm f; mkdir d")
    with pytest.raises(SandboxFileError):
        jail.write_file("d", b"x")
    assert [entry.path for entry in jail.list_files()] == ["d"]


def test_everything_is_listed_sorted_and_links_are_not_followed(jail: LocalSandbox) -> None:
    run(jail, "mkdir -p d/e; printf abc > d/e/f; ln -s / out; mkfifo pipe; chmod 700 d")
    found = jail.list_files()
    assert [(entry.path, entry.kind) for entry in found] == [
        ("d", "folder"), ("d/e", "folder"), ("d/e/f", "file"), ("out", "link"), ("pipe", "other"),
    ]  # fmt: skip
    assert found[2] == FileEntry("d/e/f", "file", 3, found[2].mode)
    assert found[0].mode == 0o700
    assert [entry.path for entry in jail.list_files("d/e")] == ["d/e/f"]


def test_links_inside_are_followed(jail: LocalSandbox) -> None:
    run(jail, 'mkdir d; echo x > d/f; ln -s d e; ln -s "$PWD/d/f" g; ln -s ../e/f d/h')
    assert [jail.read_file(path) for path in ("e/f", "g", "d/h", "e/../d/f", "./d//f")] == [b"x\n"] * 5


def test_nothing_leads_out_of_the_tree(jail: LocalSandbox) -> None:
    run(jail, "mkdir d; ln -s ../secret out; ln -s .. up; ln -s /etc abs")
    for path in ("../secret", "out", "up/secret", "d/../../secret", "/etc/passwd", "abs/passwd"):
        for ask in (jail.read_file, lambda path: jail.write_file(path, b"changed")):
            with pytest.raises(SandboxFileError, match="out of the tree") as error:
                ask(path)
            assert error.value.code == "CR0309"
    assert (jail.tree.parent / "secret").read_text() == "hush"


def test_what_cannot_be_read_is_one_sentence(jail: LocalSandbox) -> None:
    run(jail, "mkdir d; mkfifo pipe; ln -s loop loop; echo > f")
    refused = {"none": "no such file", "d": "no file", "pipe": "no file", "loop": "too many", "a\0b": "NUL"}
    for path, why in {**refused, "f/x": "not a directory"}.items():
        with pytest.raises(SandboxFileError, match=f"(?i){why}"):
            jail.read_file(path)


def test_a_folder_that_is_swapped_for_a_link_leads_nowhere(jail: LocalSandbox) -> None:
    """The jail races us: d is a folder, then a link to the folder with the secret, and back."""
    run(jail, "mkdir real; echo inside > real/secret; ln -s real d")
    race = "import os\nfor n in range(3000): os.symlink(('..', 'real')[n % 2], 'new'); os.rename('new', 'd')"
    runner = threading.Thread(target=lambda: jail.exec(python(race), timeout_seconds=20))
    runner.start()
    seen = set()
    while runner.is_alive():
        try:
            seen.add(jail.read_file("d/secret"))
        except SandboxFileError:
            continue
    runner.join()
    assert seen == {b"inside\n"}


def test_a_snapshot_brings_everything_back(jail: LocalSandbox) -> None:
    run(jail, "mkdir d; echo one > d/f; chmod 751 d/f; ln -s d/f l; mkdir empty")
    before = jail.list_files(), jail.read_file("d/f")
    first = jail.snapshot()
    run(jail, "rm -r d empty l; mkdir l; echo two > l/x; mkdir -p c/c/c; chmod 0 c/c; touch '.-hidden'")
    second = jail.snapshot()
    for _ in range(2):
        jail.restore(first)
        assert (jail.list_files(), jail.read_file("d/f")) == before
        assert (jail.tree / "l").readlink() == Path("d/f")
    assert run(jail, "echo more >> d/f && cat d/f").stdout == "one\nmore\n"
    jail.restore(second)
    assert jail.read_file("l/x") == b"two\n"


@pytest.mark.parametrize("mode", ["000", "400", "100"])
def test_a_tree_that_a_command_closed_is_open_to_the_next_call(jail: LocalSandbox, mode: str) -> None:
    close = f'chmod {mode} "$HOME" "$TMPDIR" .'
    empty = jail.snapshot()
    asks: list[Callable[[], object]] = [*calls_of(jail), lambda: jail.restore(empty)]
    for ask in asks:
        run(jail, close)
        ask()
    run(jail, close)
    done = run(jail, 'pwd; touch g "$HOME/h" "$TMPDIR/t" && echo on')
    assert (done.exit_code, done.stdout) == (0, f"{jail.tree}\non\n"), done.stderr


def calls_of(jail: LocalSandbox) -> tuple[Callable[[], object], ...]:
    return (jail.snapshot, lambda: jail.write_file("f", b""), jail.list_files, lambda: jail.read_file("f"))


def test_what_a_command_closed_is_kept_and_comes_back(jail: LocalSandbox) -> None:
    """Whether it is closed then is not said: whoever measures a folder, or fetches a tree, has to look into it."""
    run(jail, "mkdir d; echo kept | tee d/f > g; chmod 000 d/f g; chmod 500 d; chmod 555 .")
    name = jail.snapshot()
    run(jail, "chmod 700 . d; rm -rf d g; echo other > g")
    for _ in range(2):
        jail.restore(name)
        seen = run(jail, "chmod 700 d; chmod 600 g d/f; cat g d/f")
        assert seen.stdout == "kept\nkept\n", seen.stderr


def test_a_closed_folder_is_listed_and_open_again_afterwards(jail: LocalSandbox) -> None:
    run(jail, "mkdir -p d/e; touch d/f; chmod 000 d/e; chmod 400 d")
    assert [entry.path for entry in jail.list_files()] == ["d", "d/e", "d/f"]
    assert jail.read_file("d/f") == b""
    run(jail, "chmod 000 d/e d")
    jail.close()
    shutil.rmtree(jail.tree / "d")
    assert not (jail.tree / "d").exists()


def test_a_snapshot_is_not_seen_inside(jail: LocalSandbox) -> None:
    jail.write_file("marked", b"needle-in-the-snapshot")
    jail.snapshot()
    run(jail, "rm marked")
    search = 'grep -rls needle-in-the "$HOME" "$TMPDIR" "$HOME/.." . 2>/dev/null'
    assert run(jail, search).stdout == ""


def test_a_snapshot_waits_for_the_command_that_runs(jail: LocalSandbox) -> None:
    runner = threading.Thread(target=lambda: run(jail, "touch began; sleep 1; echo done > f"))
    runner.start()
    while not (jail.tree / "began").exists():
        runner.join(0.01)
    name = jail.snapshot()
    runner.join()
    jail.write_file("f", b"changed")
    jail.restore(name)
    assert jail.read_file("f") == b"done\n"


def test_an_unknown_snapshot_and_a_closed_sandbox_are_refused(jail: LocalSandbox) -> None:
    with pytest.raises(SandboxFailure, match="no snapshot 'x'") as error:
        jail.restore("x")
    assert error.value.code == "CR0309"
    jail.close()
    asks: list[Callable[[], object]] = [*calls_of(jail), lambda: run(jail, ["true"])]
    for ask in asks:
        with pytest.raises(SandboxFailure, match="closed") as error:
            ask()
        assert error.value.code == "CR0303"


def test_a_device_file_in_the_tree_is_refused(backend: SandboxBackend, tree: Path) -> None:
    (tree / "deep").mkdir()
    try:
        os.mknod(tree / "deep" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root can make a device file")
    owner = tree.stat().st_uid
    assert_refused(backend, SandboxSpec(tree), "deep/null is a device")
    assert {tree.stat().st_uid, (tree / "deep").stat().st_uid} == {owner}


def test_a_socket_in_the_tree_is_refused(backend: SandboxBackend, tree: Path) -> None:
    """Behind it may be a process outside, which no wall around the network would stop."""
    folder = os.open(tree, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/door")  # a path may be longer than a socket's name
        listener.listen()
        assert_refused(backend, SandboxSpec(tree), "door is a socket")
    os.close(folder)


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
        " for _ in range(1100): os.mkdir('d'); os.chdir('d')"
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


def test_a_tree_that_is_gone_is_a_failure_of_the_sandbox(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree)) as sandbox:
        tree.rmdir()
        with pytest.raises(SandboxFailure, match="the tree of the sandbox is gone") as caught:
            run(sandbox, ["true"])
    assert caught.value.code == "CR0302"


def test_close_is_idempotent_and_leaves_no_folder(backend: SandboxBackend, tree: Path) -> None:
    sandbox = backend.open(SandboxSpec(tree))
    home = Path(run(sandbox, "echo $HOME; mkdir -p $HOME/a; chmod 0 $HOME/a").stdout.strip())
    assert home.is_dir()
    sandbox.close()
    sandbox.close()
    assert not home.parent.exists()
    assert tree.is_dir()


def assert_refused(backend: SandboxBackend, spec: SandboxSpec, why: str) -> None:
    """It cannot be opened."""
    with pytest.raises(SandboxFailure, match=why) as caught:
        backend.open(spec)
    assert caught.value.code == "CR0304"


def test_paths_that_cannot_be_shown_are_refused(backend: SandboxBackend, tree: Path, tmp_path: Path) -> None:
    absent, inner = tmp_path / "absent", tree / "inner"
    inner.mkdir()
    assert_refused(backend, SandboxSpec(absent), "not a folder")
    assert_refused(backend, SandboxSpec(tree, (absent,)), "missing")
    for spec in (SandboxSpec(tree, (inner,)), SandboxSpec(tree, (), (inner,))):
        assert_refused(backend, spec, "lies in the tree")
