"""Replayed routing on real architectures: own choices change no bit, foreign ones give what the published formulas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_architectures import MODELS, SIZES
from torch.nn import functional

from composer_replication.trainer.rollout_columns import UNKNOWN, Replay, routers_of

LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
QWEN: dict[str, Any] = {**SIZES, "head_dim": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
OTHERS: dict[str, Callable[[], Any]] = {
    "qwen3-moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**QWEN, num_experts=4, norm_topk_prob=True, mlp_only_layers=[1])
    ),
    "deepseek-v3-groups": lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENT)),
    "deepseek-v2-groups": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**LATENT, topk_method="group_limited_greedy", n_shared_experts=1)
    ),
    "olmoe": lambda: tf.OlmoeForCausalLM(tf.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
}
QUICK = ("mixtral", "gpt-oss-sinks", "deepseek-v3-latent", "qwen3-moe")
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS if name not in QUICK)]
GROUPS = ["mixtral", pytest.param("deepseek-v2-groups", marks=pytest.mark.long)]
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0], [1] * 9])


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    model = OTHERS[name]() if name in OTHERS else MODELS[name](SIZES | {"vocab_size": 60})
    for router in routers_of(model):
        for part_name, part in [*router.named_parameters(), *router.named_buffers()]:
            torch.nn.init.normal_(part.data, std=0.02 if "correction" in part_name else 0.5)
    return model


def rows() -> torch.Tensor:
    return torch.randint(2, 60, MASK.shape, generator=torch.Generator().manual_seed(1)) * MASK


def own_routing(model: Any) -> torch.Tensor:
    """What the routers choose by themselves: (B, W, L, K)."""
    found: list[torch.Tensor] = []
    handles = [
        each.register_forward_hook(lambda _module, _inputs, output: found.append(output[2]))
        for each in routers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=rows(), attention_mask=MASK)
    for handle in handles:
        handle.remove()
    return torch.stack(found, dim=1).reshape(*MASK.shape, len(found), -1)


def foreign_routing(model: Any) -> torch.Tensor:
    """K different experts a token, drawn by chance: (B, W, L, K)."""
    own, num_experts = own_routing(model), int(routers_of(model)[0].weight.size(0))  # type: ignore[operator,union-attr]
    noise = torch.rand(*own.shape[:3], num_experts, generator=torch.Generator().manual_seed(7))
    return noise.argsort(-1)[..., : own.size(-1)].to(torch.int16)


Answer = tuple[torch.Tensor, dict[str, torch.Tensor]]


def logps_and_gradients(model: Any, routing: torch.Tensor | None) -> Answer:
    """Log-probabilities of all but the first token, and the gradient of a weighted sum of them."""
    replay = None if routing is None else Replay(model, routing, MASK)
    model.zero_grad()
    if replay is None:
        logits = model(input_ids=rows(), attention_mask=MASK).logits
    else:
        with replay.in_forwards():
            logits = model(input_ids=rows(), attention_mask=MASK).logits
    logps = functional.log_softmax(logits[:, :-1], -1).gather(-1, rows()[:, 1:, None])[..., 0]
    logps = logps * MASK[:, 1:] * MASK[:, :-1]
    (logps * torch.linspace(-1, 1, logps.numel()).reshape(logps.shape)).sum().backward()
    gradients = {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}
    assert not any("forward" in vars(router) for router in routers_of(model))  # nothing is left behind
    return logps.detach(), gradients


def assert_same(one: Answer, other: Answer, **bounds: float) -> None:
    torch.testing.assert_close(one[0], other[0], **bounds)
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        worst = (one[1][name] - other[1][name]).abs().max()
        torch.testing.assert_close(one[1][name], other[1][name], **bounds, msg=f"{name}: {worst}")


@pytest.mark.parametrize("name", NAMES)
def test_own_routing_changes_no_bit(name: str) -> None:
    """In whatever order an engine gives it."""
    model = model_of(name)
    plain = logps_and_gradients(model, None)
    for routing in (own_routing(model), own_routing(model).flip(-1)):
        replayed = logps_and_gradients(model, routing)
        assert_same(replayed, plain, rtol=0, atol=0)


def forced_weights(name: str, router: Any, logits_E: torch.Tensor, experts: list[int]) -> torch.Tensor:
    """The published gating formulas, over experts that are given."""
    if name.startswith("deepseek-v3"):  # arXiv 2412.19437, equations 12 to 15
        affinity = torch.sigmoid(logits_E)[experts]
        return affinity / affinity.sum() * router.routed_scaling_factor
    if name.startswith("deepseek-v2"):  # arXiv 2405.04434, equations 20 to 22, and its scaling factor
        return (logits_E.exp() / logits_E.exp().sum())[experts] * router.routed_scaling_factor
    if name == "olmoe":  # arXiv 2409.02060, section 2
        return (logits_E.exp() / logits_E.exp().sum())[experts]
    chosen = logits_E[experts].exp()  # arXiv 2401.04088, section 2.1
    return chosen / chosen.sum()


def expert_output(name: str, experts: Any, number: int, x_H: torch.Tensor) -> torch.Tensor:
    """One gated feed-forward network."""
    if name == "gpt-oss-sinks":
        both = x_H @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
        gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return inner @ experts.down_proj[number] + experts.down_proj_bias[number]
    both = experts.gate_up_proj[number] @ x_H
    gate, up = both[: both.numel() // 2], both[both.numel() // 2 :]
    return experts.down_proj[number] @ (gate * torch.sigmoid(gate) * up)


def put_in_oracle(name: str, model: Any, routing_BWLK: torch.Tensor) -> None:
    """Every block of experts becomes a loop over tokens and their given experts; no router runs."""
    blocks = [
        (module, getattr(module, "gate", None) or module.router)
        for module in model.modules()
        if hasattr(module, "experts") and hasattr(module.experts, "gate_up_proj")
    ]
    for layer, (block, router) in enumerate(blocks):

        def forward(
            states: torch.Tensor, block: Any = block, router: Any = router, layer: int = layer
        ) -> Any:
            flat_NH = states.reshape(-1, states.size(-1))
            bias = getattr(router, "bias", None)
            outputs = []
            for x_H, experts in zip(flat_NH, routing_BWLK[:, :, layer].flatten(0, 1).tolist(), strict=True):
                logits_E = router.weight @ x_H + (0 if bias is None else bias)
                weights_K = forced_weights(name, router, logits_E, experts)
                outputs.append(
                    sum(
                        weight * expert_output(name, block.experts, number, x_H)
                        for weight, number in zip(weights_K, experts, strict=True)
                    )
                )
            result = torch.stack(outputs).reshape(states.shape)  # type: ignore[arg-type]
            if hasattr(block, "shared_experts"):
                result = result + block.shared_experts(states)
            return (result, None) if name == "gpt-oss-sinks" else result

        block.forward = forward


@pytest.mark.parametrize("name", NAMES)
def test_foreign_routing_is_the_published_formula(name: str) -> None:
    model, oracle = model_of(name), model_of(name).double()
    routing = foreign_routing(model)
    replayed = logps_and_gradients(model, routing)
    put_in_oracle(name, oracle, routing)
    expected = logps_and_gradients(oracle, None)
    in_float64 = {part: gradient.double() for part, gradient in replayed[1].items()}
    assert_same((replayed[0].double(), in_float64), expected, rtol=1e-4, atol=1e-4)
    plain = logps_and_gradients(model, None)
    assert (plain[0] - replayed[0]).abs().max() > 1e-3  # the routing matters
    routers = [part for part in replayed[1] if part.endswith(("gate.weight", "router.weight"))]
    assert routers and all(replayed[1][part].abs().max() > 1e-6 for part in routers)  # and learns


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_run_again_choose_the_same(name: str, reentrant: bool) -> None:
    model = model_of(name)
    routing = foreign_routing(model)
    plain = logps_and_gradients(model, routing)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = logps_and_gradients(model, routing)
    assert_same(again, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GROUPS)
def test_unknown_tokens_choose_themselves(name: str) -> None:
    model = model_of(name)
    routing = foreign_routing(model)
    nothing = logps_and_gradients(model, torch.full_like(routing, UNKNOWN))
    assert_same(nothing, logps_and_gradients(model, None), rtol=0, atol=0)
    part = routing.clone()
    part[1] = UNKNOWN
    part[0, :5] = UNKNOWN
    mixed = logps_and_gradients(model, part)
    plain, forced = logps_and_gradients(model, None), logps_and_gradients(model, routing)
    torch.testing.assert_close(mixed[0][1], plain[0][1])
    torch.testing.assert_close(mixed[0][0, :5], plain[0][0, :5])
    torch.testing.assert_close(mixed[0][2], forced[0][2])
    assert not torch.allclose(mixed[0][0, 5:8], plain[0][0, 5:8])
