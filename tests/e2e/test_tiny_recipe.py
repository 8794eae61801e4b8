"""The whole path through the real command line, with the tiny recipe, killed and resumed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import main

STEPS, ROWS = 3, 4
# A shell that runs the tests in the background has its children ignore Ctrl-C.
LISTENING = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from composer_replication.cli.main import main; sys.exit(main())"
)


def words_of(recipe: Path, out: Path, **more: object) -> list[str]:
    """The command for a run of a few small steps; ``a__b`` sets the key ``a.b``."""
    settings = {
        "trl__max_steps": STEPS,
        "trl__per_device_train_batch_size": ROWS,
        "trl__num_generations": ROWS,
        "trl__max_completion_length": 8,
        "trainer__checkpoint_every": 1,
        "trl__save_total_limit": 20,
        "heldout__every": 1,
        **more,
    }
    flags = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
    return ["train", str(recipe), "--out", str(out), "--json", *flags]


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-c", LISTENING, *words]


def here(words: list[str]) -> tuple[int, str, str]:
    """The command in this process, which has loaded torch already: exit code, output, errors."""
    with redirect_stdout(StringIO()) as answer, redirect_stderr(StringIO()) as errors:
        code = main(words)
    return code, answer.getvalue(), errors.getvalue()


def finish(words: list[str]) -> dict[str, Any]:
    code, answer, errors = here(words)
    assert code == 0, errors
    summary: dict[str, Any] = json.loads(answer)
    return summary


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, finish(words_of(tiny_recipe, out))


def test_a_run_leaves_everything_that_it_promises(whole: tuple[Path, dict[str, Any]]) -> None:
    out, summary = whole
    assert summary["global_step"] == STEPS
    assert summary["verdict"] == "clean"
    assert [row["step"] for row in rows(out / "metrics.jsonl")] == list(range(1, STEPS + 1))
    verdicts = rows(out / "verdicts.jsonl")
    assert [row["round_idx"] for row in verdicts] == list(range(STEPS))
    split = json.loads((out / "split.json").read_text())
    assert {row["split_fingerprint"] for row in verdicts} == {split["fingerprint"]}
    assert "content" in split["checked"]
    rollouts = rows(out / "rollouts" / "step-000001.jsonl")
    assert len(rollouts) == ROWS
    assert all(row["completion_ids"] and row["outcomes"] for row in rollouts)
    assert "held-out" in (out / "report.html").read_text().lower()
    assert json.loads((out / "summary.json").read_text())["parameter_sha256"] == summary["parameter_sha256"]


def test_the_trained_model_loads_with_transformers_alone(whole: tuple[Path, dict[str, Any]]) -> None:
    # Here: each worker of make test-sandlock reads this file, and one of them trains.
    from transformers import AutoModelForCausalLM

    from composer_replication.trainer.model_modes import parameter_sha256

    out, summary = whole
    assert summary["model"] == str(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert parameter_sha256(model) == summary["parameter_sha256"]
    split = json.loads((out / "split.json").read_text())
    assert split["fingerprint"] in (out / "model" / "README.md").read_text()


@pytest.mark.long
@pytest.mark.promise
def test_three_channels_train_in_one_run(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from composer_replication.trainer import collator

    monkeypatch.setattr(collator, "PASS_REWARD", 0.05)  # the tiny recipe pays for single letters too
    pairs = tmp_path / "pairs.jsonl"
    rows_of_pairs = [
        {"prompt": "def f():\n", "chosen": f"    return {n}\n", "rejected": "    pass\n"} for n in range(5)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows_of_pairs))
    settings = {
        "replay__pairs": str(pairs),
        "replay__pairs_per_step": 3,
        "trl__max_steps": 2,
        "trl__max_completion_length": 24,
        "trainer__alpha_sdpo": 0.5,
        "trainer__beta_replay": 0.25,
        "replay__sibling_pairs": "true",
    }
    finish(words_of(tiny_recipe, tmp_path / "run", **settings))
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 2
    for row in rows(tmp_path / "run" / "metrics.jsonl"):
        assert row["sdpo/turns"] > 0
        assert row["loss/sdpo"] > 0.0
        assert row["replay/pairs"] > 3  # three of the file, and siblings
        assert row["loss/trace_replay"] > 0.0
        total = row["loss/grpo"] + 0.5 * row["loss/sdpo"] + 0.25 * row["loss/trace_replay"]
        assert row["loss"] == pytest.approx(total, rel=1e-4)


def test_parameters_change_at_every_step(whole: tuple[Path, dict[str, Any]]) -> None:
    out, _ = whole
    files = [out / "checkpoints" / f"checkpoint-{step}" / "model.safetensors" for step in range(1, STEPS + 1)]
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == STEPS


@pytest.mark.long
@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.promise), signal.SIGINT])
def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(
    whole: tuple[Path, dict[str, Any]], tiny_recipe: Path, tmp_path: Path, how: signal.Signals
) -> None:
    out = tmp_path / "run"
    words = words_of(tiny_recipe, out)
    process = subprocess.Popen(command(words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    manifest = out / "checkpoints" / "checkpoint-1" / "MANIFEST.json"
    deadline = time.monotonic() + 600
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    code = process.wait(timeout=300)
    assert code == (-signal.SIGKILL if how is signal.SIGKILL else 130)
    assert not (out / "summary.json").exists()
    summary = finish([*words, "--resume"])
    assert summary["parameter_sha256"] == whole[1]["parameter_sha256"]
    assert [row["step"] for row in rows(out / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert [row["round_idx"] for row in rows(out / "verdicts.jsonl")] == list(range(STEPS))
    assert (
        rows(out / "verdicts.jsonl")[-1]["proxy_real_gap"]
        == rows(whole[0] / "verdicts.jsonl")[-1]["proxy_real_gap"]
    )


def test_environment_says_what_ran_and_no_secret(whole: tuple[Path, dict[str, Any]]) -> None:
    environment = json.loads((whole[0] / "environment.json").read_text())
    assert environment["versions"]["trl"]
    assert environment["tasks_fingerprint"]
    assert not set(os.environ) & set(environment)


def test_a_guard_that_fires_halts_the_run_with_everything_on_disk(tiny_recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trigger = {"guard__min_steps": 1, "guard__max_proxy_real_gap": 1e-6}
    hair_trigger = words_of(tiny_recipe, out, trl__max_steps=20, trl__max_completion_length=24, **trigger)
    code, answer, errors = here(hair_trigger)
    assert code == 5, errors
    summary = json.loads(answer)
    assert summary["verdict"] == "halted"
    assert summary["stop_reason"] == "guard"
    assert "Hacking Gap" in summary["reason"]
    assert rows(out / "verdicts.jsonl")[-1]["fire"] is True
    assert rows(out / "metrics.jsonl")[-1]["halted"] is True
    assert (out / "checkpoints" / f"checkpoint-{summary['global_step']}" / "MANIFEST.json").is_file()
    assert "halted" in (out / "report.html").read_text().lower()
    assert summary["model"] is None
    assert not (out / "model").exists()
    code, again, _ = here([*hair_trigger, "--resume"])
    assert code == 5
    assert json.loads(again) == summary


@pytest.mark.long
def test_a_run_under_the_evidence_is_killed_between_reading_and_checkpoint_and_ends_the_same(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    """Checkpoints stand two steps apart, so the resumed run repeats evaluations that its journal holds."""
    settings = {
        "trl__max_steps": 4,
        "trainer__checkpoint_every": 2,
        "heldout__sample_size": 2,
        "heldout__num_canaries": 1,
        "evidence__planned_evaluations": 4,
        "evidence__tolerated_gap": 0.1,
    }
    whole = finish(words_of(tiny_recipe, tmp_path / "whole", **settings))
    assert whole["verdict"] == "INSUFFICIENT_DATA"  # never a pass on eight samples
    cut = tmp_path / "cut"
    words = words_of(tiny_recipe, cut, **settings)
    with subprocess.Popen(command(words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        deadline = time.monotonic() + 600
        while not (cut / "evaluations.jsonl").is_file() or len(rows(cut / "evaluations.jsonl")) < 5:
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.kill()
    resumed = finish([*words, "--resume"])
    assert resumed["parameter_sha256"] == whole["parameter_sha256"]
    for name in ("evaluations.jsonl", "verdicts.jsonl"):
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    verdicts = rows(cut / "verdicts.jsonl")
    assert [row["evidence_num_samples"] for row in verdicts] == [2, 4, 6, 8]
