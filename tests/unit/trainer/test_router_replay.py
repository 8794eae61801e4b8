"""Routing that a rollout function brings: checked, laid out to the batch, replayed in real steps, refused where it is wrong."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "invariants"))

from tiny_architectures import tiny_model

from composer_replication.errors import InputError
from composer_replication.trainer.generation import ROUTED_EXPERTS, SEGMENT_STARTS, Generation, temporarily
from composer_replication.trainer.policy_terms import merge_rows
from composer_replication.trainer.preset_settings import PolicyOptions, TrainerSettingError
from composer_replication.trainer.rollout_columns import (
    UNKNOWN,
    CheckedRollouts,
    Replay,
    laid_out,
    routers_of,
)

MakeTrainer = Callable[..., Any]


# ---- the column ---------------------------------------------------------------------------------------


def good_row() -> list[list[list[int]]]:
    return [[[0, 1], [2, 3]] for _ in range(5)]


def changed(token: int, layer: int, experts: list[int]) -> list[list[list[int]]]:
    row = good_row()
    row[token][layer] = experts
    return row


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        ([good_row()], "1 arrays for 2 completions"),
        (
            [good_row(), np.zeros((5, 2, 2), dtype=np.float32)],
            "row 1 is torch.float32 (5, 2, 2), and should be whole numbers",
        ),
        (
            [good_row()[:3], good_row()],
            "row 0 is torch.int64 (3, 2, 2), and should be whole numbers (5, layers, experts)",
        ),
        (
            [[[[0, 1]] * 4] * 5, good_row()],
            "layers and experts a token of different numbers: [(2, 2), (4, 2)]",
        ),
        ([changed(2, 1, [0, -1]), good_row()], "row 0 sends a token to [0, -1]"),
        ([changed(0, 0, [3, 3]), good_row()], "row 0 sends a token to [3, 3]"),
    ],
)
def test_a_column_that_cannot_be_followed_is_refused(routing: list[Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        laid_out(routing, [[2, 2], [2, 2]], [[3, 3, 3], [3, 3, 3]])
    assert caught.value.code == "CR0777"
    assert words in caught.value.message


def test_what_engines_leave_for_the_last_token_is_not_looked_at() -> None:
    row = np.zeros((5, 2, 2), dtype=np.uint8)  # zeros are an expert twice
    row[:4] = [4, 5]
    laid = laid_out([row], [[2, 2]], [[3, 3, 3]])
    assert laid is not None and laid[0, :4].flatten(0, 1).tolist() == [[4, 5]] * 8
    assert (laid[0, 4] == UNKNOWN).all()


MASK = torch.ones(1, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("routing", "code", "words"),
    [
        (
            torch.ones(1, 3, 2, 1),
            "CR0777",
            "they are of 2 layers, and MixtralForCausalLM has 3 with a router",
        ),
        (torch.full((1, 3, 3, 1), 4), "CR0777", "they name the expert 4 of a router that has 4"),
        (torch.ones(1, 3, 3, 1), "CR0757", "does not choose 1 of all its experts"),
    ],
)
def test_routing_that_is_not_the_models_is_refused(routing: torch.Tensor, code: str, words: str) -> None:
    model = tiny_model("mixtral", 258)
    with pytest.raises(InputError) as caught, Replay(model, routing.long(), MASK).in_forwards():
        model(input_ids=torch.tensor([[5, 6, 7]]))
    assert caught.value.code == code
    assert words in caught.value.message


def test_a_model_without_routers_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(InputError, match=r"CR0777.*Qwen2ForCausalLM has 0 with a router"):
        Replay(make_trainer(max_steps=1).model, torch.ones(1, 3, 2, 1).long(), MASK)


def test_chains_with_routing_are_refused() -> None:
    output = {
        "completion_ids": [[5, 6, 7]],
        "env_mask": [[1, 0, 1]],
        SEGMENT_STARTS: [[1]],
        ROUTED_EXPERTS: [good_row()],
    }
    with pytest.raises(InputError, match=r"CR0777.*chain of conversations"):
        CheckedRollouts(lambda prompts, trainer: output)([], None)


def test_rows_with_routing_are_not_merged() -> None:
    batch = {"prompt_ids": torch.full((2, 2), 5), ROUTED_EXPERTS: torch.full((2, 4, 1, 1), 7)}
    with pytest.raises(TrainerSettingError, match=r"CR0760.*routed_experts"):
        merge_rows(batch, batch, [(1, 0)], pad_token_id=0)


# ---- real steps -----------------------------------------------------------------------------------------


class Engine:
    """A rollout function whose sampler has another router than the policy: it sends about a third of the tokens elsewhere.

    Its weights of experts are the policy's, so that routing is all that sampler and trainer disagree about.
    """

    def __init__(self, *, brings_routing: bool = True, keeps_last: bool = False) -> None:
        self.brings_routing, self.keeps_last = brings_routing, keeps_last
        self.random = random.Random(5)
        self.routing_of: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        names = ["prompt_ids", "completion_ids", "logprobs", ROUTED_EXPERTS]
        output: dict[str, Any] = {name: [] for name in names if name != ROUTED_EXPERTS or self.brings_routing}
        model = trainer.accelerator.unwrap_model(trainer.model)
        for prompt in prompts:
            ids = trainer.processing_class.encode(prompt)
            answer = [self.random.randrange(2, 258) for _ in range(self.random.randint(3, 6))]
            logps, routing = routed_elsewhere(model, ids, answer)
            self.routing_of[(*ids, *answer)] = routing
            row = (ids, answer, logps, routing if self.keeps_last else routing[:-1].numpy())
            for name, value in zip(names, row, strict=True):
                if name in output:
                    output[name].append(value)
        return output


def routed_elsewhere(model: Any, prompt: list[int], answer: list[int]) -> tuple[list[float], torch.Tensor]:
    """Log-probabilities of the answer and the routing (tokens, L, K) where routers are disturbed but weights are not."""
    generator = torch.Generator().manual_seed(sum(answer))
    found: list[torch.Tensor] = []

    def disturb(router: Any, _inputs: Any, output: Any) -> Any:
        logits = output[0]
        moved = (
            (logits + logits.std() * torch.randn(logits.shape, generator=generator))
            .topk(router.top_k)
            .indices
        )
        found.append(moved)
        return logits, logits.softmax(-1).gather(-1, moved) / logits.softmax(-1).gather(-1, moved).sum(-1, keepdim=True), moved  # fmt: skip

    handles = [router.register_forward_hook(disturb) for router in routers_of(model)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    for handle in handles:
        handle.remove()
    logps = functional.log_softmax(logits[len(prompt) - 1 : -1], -1)[range(len(answer)), answer]
    return logps.tolist(), torch.stack(found, dim=1)


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


SETTINGS: list[dict[str, Any]] = [
    {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "pad_to_multiple_of": 8},
    {"steps_per_generation": 2, "num_iterations": 2},
    {"beta": 0.1, "lora_adapter": True, "policy_options": PolicyOptions(importance_clip=2.0)},
    {"prefix_sharing": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_replayed_run_drifts_from_nothing(make_trainer: MakeTrainer, settings: dict[str, Any]) -> None:
    """Shuffled, split, used again and run again in backward: each row stays with its own routing."""
    model = tiny_model("mixtral", 258)
    trainer = make_trainer(model=model, max_steps=2, learning_rate=0.0, rollout_func=Engine(), **settings)
    trainer.train()
    drifts = logged(trainer, "checks/token_drift_max")
    assert len(drifts) == 2 and max(drifts) < 1e-4
    if "num_iterations" in settings:  # the older weights' probabilities are replayed, too
        assert logged(trainer, "clip_ratio/region_mean") == [0.0, 0.0]
    if "policy_options" in settings:
        assert logged(trainer, "sampling/effective_sample_size") == pytest.approx([1.0, 1.0], abs=1e-6)
    if settings.get("prefix_sharing"):
        assert trainer.shared_prompts.off_reasons == (
            "log-probabilities: the routing of the rollouts is replayed.",
        )


def test_a_generation_without_the_column_takes_none_from_the_one_before(make_trainer: MakeTrainer) -> None:
    engine = Engine()

    def first_time_only(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = engine(prompts, trainer)
        engine.brings_routing = False
        return output

    trainer = make_trainer(
        model=tiny_model("mixtral", 258), max_steps=2, learning_rate=0.0, rollout_func=first_time_only
    )
    trainer.train()
    drifts = logged(trainer, "checks/token_drift_max")
    assert drifts[0] < 1e-4 and drifts[1] > 0.1


def test_each_micro_batch_has_the_routing_of_its_own_rows(make_trainer: MakeTrainer) -> None:
    engine, seen = Engine(keeps_last=True), 0
    trainer = make_trainer(
        model=tiny_model("mixtral", 258), max_steps=2, steps_per_generation=2, rollout_func=engine
    )
    plain = trainer._compute_loss

    def looking(model: Any, inputs: Any) -> Any:
        nonlocal seen
        for row in range(inputs["prompt_ids"].size(0)):
            kept = torch.cat([inputs[f"{part}_mask"][row].bool() for part in ("prompt", "completion")])
            ids = torch.cat([inputs[f"{part}_ids"][row] for part in ("prompt", "completion")])[kept].tolist()
            routing = inputs[ROUTED_EXPERTS][row]
            assert (routing[~kept] == UNKNOWN).all()
            assert torch.equal(routing[kept][:-1].long(), engine.routing_of[tuple(ids)][:-1])
            seen += 1
        return plain(model, inputs)

    trainer._compute_loss = looking
    trainer.train()
    assert seen == 8


def test_the_reference_chooses_itself(make_trainer: MakeTrainer) -> None:
    """Its weights are the policy's here, so that the KL is what their routing makes of them."""
    trainer = make_trainer(
        model=tiny_model("mixtral", 258),
        max_steps=1,
        learning_rate=0.0,
        beta=0.1,
        lora_adapter=True,
        rollout_func=Engine(),
    )
    trainer.train()
    assert logged(trainer, "kl")[0] > 1e-2


