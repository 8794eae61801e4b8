"""Jails made by a container engine of this machine: ``docker`` and ``podman``.

Each command is a container of its own: when its first process ends, the kernel ends all the others,
and the engine says whether memory was what ended it. Tree, ``HOME``, ``TMPDIR``, ``/tmp`` and ``/dev/shm``
are mounted folders of ours, so that files, snapshots and the disk limit are those of every local jail.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_replication.errors import ComposerError, MissingError
from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.call_checks import check_limits
from composer_replication.sandbox.engine.container_request import Inside, container_request
from composer_replication.sandbox.engine.container_run import Container
from composer_replication.sandbox.engine.engine_client import EngineClient, EngineRefusal
from composer_replication.sandbox.engine.orphans import owner, remove_orphans
from composer_replication.sandbox.engine.root_image import ensure_root_image
from composer_replication.sandbox.jailed_tree import STARTER, failure, to_result
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.mounts import MountPlan
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.sandbox.user_ids import private_uid

_START_SECONDS = 60.0
_UNIX = "unix://"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a machine may want otherwise; a subclass of a backend, named by dotted path, brings its own.

    Args:
        image: one that has programs and interpreter itself; empty for this machine's, mounted read-only.
        runtime: of the engine, ``runsc`` for gVisor; empty for its default.
        security_options: as ``--security-opt``, beyond ``no-new-privileges``.
    """

    image: str = field(default_factory=lambda: os.environ.get("COMPOSER_RL_ENGINE_IMAGE", ""))
    runtime: str = field(default_factory=lambda: os.environ.get("COMPOSER_RL_ENGINE_RUNTIME", ""))
    security_options: tuple[str, ...] = field(
        default_factory=lambda: tuple(os.environ.get("COMPOSER_RL_ENGINE_SECURITY_OPT", "").split())
    )


