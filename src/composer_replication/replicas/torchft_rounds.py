"""Outer steps over gloo between processes of one network, with torchft's lighthouse, quorum and healing.

torchft decides who takes part in a round, forms the process group anew when somebody comes or goes, votes on whether
all have got everything, and has a late one healed by another. What is sent, how it is rounded and what is done with it is
``outer_step``: the same as over an object store. Beside the lighthouse, one port higher, a ``RecordServer`` keeps
what the run is, and how it ended.

Always set, since torchft's own defaults hang or fork a run: deadlines and retries of the quorum, an end-of-run mark that is read
before each round, and healing by safetensors with hash and token in place of pickles from whoever answers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import AllgatherOptions, TCPStore
from torchft.checkpointing.transport import CheckpointTransport
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from composer_replication.config import ReplicasSection
from composer_replication.replicas.object_store import open_store
from composer_replication.replicas.record_server import RecordServer, open_records, records_address
from composer_replication.replicas.replica_errors import damaged, too_few, unreachable
from composer_replication.replicas.rounds import Contribution, Merge, State
from composer_replication.replicas.run_records import RunEnd, RunRecords

logger = logging.getLogger(__name__)

_QUORUM_SECONDS = 30.0  # one try; between two the end-of-run mark is read
_RETRY_SECONDS = 0.5
_HEADER = struct.Struct("<qqqq16s")  # replica, round, tokens, bytes that follow, outer state
_JOINING = -1  # the round in which all begin


class _Own(NamedTuple):
    """What this replica brings into a round."""

    round_idx: int = _JOINING
    payload: bytes = b""
    tokens: int = 0
    fingerprint: str = ""


class TorchftRounds:
    """``Rounds`` over torchft: ``options.lighthouse`` at HOST:PORT, its records at the next port.

    ``options.grace_seconds`` is how long an exchange may take. All replicas are waited for before the first round.
    """

    def __init__(self, options: ReplicasSection, *, token: str, replica: int) -> None:
        self._options, self._token = options, token
        self._host, self._port = records_address(options.lighthouse)
        self._address = f"http://{self._host}:{self._port}"
        self._client = open_records(self._address, token, patience_seconds=options.deadline_seconds)
        self.records = RunRecords(self._client, replica=replica)
        self._manager: Manager | None = None
        self._healed: list[Mapping[str, Any]] = []
        self._decided: Merge | None = None
        self._round_idx = _JOINING

    def probe(self) -> None:
        """Before anything depends on it: the records beside the lighthouse are there, and take our token (CR1101)."""
        open_records(self._address, self._token, patience_seconds=0.0).read("run")

    def join(self, identity: Mapping[str, str], dump: Callable[[], bytes]) -> State | None:
        self.records.agree(identity, {})
        if self.records.end() is not None:
            return None
        self.records.take_lease(0)
        self._dump = dump
        self._begin_by = time.monotonic() + self._options.deadline_seconds / 2
        self._open_manager()
        found = self._exchange(_Own())
        self._round_idx = max(self._round_idx, 0)
        return found if isinstance(found, State) else None

    def offer(self, round_idx: int, payload: bytes, *, tokens: int, fingerprint: str) -> None:
        self._offer = _Own(round_idx, payload, tokens, fingerprint)

    def decided(self, round_idx: int) -> Merge | State | None:
        merge, self._decided = self._decided, None
        return merge if merge is not None and merge.round_idx == round_idx else None

    def collect(self, round_idx: int) -> Merge | State | RunEnd:
        self._round_idx = round_idx
        return self._exchange(self._offer)

    def after_merge(self, round_idx: int) -> None:
        self._round_idx = round_idx

    def finish(self, end: RunEnd) -> RunEnd:
        return self.records.finish(end)

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is None:
            return
        self._client.patience_seconds = 1.0
        shut_down = partial(manager.shutdown, wait=False)
        for leave in (self.records.leave, shut_down, self._group.abort, self._healing.shutdown):
            with suppress(Exception):
                leave()

    def _open_manager(self) -> None:
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        options = self._options
        timeout = timedelta(seconds=options.grace_seconds)
        self._group = ProcessGroupGloo(timeout=timeout)
        try:
            with socket.create_connection((self._host, self._port - 1), timeout=10) as there:
                host = there.getsockname()[0]  # at which the others reach this machine, too
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._healing = HealTransport(self._token, host=host, num_bytes=self.records.num_bytes)
            self._manager = Manager(
                pg=self._group,
                load_state_dict=self._healed.append,
                state_dict=lambda: {"round_idx": self._round_idx, "data": self._dump()},
                min_replica_size=options.min_replicas,
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=timedelta(seconds=_QUORUM_SECONDS),
                connect_timeout=timedelta(seconds=10),
                rank=0,
                world_size=1,
                store_addr=host,
                store_port=self._store.port,
                lighthouse_addr=f"http://{options.lighthouse}",
                replica_id=f"replica_{self.records.replica}",
                hostname=host,
                checkpoint_transport=self._healing,
                quorum_retries=10,
            )
        except Exception as error:
            raise unreachable("the lighthouse", error, where=options.lighthouse) from error

    def _exchange(self, own: _Own) -> Merge | State | RunEnd:
        """One round, tried until all agree that they have everything, the run is over, or the deadline has passed."""
        give_up_at = time.monotonic() + self._options.deadline_seconds
        healed: State | None = None
        while time.monotonic() < give_up_at:
            if (end := self.records.end()) is not None:
                return end
            assert self._manager is not None
            self.records.roll_call(max(own.round_idx, 0))
            self._healed.clear()
            merge = None
            try:
                self._manager.start_quorum()
            except Exception as error:  # noqa: BLE001 - whatever torchft says, it is tried again
                logger.warning("replicas: no quorum yet: %s", error)
            else:
                if self._healed:
                    healed = State(**self._healed[0])
                    own = _Own(healed.round_idx)
                merge = self._vote(own)
            if merge is None:
                time.sleep(_RETRY_SECONDS)
                continue
            if healed is None:
                return merge
            self._decided = merge if merge.contributions else None
            self._round_idx = max(healed.round_idx, 0)
            return State(self._round_idx, healed.data)
        raise too_few(0, self._options, where=self._options.lighthouse)

    def _vote(self, own: _Own) -> Merge | None:
        """Exchange what there is; None where somebody has not got everything."""
        assert self._manager is not None
        contributions: list[Contribution] = []
        fingerprints: set[bytes] = set()
        try:
            is_early = own.round_idx == _JOINING and time.monotonic() < self._begin_by
            if is_early and self._group.size() < self._options.num_replicas:
                raise RuntimeError("not all replicas of the run are there yet")
            if self._manager.errored() is None:
                contributions, fingerprints = self._gather(own)
        except Exception as error:  # noqa: BLE001 - the vote says so, and the round is taken again
            self._manager.report_error(error)
        if (trouble := self._manager.errored()) is not None and own.round_idx != _JOINING:
            logger.warning("replicas: the round is taken again: %s", trouble.original_exception)
        has_all = False  # no vote is no yes
        with suppress(Exception):
            has_all = self._manager.should_commit()
        if not has_all:
            return None
        if len(fingerprints) > 1:
            raise damaged("the replicas' outer states have come apart")
        return Merge(own.round_idx, tuple(contributions), is_included=bool(own.payload))

    def _gather(self, own: _Own) -> tuple[list[Contribution], set[bytes]]:
        digest = hashlib.sha256(own.fingerprint.encode()).digest()[:16]
        header = _HEADER.pack(self.records.replica, own.round_idx, own.tokens, len(own.payload), digest)
        headers = [_HEADER.unpack(data) for data in self._all_of(header, kind="records")]
        if len({header[1] for header in headers}) > 1:
            raise RuntimeError(f"the replicas are at rounds {sorted({header[1] for header in headers})}")
        length = max(header[3] for header in headers)
        if not length:
            return [], set()
        payloads = self._all_of(own.payload.ljust(length, b"\0"), kind="outer")
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
        for way in ("sent", "received"):
            self.records.num_bytes[f"{way}/{kind}"] += len(data) * (number - 1)
        return [tensor.numpy().tobytes() for tensor in out]


class HealTransport(CheckpointTransport[dict[str, Any]]):  # type: ignore[misc]
    """How a late replica gets the outer state: JSON and safetensors over HTTP, by token, with a hash."""

    def __init__(self, token: str, *, host: str, num_bytes: Counter[str]) -> None:
        self._token, self._num_bytes = token, num_bytes
        self._server = RecordServer(token, open_store("memory:///", patience_seconds=0.0), host=host)

    def metadata(self) -> str:
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        user = state_dict["user"]["default"]
        head = {"torchft": state_dict["torchft"], "round_idx": user["round_idx"]}
        data = json.dumps(head).encode() + b"\n" + user["data"]
        self._num_bytes["sent/states"] += len(data) * len(dst_ranks)
        store = open_store("memory:///", patience_seconds=0.0)
        store.create(f"state/{step}", data)
        self._server.store = store  # the one before goes

    def disallow_checkpoint(self) -> None:
        """Kept until the next one: a state that is read is never changed."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        client = open_records(metadata, self._token, patience_seconds=timeout.total_seconds())
        give_up_at = time.monotonic() + timeout.total_seconds()
        while (data := client.read(f"state/{step}", kind="states")) is None:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{metadata} has no state of step {step}")
            time.sleep(0.1)
        self._num_bytes["received/states"] += len(data)
        head, _, state = data.partition(b"\n")
        table = json.loads(head)
        user = {"round_idx": int(table["round_idx"]), "data": state}
        return {"user": {"default": user}, "torchft": table["torchft"]}

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        self._server.close()