@pytest.mark.parametrize("lora_adapter", [False, True])
def test_which_forwards_are_replayed(make_trainer: MakeTrainer, lora_adapter: bool) -> None:
    trainer = make_trainer(model=tiny_model("mixtral", 258), max_steps=1, lora_adapter=lora_adapter)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    mask = torch.ones_like(ids)

    def score(model: Any, routing: Any) -> Any:
        batch = {} if routing is None else {ROUTED_EXPERTS: routing}
        with torch.no_grad(), temporarily(trainer, generation=Generation.of_batch(batch)):
            return trainer._get_per_token_logps_and_entropies(model, ids, mask, 3)[0]

    _, elsewhere = routed_elsewhere(trainer.accelerator.unwrap_model(trainer.model), [5, 6], [7, 8, 9])
    routing = elsewhere[None]
    assert not torch.equal(score(trainer.model, routing), score(trainer.model, None))
    other = copy.deepcopy(trainer.model)
    trainer.ref_model = other
    assert torch.equal(score(other, routing), score(other, None))
    if lora_adapter:
        with trainer.model.disable_adapter():
            assert torch.equal(score(trainer.model, routing), score(trainer.model, None))
        trainer.model.add_adapter("ref", trainer.model.peft_config["default"])
        trainer.model.set_adapter("ref")
        assert torch.equal(score(trainer.model, routing), score(trainer.model, None))


