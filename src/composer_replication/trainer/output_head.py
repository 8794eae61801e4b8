"""The head of a causal language model, apart from the model, and what it reads.

Letters: N rows, S columns, H hidden size, V vocabulary; M tokens that carry loss, P prompt and T completion columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from composer_replication.losses.gathered_weight import gathered, is_spread
from composer_replication.trainer.collator import TokenRows
from composer_replication.trainer.model_modes import (
    evaluation_mode,
    fsdp_plugin,
    spread_again,
    weights_are_sharded,
)
from composer_replication.trainer.prefix_support import (
    VIRTUAL_TOKENS,
    accepts,
    has_virtual_tokens,
    inner_model,
)
from composer_replication.trainer.processes import num_processes


def head_of(model: nn.Module) -> tuple[torch.Tensor, dict[str, Any]]:
    """The weight (V, H) of the output head as it is now, and keyword arguments for ``losses.chunked_head``.

    logits = softcap(weight states), of states that are scaled already; ``softcap`` None is the identity. With
    ``adds_to_weight_grad`` the weight's gradient goes straight into ``weight.grad``: nothing else waits for it. Only for models
    without ``states_problem``. Under FSDP2 the weight is a DTensor, whatever a forward left whole: that copy may be freed before
    backward reads it.
    """
    spread_again(model)
    inner = inner_model(model)
    weight = inner.get_output_embeddings().weight
    softcap = getattr(inner.config.get_text_config(), "final_logit_softcapping", None)
    # With several processes the data-parallel wrapper waits for the gradient, and hooks of an optimizer that steps inside
    # backward do; where autograd alone would see it, it need not exist a second time.
    hooks = (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None))  # noqa: SLF001 - no public name
    is_alone = num_processes() == 1 and not is_spread(weight)
    adds = weight.requires_grad and weight.is_leaf and is_alone and not any(hooks)
    return weight, {"softcap": softcap, "adds_to_weight_grad": adds}


def states_problem(model: nn.Module) -> str | None:
    """Why the head cannot be applied apart from the model, in one sentence; None if it can. Forwards a few ids."""
    if (problem := _spread_problem(model)) is not None:
        return problem
    inner = inner_model(model)
    name = type(inner).__name__
    head: Any = getattr(inner, "get_output_embeddings", lambda: None)()
    kind = type(head)  # FSDP2 makes a class of its own of each layer that it wraps
    is_linear = kind is nn.Linear or (hasattr(head, "reshard") and kind.__bases__[-1] is nn.Linear)
    if not is_linear or head.bias is not None:
        return f"the head of {name} is not a plain linear layer without bias (an adapter on it counts)."
    if not accepts(inner, "logits_to_keep") or inner.base_model is inner:
        return f"{name} does not give its last hidden states apart from its logits."
    return VIRTUAL_TOKENS if has_virtual_tokens(model) else _other_logits(model)


def last_states(
    model: nn.Module, ids_NS: torch.Tensor, mask_NS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head reads at every position (N, S, H), not scaled, and the logits that it makes of the last one (N, 1, V).

    Rows are padded on the left; positions count from the first token. A model with spread weights is called in its wrappers,
    whose hooks gather them, any other without: the gradient hooks of DDP sit on the parameters. Backward through the states of
    spread weights begins at the logits, with a gradient of zero: there FSDP2 has its hooks.
    """
    arguments: dict[str, Any] = {"input_ids": ids_NS, "attention_mask": mask_NS, "use_cache": False}
    if accepts(inner_model(model), "position_ids"):
        arguments["position_ids"] = (mask_NS.cumsum(-1) - 1).clamp(min=0)
    is_sharded, seen = weights_are_sharded(model), list[torch.Tensor]()
    hook = inner_model(model).base_model.register_forward_hook(
        lambda _module, _inputs, output: seen.append(output.last_hidden_state)
    )
    try:
        called = model if is_sharded else inner_model(model)
        logits_N1V = called(**arguments, logits_to_keep=1).logits
    finally:
        hook.remove()
    states_NSH = seen[-1]
    if is_sharded and states_NSH.requires_grad and logits_N1V.requires_grad:
        states_NSH = _BehindLogits.apply(states_NSH, logits_N1V)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return states_NSH, logits_N1V


