"""This process as the driver of a Ray cluster: join it, notice when its head is gone, leave it."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

from composer_replication.errors import ComposerError, MissingError, SandboxFailure, UsageError

AUTO = "auto"
_ADDRESS = re.compile(r"(?P<client>ray://)?(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]+):(?P<port>\d{1,5})")
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 5.0
_LOST_SECONDS = 20.0
"""A head that restarts is waited for; but Ray ends this process, unasked, 60 s after it lost its head."""


class Head:
    """The machine that leads a cluster: does it still answer?

    Without its head a cluster does nothing and says nothing, and Ray ends this process.

    Args:
        host: where it is.
        port: where it listens.
        look_seconds: how often it is looked for, at most.
        lost_seconds: how long it may be away.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        look_seconds: float = _LOOK_SECONDS,
        lost_seconds: float = _LOST_SECONDS,
    ) -> None:
        self._place = (host, port)
        self._look_seconds = look_seconds
        self._lost_seconds = lost_seconds
        self._lock = threading.Lock()
        self._looked = self._answered = time.monotonic()

    def is_gone(self) -> bool:
        """Whether it has not answered for a while; looks for it if that was not done a moment ago; in any thread."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= self._look_seconds:
                self._looked = now
                with suppress(OSError):
                    _knock(self._place)
                    self._answered = now
            return self._looked - self._answered > self._lost_seconds

    def check(self) -> None:
        """Refuse to wait for a cluster that is gone.

        Raises:
            SandboxFailure: it has not answered for a while (CR0491).
        """
        if self.is_gone():
            raise SandboxFailure(
                "CR0491",
                f"the head of the Ray cluster at {self} is gone.",
                where="--ray",
                fix="the same command again, once the cluster is back, goes on where it stopped.",
            )

    def __str__(self) -> str:
        return f"{self._place[0]}:{self._place[1]}"


class RayConnection:
    """This process as a driver of a cluster; one at a time.

    Args:
        address: ``auto`` for the cluster that ``RAY_ADDRESS`` names or that runs on this machine,
            ``HOST:PORT`` of its head for one that this machine is a node of, ``ray://HOST:PORT`` of
            its client server for any other (needs ``ray[client]``).

    Raises:
        UsageError: no such form of address, or this program has joined a cluster already (CR0490).
        MissingError: nothing answers there, or not as Ray does (CR0490); it runs another
            version of Ray or Python (CR0490).
    """

    def __init__(self, address: str) -> None:
        match = check_address(address)
        try:
            with _own_way_to_end(), _silence():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:
            ray.shutdown()
            if isinstance(error, Exception):
                raise _refusal(address, error) from error
            raise
        head = address if match and match["client"] else ray.get_runtime_context().gcs_address
        host, _, port = head.removeprefix("ray://").rpartition(":")
        self.head = Head(host.strip("[]"), int(port))

    def close(self) -> None:
        """Leave the cluster, which forgets all that was sent to it."""
        with _silence():
            ray.shutdown()


def check_address(address: str) -> re.Match[str] | None:
    """Refuse what cannot be an address, and where nothing listens: Ray itself would wait for minutes.

    Its parts; None for ``auto``, of which only Ray knows where it is.

    Raises:
        UsageError: no such form of address, or this program has joined a cluster already (CR0490).
        MissingError: nothing answers there (CR0490).
    """
    if ray.is_initialized():
        raise UsageError(
            "CR0490",
            "this program has joined a Ray cluster already.",
            where=address,
            fix="leave it with ray.shutdown() first.",
        )
    if address == AUTO:
        return None
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise UsageError(
            "CR0490",
            f"{address!r} is no address of a Ray cluster.",
            where="--ray",
            fix="--ray auto, --ray HOST:PORT or --ray ray://HOST:PORT",
        )
    try:
        _knock((match["host"].strip("[]"), int(match["port"])))
    except OSError as error:
        raise _refusal(address, error) from error
    return match


def _knock(place: tuple[str, int]) -> None:
    socket.create_connection(place, timeout=_ANSWER_SECONDS).close()


def _refusal(address: str, error: Exception) -> ComposerError:
    """One sentence for what Ray says in many."""
    text = f"{error}\n{error.__cause__ or ''}".strip()
    if "ersion mismatch" in text or "versions don't match" in text:
        found = re.findall(r"(Ray|Python): ([\w.+-]+)", text)
        what = ", ".join(f"{name} {version}" for name, version in found[:4])
        return MissingError(
            "CR0490",
            f"the cluster runs another version of Ray or Python{f' ({what})' if what else ''}.",
            where=address,
            fix=f"use Ray {ray.__version__} and this Python on every node, or those of the cluster here.",
        )
    if "uthentica" in text:
        reason = "it wants a token, which is missing here or another one"
        fix = "RAY_AUTH_MODE=token, with the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    else:
        reason = first_sentence(text) or type(error).__name__
        fix = "ray status on the head tells whether it runs; ray start --head starts one."
    return MissingError("CR0490", f"the Ray cluster cannot be joined: {reason}.", where=address, fix=fix)


def first_sentence(text: str) -> str:
    """What Ray says first, without its full stop and at most 200 characters of it."""
    line = (text.strip().splitlines() or [""])[0]
    return re.split(r"\.\s", line)[0].rstrip(".")[:200]


@contextmanager
def _own_way_to_end() -> Iterator[None]:
    """Keep what this program does on SIGTERM: Ray puts its own in the place of it."""
    is_main = threading.current_thread() is threading.main_thread()
    before: Any = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _silence() -> Iterator[None]:
    """Inside, nothing is written to standard error: what Ray's own parts write there is said in one sentence."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
