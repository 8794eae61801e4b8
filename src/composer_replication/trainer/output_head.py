"""The head of a causal language model, apart from the model, and what it reads.

Letters: N rows, S columns, H hidden size, V vocabulary; M tokens that carry loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from composer_replication.losses.gathered_weight import gathered, is_spread
from composer_replication.trainer.collator import TokenRows
from composer_replication.trainer.generation import temporarily
from composer_replication.trainer.model_modes import (
    VIRTUAL_TOKENS,
    evaluation_mode,
    fsdp_plugin,
    has_virtual_tokens,
    inner_model,
    spread_again,
    weights_are_sharded,
)
from composer_replication.trainer.processes import num_processes


def head_of(model: nn.Module) -> tuple[torch.Tensor, dict[str, Any]]:
    """The weight (V, H) of the output head as it is now, and keyword arguments for ``losses.chunked_head``.

    logits = softcap(weight states), of states that are scaled already; ``softcap`` None is the identity. With
    ``adds_to_weight_grad`` the weight's gradient goes straight into ``weight.grad``: nothing else waits for it. Only for models
    without ``states_problem``. Under FSDP2 the weight is a DTensor: what a forward left whole may be freed before backward.
    """
    spread_again(model)
    inner = inner_model(model)
    weight = inner.get_output_embeddings().weight
    softcap = getattr(inner.config.get_text_config(), "final_logit_softcapping", None)
    # With several processes the data-parallel wrapper waits for the gradient, and so do hooks of an optimizer inside backward.
    hooks = (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None))  # noqa: SLF001 - no public name
    is_alone = num_processes() == 1 and not is_spread(weight)
    adds = weight.requires_grad and weight.is_leaf and is_alone and not any(hooks)
    return weight, {"softcap": softcap, "adds_to_weight_grad": adds}


@torch.no_grad()
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
    if inner.base_model is inner:
        return f"{name} does not give its last hidden states apart from its logits."
    if has_virtual_tokens(model):
        return VIRTUAL_TOKENS
    weight, options = head_of(model)
    weight_VH, softcap = gathered(weight), options["softcap"]
    ids_NS = torch.arange(min(4, weight_VH.size(0)), device=weight_VH.device)[None]
    with evaluation_mode(inner):
        states_NSH = last_states(model, ids_NS) * logit_scale(inner.config.get_text_config())
        logits_NSV = _called(model)(input_ids=ids_NS, use_cache=False).logits
    made_NSV = linear(states_NSH.to(weight_VH.dtype), weight_VH).float()
    if softcap is not None:
        made_NSV = softcap * torch.tanh(made_NSV / softcap)
    tolerance = 1e-3 if logits_NSV.dtype.itemsize > 2 else 3e-2  # rounding alone is some of the last bits
    most_apart = tolerance * logits_NSV.float().abs().max()
    if made_NSV.shape == logits_NSV.shape and (made_NSV - logits_NSV.float()).abs().max() <= most_apart:
        return None
    return f"the logits of {name} are not what its head makes of its last hidden states."


def last_states(model: nn.Module, ids_NS: torch.Tensor) -> torch.Tensor:
    """What the head reads at every position (N, S, H), not scaled; rows begin with their first token.

    The model's own forward is replaced by that of its body and called as ever, so that hooks gather spread weights.
    """
    inner = inner_model(model)

    def states(**arguments: Any) -> torch.Tensor:
        # an adapter adds some that are None
        given = {name: value for name, value in arguments.items() if value is not None}
        found: torch.Tensor = inner.base_model(**given).last_hidden_state
        return found

    with temporarily(inner, forward=states):
        found: torch.Tensor = _called(model)(input_ids=ids_NS, use_cache=False)
    return found


def _called(model: nn.Module) -> nn.Module:
    """Wrappers gather spread weights; others are left out, as the gradient hooks of DDP sit on the parameters."""
    inner: nn.Module = inner_model(model)
    return model if weights_are_sharded(model) else inner


def _spread_problem(model: nn.Module) -> str | None:
    """Why the head of a model whose weights are, or will be, spread over processes cannot be gathered by itself."""
    if not weights_are_sharded(model):
        return None
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = fsdp_plugin()
    is_by_hand = plugin is None and any(is_spread(part) for part in model.parameters())
    if not is_by_hand and getattr(plugin, "fsdp_version", None) != 2:
        return "its weights are spread over processes, and not by FSDP2."
    is_offloaded = isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy)
    if is_offloaded or getattr(plugin, "cpu_ram_efficient_loading", False):
        return "FSDP2 runs with fsdp_offload_params or fsdp_cpu_ram_efficient_loading."
    return None


def logit_scale(config: Any) -> float:
    """What the logits are multiplied by before a soft cap, as each family names it."""
    for key in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, key, None) is not None:
            return float(getattr(config, key))
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return float(divisor) if config.model_type == "hyperclovax" else 1.0 / float(divisor)


def completion_states(model: nn.Module, rows: TokenRows) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Scaled last hidden state before each id that carries loss (M, H), row by row, and the head of ``head_of``."""
    states_MH = last_states(model, rows.ids_NS)[:, :-1][rows.loss_mask_NS[:, 1:].bool()]
    return states_MH * logit_scale(inner_model(model).config.get_text_config()), *head_of(model)


def scored_ids(rows: TokenRows) -> torch.Tensor:
    """The ids that carry loss, (M,), in the order of ``completion_states``."""
    return rows.ids_NS[rows.loss_mask_NS.bool()]
