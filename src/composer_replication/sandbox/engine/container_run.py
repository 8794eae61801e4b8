"""One container from its creation to its removal: feed it, drain it, watch it, kill it."""

from __future__ import annotations

import os
import selectors
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from composer_replication.errors import SandboxFailure
from composer_replication.sandbox.engine.engine_client import EngineClient, EngineRefusal
from composer_replication.sandbox.engine.stream_frames import FrameError, FrameReader
from composer_replication.sandbox.jailed_tree import failure
from composer_replication.sandbox.process_tree import descendants, speakers
from composer_replication.sandbox.supervised_run import Ended, Verdict, Watched, is_interrupted

_CHUNK_BYTES = 1 << 18
_WATCH_SECONDS = 0.05
_ASK_SECONDS = 0.25
_WATCH_SHARE = 10  # a look may cost at most a tenth of the time
_LONGEST_WATCH_SECONDS = 1.0
_END_SECONDS = 15.0  # for the engine to notice that its container is dead
_EXIT_KILLED = 137
_NOT_FOUND, _CONFLICT = 404, 409


class Container:
    """One container, made on entry and removed on exit, running or not.

    Raises (on entry):
        SandboxFailure: no engine (CR0320), it refuses (CR0321), or has no such image (CR0322).
    """

    def __init__(self, client: EngineClient, request: dict[str, Any]) -> None:
        self._client = client
        self._request = request
        self._path = ""
        self.host_pid = 0

    def __enter__(self) -> Container:
        try:
            made = self._client.ask("POST", "/containers/create", body=self._request)
        except EngineRefusal as error:
            if error.status == _NOT_FOUND:
                image = self._request["Image"]
                raise failure("CR0322", f"the engine has no image {image!r}: {error.message}.") from error
            raise _refused("make a container", error) from error
        self._path = f"/containers/{quote(str((made or {}).get('Id', '')), safe='')}"
        if self._path == "/containers/":
            raise failure("CR0321", "the engine made a container and does not say which.")
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self._client.ask("DELETE", self._path, query={"force": "1", "v": "1"})
        except EngineRefusal as refusal:
            if refusal.status not in (_NOT_FOUND, _CONFLICT) and kind is None:
                raise _refused("remove a container", refusal) from refusal
        except SandboxFailure:
            if kind is None:  # what was raised first says more
                raise

    def run(self, stdin: bytes, timeout_seconds: float, watched: Watched, extra_bytes: int) -> Ended:
        """Start it and wait for its end, which is ours at the time-out or past a limit.

        Raises:
            SandboxFailure: the engine went away (CR0320), refused (CR0321), cut or garbled the streams
                while the command ran (CR0323), cannot end it (CR0324); an interruption (CR0302).
        """
        try:
            channel, first = self._client.attach(self._path.rpartition("/")[2])
        except EngineRefusal as error:
            raise _refused("attach to a container", error) from error
        with channel:
            streams = _Streams(channel, stdin, FrameReader(watched.limits.output_bytes + extra_bytes))
            try:
                streams.reader.take(first)
                self._start()
                started = time.monotonic()
                verdict = self._wait(streams, watched, started + timeout_seconds)
                if verdict is not Verdict.ENDED:
                    self._kill()
                    streams.drain_rest()
            except FrameError as error:
                raise failure("CR0323", f"the container's streams are garbled: {error}.") from error
            finally:
                streams.close()
            seconds = time.monotonic() - started
        state = self._final_state(is_killed=verdict is not Verdict.ENDED)
        if verdict is Verdict.ENDED and not streams.reader.is_between_frames:
            raise failure("CR0323", "the container's streams were cut in the middle.")
        if verdict in (Verdict.ENDED, Verdict.OVER_MEMORY) and state.get("OOMKilled"):
            verdict = Verdict.OVER_MEMORY
        if verdict is Verdict.ENDED and watched.disk_is_exceeded():
            verdict = Verdict.OVER_DISK
        return Ended(
            verdict=verdict,
            exit_code=int(state.get("ExitCode", 0)) if verdict is Verdict.ENDED else _EXIT_KILLED,
            stdout=bytes(streams.reader.kept[0]),
            stderr=bytes(streams.reader.kept[1]),
            truncated=streams.reader.truncated,
            seconds=seconds,
        )

    def _start(self) -> None:
        try:
            self._client.ask("POST", f"{self._path}/start")
            self.host_pid = int(self._state().get("Pid") or 0)
        except EngineRefusal as error:
            raise _refused("start a container", error) from error

    def _state(self) -> dict[str, Any]:
        answer = self._client.ask("GET", f"{self._path}/json")
        state = answer.get("State") if isinstance(answer, dict) else None
        if not isinstance(state, dict):
            raise failure("CR0321", "the engine does not say how its container is.")
        return state

    def _wait(self, streams: _Streams, watched: Watched, deadline: float) -> Verdict:
        next_look, next_question = time.monotonic() + _WATCH_SECONDS, time.monotonic() + _ASK_SECONDS
        while not streams.at_end:
            streams.step(max(0.0, min(deadline, next_look) - time.monotonic()))
            if is_interrupted():
                raise SandboxFailure("CR0302", "the run was killed because the program was interrupted.")
            now = time.monotonic()
            if now >= deadline:
                return Verdict.TIMED_OUT
            if now >= next_question:
                if self._is_out_of_memory():
                    return Verdict.OVER_MEMORY
                next_question = time.monotonic() + _ASK_SECONDS
            if now >= next_look:
                pids = self._pids()
                shown = [pid for pid in pids if os.access(f"/proc/{pid}/fd", os.R_OK)]
                closed = [pid for pid in pids if pid not in shown]
                # The kernel counts memory and processes; files nobody does.
                if (verdict := watched.look_at_files(shown, closed, deadline)) is not Verdict.ENDED:
                    return verdict
                cost = time.monotonic() - now
                pause = min(max(_WATCH_SECONDS, _WATCH_SHARE * cost), _LONGEST_WATCH_SECONDS)
                next_look = time.monotonic() + pause
        return Verdict.ENDED

    def _is_out_of_memory(self) -> bool:
        """The kernel kills one process of several; the command as a whole is over the limit then."""
        try:
            return bool(self._state().get("OOMKilled"))
        except EngineRefusal as error:
            if error.status == _NOT_FOUND:
                raise failure("CR0323", "somebody removed the container while it ran.") from error
            raise _refused("describe a container", error) from error

    def _pids(self) -> list[int]:
        return speakers([self.host_pid, *descendants(self.host_pid)]) if self.host_pid > 0 else []

    def _kill(self) -> None:
        try:
            self._client.ask("POST", f"{self._path}/kill", query={"signal": "KILL"})
        except EngineRefusal as error:
            if error.status not in (_NOT_FOUND, _CONFLICT):  # it is gone, or ended by itself just now
                raise failure("CR0324", f"the container cannot be killed: {error.message}.") from error

    def _final_state(self, *, is_killed: bool) -> dict[str, Any]:
        """How it ended. The streams end a moment before the engine knows; one that runs on was cut off."""
        deadline = time.monotonic() + _END_SECONDS
        while True:
            try:
                state = self._state()
            except EngineRefusal as error:
                raise _refused("describe a container", error) from error
            if not state.get("Running"):
                if state.get("Error"):
                    raise failure("CR0321", f"the engine could not run it: {state['Error']}.")
                return state
            if time.monotonic() > deadline:
                if is_killed:
                    raise failure("CR0324", "the container lives on after it was killed.")
                raise failure("CR0323", "the engine let go of the streams while the command ran.")
            time.sleep(0.02)