class _BehindLogits(torch.autograd.Function):
    """The states themselves; backward reaches the logits, too, and first."""

    @staticmethod
    def forward(ctx: Any, states_NSH: torch.Tensor, logits_N1V: torch.Tensor) -> torch.Tensor:
        ctx.logits_like = logits_N1V.shape, logits_N1V.dtype, logits_N1V.device
        return states_NSH.view_as(states_NSH)

    @staticmethod
    def backward(ctx: Any, grad_NSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.logits_like
        return grad_NSH, torch.zeros(shape, dtype=dtype, device=device)


@torch.no_grad()
def _other_logits(model: nn.Module) -> str | None:
    """A sentence where the model makes other logits of its states than ``head_of`` says, as the model itself shows on a few ids."""
    inner, (weight, options) = inner_model(model), head_of(model)
    weight_VH, softcap = gathered(weight), options["softcap"]
    ids_NS = torch.arange(min(4, weight_VH.size(0)), device=weight_VH.device)[None]
    with evaluation_mode(inner):
        states_NSH, logits_N1V = last_states(model, ids_NS, torch.ones_like(ids_NS))
    scale = logit_scale(inner.config.get_text_config())
    made_N1V = linear((states_NSH[:, -1:] * scale).to(weight_VH.dtype), weight_VH)
    if softcap is not None:
        made_N1V = softcap * torch.tanh(made_N1V / softcap)
    if made_N1V.shape == logits_N1V.shape:
        tolerance = 1e-3 if logits_N1V.dtype.itemsize > 2 else 3e-2  # rounding alone is some of the last bits
        error, largest = (made_N1V.float() - logits_N1V.float()).abs().max(), logits_N1V.float().abs().max()
        if error <= tolerance * largest:
            return None
    return f"the logits of {type(inner).__name__} are not what its head makes of its last hidden states."


def _spread_problem(model: nn.Module) -> str | None:
    """Why the head of a model whose weights are, or will be, spread over processes cannot be gathered by itself."""
    if not weights_are_sharded(model):
        return None
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = fsdp_plugin()
    is_by_hand = plugin is None and any(is_spread(part) for part in model.parameters())
    if not is_by_hand and getattr(plugin, "fsdp_version", None) != 2:
        return "its weights are spread over processes, and not by FSDP2."
    if isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy):
        return "FSDP2 keeps its weights in the processor's memory (fsdp_offload_params)."
    if getattr(plugin, "cpu_ram_efficient_loading", False):
        return "one process alone loads its weights (fsdp_cpu_ram_efficient_loading)."
    return None


def logit_scale(config: Any) -> float:
    """What the logits are multiplied by before a soft cap, as each family names it."""
    for key in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, key, None) is not None:
            return float(getattr(config, key))
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type == "hyperclovax" else 1.0 / float(divisor)


def completion_states(model: nn.Module, rows: TokenRows) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Scaled last hidden state before each completion token that carries loss (M, H), row by row, and the head of ``head_of``.

    Positions count from the first token of the prompt, as in generation.
    """
    ids = torch.cat([rows.prompt_ids_NP, rows.completion_ids_NT], dim=1)
    mask = torch.cat([rows.prompt_mask_NP, rows.completion_mask_NT], dim=1)
    states_NTH = last_states(model, ids, mask)[0][:, rows.prompt_ids_NP.size(1) - 1 : -1]
    scale = logit_scale(inner_model(model).config.get_text_config())
    return states_NTH[rows.loss_mask_NT.bool()] * scale, *head_of(model)


def scored_ids(rows: TokenRows) -> torch.Tensor:
    """The completion ids that carry loss, (M,), in the order of ``completion_states``."""
    return rows.completion_ids_NT[rows.loss_mask_NT.bool()]
