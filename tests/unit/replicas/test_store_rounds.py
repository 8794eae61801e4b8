"""Outer steps through an object store: all replicas agree, whatever comes late, twice or never."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from replica_threads import IDENTITY, SmallReplica, section, together, weights_sha

from composer_replication.errors import ComposerError, InputError, MissingError, NothingToDoError, UsageError
from composer_replication.replicas.object_store import ObjectStore, open_store
from composer_replication.replicas.run_records import RunEnd, RunRecords
from composer_replication.replicas.store_rounds import StoreRounds


def rounds(store: Any, replica: int, **options: Any) -> StoreRounds:
    if not isinstance(store, ObjectStore):
        store = ObjectStore(store, "memory", patience_seconds=1.0)
    table = section(**({"grace_seconds": 0.3, "deadline_seconds": 5.0} | options))
    return StoreRounds(store, table, replica=replica, poll_seconds=0.01, state_every=2)


def merged(*replicas: SmallReplica) -> list[list[tuple[int, str]]]:
    return [[(row["outer_step"], row["outer_sha256"]) for row in replica.rows] for replica in replicas]


@pytest.mark.parametrize(
    ("fragments", "delay", "precision", "number"),
    [(1, 0, "fp32", 2), (2, 1, "int8", 2), (4, 3, "int4", 3), (1, 2, "bf16", 2)],
)
def test_replicas_are_equal_after_every_outer_step(
    fragments: int, delay: int, precision: str, number: int
) -> None:
    store = MemoryStore()
    replicas = [
        SmallReplica(
            rounds(store, n, num_replicas=number), n, fragments=fragments, delay=delay, precision=precision
        )
        for n in range(number)
    ]
    ends = together(*(replica.train for replica in replicas))
    assert {end.kind for end in ends} == {"finished"}, ends
    first, *others = merged(*replicas)
    assert [step for step, _ in first] == list(range(1, 6 + fragments))
    assert all(other == first for other in others)
    assert len({sha for _, sha in first}) >= 6  # each step moved something
    assert len({weights_sha(replica.model) for replica in replicas}) == 1
    assert all(row["present"] == list(range(number)) for row in replicas[0].rows)


def test_tokens_weigh_and_bytes_are_counted() -> None:
    store = MemoryStore()
    one, other = (SmallReplica(rounds(store, n), n, precision="int8") for n in range(2))
    together(one.train, other.train)
    num_weights = 8 * 16 + 16 + 16 * 2 + 2
    assert one.rows[-1]["bytes"]["sent/outer"] == 6 * (num_weights + 4)  # one block
    assert one.rows[-1]["bytes"]["received/outer"] == 6 * (num_weights + 4)
    assert [row["tokens"] for row in one.rows] == [80] * 6


def test_one_that_vanishes_is_waited_for_once_and_comes_back_equal() -> None:
    store = MemoryStore()

    class Killed(Exception):
        pass

    def die(step: int, replica: SmallReplica) -> None:
        if step == 9:
            raise Killed

    def slowly(step: int, replica: SmallReplica) -> None:
        time.sleep(0.02)

    survivor = SmallReplica(rounds(store, 0, grace_seconds=0.5), 0, steps=80, after_step=slowly)
    killed = SmallReplica(rounds(store, 1), 1, steps=80, after_step=die)
    back = SmallReplica(rounds(store, 1), 1, steps=80, after_step=slowly)

    def die_and_return() -> RunEnd:
        with pytest.raises(Killed):
            killed.train()
        time.sleep(1.0)
        return back.train(first_step=8)

    ends = together(survivor.train, die_and_return)
    assert [end.kind for end in ends] == ["finished", "finished"], ends
    present = [row["present"] for row in survivor.rows]
    assert present[:2] == [[0, 1], [0, 1]]
    assert [0] in present
    assert present[-1] == [0, 1]
    assert sum(row["stall_seconds"] > 0.4 for row in survivor.rows) <= 2
    theirs = dict(merged(survivor)[0])
    own = [(row["outer_step"], row["outer_sha256"]) for row in back.rows]
    assert own
    assert all(theirs[step] == sha for step, sha in own)
    assert weights_sha(survivor.model) == weights_sha(back.model)


def test_one_that_wakes_after_the_end_takes_the_result_and_trains_no_further() -> None:
    store = MemoryStore()
    woken = threading.Event()

    trained: list[int] = []

    def stop(step: int, replica: SmallReplica) -> None:
        trained.append(step)
        if step == 6:
            woken.wait(30)

    other = SmallReplica(rounds(store, 0), 0)
    late = SmallReplica(rounds(store, 1), 1, after_step=stop)

    def run_to_the_end() -> RunEnd:
        end = other.train()
        woken.set()
        return end

    ends = together(run_to_the_end, late.train)
    assert [end.kind for end in ends] == ["finished", "finished"], ends
    assert weights_sha(late.model) == weights_sha(other.model)
    assert late.loop.round_idx == 6
    assert trained[-1] <= 8  # at its next outer step it knew


def test_all_vanish_and_the_run_goes_on_where_it_was() -> None:
    store = MemoryStore()

    def die(step: int, replica: SmallReplica) -> None:
        if step == 14:
            raise RuntimeError("killed")

    first = [SmallReplica(rounds(store, n), n, after_step=die) for n in range(2)]
    assert all(isinstance(end, RuntimeError) for end in together(*(replica.train for replica in first)))
    again = [SmallReplica(rounds(store, n), n) for n in range(2)]
    ends = together(*(lambda r=replica: r.train(first_step=13) for replica in again))
    assert [end.kind for end in ends] == ["finished", "finished"], ends
    assert again[0].rows[0]["outer_step"] <= 4
    assert again[0].rows[-1]["outer_step"] == 6
    assert dict(merged(again[0])[0])[3] == dict(merged(first[0])[0])[3]
    assert len({weights_sha(replica.model) for replica in again}) == 1


def test_a_verdict_on_one_stops_all_for_the_same_reason() -> None:
    store = MemoryStore()

    def halt(step: int, replica: SmallReplica) -> None:
        if step == 10:
            replica.loop.halt("the gap is too wide")

    one = SmallReplica(rounds(store, 0), 0, after_step=halt)
    other = SmallReplica(rounds(store, 1), 1)
    ends = together(one.train, other.train)
    assert {(end.kind, end.replica, end.reason) for end in ends} == {("halted", 0, "the gap is too wide")}


def test_messages_that_come_twice_or_late_change_nothing() -> None:
    """Every create is sent a second time, and after the end every offer once more."""

    class Doubling(ObjectStore):
        def create(self, key: str, data: bytes, *, kind: str = "records") -> bool:
            sent.append((key, data))
            is_ours = super().create(key, data, kind=kind)
            assert super().create(key, data, kind=kind) == is_ours
            return is_ours

    sent: list[tuple[str, bytes]] = []
    memory = MemoryStore()
    replicas = [SmallReplica(rounds(Doubling(memory, "memory"), n), n) for n in range(2)]
    together(*(replica.train for replica in replicas))
    plain_store = MemoryStore()
    plain = [SmallReplica(rounds(plain_store, n), n) for n in range(2)]
    together(*(replica.train for replica in plain))
    assert merged(*replicas) == merged(*plain)
    late = ObjectStore(memory, "memory")
    for key, data in sent:
        late.create(key, data)
    back = SmallReplica(rounds(memory, 1), 1)
    assert back.train(first_step=4).kind == "finished"
    assert weights_sha(back.model) == weights_sha(plain[0].model)


def test_a_failing_store_is_tried_again_and_then_named() -> None:
    class Failing:
        def __init__(self, num_failures: int) -> None:
            self._left, self._store = num_failures, MemoryStore()

        def __getattr__(self, name: str) -> Any:
            if self._left > 0:
                self._left -= 1
                raise OSError("503 slow down")
            return getattr(self._store, name)

    assert ObjectStore(Failing(1), "x", patience_seconds=5.0).create("a", b"1")
    with pytest.raises(MissingError, match="503 slow down") as caught:
        ObjectStore(Failing(10**6), "x", patience_seconds=0.0).read("a")
    assert caught.value.code == "CR1101"


def test_garbage_goes_and_the_newest_state_stays() -> None:
    store = MemoryStore()
    replicas = [SmallReplica(rounds(store, n), n, steps=48) for n in range(2)]
    together(*(replica.train for replica in replicas))
    view = ObjectStore(store, "memory")
    kept = {int(name[:8]) for name in view.names("state")}
    assert max(kept) == 12
    assert min(kept) >= 8
    offers = [name for name in view.names("round") if "/offer-" in name]
    assert {int(name[:8]) for name in offers} <= set(range(8, 12))
    assert len([name for name in view.names("round") if name.endswith("/merge")]) == 12


def test_a_payload_that_was_changed_is_refused() -> None:
    store = MemoryStore()
    view = rounds(store, 0, num_replicas=2)
    view.join(IDENTITY, lambda: b"state")
    other = rounds(store, 1)
    other.join(IDENTITY, lambda: b"state")
    view.offer(0, b"mine", tokens=1, fingerprint="f" * 64)
    other.offer(0, b"theirs", tokens=1, fingerprint="f" * 64)
    name = next(n for n in ObjectStore(store, "m").names("round/00000000") if n.startswith("offer-1"))
    store.put(f"round/00000000/{name}", b"forged")
    with pytest.raises(InputError, match="not what its name says"):
        view.collect(0)


def test_a_replica_with_another_outer_state_is_told() -> None:
    store = MemoryStore()
    one, astray = rounds(store, 0), rounds(store, 1, grace_seconds=5.0, deadline_seconds=5.0)
    for view in (one, astray):
        view.join(IDENTITY, lambda: b"state")
    one = rounds(store, 0, deadline_seconds=0.2)
    one.join(IDENTITY, lambda: b"state")
    one.offer(0, b"mine", tokens=1, fingerprint="a" * 64)
    astray.offer(0, b"theirs", tokens=1, fingerprint="b" * 64)
    merge = one.collect(0)
    assert [c.replica for c in merge.contributions] == [0]  # type: ignore[union-attr]
    with pytest.raises(InputError, match="not the others'"):
        astray.collect(0)


def test_too_few_replicas() -> None:
    view = rounds(MemoryStore(), 0, min_replicas=2, deadline_seconds=0.2)
    view.join(IDENTITY, lambda: b"state")
    view.offer(0, b"mine", tokens=1, fingerprint="a" * 64)
    with pytest.raises(NothingToDoError, match="1 of at least 2 replicas") as caught:
        view.collect(0)
    assert caught.value.code == "CR1101"


def test_a_second_process_of_the_same_number_takes_over() -> None:
    store = MemoryStore()
    old = rounds(store, 0, num_replicas=2, deadline_seconds=5.0)
    old.join(IDENTITY, lambda: b"state")
    old.offer(0, b"mine", tokens=1, fingerprint="a" * 64)
    rounds(store, 0).join(IDENTITY, lambda: b"state")
    with pytest.raises(UsageError, match="another process has joined as replica 0") as caught:
        old.collect(0)
    assert caught.value.code == "CR1105"


def test_another_recipe_or_version_is_refused_by_name() -> None:
    store = MemoryStore()
    rounds(store, 0).join(IDENTITY | {"version": "1"}, lambda: b"state")
    for check in (
        rounds(store, 1).records.agree,
        lambda identity: rounds(store, 1).join(identity, lambda: b"state"),
    ):
        with pytest.raises(UsageError, match=r"differs .* model, version\.") as caught:
            check(IDENTITY | {"model": "c", "version": "2"})
        assert caught.value.code == "CR1103"


def test_the_first_end_counts() -> None:
    store = ObjectStore(MemoryStore(), "memory")
    one, other = (RunRecords(store, replica=n) for n in range(2))
    assert one.end() is None
    first = one.finish(RunEnd("halted", 3, 0, "x"))
    assert other.finish(RunEnd("finished", 4, 1)) == first == other.end()


def test_one_winner_of_eight_on_a_file_store(tmp_path: Path) -> None:
    stores = [open_store(f"file://{tmp_path}/run") for _ in range(8)]
    for race in range(20):
        won = together(
            *(
                lambda s=store, n=n, r=race: s.create(f"race/{r}", bytes([n]))
                for n, store in enumerate(stores)
            )
        )
        assert won.count(True) == 1


def test_a_store_that_lets_a_key_be_created_twice_is_refused() -> None:
    class Overwriting:
        def __init__(self) -> None:
            self._store = MemoryStore()

        def put(self, key: str, data: bytes, *, mode: str) -> None:
            self._store.put(key, data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

    with pytest.raises(UsageError) as caught:
        ObjectStore(Overwriting(), "s3://bucket").probe()
    assert caught.value.code == "CR1101"
    ObjectStore(MemoryStore(), "memory").probe()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ftp://here/x", "'ftp' is none of"),
        ("s3://key:secret@bucket/run", "holds credentials"),
        ("s3://bucket/run?token=1", "holds credentials or options"),
    ],
)
def test_addresses_that_cannot_be_used(address: str, says: str) -> None:
    with pytest.raises(MissingError, match=says) as caught:
        open_store(address)
    assert caught.value.code == "CR1101"
    assert "secret" not in str(caught.value)


def test_nobody_answers_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ComposerError) as caught:
        open_store("s3://bucket/run").probe()
    assert caught.value.code == "CR1101"
