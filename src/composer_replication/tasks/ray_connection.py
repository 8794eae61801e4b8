"""Join a Ray cluster, or start one on this machine that nobody else sees and that ends with us."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from composer_replication.errors import ComposerError, MissingError, UsageError
from composer_replication.sandbox.process_folder import PREFIX, hold, process_folder

LOCAL, AUTO = "local", "auto"
_ADDRESS = re.compile(r"(?:ray://)?(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]+):(?P<port>\d{1,5})")
_ANSWER_SECONDS = 5.0
_MOST_FOLDER_BYTES = 40
"""Ray's sockets lie 62 bytes below its folder, and the address of one may have 107."""
_STORE_BYTES = 512 * 1024**2
"""Room for repositories and wheels in shared memory; what does not fit lies in Ray's folder."""
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""A build tells nobody that it is made."""


class RayConnection:
    """This process as a driver of a cluster.

    Args:
        address: ``local`` starts a cluster on this machine without a dashboard; ``auto`` joins the
            one that this program has joined already, that ``RAY_ADDRESS`` names or that runs here;
            ``HOST:PORT`` one that runs on this machine too; ``ray://HOST:PORT`` any.
        num_cpus: of a cluster that is started.

    Raises:
        UsageError: no such form of address, or this program is in another cluster (CR0490).
        MissingError: nothing answers there, or not as Ray does, or the cluster has no processor
            (CR0490); it runs another version of Ray or Python (CR0493).
    """

    def __init__(self, address: str, num_cpus: int) -> None:
        self._folder: Path | None = None
        self._is_ours = not (address == AUTO and ray.is_initialized())
        if not self._is_ours:
            return
        _check_address(address)
        _check_free(address)
        self._on_terminate = _terminate_signal()
        try:
            with _environment(_QUIET):
                if address == LOCAL:
                    self._folder = _session_folder()
                    self._start(num_cpus, self._folder)
                else:
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            if ray.cluster_resources().get("CPU", 0) < 1:
                raise MissingError(
                    "CR0490",
                    "the cluster has no processor for this build.",
                    where=address,
                    fix="ray status",
                )
        except BaseException as error:
            self.close()
            if isinstance(error, ConnectionError | RuntimeError | ValueError | TimeoutError | OSError):
                raise _refusal(address, error) from error
            raise

    @staticmethod
    def _start(num_cpus: int, folder: Path) -> None:
        options: dict[str, Any] = {"_temp_dir": str(folder)}
        ray.init(
            address=LOCAL,
            num_cpus=num_cpus,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )

    def close(self) -> None:
        """Leave the cluster; one that was started is stopped, and its folder removed."""
        if not self._is_ours:
            return
        ray.shutdown()
        if threading.current_thread() is threading.main_thread() and self._on_terminate is not None:
            signal.signal(signal.SIGTERM, self._on_terminate)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _check_address(address: str) -> None:
    if address in (LOCAL, AUTO):
        return
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise UsageError(
            "CR0490",
            f"{address!r} is no address of a Ray cluster.",
            where="--ray",
            fix="--ray local, --ray auto, --ray HOST:PORT or --ray ray://HOST:PORT",
        )
    try:  # Ray itself would wait for minutes
        socket.create_connection(
            (match["host"].strip("[]"), int(match["port"])), timeout=_ANSWER_SECONDS
        ).close()
    except OSError as error:
        raise _refusal(address, error) from error


def _check_free(address: str) -> None:
    if ray.is_initialized():
        raise UsageError(
            "CR0490",
            f"this program has joined a cluster already, and cannot join {address} too.",
            where=address,
            fix="auto uses the cluster that it is in.",
        )


def _refusal(address: str, error: BaseException) -> ComposerError:
    """One sentence for what Ray says in many."""
    text = str(error).strip()
    if "ersion mismatch" in text or "versions don't match" in text:
        found = re.findall(r"(Ray|Python): ([\w.+-]+)", text)
        what = ", ".join(f"{name} {version}" for name, version in found[:4])
        return MissingError(
            "CR0493",
            f"the cluster runs another version of Ray or Python{f' ({what})' if what else ''}.",
            where=address,
            fix=f"use Ray {ray.__version__} and this Python on every node, or those of the cluster here.",
        )
    reason = (text.splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
    what = "a local Ray cannot be started" if address == LOCAL else "no Ray cluster can be joined"
    return MissingError(
        "CR0490", f"{what}: {reason}.", where=address, fix="ray status, or --ray local for this machine."
    )


def _session_folder() -> Path:
    """A folder for logs and sockets that goes with this process, with a name that is short enough."""
    folder = process_folder() / "ray"
    if len(os.fsencode(folder)) > _MOST_FOLDER_BYTES:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))  # where sockets have room
        hold(folder)
    folder.mkdir(exist_ok=True)
    return folder


def _terminate_signal() -> Any:
    """What happens on SIGTERM: Ray puts its own way in the place of it."""
    is_main = threading.current_thread() is threading.main_thread()
    return signal.getsignal(signal.SIGTERM) if is_main else None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
