"""Two processes under DeepSpeed over gloo: ZeRO-2 shares gradients and optimizer, ZeRO-3 the weights too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from channel_runs import trained, weights_of
from zero_launch import Ranks, launched


@pytest.fixture(scope="module")
def zero2(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launched("zero_worker.py", "2", tmp_path_factory.mktemp("zero2"))


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launched("zero_worker.py", "3", tmp_path_factory.mktemp("zero3"))


@pytest.fixture(params=["zero2", "zero3"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    """The weights of one process, by channel."""
    folder = tmp_path_factory.mktemp("alone")
    return cache(lambda channel: weights_of(trained(folder / channel, channel, num_processes=1)))


def test_zero2_keeps_all_of_the_weights_on_each_process(zero2: Ranks) -> None:
    for found in (result["where_weights_lie"] for result in zero2[1]):
        assert found["held"] == found["whole"] > 0
    assert all(result["plain_run"]["gathered"] is None for result in zero2[1])


def test_zero3_keeps_half_of_the_weights_on_each_process_and_the_first_gathers_them(zero3: Ranks) -> None:
    for found in (result["where_weights_lie"] for result in zero3[1]):
        assert (found["held"], 2 * found["part"]) == (0, found["whole"])
    first, second = (result["plain_run"] for result in zero3[1])
    assert first["gathered"] > 20
    assert second["gathered"] == 0


def test_two_steps_end_with_the_weights_of_one_process(
    ranks: Ranks, alone: Callable[[str], dict[str, torch.Tensor]]
) -> None:
    for rank in range(2):
        whole = torch.load(ranks[0] / "plain_run" / f"off-{rank}.pt")
        for name, weight in alone("off").items():
            torch.testing.assert_close(whole[name], weight, rtol=1e-4, atol=1e-6)
    first, second = (result["plain_run"] for result in ranks[1])
    assert first["sha256"] == second["sha256"]


@pytest.mark.parametrize("channel", ["hints", "replay"])
def test_channels_have_whole_weights_under_zero2(
    zero2: Ranks, alone: Callable[[str], dict[str, torch.Tensor]], channel: str
) -> None:
    assert any(not torch.equal(weight, alone("off")[name]) for name, weight in alone(channel).items())
    for rank in range(2):
        whole = torch.load(zero2[0] / "channels" / f"{channel}-{rank}.pt")
        for name, weight in alone(channel).items():
            torch.testing.assert_close(whole[name], weight, rtol=1e-4, atol=1e-6)


def test_the_model_is_written_and_loads(ranks: Ranks) -> None:
    model = AutoModelForCausalLM.from_pretrained(ranks[0] / "plain_run" / "model")
    whole = torch.load(ranks[0] / "plain_run" / "off-0.pt")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, whole[name]), name
    assert model.config.architectures == ["Qwen2ForCausalLM"]


def test_prompts_are_shared(ranks: Ranks) -> None:
    for result in ranks[1]:
        assert result["shared_prompts"]["off"] == []
        assert result["shared_prompts"]["apart"] < 1e-6


def test_a_resumed_run_equals_an_uninterrupted_one(ranks: Ranks) -> None:
    first, second = (result["resumed_run"] for result in ranks[1])
    assert first["whole"] == first["resumed"] == second["whole"] == second["resumed"]


def test_a_finished_run_is_loaded_as_it_was(ranks: Ranks) -> None:
    for result in ranks[1]:
        assert result["resumed_run"]["kept"] == result["resumed_run"]["whole"]


def test_the_guard_stops_both_at_the_same_step(ranks: Ranks) -> None:
    """With weights in parts both evaluate, in the middle of a step, else the first one alone."""
    first, second = (result["halting_run"] for result in ranks[1])
    own = {"calls", "sampled"}
    assert {k: v for k, v in first.items() if k not in own} == {
        k: v for k, v in second.items() if k not in own
    }
    assert "Hacking Gap" in first["outcome"]
    assert (first["calls"], first["step"]) == (4, 3)
    assert second["sampled"] in ([], first["sampled"])
    assert abs(first["guard"]["memory"]["kl_ema"]) > 1e-6  # with the adapter off, the initial policy


def test_the_guard_reads_the_kl_to_a_reference(ranks: Ranks) -> None:
    first, second = (result["reference_run"] for result in ranks[1])
    assert first == second
    assert first["path"] == "logged by TRL"
    assert first["kls"][0] == 0.0
    assert all(kl > 1e-6 for kl in first["kls"][1:])
    assert first["guard"]["memory"]["kl_ema"] > 1e-6


def test_the_callback_stops_both_at_the_same_step(ranks: Ranks) -> None:
    for name in ("halting", "failing"):
        first, second = (result["callback_runs"][name] for result in ranks[1])
        assert {**first, "calls": 0} == {**second, "calls": 0}
        assert first["outcome"] == {"halting": "CR0601", "failing": "CR0999"}[name]


def test_a_step_that_is_not_finite_is_said_and_deepspeed_skips_it(ranks: Ranks) -> None:
    for result in (both["broken_steps"] for both in ranks[1]):
        first, second, third, *rest = result["hashes"]
        assert first == second != third
        assert set(rest) == {third}
        assert (
            result["rates"][0] > result["rates"][1] == result["rates"][2] > result["rates"][3]
        )  # not moved on
        assert result["said"] == [[step, "non_finite"] for step in (2, 4, 5, 6)]
        assert (result["outcome"], result["step"]) == ("CR0770", 6)


def test_half_precision_trains(ranks: Ranks) -> None:
    first, second = (result["half_precision"] for result in ranks[1])
    assert first == second
    assert first["is_finite"]
    assert first["dtypes"] == ["torch.bfloat16"]
    assert first["off"] == []


def test_zero3_rows_that_end_at_different_tokens_go_on_together(zero3: Ranks) -> None:
    first, second = (result["uneven_sampling"] for result in zero3[1])
    assert first == second
    assert first["lengths"] == [3.0, 3.0]  # the mean of 1 and 5


def test_zero3_chains_of_one_process_alone_hold_up_nobody(zero3: Ranks) -> None:
    first, second = (result["chains_on_one_process"] for result in zero3[1])
    assert first == second
    assert first["steps"] == 2


def test_zero3_refuses_what_needs_whole_weights(zero3: Ranks) -> None:
    for result in zero3[1]:
        assert result["refused"] == {"hints": "CR0757", "replay": "CR0757", "episodes": "CR0757"}
