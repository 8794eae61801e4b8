"""One command in a container of a pod, over ``exec`` (v4 or v5.channel.k8s.io).

The first byte of a message is its channel: 0 standard input, 1 output, 2 error, 3 the status at the
end, a JSON ``Status`` whose cause ``ExitCode`` is the exit code. v4 cannot end standard input, so
whoever reads it inside is told how many bytes come (``head -c``); nothing is ever ended here.
Reference: k8s.io/apimachinery/pkg/util/remotecommand/constants.go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from composer_replication.errors import SandboxFailure
from composer_replication.sandbox.jailed_tree import failure
from composer_replication.sandbox.pods.api_client import REPEATED, ApiClient, ApiRefusal
from composer_replication.sandbox.pods.websocket import WebSocket, WebSocketEndedError
from composer_replication.sandbox.supervised_run import is_interrupted

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3
_CHUNK_BYTES = 1 << 17
_TICK_SECONDS = 0.2
_CONNECT_SECONDS = 15.0
_FIRST_PAUSE_SECONDS = 0.1


@dataclass(slots=True)
class ExecEnd:
    """How a command ended; ``exit_code`` is None where our deadline or ``look`` came first."""

    exit_code: int | None = None
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    stopped: Any = None
    """What ``look`` said."""


@dataclass(frozen=True, slots=True)
class PodExec:
    """Runs commands in one container.

    Args:
        client: of the cluster.
        pod_path: ``/api/v1/namespaces/NAMESPACE/pods/NAME``.
        container: its name.
    """

    client: ApiClient
    pod_path: str
    container: str

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        stdin: IO[bytes] | None = None,
        keep_bytes: int = 1 << 20,
        sink: Callable[[bytes], None] | None = None,
        look: Callable[[], Any] | None = None,
    ) -> ExecEnd:
        """Run it to its end, or until ``deadline`` (monotonic) or ``look`` ends our patience.

        What we stop listening to runs on inside: the caller kills it.

        Args:
            argv: program and arguments.
            deadline: of ``time.monotonic``.
            stdin: sent whole.
            keep_bytes: of each stream; the rest is drained.
            sink: takes standard output in the place of ``stdout``.
            look: asked now and then; anything true ends the wait and is ``stopped``.

        Raises:
            ApiRefusal: the server does not start it.
            SandboxFailure: the connection broke or is no exec (CR0336, CR0331); an interruption (CR0302).
        """
        query = [("container", self.container), ("stdout", "true"), ("stderr", "true"), ("tty", "false")]
        query += [("stdin", "true")] if stdin is not None else []
        query += [("command", word) for word in argv]
        end = ExecEnd()
        channel = self._connect(self.client.target(f"{self.pod_path}/exec", query))
        try:
            while stdin is not None and (chunk := stdin.read(_CHUNK_BYTES)):
                channel.send(bytes([_STDIN]) + chunk)
            self._listen(channel, end, deadline=deadline, keep_bytes=keep_bytes, sink=sink, look=look)
        except WebSocketEndedError as error:
            raise failure("CR0336", f"the connection to the pod broke ({error}).", self.pod_path) from error
        finally:
            channel.close()
        return end

    def _connect(self, target: str) -> WebSocket:
        """Before the connection is taken over nothing has begun, so a busy server may be asked again."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return WebSocket(self.client, target, PROTOCOLS)
            except ApiRefusal as error:
                if error.status not in REPEATED or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause *= 2

    def _listen(
        self,
        channel: WebSocket,
        end: ExecEnd,
        *,
        deadline: float,
        keep_bytes: int,
        sink: Callable[[bytes], None] | None,
        look: Callable[[], Any] | None,
    ) -> None:
        while end.exit_code is None:
            message = channel.receive(max(0.0, min(_TICK_SECONDS, deadline - time.monotonic())))
            if is_interrupted():
                raise SandboxFailure("CR0302", "the run was killed because the program was interrupted.")
            if message:
                kind, rest = message[0], message[1:]
                if kind == _STDOUT and sink is not None:
                    sink(rest)
                elif kind in (_STDOUT, _STDERR):
                    kept = end.stdout if kind == _STDOUT else end.stderr
                    room = keep_bytes - len(kept)
                    kept += rest[: max(room, 0)]
                    end.truncated = end.truncated or len(rest) > room
                elif kind == _STATUS:
                    end.exit_code = _exit_code(rest)
                    return
            if time.monotonic() >= deadline:
                return
            if look is not None and (stopped := look()):
                end.stopped = stopped
                return


def _exit_code(text: bytes) -> int:
    """The exit code that a ``Status`` tells.

    Raises:
        SandboxFailure: the command was not run to its end (CR0336).
    """
    try:
        status = json.loads(text)
        if status.get("status") == "Success":
            return 0
        if status.get("reason") == "NonZeroExitCode":
            causes = status["details"]["causes"]
            return next(int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode")
        said = str(status.get("message") or status.get("reason") or "no reason given")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        said = f"a status that says nothing: {text[:200].decode(errors='replace')}"
    raise failure("CR0336", f"the command was not run to its end: {' '.join(said.split())[:400]}.")
