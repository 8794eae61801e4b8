"""A real vLLM on the processor says how likely a student's own tokens are, against a forward pass of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import composer_rl, started

from composer_replication.config import ModelSection
from composer_replication.run_folder import read_jsonl
from composer_replication.trainer.model_loading import load_model

pytestmark = pytest.mark.timeout(1800)
SESSION = Path(__file__).parents[3] / "examples" / "traces" / "session.jsonl"


def test_traces_distill_asks_it(caller: Path, tmp_path: Path) -> None:
    server = started(caller, tmp_path / "vllm.log", num_context=8192)
    try:
        sessions, out = tmp_path / "sessions", tmp_path / "rows.jsonl"
        assert composer_rl("traces", "ingest", str(SESSION), "--out", str(sessions)).returncode == 0
        done = composer_rl(
            *("traces", "distill", str(sessions), "--model", str(caller), "--out", str(out), "--every-step"),
            *("--teacher", f"vllm={server.url}/v1#{caller}"),
        )
        assert done.returncode == 0, done.stderr[-3000:]
    finally:
        server.kill()
    rows = read_jsonl(out)
    assert json.loads(done.stdout)["rows"] == len(rows) > 1
    model, _ = load_model(ModelSection(name=str(caller)), seed=0)
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logp = torch.log_softmax(model.eval()(ids).logits[0].double(), dim=-1)
        first = len(row["prompt_ids"])
        wanted = [float(logp[place - 1, ids[0, place]]) for place in range(first, ids.shape[1])]
        assert len(wanted) > 3
        assert row["teacher_logp"] == pytest.approx(wanted, abs=1e-4)
