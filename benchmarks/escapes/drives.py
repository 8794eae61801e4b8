"""How a sandbox is used around an attempt."""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.escapes.attempt import Attempt, Drive, Outcome
from benchmarks.escapes.scene import Scene
from composer_replication.errors import ComposerError, SandboxFailure, SandboxFileError
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import LocalSandbox, SandboxBackend, base_python
from composer_replication.sandbox.bubblewrap import WarmBubblewrapSandbox
from composer_replication.sandbox.harbor_inside import UnsafeTreeError, unpack_tree

_BESIDE_SECONDS = 1.5
_REFUSED, _KILLED = 3, 137


def program(script: str) -> str:
    """A whole program from the body of an attempt."""
    body = "\n".join(f"    {line}" for line in script.splitlines()) or "    pass"
    inside = Path(__file__).with_name("inside.py").read_text()
    return f"{inside}\n\ndef attempt():\n{body}\n\n\nrun(attempt)\n"


@dataclass(slots=True)
class Stage:
    """Everything that a drive needs; ``told`` is what the script will be told."""

    backend: SandboxBackend
    attempt: Attempt
    scene: Scene
    outcome: Outcome
    sandbox: LocalSandbox
    told: dict[str, object] = field(default_factory=dict)

    def command(self, script: str | None = None, **more: object) -> list[str]:
        """The program and its arguments."""
        told = json.dumps({**self.scene.told, "timeout": self.attempt.timeout_seconds, **self.told, **more})
        text = program(self.attempt.script if script is None else script)
        return [str(base_python()), "-I", "-S", "-c", text, self.scene.token, told]

    def run(
        self,
        command: list[str] | str | None = None,
        sandbox: LocalSandbox | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """One command; what comes of it is kept."""
        try:
            result = (sandbox or self.sandbox).exec(
                self.command() if command is None else command,
                timeout_seconds=self.attempt.timeout_seconds,
                env=env,
            )
        except SandboxFailure as error:
            self.outcome.broken.append(f"the jail broke: {error.code} {error.message}")
        else:
            self.outcome.results.append(result)
            came_so_far = (self.scene.tree / "began").exists() or result.exit_code in {0, _REFUSED}
            if result.exit_code == _KILLED and not came_so_far:
                self.outcome.notes["never_began"] = True

    def open(self, tree: Path) -> LocalSandbox:
        """A further sandbox of the same backend, which sees the same folders."""
        tree.mkdir(parents=True, exist_ok=True)
        return self.backend.open(spec_of(self.scene, self.attempt, tree))


def spec_of(scene: Scene, attempt: Attempt, tree: Path) -> SandboxSpec:
    """What a sandbox of an attempt sees."""
    return SandboxSpec(tree, (scene.shown,), (scene.masked,), attempt.limits)


def then_every_call(stage: Stage) -> None:
    """After the command everything else is asked of the sandbox; an error of a file is an answer, any other is not."""
    kept = stage.sandbox.snapshot()
    stage.run()
    calls: list[Callable[[], object]] = [stage.sandbox.list_files, stage.sandbox.snapshot]
    calls += [lambda: stage.run("true"), lambda: stage.sandbox.restore(kept)]
    seconds = stage.attempt.timeout_seconds
    again = lambda: stage.sandbox.exec(stage.command(), timeout_seconds=seconds)  # noqa: E731
    if isinstance(stage.sandbox, WarmBubblewrapSandbox):
        calls += [again, lambda: stage.run("true")]
    for call in calls:
        try:
            call()
        except SandboxFileError:
            pass
        except Exception as error:  # noqa: BLE001  whatever it is: a rollout is lost
            stage.outcome.broken.append(f"the jail broke: {error!r}"[:300])


def before(action: Callable[[Stage], None], after: Callable[[Stage], None]) -> Drive:
    """The parent does something, the command runs, the parent does something."""

    def drive(stage: Stage) -> None:
        _parent_does(stage, action)
        stage.run()
        _parent_does(stage, after)

    return drive


then = partial(before, lambda _: None)
"""After the command the parent does something with the sandbox."""


def _parent_does(stage: Stage, action: Callable[[Stage], None]) -> None:
    with suppress(SandboxFileError, SandboxFailure, OSError, RecursionError):
        action(stage)


def beside(action: Callable[[Stage], None]) -> Drive:
    """While the command runs the parent does something again and again."""

    def drive(stage: Stage) -> None:
        runner = threading.Thread(target=stage.run)
        runner.start()
        end = time.monotonic() + _BESIDE_SECONDS
        while time.monotonic() < end:
            _parent_does(stage, action)
        runner.join()

    return drive


def next_command(
    script: str, *, isolated: bool = True, command: str = "", in_own_sandbox: bool = False
) -> Drive:
    """A second command, which is told nothing, in the same sandbox or, as a second rollout, in one of its own.

    It is a script as of an attempt, ``isolated`` from files of the user that its interpreter may look for, or text for the shell.
    """

    def drive(stage: Stage) -> None:
        stage.run(stage.command(mark=stage.scene.mark))
        isolated_or_not = stage.command(script) if isolated else [str(base_python()), "-c", script]
        with ExitStack() as stack:
            second = stage.sandbox
            if in_own_sandbox:
                second = stack.enter_context(stage.open(stage.scene.root / "work" / "next"))
            stage.run(command or isolated_or_not, second)

    return drive


next_rollout = partial(next_command, in_own_sandbox=True)


def next_with_programs_of_tree(stage: Stage) -> None:
    """A second command, whose PATH begins in the tree; a third one says who ran its programs."""
    stage.run()
    stage.run("env true", env={"PATH": f"{stage.scene.tree}/bin:/usr/bin:/bin"})
    stage.run("cat said")


def beside_neighbour(script: str) -> Drive:
    """Another sandbox of the same kind runs ``script`` meanwhile, and holds the secret."""

    def drive(stage: Stage) -> None:
        tree = stage.scene.root / "work" / "neighbour"
        neighbour = stage.open(tree)
        neighbour.write_file("note.txt", stage.scene.word.encode())
        holder = stage.command(script, word=stage.scene.word)

        def hold() -> None:
            with suppress(SandboxFailure):
                neighbour.exec(holder, timeout_seconds=stage.attempt.timeout_seconds + 60)

        thread = threading.Thread(target=hold)
        thread.start()
        ready, end = tree / "ready", time.monotonic() + 60
        while time.monotonic() < end and not (ready.exists() and ready.stat().st_size):
            time.sleep(0.02)
        stage.told["neighbour"] = str(tree)
        with suppress(OSError, ValueError):
            stage.told["neighbour_port"] = int(ready.read_text() or "0")
        stage.run()
        stage.outcome.notes["neighbour_was_alive"] = thread.is_alive()
        (tree / "end").touch()
        thread.join()
        with suppress(OSError):
            stage.outcome.notes["neighbour_note"] = (tree / "note.txt").read_bytes()
        with suppress(OSError):
            stage.outcome.notes["neighbour_hurt"] = (tree / "hurt").read_text()
        neighbour.close()

    return drive


def with_inherited(stage: Stage) -> None:
    """The parent holds descriptors that a child would inherit; a file, a folder, a socket, a pipe."""
    scene = stage.scene
    read, write = os.pipe()
    flags = os.O_RDONLY
    held = [os.open(scene.outside / "secret.txt", flags), os.open(scene.outside, flags), write]
    for descriptor in held:
        os.set_inheritable(descriptor, True)
    stage.told |= dict(zip(("file", "folder", "pipe"), held, strict=True))
    try:
        stage.run()
        os.set_blocking(read, False)
        with suppress(OSError):
            stage.outcome.notes["through_pipe"] = os.read(read, 64)
    finally:
        for descriptor in (*held, read):
            os.close(descriptor)


def command_line(stage: Stage) -> None:
    """Our own command line runs the attempt, as a person does, with a terminal that it could write to."""
    master, slave = os.openpty()
    stage.told["terminal"] = os.ttyname(slave)
    os.chmod(os.ttyname(slave), 0o666)
    argv = [sys.executable, "-m", "composer_replication.cli.main", "sandbox", "exec"]
    argv += ["--backend", stage.backend.name]
    argv += ["--i-accept-no-isolation", "everything"] if stage.backend.name == "none" else []
    with tempfile.TemporaryDirectory(prefix="escapes-home-") as home:
        done = subprocess.run(
            stage.command() if stage.backend.name == "control" else [*argv, "--", *stage.command()],
            capture_output=True,
            check=False,
            cwd=stage.scene.root,
            timeout=120,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
            env={**os.environ, "HOME": home, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    stage.outcome.notes["printed"] = done.stdout + done.stderr
    for name, descriptor in (("on_terminal", master), ("typed", slave)):
        os.set_blocking(descriptor, False)
        with suppress(OSError):
            stage.outcome.notes[name] = os.read(descriptor, 4096)
    os.close(master)
    os.close(slave)


def reads(path: str) -> Callable[[Stage], None]:
    return lambda stage: stage.outcome.said.extend(stage.sandbox.read_file(path))


def writes(path: str) -> Callable[[Stage], None]:
    return lambda stage: stage.sandbox.write_file(path, b"by the parent")


def lists(path: str) -> Callable[[Stage], None]:
    def action(stage: Stage) -> None:
        names = " ".join(entry.path for entry in stage.sandbox.list_files(path))
        stage.outcome.said += names.encode(errors="replace")

    return action


def snapshot(stage: Stage) -> None:
    stage.outcome.notes["snapshot"] = stage.sandbox.snapshot()


def restore(stage: Stage) -> None:
    stage.sandbox.restore(stage.outcome.notes["snapshot"])


def both(stage: Stage) -> None:
    snapshot(stage)
    restore(stage)


def without_link(stage: Stage) -> None:
    """What a link led to must not be in the copy."""
    snapshot(stage)
    stage.run(["/bin/rm", "-f", "new"])
    restore(stage)


def holding(stage: Stage) -> None:
    """The parent has the secret open under a number that it would find in its own ``/proc/self``."""
    held = os.open(stage.scene.outside / "secret.txt", os.O_RDONLY)
    try:
        stage.run(stage.command(held=held))
        with suppress(SandboxFileError):
            stage.outcome.said += stage.sandbox.read_file("new")
    finally:
        os.close(held)


def unpacks(stage: Stage) -> None:
    """The parent unpacks an archive that was made inside."""
    data = io.BytesIO(stage.sandbox.read_file("a.tar"))
    place = stage.scene.root / "work" / "unpacked"
    place.mkdir()
    if stage.backend.name == "control":
        with tarfile.open(fileobj=data) as archive, suppress(tarfile.TarError):
            if hasattr(tarfile, "fully_trusted_filter"):  # from 3.11.4 on
                archive.extraction_filter = tarfile.fully_trusted_filter
            archive.extractall(place)
    else:
        with suppress(UnsafeTreeError):
            unpack_tree(data, place)
    for path in place.rglob("*"):
        mode = path.lstat().st_mode
        if mode & (stat.S_ISUID | stat.S_ISGID) and stat.S_ISREG(mode):
            stage.outcome.notes["privileged"] = "a setuid file was unpacked"
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            stage.outcome.notes["privileged"] = "a device was unpacked"
        with suppress(OSError):
            if stat.S_ISREG(mode):
                stage.outcome.said += path.read_bytes()[:4096]


def after_restore(script: str, *, is_module: bool = False) -> Drive:
    """The tree is brought back to what it was, and a trusted command runs in it."""

    def drive(stage: Stage) -> None:
        stage.sandbox.write_file("trusted.py", b"ANSWER = 'clean'\n")
        name = stage.sandbox.snapshot()
        stage.run(stage.command(mark=stage.scene.mark))
        stage.sandbox.restore(name)
        python = stage.command()[0]
        stage.run([python, "-m", script] if is_module else [python, "-c", script])

    return drive


def places_looked_at(stage: Stage) -> None:
    """The attempt; how many of the machine's places were taken at most meanwhile."""
    runner = threading.Thread(target=stage.run)
    runner.start()
    most = 0
    while runner.is_alive():
        most = max(most, int(Path("/proc/sys/fs/aio-nr").read_text()))
        time.sleep(0.01)
    stage.outcome.notes["places"] = most


def reads_hostile_names(stage: Stage) -> None:
    """The parent asks for each file that it finds, and prints what goes wrong."""
    said = []
    for entry in stage.sandbox.list_files():
        try:
            stage.sandbox.read_file(entry.path + "/nothing")
        except ComposerError as error:
            said.append(str(error))
        except OSError as error:
            said.append(f"{entry.path}: {error.strerror}")
    stage.outcome.notes["printed"] = "\n".join(said).encode(errors="surrogateescape")
