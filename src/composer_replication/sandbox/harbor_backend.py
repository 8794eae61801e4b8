"""Jails that are containers, pods or machines of a cloud: whatever Harbor has an environment for.

Harbor starts and stops the environment, runs a program in it and carries files. The rest is ours: ``harbor_inside``,
sent into it, holds the limits and leaves nothing. The folder of this machine stays the truth between two commands: it is
sent when it has changed, and is what the tree in the container was after each command. So files and snapshots
are those of every other jail. Commands of one sandbox run one at a time.

How far an environment isolates is not known here. It is asked for one without a network and without rights on this machine;
``require_selftest`` finds out.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tarfile
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from composer_replication.errors import ComposerError, MissingError, SandboxFailure, UsageError, needs_extra
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.calls import check_limits, failure
from composer_replication.sandbox.folders import remove_folder
from composer_replication.sandbox.harbor_inside import UnsafeTreeError, pack_tree, unpack_tree
from composer_replication.sandbox.host_paths import base_python, is_below, paths_of, resolve_links
from composer_replication.sandbox.keeper_process import launch_program
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.process_folder import HARBOR_PREFIX, abandoned_folders, make_held_folder
from composer_replication.sandbox.supervised_run import is_interrupted

IMAGE, OPTIONS = "COMPOSER_RL_HARBOR_IMAGE", "COMPOSER_RL_HARBOR_OPTIONS"
_RECORD = "environment.json"
_OURS = "/composer-rl"  # only its root may look into it
_START_SECONDS, _SEND_SECONDS, _MORE_SECONDS = 900, 600, 120
_LOOK_SECONDS = 0.05
_SLACK_MIB = 256  # for whoever watches, in the container
_MIB = 1 << 20
_MOST_SAID_BYTES = 2000


class Harbor:
    """The backend ``harbor:NAME``, of one of Harbor's own environments, or ``harbor:package.module:Class``."""

    known_failures = {  # noqa: RUF012  read by the suite of the contract
        "test_the_jail_dies_with_us": "the service keeps it; the next process that opens such a sandbox removes it"
    }

    def __init__(self, kind: str) -> None:
        self.name = f"harbor:{kind}"
        self._kind = kind

    def is_available(self) -> Check:
        """Is Harbor installed, and does it find what this environment needs? Starts nothing."""
        try:
            factory, config = _factory(), self._config()
            self._require_image()
            factory.run_preflight(config.type, config.import_path, config.kwargs)
        except ComposerError as error:
            return Check(self.name, False, error.message, error.fix)
        except (Exception, SystemExit) as error:  # noqa: BLE001  each environment has its own
            return Check(self.name, False, f"Harbor says: {error}", "do what it says")
        return Check(self.name, True, "Harbor finds what it needs.")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        """Start an environment and send ``spec``'s files into it."""
        check_limits(spec.limits)
        _factory()
        self._require_image()
        _remove_orphans()
        return HarborSandbox(spec, self)

    def environment(self, session: str, folder: Path, memory_bytes: int) -> Any:
        """An environment of Harbor's, not started: its service knows it by ``session``, and Harbor writes into ``folder``."""
        from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
        from harbor.models.trial.paths import TrialPaths

        (folder / "environment").mkdir(parents=True, exist_ok=True)
        return _factory().create_environment_from_config(
            self._config(),
            environment_dir=folder / "environment",
            environment_name="composer-rl",
            session_id=session,
            trial_paths=TrialPaths(trial_dir=folder / "trial"),
            task_env_config=EnvironmentConfig(
                docker_image=os.environ.get(IMAGE) or None, memory_mb=memory_bytes // _MIB + _SLACK_MIB
            ),
            network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
        )

    def _config(self) -> Any:
        """What Harbor is asked for."""
        from harbor.models.environment_type import EnvironmentType
        from harbor.models.trial.config import EnvironmentConfig

        try:
            options = json.loads(os.environ.get(OPTIONS) or "{}")
            kind = {"import_path": self._kind} if ":" in self._kind else {"type": EnvironmentType(self._kind)}
            return EnvironmentConfig(kwargs=options, **kind)
        except ValueError as error:
            why = str(error).splitlines()[0]
            names = ", ".join(_factory().registered_names())
            said = f"Harbor cannot be asked for {self._kind!r}: {why}."
            fix = f"harbor:NAME with one of {names}; or harbor:package.module:Class"
            fix = f"{fix}; {OPTIONS} is a JSON object"
            raise UsageError("CR0305", said, where="backend", fix=fix) from error

    def _require_image(self) -> None:
        if ":" not in self._kind and not os.environ.get(IMAGE):
            why = "no image is named for the containers, with this interpreter at the same path."
            raise MissingError("CR0301", why, fix=f"export {IMAGE}=IMAGE")


