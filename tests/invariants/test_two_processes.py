"""Two trainer processes over gloo: one evaluation in total, the same verdict, and nobody hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from channel_runs import CHANNELS, norm, trained, weights_of
from two_processes import both_ranks

from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.trainer.checkpoints import newest_whole_checkpoint
from composer_replication.trainer.model_modes import head_of

WORKER = Path(__file__).with_name("two_process_worker.py")

pytestmark = [pytest.mark.long, pytest.mark.promise]

Ranks = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The folder of the runs and each rank's results."""
    folder = tmp_path_factory.mktemp("two-processes")
    return folder, both_ranks(WORKER, folder)


def test_both_stop_at_the_same_step_on_the_same_reading(ranks: Ranks) -> None:
    first, second = (result["halting"] for result in ranks[1])
    assert "Hacking Gap" in first["outcome"]
    own: dict[str, Any] = {"calls": 0, "sampled": []}
    assert {**first, **own} == {**second, **own}  # verdict, step, guard state and weights
    assert (first["calls"], second["calls"]) == (4, 0)
    assert first["step"] == 3
    assert abs(first["guard"]["memory"]["kl_ema"]) > 1e-6  # a small sample may come out below zero
    assert first["sharing_off"] == []  # prompts were shared under DistributedDataParallel


def test_one_process_writes_the_run_folder(ranks: Ranks) -> None:
    run = RunFolder(ranks[0] / "halting")
    assert [row["step"] for row in read_jsonl(run.metrics)] == [1, 2, 3, 4]
    assert [row["fire"] for row in read_jsonl(run.verdicts)] == [False, False, False, True]
    checkpoint = newest_whole_checkpoint(run.checkpoints)
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-3"
    assert {path.name for path in checkpoint.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_a_failed_evaluation_stops_both(ranks: Ranks) -> None:
    first, second = (result["failing"] for result in ranks[1])
    assert (first["error"], second["error"]) == ("CR0999", "CR0999")
    assert (first["notes"], second["notes"]) == ([], ["raised on process 0"])


def test_a_checkpoint_that_cannot_be_written_ends_both(ranks: Ranks) -> None:
    for result in ranks[1]:
        assert result["saves"] == dict.fromkeys(("write", "write_manifest"), "the disk is full")


def test_a_failure_of_any_process_stops_both(ranks: Ranks) -> None:
    errors = [result["joint"]["error"] for result in ranks[1]]
    assert errors == ["RuntimeError: Unpicklable: out of memory", "Unpicklable: out of memory"]


def test_the_first_processs_numbers_count(ranks: Ranks) -> None:
    first, second = (result["bare"] for result in ranks[1])
    assert first["rows"] == second["rows"]
    assert first["rows"][0]["killswitch/in_loop_ema"] == 0.5
    assert (first["calls"], second["calls"]) == (1, 0)


def test_a_guard_on_one_process_only_is_refused_on_both(ranks: Ranks) -> None:
    assert all("CR0710" in result["disagreeing"]["error"] for result in ranks[1])


def test_a_resumed_pair_equals_an_uninterrupted_one(ranks: Ranks) -> None:
    first, second = (result["resumed"] for result in ranks[1])
    assert first["whole"] == first["resumed"] == first["kept"]
    assert first == second


def test_dull_groups_and_a_bad_step_are_the_same_decision_on_both(ranks: Ranks) -> None:
    first, second = (result["fresh"] for result in ranks[1])
    assert first == second  # weights, replaced groups and what the checks said
    assert first["is_finite"]
    assert [3, "non_finite"] in first["findings"]
    lines = read_jsonl(RunFolder(ranks[0] / "fresh").metrics)
    assert sum(line["dynamic_sampling/replaced_groups"] for line in lines) > 0
    assert (ranks[0] / "fresh" / "bad_batches" / "step-000003-process-1.pt").is_file()


def test_both_choose_the_same_tasks_and_learn_what_either_graded(ranks: Ranks) -> None:
    first, second = (result["curriculum"] for result in ranks[1])
    assert {**first, "graded_here": None} == {**second, "graded_here": None}  # weights and state
    # Two rows of each group of four were graded here, two there; one group a step, four steps.
    assert first["graded_here"] == second["graded_here"]
    assert sum(first["graded_here"].values()) == 8
    assert first["known"] == {f"t{n}": 2 * first["graded_here"].get(f"t{n}", 0) for n in range(8)}


@pytest.mark.parametrize("channel", [name for name in CHANNELS if name != "off"])
def test_a_channel_on_two_processes_is_that_of_one(ranks: Ranks, tmp_path: Path, channel: str) -> None:
    """Given records and those of the step's own rollouts; three of each, which two processes cannot share evenly."""
    first, second, off = (
        torch.load(ranks[0] / "channels" / f"{name}.pt") for name in (f"{channel}-0", f"{channel}-1", "off-0")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    trainer = trained(tmp_path, channel, num_processes=1)
    alone = weights_of(trainer)
    assert norm(alone, off) > 1e-3  # the channel moves the weights
    assert norm(first, alone) < 1e-4 * norm(alone, off)
    # the data-parallel wrapper waits for the head's gradient; alone nothing does
    assert [result["channels"][channel]["in_place"] for result in ranks[1]] == [False, False]
    assert head_of(trainer.model)[1]["adds_to_weight_grad"]


def test_under_the_callback_one_process_evaluates_and_both_stop(ranks: Ranks) -> None:
    """A plain Trainer of transformers, with the guard as its callback."""
    first, second = (result["callback"]["halting"] for result in ranks[1])
    assert (first["outcome"], first["step"]) == ("CR0601", 3)
    assert (first["calls"], second["calls"]) == (3, 0)
    assert {**first, "calls": 0} == {**second, "calls": 0}  # verdict, step, guard and weights
    run = ranks[0] / "callback" / "halting"
    assert (run / "checkpoint-3" / "trainer_state.json").is_file()
    assert [row["fire"] for row in read_jsonl(run / "verdicts.jsonl")] == [False, False, True]
    failing = [result["callback"]["failing"] for result in ranks[1]]
    assert [(one["outcome"], one["calls"]) for one in failing] == [("CR0999", 1), ("CR0999", 0)]
