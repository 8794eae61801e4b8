"""``composer-rl train`` in two processes under ZeRO-3: the model it leaves is the trained one, also after a kill at the end."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from transformers import AutoModelForCausalLM
from zero_launch import launched

from composer_replication.run_folder import RunFolder, read_json, read_jsonl
from composer_replication.trainer.model_modes import parameter_sha256


def test_the_model_and_its_pass_rates_are_those_of_the_trained_weights(tmp_path: Path) -> None:
    _, ranks = launched("train_worker.py", "3", tmp_path)
    assert ranks == [{"code": 0}, {"code": 0}]
    run = RunFolder(tmp_path / "run")
    summary = read_json(run.summary)
    assert (summary["steps"], summary["stop_reason"]) == (2, "finished")
    assert len(read_jsonl(run.verdicts)) == 2
    trained = summary["parameter_sha256"]
    assert parameter_sha256(AutoModelForCausalLM.from_pretrained(run.model)) == trained
    # as after a kill between the last checkpoint and the measurement
    after = read_json(run.root / "after.json")
    run.summary.unlink()
    (run.root / "after.json").unlink()
    shutil.rmtree(run.model)
    launched("train_worker.py", "3", tmp_path, "--resume")
    assert read_json(run.summary)["parameter_sha256"] == trained
    assert read_json(run.root / "after.json") == after
    assert parameter_sha256(AutoModelForCausalLM.from_pretrained(run.model)) == trained
