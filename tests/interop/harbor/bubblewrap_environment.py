"""An environment for Harbor that is a container made by ``bwrap``, as confined as Docker's are and no more.

It stands for an engine: it lives until somebody stops it by its session, whoever started it; its first process
collects no orphans; its root has the capabilities that Docker leaves to one, so it may not look into other users'
processes; its files are its own and writable, packages of the interpreter included. What it has not are cgroups and
a filter of system calls. Needs root, for ``nsenter``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

from composer_replication.sandbox.bwrap_program import require_bwrap
from composer_replication.sandbox.host_paths import base_interpreter, resolve_links, system_folders

# https://docs.docker.com/engine/security/: of root's capabilities a container keeps these.
_CAPABILITIES = (
    "chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod"
)
_KEPT = "-all," + ",".join(f"+{name}" for name in f"{_CAPABILITIES} audit_write setfcap".split())
_SHARED_BYTES = 64 << 20


class BubblewrapEnvironment(BaseEnvironment):
    """One container; ``session_id`` names it."""

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """The image is this machine's programs."""

    @property
    def _path(self) -> str:
        return "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    @property
    def _folder(self) -> Path:
        return Path(tempfile.gettempdir()) / f"harbor-{self.session_id}"

    @property
    def _root(self) -> Path:
        return self._folder / "root"

    @property
    def _first_pid(self) -> int:
        return int((self._folder / "pid").read_text())

    async def start(self, force_build: bool) -> None:
        self._folder.mkdir(mode=0o700)
        for name in ("etc", "proc", "dev", "run/lock", "tmp/of-root", "var/tmp", "root"):
            (self._root / name).mkdir(parents=True)
        for name, mode in (
            ("tmp/of-root", 0o700),
            ("run/lock", 0o1777),
            ("tmp", 0o1777),
            ("var/tmp", 0o1777),
            ("root", 0o711),
        ):
            (self._root / name).chmod(mode)
        for name in ("passwd", "group", "hosts", "nsswitch.conf", "hostname"):
            (self._root / "etc" / name).write_text("the image's own\n")
        words = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1"]
        if self.network_policy.network_mode == NetworkMode.NO_NETWORK:
            words.append("--unshare-net")
        words += ["--bind", str(self._root), "/", *self._programs(), "--proc", "/proc", "--dev", "/dev"]
        words += ["--perms", "1777", "--size", str(_SHARED_BYTES), "--tmpfs", "/dev/shm", "--clearenv"]
        read, write = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                require_bwrap(), "--info-fd", str(write), "--cap-add", "ALL", *words, "--", "sleep", "infinity",
                pass_fds=[write], start_new_session=True, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL, stderr=(self._folder / "said").open("wb"),
            )  # fmt: skip
        finally:
            os.close(write)
        with os.fdopen(read) as handle:
            said = await asyncio.to_thread(handle.read)
        if not said:
            raise RuntimeError((self._folder / "said").read_text())
        (self._folder / "pid").write_text(str(json.loads(said)["child-pid"]))
        await asyncio.to_thread(self._wait_for_the_first_process)

    def _wait_for_the_first_process(self) -> None:
        """Until it is no more ``bwrap``, which sees this machine's files."""
        while Path(f"/proc/{self._first_pid}/comm").read_text().strip() != "sleep":
            time.sleep(0.005)

    def _programs(self) -> list[str]:
        """This machine's, read-only; where packages are installed something of the container's own."""
        words: list[str] = []
        groups = (system_folders(), base_interpreter())
        for path in (path for group in groups for path in group.read_only):
            real, links = resolve_links(path)
            for link, target in links:
                place = self._root / str(link)[1:]
                place.parent.mkdir(parents=True, exist_ok=True)
                if not os.path.lexists(place):
                    place.symlink_to(target)
            (self._root / str(real)[1:]).parent.mkdir(
                parents=True, exist_ok=True
            )  # those of bwrap are root's alone
            words += ["--ro-bind", str(real), str(real)]
        for number, path in enumerate(path for group in groups for path in group.masked):
            own = self._folder / f"packages-{number}"
            (own / "pip").mkdir(parents=True)
            (own / "pip" / "__init__.py").write_text("word = 'installed'\n")
            words += ["--bind", str(own), str(path.resolve())]
        return words

    async def stop(self, delete: bool) -> None:
        with suppress(OSError, ValueError):
            os.kill(self._first_pid, signal.SIGKILL)
        if process := getattr(self, "_process", None):
            await process.wait()
        removal = await asyncio.create_subprocess_exec("rm", "-rf", str(self._folder))  # however deep
        await removal.wait()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        assert user in (None, "root")
        enter = [
            "nsenter",
            "--target",
            str(self._first_pid),
            "--mount",
            "--pid",
            "--ipc",
            "--uts",
            "--net",
            "--root",
        ]
        enter += ["setpriv", f"--bounding-set={_KEPT}", "--inh-caps=-all"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *enter, "sh", "-c", f"cd {cwd or '/'} && {command}", env={"PATH": self._path, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
        )  # fmt: skip
        try:  # whoever asks goes away; what was started in the container stays, as with an engine
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_sec)
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        return ExecResult(
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            return_code=process.returncode or 0,
        )

    def _place(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await asyncio.to_thread(shutil.copyfile, source_path, self._place(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await asyncio.to_thread(shutil.copytree, source_dir, self._place(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await asyncio.to_thread(shutil.copyfile, self._place(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await asyncio.to_thread(shutil.copytree, self._place(source_dir), target_dir, dirs_exist_ok=True)