class Docker:
    """The backend ``docker``: rootless where its service is there, else the machine's."""

    name = "docker"
    _variable = "DOCKER_HOST"
    _start = (
        "start its service (systemctl start docker; dockerd-rootless-setuptool.sh install for a rootless one)"
    )

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self.settings = settings or EngineSettings()

    def is_available(self) -> Check:
        """Can a container be started that sees a folder of ours? Starts one that reads a file."""
        try:
            problem = self._first_start()
        except ComposerError as error:
            return Check(self.name, False, error.message, error.fix)
        if problem:
            return Check(
                self.name, False, problem, "run the engine on this very machine, without a virtual one"
            )
        return Check(self.name, True, f"{self.name} starts a container.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Take over ``spec.tree`` and prepare containers around it.

        Raises:
            MissingError: no socket of the engine here, or one of another machine (CR0301).
            SandboxFailure: it does not answer (CR0320), is no engine or refuses (CR0321), or a path of the
                spec is missing or cannot be shown (CR0304).
            UsageError: a limit that cannot be held (CR0882).
        """
        check_limits(spec.limits)
        client = EngineClient(self._socket())
        described = client.negotiate()
        remove_orphans(client)
        return EngineSandbox(spec, client, self._inside(client, described), self.settings, self.name)

    def _socket(self) -> str:
        named = os.environ.get(self._variable, "")
        if named and not named.startswith(_UNIX):
            raise MissingError(
                "CR0301",
                f"{self._variable} names an engine elsewhere, and the tree is mounted, not copied.",
                where=f"{self._variable}={named}",
                fix=f"unset {self._variable}, or give a socket of this machine: unix:///PATH",
            )
        if named:
            return named.removeprefix(_UNIX)
        for path in self._usual_sockets():
            if path.is_socket():
                return str(path)
        raise MissingError("CR0301", f"there is no socket of {self.name} on this machine.", fix=self._start)

    def _usual_sockets(self) -> list[Path]:
        own = _runtime_folder() / "docker.sock"
        return (
            [Path("/var/run/docker.sock"), own] if os.geteuid() == 0 else [own, Path("/var/run/docker.sock")]
        )

    def _inside(self, client: EngineClient, described: str) -> Inside:
        """As whom the command runs: never root of this machine, and the owner of the tree."""
        options = _security_options(client)
        uid, gid, namespace = os.getuid(), os.getgid(), ""
        if "rootless" in options:
            # The root inside is us outside. Podman can give us our own id; Docker cannot.
            if "podman" in described.lower():
                namespace = "keep-id"
            else:
                uid = gid = 0
        else:
            if uid == 0:
                uid = gid = private_uid()
            if "userns" in options:
                namespace = "host"  # a remapped id would not own the tree
        settings = self.settings
        return Inside(
            settings.image, f"{uid}:{gid}", settings.runtime, namespace, settings.security_options, owner()
        )

    def _first_start(self) -> str:
        """Empty, or what is wrong; a daemon in another machine mounts other folders than ours."""
        word = random.randbytes(8).hex()  # noqa: S311  tells files apart, guards nothing
        with tempfile.TemporaryDirectory(dir=process_folder(), ignore_cleanup_errors=True) as folder:
            tree = Path(folder) / "tree"
            tree.mkdir()
            (tree / "word").write_text(word)
            with self.open(SandboxSpec(tree)) as sandbox:
                seen = sandbox.exec(["cat", "word"], timeout_seconds=_START_SECONDS)
        return "" if seen.stdout == word else "the container does not see this machine's folders."


class Podman(Docker):
    """The backend ``podman``: its service speaks Docker's API, with or without root."""

    name = "podman"
    _variable = "CONTAINER_HOST"
    _start = "start its service: systemctl --user start podman.socket"

    def _usual_sockets(self) -> list[Path]:
        own, shared = _runtime_folder() / "podman" / "podman.sock", Path("/run/podman/podman.sock")
        return [shared, own] if os.geteuid() == 0 else [own, shared]


class EngineSandbox(LocalSandbox):
    """One tree; every ``exec`` is a container, so several may run at once."""

    def __init__(
        self, spec: SandboxSpec, client: EngineClient, inside: Inside, settings: EngineSettings, name: str
    ) -> None:
        uid, gid = (int(part) for part in inside.user.split(":"))
        super().__init__(spec, uid if os.geteuid() == 0 and uid != 0 else None)
        self._client = client
        self._name = name
        try:
            self._jailed.write_accounts(uid, gid)
            self._mounts = MountPlan(spec, self._jailed.scratch, with_system=not settings.image)
            links = self._mounts.root_links()
            if settings.image and links:
                raise failure(
                    "CR0304",
                    "a path goes through a link, which an image of your own cannot repeat; give the real path.",
                    str(next(iter(links))),
                )
            image = inside.image or ensure_root_image(client, links)
        except BaseException:
            self.close()
            raise
        self._inside = replace(inside, image=image)

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        marker = f"<{random.randbytes(16).hex()}>"  # noqa: S311  tells lines apart, guards nothing
        starter = ["/bin/sh", "-c", STARTER, "sandbox", marker, *argv]
        uid = int(self._inside.user.partition(":")[0])
        with self._jailed.scratch.for_one_command(uid if os.geteuid() == 0 and uid else None) as fresh:
            request = self._request(starter, environment, fresh)
            with Container(self._client, request) as container:
                ended = container.run(
                    stdin, timeout_seconds, self._jailed.watched(fresh), extra_bytes=len(marker)
                )
        return to_result(ended, marker.encode(), self._jailed.limits, backend=self._name)

    def _request(self, argv: list[str], environment: Mapping[str, str], fresh: Path) -> dict[str, Any]:
        return container_request(
            self._inside,
            argv,
            env=environment,
            working_directory=self._jailed.real_tree,
            mounts=self._mounts.mounts(fresh),
            limits=self._jailed.limits,
        )


def _runtime_folder() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")


def _security_options(client: EngineClient) -> set[str]:
    """Names of what the engine says about itself, as rootless, userns and seccomp."""
    try:
        answer = client.ask("GET", "/info") or {}
    except EngineRefusal as error:
        raise failure("CR0321", f"the engine does not describe itself: {error.message}.") from error
    options = answer.get("SecurityOptions") if isinstance(answer, dict) else None
    return {str(option).partition(",")[0].removeprefix("name=") for option in options or []}
