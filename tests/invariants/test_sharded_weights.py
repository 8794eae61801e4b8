"""Two processes that share one copy of the weights (FSDP2 over gloo): the same training, and nobody hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from channel_runs import norm, trained, weights_of
from transformers import AutoModel, AutoModelForCausalLM
from two_processes import both_ranks

pytestmark = [pytest.mark.long, pytest.mark.promise]
WORKER = Path(__file__).with_name("sharded_worker.py")
Ranks = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("sharded-weights")
    return folder, both_ranks(WORKER, folder)


def test_two_steps_end_with_the_weights_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    alone = weights_of(trained(tmp_path, "off", num_processes=1))
    for rank in range(2):
        whole = torch.load(ranks[0] / "plain_run" / f"off-{rank}.pt")
        assert whole.keys() >= alone.keys()
        for name, weight in alone.items():
            torch.testing.assert_close(whole[name], weight, rtol=1e-4, atol=1e-6)
    first, second = (result["plain_run"] for result in ranks[1])
    assert first["sha256"] == second["sha256"]


def test_the_model_is_gathered_and_loads(ranks: Ranks) -> None:
    first, second = (result["plain_run"] for result in ranks[1])
    assert first["gathered"] > 20
    assert second["gathered"] == 0
    folder = ranks[0] / "plain_run" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = torch.load(ranks[0] / "plain_run" / "off-0.pt")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, whole[name]), name
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert AutoModel.from_pretrained(folder).config.vocab_size == model.config.vocab_size
    assert all(result["halting_run"]["adapter"] is None for result in ranks[1])


def test_prompts_are_shared(ranks: Ranks) -> None:
    for result in ranks[1]:
        assert result["shared_prompts"]["off"] == []
        assert result["shared_prompts"]["apart"] < 1e-6


def test_the_guard_stops_both_at_the_same_step(ranks: Ranks) -> None:
    first, second = (result["halting_run"] for result in ranks[1])
    assert first == second
    assert "Hacking Gap" in first["outcome"]
    assert (first["calls"], first["step"]) == (4, 3)
    assert abs(first["guard"]["memory"]["kl_ema"]) > 1e-6  # with the adapter off, the initial policy


def test_processes_whose_rows_end_at_different_tokens_go_on_together(ranks: Ranks) -> None:
    first, second = (result["uneven_sampling"] for result in ranks[1])
    assert first["lengths"] == second["lengths"] == [3.0, 3.0]  # the mean of 1 and 5
    assert first["off"] == []
    assert first["sha256"] == second["sha256"]


def test_chains_of_one_process_alone_hold_up_nobody(ranks: Ranks) -> None:
    first, second = (result["chains_on_one_process"] for result in ranks[1])
    assert first == second
    assert first["steps"] == 2


@pytest.mark.parametrize("channel", ["hints", "replay"])
def test_a_channel_is_that_of_one_process(ranks: Ranks, tmp_path: Path, channel: str) -> None:
    """Three records of each kind for two processes and two micro-batches: now and then one has none and forwards a stand-in."""
    first, second, off = (
        torch.load(ranks[0] / folder / f"{name}.pt")
        for folder, name in (
            ("channels", f"{channel}-0"),
            ("channels", f"{channel}-1"),
            ("plain_run", "off-0"),
        )
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    alone = weights_of(trained(tmp_path, channel, num_processes=1))
    assert norm(alone, off) > 1e-3  # the channel moves the weights
    assert norm(alone, first) < 1e-4 * norm(alone, off)


def test_a_resumed_run_equals_an_uninterrupted_one_and_a_finished_one_is_loaded_as_it_was(
    ranks: Ranks,
) -> None:
    """With both channels on, so that teacher and first weights are resumed, too."""
    first, second = (result["resumed_channels"] for result in ranks[1])
    assert first["whole"] == first["resumed"] == second["whole"] == second["resumed"]
    assert first["kept"] == second["kept"] == first["whole"]


def test_the_model_without_its_adapter_teaches(ranks: Ranks) -> None:
    first, second = (result["taught_by_the_bare_model"] for result in ranks[1])
    assert first["sha256"] == second["sha256"]
    assert len(first["divergence"]) == 3
    assert min(first["divergence"] + second["divergence"]) > 0.0
