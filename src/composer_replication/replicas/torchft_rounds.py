"""Outer steps over gloo between processes of one network, with torchft's lighthouse, quorum and healing.

torchft decides who takes part in a round, forms the process group anew when somebody comes or goes, votes on whether
all have got everything, and has a late one healed by another. What is sent, how it is rounded and what is done with it is
``outer_step``: the same as over an object store. Beside the lighthouse, one port higher, a ``RecordServer`` keeps
what the run is, and how it ended.

Always set, since torchft's own defaults hang or fork a run: deadlines and retries of the quorum, an end-of-run mark that is read
before each round, and healing by safetensors with hash and token in place of pickles from whoever answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, TCPStore
from torchft.checkpointing.transport import CheckpointTransport
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from composer_replication.replicas.record_server import RecordClient, RecordServer
from composer_replication.replicas.replica_errors import damaged, too_few, unreachable
from composer_replication.replicas.rounds import Contribution, Merge, State
from composer_replication.replicas.run_records import RunEnd, RunRecords

logger = logging.getLogger(__name__)

_QUORUM_SECONDS = 30.0  # one try; between two the end-of-run mark is read
_END_EVERY_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_HEADER = struct.Struct("<qqqq16s")  # replica, round, tokens, bytes that follow, outer state
_JOINING = -1  # the round in which all begin

State0 = dict[str, Any]


class TorchftRounds:
    """``Rounds`` over torchft: the lighthouse at HOST:PORT, its records at the next port.

    ``grace_seconds`` is how long an exchange may take, ``host`` where the others reach this replica. All ``num_replicas`` are
    waited for before the first round.
    """

    def __init__(
        self,
        *,
        lighthouse: str,
        token: str,
        replica: int,
        num_replicas: int,
        min_replicas: int = 1,
        grace_seconds: float = 60.0,
        deadline_seconds: float = 600.0,
        host: str = "127.0.0.1",
    ) -> None:
        self._lighthouse, self._token, self._host = lighthouse, token, host
        self._replica, self._num_replicas, self._min_replicas = replica, num_replicas, min_replicas
        self._grace_seconds, self._deadline_seconds = grace_seconds, deadline_seconds
        name, _, port = lighthouse.rpartition(":")
        if not name or not port.isdecimal():
            raise unreachable(
                "the lighthouse", f"{lighthouse!r} is not HOST:PORT", where="replicas.lighthouse"
            )
        client = RecordClient(f"http://{name}:{int(port) + 1}", token, patience_seconds=deadline_seconds)
        self._client, self._records = client, RunRecords(client, replica=replica)
        self._manager: Manager | None = None
        self._healed: tuple[int, bytes] | None = None
        self._decided: Merge | None = None
        self._offer: tuple[int, bytes, int, str] = (_JOINING, b"", 0, "")
        self._round_idx = _JOINING
        self._looked_at = self._begin_by = 0.0
        self._num_expected = 1
        self.num_bytes: Counter[str] = client.num_bytes

    def probe(self) -> None:
        """Before anything depends on it: the lighthouse is there, and takes our token (CR1101)."""
        patience, self._client.patience_seconds = self._client.patience_seconds, 0.0
        host, _, port = self._lighthouse.rpartition(":")
        try:
            self._client.read("run")
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise unreachable("the lighthouse", error, where=self._lighthouse) from error
        finally:
            self._client.patience_seconds = patience

    def check(self, identity: Mapping[str, str]) -> None:
        self._records.agree(identity)

    def join(self, identity: Mapping[str, str], dump: Callable[[], bytes]) -> State | None:
        self._records.agree(identity, {})
        if self._records.end() is not None:
            return None
        self._records.take_lease(0)
        self._dump = dump
        self._wait_for_all()
        self._open_manager()
        found = self._exchange(_JOINING, b"", 0, "")
        self._round_idx = max(self._round_idx, 0)
        return found if isinstance(found, State) else None

    def offer(self, round_idx: int, payload: bytes, *, tokens: int, fingerprint: str) -> None:
        self._offer = (round_idx, payload, tokens, fingerprint)

    def decided(self, round_idx: int) -> Merge | State | None:
        merge, self._decided = self._decided, None
        return merge if merge is not None and merge.round_idx == round_idx else None

    def collect(self, round_idx: int) -> Merge | State | RunEnd:
        self._round_idx = round_idx
        return self._exchange(*self._offer)

    def wants_state(self, round_idx: int) -> bool:
        return False

    def after_merge(self, round_idx: int, state: bytes | None) -> None:
        self._round_idx = round_idx

    def ended(self) -> RunEnd | None:
        if time.monotonic() - self._looked_at < _END_EVERY_SECONDS:
            return None
        self._looked_at = time.monotonic()
        return self._records.end()

    def finish(self, end: RunEnd, dump: Callable[[], bytes]) -> RunEnd:
        return self._records.finish(end)

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is None:
            return
        with contextlib.suppress(Exception):
            self._client.patience_seconds = 1.0
            self._records.leave()
        with contextlib.suppress(Exception):
            manager.shutdown(wait=False)
        with contextlib.suppress(Exception):
            self._group.abort()
        self._healing.shutdown()

    def _wait_for_all(self) -> None:
        """Until every replica has been there once, or the deadline has passed."""
        self._begin_by = time.monotonic() + self._deadline_seconds / 2
        while time.monotonic() < self._begin_by and self._records.end() is None:
            recent, left = self._records.roll_call(0)
            self._num_expected = len(recent)
            if len(recent | left) >= self._num_replicas:
                return
            time.sleep(0.2)

    def _open_manager(self) -> None:
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._tcp_store = store
        self._group = ProcessGroupGloo(timeout=timedelta(seconds=self._grace_seconds))
        self._healing = HealTransport(self._token, host=self._host, num_bytes=self.num_bytes)
        try:
            self._manager = Manager(
                pg=self._group,
                load_state_dict=self._take_over,
                state_dict=lambda: {"round_idx": self._round_idx, "state": self._dump()},
                min_replica_size=self._min_replicas,
                use_async_quorum=False,
                timeout=timedelta(seconds=self._grace_seconds),
                quorum_timeout=timedelta(seconds=_QUORUM_SECONDS),
                connect_timeout=timedelta(seconds=10),
                rank=0,
                world_size=1,
                store_addr=self._host,
                store_port=store.port,
                lighthouse_addr=f"http://{self._lighthouse}",
                replica_id=f"replica_{self._replica}",
                hostname=self._host,
                checkpoint_transport=self._healing,
                quorum_retries=10,
            )
        except Exception as error:
            raise unreachable("the lighthouse", error, where=self._lighthouse) from error

    def _take_over(self, state: Mapping[str, Any]) -> None:
        self._healed = (int(state["round_idx"]), state["state"])

    def _newly_healed(self) -> tuple[int, bytes] | None:
        found, self._healed = self._healed, None
        return found

    def _exchange(
        self, round_idx: int, payload: bytes, tokens: int, fingerprint: str
    ) -> Merge | State | RunEnd:
        """One round, tried until all agree that they have everything, the run is over, or the deadline has passed."""
        give_up_at = time.monotonic() + self._deadline_seconds
        healed: tuple[int, bytes] | None = None
        while time.monotonic() < give_up_at:
            end = self._records.end()
            if end is not None:
                return end
            assert self._manager is not None
            self._records.roll_call(max(round_idx, 0))
            self._newly_healed()
            try:
                self._manager.start_quorum()
            except Exception as error:  # noqa: BLE001 - whatever torchft says, it is tried again
                logger.warning("replicas: no quorum yet: %s", error)
                time.sleep(_RETRY_SECONDS)
                continue
            if (found := self._newly_healed()) is not None:
                healed = found
                round_idx, payload, tokens, fingerprint = healed[0], b"", 0, ""
            merge = self._vote(round_idx, payload, tokens, fingerprint)
            if merge is None:
                time.sleep(_RETRY_SECONDS)
                continue
            if healed is None:
                return merge
            self._decided = merge if merge.contributions else None
            self._round_idx = max(healed[0], 0)
            return State(self._round_idx, healed[1])
        raise too_few(0, self._min_replicas, self._deadline_seconds, where=self._lighthouse)

    def _vote(self, round_idx: int, payload: bytes, tokens: int, fingerprint: str) -> Merge | None:
        """Exchange what there is; None where somebody has not got everything."""
        assert self._manager is not None
        contributions: list[Contribution] = []
        fingerprints: set[bytes] = set()
        try:
            if (
                round_idx == _JOINING
                and self._group.size() < self._num_expected
                and time.monotonic() < self._begin_by
            ):
                raise RuntimeError("not all replicas of the run are there yet")
            if self._manager.errored() is None:
                contributions, fingerprints = self._gather(round_idx, payload, tokens, fingerprint)
        except Exception as error:  # noqa: BLE001 - the vote says so, and the round is taken again
            self._manager.report_error(error)
        if (trouble := self._manager.errored()) is not None and round_idx != _JOINING:
            logger.warning("replicas: the round is taken again: %s", trouble.original_exception)
        try:
            has_all = self._manager.should_commit()
        except Exception:  # noqa: BLE001 - no vote is no yes
            return None
        if not has_all:
            return None
        if len(fingerprints) > 1:
            raise damaged("the replicas' outer states have come apart")
        return Merge(round_idx, tuple(contributions), is_included=tokens > 0 or bool(payload))

    def _gather(
        self, round_idx: int, payload: bytes, tokens: int, fingerprint: str
    ) -> tuple[list[Contribution], set[bytes]]:
        digest = hashlib.sha256(fingerprint.encode()).digest()[:16] if fingerprint else bytes(16)
        own = _HEADER.pack(self._replica, round_idx, tokens, len(payload), digest)
        headers = [_HEADER.unpack(data) for data in self._all_of(own, kind="records")]
        if len({header[1] for header in headers}) > 1:
            raise RuntimeError(f"the replicas are at rounds {sorted({header[1] for header in headers})}")
        length = max(header[3] for header in headers)
        if not length:
            return [], set()
        payloads = self._all_of(payload.ljust(length, b"\0"), kind="outer")
        contributions = [
            Contribution(int(header[0]), int(header[2]), data)
            for header, data in zip(headers, payloads, strict=True)
            if header[3] == length
        ]
        return contributions, {header[4] for header in headers if header[3]}

    def _all_of(self, data: bytes, *, kind: str) -> list[bytes]:
        """The bytes of all participants, in the order of their ranks."""
        number = max(self._group.size(), 1)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        out = [torch.empty_like(own) for _ in range(number)]
        self._group.allgather([out], [own], AllgatherOptions()).wait()
        self.num_bytes[f"sent/{kind}"] += len(data) * (number - 1)
        self.num_bytes[f"received/{kind}"] += len(data) * (number - 1)
        return [tensor.numpy().tobytes() for tensor in out]


class HealTransport(CheckpointTransport[State0]):  # type: ignore[misc]
    """How a late replica gets the outer state: JSON and safetensors over HTTP, by token, with a hash."""

    def __init__(self, token: str, *, host: str, num_bytes: Counter[str]) -> None:
        self._token, self._num_bytes = token, num_bytes
        self._server = RecordServer(token, host=host)

    def metadata(self) -> str:
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: State0, timeout: timedelta
    ) -> None:
        user = state_dict["user"]["default"]
        head = {"torchft": state_dict["torchft"], "round_idx": user["round_idx"]}
        data = json.dumps(head).encode() + b"\n" + user["state"]
        self._num_bytes["sent/states"] += len(data) * len(dst_ranks)
        with self._server.lock:
            self._server.records = {f"state/{step}": data}

    def disallow_checkpoint(self) -> None:
        """Kept until the next one: a state that is read is never changed."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> State0:
        client = RecordClient(metadata, self._token, patience_seconds=timeout.total_seconds())
        give_up_at = time.monotonic() + timeout.total_seconds()
        while (data := client.read(f"state/{step}", kind="states")) is None:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{metadata} has no state of step {step}")
            time.sleep(0.1)
        self._num_bytes["received/states"] += len(data)
        head, _, state = data.partition(b"\n")
        table = json.loads(head)
        user = {"default": {"round_idx": table["round_idx"], "state": state}}
        return {"user": user, "torchft": table["torchft"]}

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        self._server.close()