class _Streams:
    """The attached socket: what goes in, what comes out, without ever blocking."""

    def __init__(self, channel: socket.socket, stdin: bytes, reader: FrameReader) -> None:
        self._channel = channel
        self._to_send = memoryview(stdin)
        self.reader = reader
        self.at_end = False
        self._selector = selectors.DefaultSelector()
        if stdin:
            self._selector.register(channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
        else:
            self._selector.register(channel, selectors.EVENT_READ)
            self._end_of_input()

    def step(self, patience_seconds: float) -> None:
        """Move what can be moved, or wait for it."""
        for _, events in self._selector.select(patience_seconds):
            if events & selectors.EVENT_READ:
                self._receive()
            if events & selectors.EVENT_WRITE and not self.at_end and self._to_send:
                self._send()

    def drain_rest(self) -> None:
        """All writers are dead: read until the engine hangs up, or for so long."""
        deadline = time.monotonic() + _END_SECONDS
        while not self.at_end and time.monotonic() < deadline:
            self.step(0.1)

    def _receive(self) -> None:
        try:
            chunk = self._channel.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it hung up with our input unread; all that it wrote came before
            self.at_end = True
            return
        except OSError as error:
            raise failure("CR0320", f"the container engine cannot be asked: {error}.") from error
        if chunk:
            self.reader.take(chunk)
        else:
            self.at_end = True

    def _send(self) -> None:
        try:
            self._to_send = self._to_send[self._channel.send(self._to_send[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # it does not want to read: its own affair
            self._to_send = self._to_send[:0]
        if not self._to_send:
            self._selector.modify(self._channel, selectors.EVENT_READ)
            self._end_of_input()

    def _end_of_input(self) -> None:
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._selector.close()


def _refused(what: str, error: EngineRefusal) -> SandboxFailure:
    return failure("CR0321", f"the engine does not {what}: {error.message} (status {error.status}).")
