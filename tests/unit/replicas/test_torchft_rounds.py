"""Outer steps over torchft's lighthouse and gloo, replicas as threads of this process."""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from ray_head import free_port
from replica_threads import IDENTITY, SmallReplica, section, together, weights_sha

from composer_replication.cli.replicas_verb import quiet_torchft
from composer_replication.errors import InputError, MissingError, NothingToDoError, UsageError
from composer_replication.replicas.run_records import RunEnd

quiet_torchft()
from composer_replication.replicas.lighthouse import Lighthouse  # noqa: E402
from composer_replication.replicas.torchft_rounds import HealTransport, TorchftRounds  # noqa: E402


@pytest.fixture
def lighthouse() -> Iterator[str]:
    table = section(transport=f"torchft://127.0.0.1:{free_port()}", grace_seconds=1.0)
    with closing(Lighthouse("right", table, heartbeat_seconds=1.0)):
        yield table.lighthouse


def rounds(lighthouse: str, replica: int, *, token: str = "right", **options: Any) -> TorchftRounds:
    table = {"grace_seconds": 10.0, "deadline_seconds": 20.0} | options
    return TorchftRounds(section(transport=f"torchft://{lighthouse}", **table), token=token, replica=replica)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fragments", "delay", "precision"), [(1, 0, "fp32"), (2, 1, "int8"), (4, 3, "int4")]
)
def test_replicas_are_equal_after_every_outer_step(
    lighthouse: str, fragments: int, delay: int, precision: str
) -> None:
    replicas = [
        SmallReplica(rounds(lighthouse, n), n, fragments=fragments, delay=delay, precision=precision)
        for n in range(2)
    ]
    ends = together(*(replica.train for replica in replicas))
    assert [getattr(end, "kind", end) for end in ends] == ["finished", "finished"]
    one, other = ([(r["outer_step"], r["outer_sha256"]) for r in replica.rows] for replica in replicas)
    assert one == other
    assert [step for step, _ in one] == list(range(1, 6 + fragments))
    assert len({weights_sha(replica.model) for replica in replicas}) == 1
    assert {tuple(row["present"]) for row in replicas[0].rows} == {(0, 1)}
    assert replicas[0].rows[-1]["bytes"]["sent/outer"] > 0


def test_one_that_vanishes_is_gone_on_without_and_healed_when_it_returns(lighthouse: str) -> None:
    def die(step: int, replica: SmallReplica) -> None:
        if step == 9:
            replica.rounds.close()
            raise RuntimeError("killed")

    def slowly(step: int, replica: SmallReplica) -> None:
        time.sleep(0.04)

    survivor = SmallReplica(rounds(lighthouse, 0), 0, steps=160, after_step=slowly)
    killed = SmallReplica(rounds(lighthouse, 1), 1, steps=160, after_step=die)
    back = SmallReplica(rounds(lighthouse, 1), 1, steps=160, after_step=slowly)

    def die_and_return() -> RunEnd:
        with pytest.raises(RuntimeError, match="killed"):
            killed.train()
        time.sleep(2.0)
        return back.train(first_step=8)

    ends = together(survivor.train, die_and_return)
    assert [getattr(end, "kind", end) for end in ends] == ["finished", "finished"]
    present = [row["present"] for row in survivor.rows]
    assert present[0] == [0, 1]
    assert [0] in present
    assert present[-1] == [0, 1]
    theirs = {row["outer_step"]: row["outer_sha256"] for row in survivor.rows}
    assert back.rows
    assert all(theirs[row["outer_step"]] == row["outer_sha256"] for row in back.rows)
    assert weights_sha(back.model) == weights_sha(survivor.model)
    assert back.rows[-1]["bytes"]["received/states"] > 0


def test_a_verdict_on_one_stops_all_for_the_same_reason(lighthouse: str) -> None:
    def halt(step: int, replica: SmallReplica) -> None:
        if step == 10:
            replica.loop.halt("the gap is too wide")

    one = SmallReplica(rounds(lighthouse, 0), 0, after_step=halt)
    other = SmallReplica(rounds(lighthouse, 1), 1)
    ends = together(one.train, other.train)
    assert [(end.kind, end.reason) for end in ends] == [("halted", "the gap is too wide")] * 2


def test_one_that_comes_after_the_end_is_told_and_trains_no_further(lighthouse: str) -> None:
    replicas = [SmallReplica(rounds(lighthouse, n), n) for n in range(2)]
    together(*(replica.train for replica in replicas))
    late = SmallReplica(rounds(lighthouse, 1), 1)
    with pytest.raises(NothingToDoError, match="ended without this replica") as caught:
        late.train(first_step=12)
    assert caught.value.code == "CR1105"
    assert late.rows == []


def test_a_resume_of_which_nobody_holds_the_state_is_refused(lighthouse: str) -> None:
    alone = SmallReplica(rounds(lighthouse, 0, num_replicas=1), 0)
    with pytest.raises(InputError, match="no replica that lives holds the outer state") as caught:
        alone.train(first_step=9)
    alone.rounds.close()
    assert caught.value.code == "CR1107"


def test_too_few(lighthouse: str) -> None:
    alone = SmallReplica(rounds(lighthouse, 0, min_replicas=2, deadline_seconds=1.0), 0)
    with pytest.raises(NothingToDoError) as caught:
        alone.train()
    alone.rounds.close()
    assert caught.value.code == "CR1101"


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"token": "wrong"}, "CR1101", "the token is wrong"),
        ({}, "CR1103", "differs from the run that it would join in: model"),
    ],
)
def test_refused_before_the_first_step(
    lighthouse: str, options: dict[str, Any], code: str, says: str
) -> None:
    rounds(lighthouse, 0).records.agree(IDENTITY, {})
    late = rounds(lighthouse, 1, **options)

    def look() -> None:
        late.probe()
        late.records.agree(IDENTITY | {"model": "another"})

    with pytest.raises((MissingError, UsageError), match=says) as caught:
        look()
    assert caught.value.code == code


def test_no_lighthouse_and_a_port_in_use(lighthouse: str) -> None:
    with pytest.raises(MissingError) as caught:
        Lighthouse("right", section(transport=f"torchft://{lighthouse}"))
    assert caught.value.code == "CR1101"
    with pytest.raises(MissingError) as caught:
        rounds(f"127.0.0.1:{free_port()}", 0).probe()
    assert caught.value.code == "CR1101"
    with pytest.raises(MissingError, match="is not HOST:PORT"):
        rounds("here", 0)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('code of another machine ran')",)


def test_healing_runs_no_code_and_takes_no_other_token() -> None:
    source = HealTransport("right", host="127.0.0.1", num_bytes=Counter())
    state = {
        "user": {"default": {"round_idx": 3, "data": b"weights"}},
        "torchft": {"step": 4, "batches_committed": 8},
    }
    source.send_checkpoint([1], 4, state, timedelta(seconds=5))
    received: Counter[str] = Counter()
    target = HealTransport("right", host="127.0.0.1", num_bytes=received)
    assert target.recv_checkpoint(0, source.metadata(), 4, timedelta(seconds=5)) == state
    assert received["received/states"] > 7
    thief = HealTransport("other", host="127.0.0.1", num_bytes=Counter())
    with pytest.raises(MissingError, match="the token is wrong"):
        thief.recv_checkpoint(0, source.metadata(), 4, timedelta(seconds=0))
    source._server.store.create("state/5", pickle.dumps(Trap()))
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        target.recv_checkpoint(0, source.metadata(), 5, timedelta(seconds=1))
    for transport in (source, target, thief):
        transport.shutdown()