class HarborSandbox(LocalSandbox):
    """One environment around a copy of one tree."""

    _runs_alone = True  # the tree of this machine is sent before a command, and another one comes after it

    def __init__(self, spec: SandboxSpec, backend: Harbor) -> None:
        self._environment: Any = None
        self._record: tuple[Path, int] | None = None
        self._problem: SandboxFailure | None = None
        super().__init__(spec, None)
        self._name = backend.name
        self._folders = [str(path) for path in (self._real_tree, *self._scratch.writable)]
        self._outbox = self._scratch.root / "outbox"
        try:
            self._outbox.mkdir()
            session = f"composer-rl-{secrets.token_hex(8)}"
            # Held as long as we live: who finds it without a holder stops that environment.
            self._record = make_held_folder(HARBOR_PREFIX)
            record = self._record[0] / _RECORD
            record.write_text(json.dumps({"name": backend.name, "session": session}))
            told = session, self._scratch.root / "harbor", spec.limits.memory_bytes
            self._environment = self._ask(lambda: backend.environment(*told), "be made")
            self._wait(self._environment.start(force_build=False), "start", _START_SECONDS)
            self._prepare(spec)
        except BaseException:
            self.close()
            raise

    def _ask(self, call: Any, what: str) -> Any:
        try:
            return call()
        except ComposerError:
            raise
        except (Exception, SystemExit) as error:  # each environment has its own
            said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise failure("CR0302", f"{self._name} does not {what}: {said[-500:]}.") from error

    def _wait(self, work: Coroutine[Any, Any, Any], what: str, seconds: float) -> Any:
        """The answer of Harbor, which works in a thread of its own."""
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), _loop(os.getpid()))
        try:
            while not future.done():
                with suppress(TimeoutError):
                    future.exception(_LOOK_SECONDS)
                if not future.done() and is_interrupted():
                    raise SandboxFailure("CR0302", "the run was killed because the program was interrupted.")
        except BaseException:
            future.cancel()
            raise
        return self._ask(future.result, what)

    def _send(self, path: Path, name: str) -> None:
        self._wait(self._environment.upload_file(path, f"{_OURS}/{name}"), "take a file", _SEND_SECONDS)

    def _shell(self, command: str, seconds: float) -> str:
        """Run our own program in the container, as its root: the end of what it says, which is bounded there."""
        whole = f"timeout -s KILL {int(seconds) + 1} {command} 2>&1 | tail -c {_MOST_SAID_BYTES}"
        limit = int(seconds) + _MORE_SECONDS
        work = self._environment.exec(whole, cwd="/", user="root", timeout_sec=limit)
        return str(self._wait(work, "run a program", limit + _LOOK_SECONDS).stdout or "").strip()

    def _inside(self, verb: str, seconds: float, orders: Mapping[str, Any] | None = None) -> None:
        """Have ``harbor_inside`` do something."""
        if orders is not None:
            (self._outbox / "orders.json").write_text(json.dumps(orders))
            self._send(self._outbox / "orders.json", "orders.json")
        said = self._shell(f"{base_python()} -I -S {_OURS}/start.py {verb}", seconds)
        last = (said.splitlines() or ["nothing is said"])[-1]
        if last != "done":
            raise failure("CR0302", f"{self._name} cannot {verb} a command: {last[-500:]}.")

    def _prepare(self, spec: SandboxSpec) -> None:
        self._shell(f"sh -c 'umask 077 && mkdir -p {_OURS}'", _MORE_SECONDS)
        code, start, shown = (self._outbox / name for name in ("code.tar", "start.py", "shown.tar"))
        package, there = Path(__file__).resolve().parents[1], f"{_OURS}/code"
        with tarfile.open(code, "w") as archive:  # the modules that run inside
            for path in (*package.glob("*.py"), *(package / "sandbox").glob("*.py")):
                archive.add(path, str(path.relative_to(package)), filter=_as_roots)
        self._send(code, "code.tar")
        self._shell(f"sh -c 'mkdir -p {there} && tar -xf {_OURS}/code.tar -C {there}'", _SEND_SECONDS)
        folders = {"composer_replication": there, "composer_replication.sandbox": f"{there}/sandbox"}
        start.write_text(launch_program(folders, "harbor_inside"))
        self._send(start, "start.py")
        masked = {path for path in paths_of(spec).masked if not is_below(self._real_tree, [path])}
        with tarfile.open(shown, "w", format=tarfile.PAX_FORMAT) as archive:
            _add_shown(archive, spec, masked, self._real_tree)
        self._send(shown, "shown.tar")
        orders = {"folders": self._folders, "masked": sorted(map(str, masked))}
        self._inside("prepare", _SEND_SECONDS, orders)

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        orders = {
            "backend": self._name,
            "argv": argv,
            "env": dict(environment),
            "folders": self._folders,
            "limits": asdict(self._limits),
            "timeout_seconds": timeout_seconds,
            "has_tree": self._is_dirty,
        }
        try:
            (self._outbox / "stdin").write_bytes(stdin)
            self._send(self._outbox / "stdin", "stdin")
            if self._is_dirty:
                with (self._outbox / "tree.tar").open("wb") as target:
                    pack_tree(self._real_tree, target)
                self._send(self._outbox / "tree.tar", "tree.tar")
            self._inside("run", timeout_seconds + _MORE_SECONDS, orders)
            return self._fetch()
        except BaseException:
            self._is_dirty = True
            with suppress(SandboxFailure):
                self._inside("kill", _MORE_SECONDS)
            raise

    def _fetch(self) -> ExecResult:
        """What a command left: its result, and its tree in the place of ours."""
        found = json.loads(self._receive("result.json").read_text())
        result = ExecResult(**found["result"])
        self._is_dirty = not found["has_tree"]
        if found["has_tree"]:
            try:
                with self._receive("tree.tar").open("rb") as source:
                    unpack_tree(source, self._real_tree)
            except (UnsafeTreeError, OSError) as error:
                self._is_dirty = True
                if not (result.timed_out or result.stopped):
                    why = f"the tree of the container cannot be kept: {error}."
                    raise failure("CR0302", why) from error
        return result

    def _receive(self, name: str) -> Path:
        target = self._outbox / name
        work = self._environment.download_file(f"{_OURS}/{name}", target)
        self._wait(work, "give a file", _SEND_SECONDS)
        return target

    def close(self) -> None:
        """Stop the environment, give the tree back; idempotent."""
        is_failing = sys.exc_info()[0] is not None  # what was raised first says more
        super().close()
        problem, self._problem = self._problem, None
        if problem is not None and not is_failing:
            raise problem

    def _end_jail(self) -> None:
        try:
            if self._environment is not None:
                self._wait(self._environment.stop(delete=True), "stop", _SEND_SECONDS)
            if self._record is not None:
                remove_folder(self._record[0])
                os.close(self._record[1])
        except SandboxFailure as error:  # the next process removes it
            self._problem = error


