"""Episodes of several turns in two processes that share one copy of the weights (FSDP2 over gloo).

Each process attempts tasks of its own, in jails of its own, and asks for answers at times of its own; every forward needs both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agentic_runs import SETTINGS, played_by_file
from two_processes import both_ranks

from composer_replication.run_folder import RunFolder, read_jsonl

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WORKER = Path(__file__).with_name("sharded_agents_worker.py")
Run = Callable[..., tuple[RunFolder, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def run(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    pins = tuple(f"tinymath/numbers.py::{name}" for name in ("absolute", "clamp", "sign"))
    store = build_tiny(tmp_path_factory.mktemp("store") / "tasks", pins)
    common = {"tasks": {"store": str(store)}, **SETTINGS, "trl.per_device_train_batch_size": 4}
    common |= {"trl.max_steps": 2, "heldout.before_and_after_samples": 1}

    def start(*, is_sharded: bool, is_scripted: bool = True, fails_at: int = 0, **settings: Any) -> Any:
        folder = tmp_path_factory.mktemp("run")
        spec = folder / "spec.json"
        told = {"is_sharded": is_sharded, "is_scripted": is_scripted, "fails_at": fails_at}
        spec.write_text(json.dumps({**told, "settings": common | settings}))
        return RunFolder(folder / "run"), both_ranks(WORKER, folder, str(spec))

    return start


def test_the_same_episodes_and_weights_as_with_whole_weights(run: Run) -> None:
    three = {"trl.max_steps": 3}
    spread, (first, second) = run(is_sharded=True, **three)
    whole, (alone, _) = run(is_sharded=False, **three)
    assert first["sha256"] == second["sha256"]
    assert first["steps"] == second["steps"] == alone["steps"] == 3
    played, expected = played_by_file(spread), played_by_file(whole)
    assert len(expected) == 9  # three generations in two processes, three held-out readings in the first
    assert {name: played[name] for name in expected} == expected
    assert len(played) == 12  # with spread weights each has to take part in a reading
    for ours, theirs in zip(read_jsonl(spread.metrics), read_jsonl(whole.metrics), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert first["stand_ins"] + second["stand_ins"] > 0  # somebody had no rows where the other had
    assert first["batches"] + first["stand_ins"] == second["batches"] + second["stand_ins"]


def test_the_models_own_words_are_drawn_together(run: Run) -> None:
    spread, (first, second) = run(is_sharded=True, is_scripted=False, **{"agent.max_new_tokens": 24})
    whole, _ = run(is_sharded=False, is_scripted=False, **{"agent.max_new_tokens": 24})
    assert first["sha256"] == second["sha256"]
    ours, theirs = played_by_file(spread), played_by_file(whole)
    first_step = [name for name in theirs if name.startswith("episodes-000001")]
    assert len(first_step) == 2  # of both processes
    for name in first_step:
        assert ours[name] == theirs[name]
        assert any(turn.token_ids for episode in ours[name] for turn in episode[4:])


def test_a_process_that_fails_amid_a_batch_is_heard(run: Run) -> None:
    _, (first, second) = run(is_sharded=True, fails_at=4)
    assert first["error"] == second["error"] == "CR0999"
    assert first["notes"] == ["raised on process 1"]