def test_evaluation_is_not_replayed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(model=tiny_model("mixtral", 258), max_steps=1)
    trainer.model.eval()
    output = {"completion_ids": [[6]], ROUTED_EXPERTS: ["this is not looked at"]}
    CheckedRollouts(lambda prompts, trainer: output)([], trainer)
    assert trainer.generation.routing_BWLK is None


# ---- what is logged of routers, in real steps of real architectures; nothing where there are no experts


def test_a_step_logs_its_routers(make_trainer: MakeTrainer) -> None:
    model = tiny_model("mixtral", 258)
    assert routers_of(model)
    trainer = make_trainer(
        model=model, max_steps=2, gradient_accumulation_steps=2, gradient_checkpointing=True
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "router/max_load" in row]
    assert len(rows) == 2  # once a step, whatever the micro-steps
    for row in rows:
        assert 1.0 <= row["router/max_load"] <= 4.0


def test_a_collapsed_router_is_seen(make_trainer: MakeTrainer) -> None:
    model = tiny_model("gpt-oss-sinks", 258)
    for router in routers_of(model):
        bias: Any = router.bias
        bias.data[:] = torch.tensor([50.0, 40.0, -50.0, -50.0])
    trainer = make_trainer(model=model, max_steps=1)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "router/max_load" in row]
    assert row["router/max_load"] == 2.0  # two experts a token, always the same


def test_a_model_without_experts_logs_nothing_of_them(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    assert routers_of(trainer.model) == []
    assert not [name for row in trainer.state.log_history for name in row if name.startswith("router/")]