def _remove_orphans() -> None:
    """Stop the environments of processes that were killed; a service that knows them by their session removes them."""
    for folder in abandoned_folders([HARBOR_PREFIX]):
        with suppress(Exception):
            record = folder / _RECORD
            if not record.exists() and any(folder.glob("*.json")):
                continue  # the records of an earlier version, which this one cannot follow
            if record.exists():
                found = json.loads(record.read_text())
                environment = Harbor(found["name"].partition(":")[2]).environment(found["session"], folder, 0)
                work = environment.stop(delete=True)
                asyncio.run_coroutine_threadsafe(work, _loop(os.getpid())).result(_SEND_SECONDS)
            remove_folder(folder)


def _factory() -> Any:
    with needs_extra("harbor", "the sandbox backend harbor, which Python 3.12 or newer can have,"):
        from harbor.environments.factory import EnvironmentFactory
    return EnvironmentFactory


@lru_cache(maxsize=1)
def _loop(_pid: int) -> asyncio.AbstractEventLoop:
    """Of a thread of this process that runs nothing else; a forked child has its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="harbor", daemon=True).start()
    return loop


def _add_shown(archive: tarfile.TarFile, spec: SandboxSpec, masked: set[Path], tree: Path) -> None:
    """The read-only paths under their real names without what is masked, and the links that lead there."""
    done: set[Path] = set()

    def add(path: Path) -> None:  # to a file that its own filter left out, the archive would make hard links
        if path not in done and path != tree and not is_below(path, masked):
            done.add(path)
            archive.add(path, str(path), recursive=False, filter=_as_roots)
            for child in sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else ():
                add(child)

    for path in sorted(spec.read_only):
        real, links = resolve_links(path)
        for link, _ in links:
            if link not in done:
                done.add(link)
                archive.add(link, str(link), filter=_as_roots)
        add(real)


def _as_roots(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """It belongs to the container's root, and others may read what its owner may read here."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = entry.mode & 0o777 | (entry.mode & 0o500) >> 6 | (entry.mode & 0o500) >> 3
    return entry
