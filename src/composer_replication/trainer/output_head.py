"""The head of a causal language model, apart from the model, and what it reads.

Letters: N rows, S columns, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from composer_replication.trainer.model_modes import evaluation_mode
from composer_replication.trainer.prefix_support import accepts, inner_model
from composer_replication.trainer.processes import num_processes


@dataclass(frozen=True, slots=True)
class Head:
    """logits = softcap(scale * (weight states + bias)); ``softcap`` None is the identity."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    softcap: float | None
    scale: float
    adds_to_weight_grad: bool
    """The gradient of the weight goes straight into ``weight.grad``: nothing else waits for it."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the functions of ``losses.chunked_head``; the scale is in the states."""
        return {
            "bias_V": self.bias_V,
            "softcap": self.softcap,
            "adds_to_weight_grad": self.adds_to_weight_grad,
        }


def head_of(model: nn.Module) -> Head:
    """The output head as it is now; only for models without ``states_problem``."""
    inner = inner_model(model)
    head = inner.get_output_embeddings()
    config = inner.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(head.weight, head.bias, softcap, logit_scale(config), _may_add_in_place(head.weight))


def states_problem(model: nn.Module) -> str | None:
    """Why the head cannot be applied apart from the model, in one sentence; None if it can. Forwards a few ids."""
    inner = inner_model(model)
    name = type(inner).__name__
    if not hasattr(inner, "get_output_embeddings") or type(inner.get_output_embeddings()) is not nn.Linear:
        return f"the head of {name} is not a plain linear layer (an adapter on it counts)."
    if not accepts(inner, "logits_to_keep") or inner.base_model is inner:
        return f"{name} does not give its last hidden states apart from its logits."
    if inner.get_output_embeddings().bias is not None and logit_scale(inner.config.get_text_config()) != 1.0:
        return f"the head of {name} has a bias and scales its logits."
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for config in configs.values() if isinstance(configs, dict) else ():
            if getattr(config, "is_prompt_learning", False):
                return "a PEFT prompt-learning adapter puts virtual tokens before the prompt."
    return _other_logits(inner)


def states_before_head(model: nn.Module, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head reads at every position (N, S, H), not scaled, and the logits that it makes of the last one (N, 1, V).

    Args:
        model: one without ``states_problem``, in whatever wrapper it is to be called.
        arguments: of its forward, but for ``logits_to_keep``.
    """
    seen: list[torch.Tensor] = []
    hook = inner_model(model).base_model.register_forward_hook(
        lambda _module, _inputs, output: seen.append(output.last_hidden_state)
    )
    try:
        output = model(**arguments, logits_to_keep=1)
    finally:
        hook.remove()
    return seen[-1], output.logits


def last_states(inner: Any, ids_NS: torch.Tensor, mask_NS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``states_before_head`` of rows without a cache; positions count from the first token."""
    arguments: dict[str, Any] = {"input_ids": ids_NS, "attention_mask": mask_NS, "use_cache": False}
    if accepts(inner, "position_ids"):
        arguments["position_ids"] = (mask_NS.cumsum(-1) - 1).clamp(min=0)
    return states_before_head(inner, arguments)


@torch.no_grad()
def _other_logits(inner: Any) -> str | None:
    """A sentence where the model makes other logits of its states than ``Head`` says, as the model itself shows on a few ids."""
    head = head_of(inner)
    ids_NS = torch.arange(min(4, head.weight_VH.size(0)), device=head.weight_VH.device)[None]
    with evaluation_mode(inner):
        states_NSH, logits_N1V = last_states(inner, ids_NS, torch.ones_like(ids_NS))
    made_N1V = linear((states_NSH[:, -1:] * head.scale).to(head.weight_VH.dtype), head.weight_VH, head.bias_V)
    if head.softcap is not None:
        made_N1V = head.softcap * torch.tanh(made_N1V / head.softcap)
    if made_N1V.shape == logits_N1V.shape:
        tolerance = 1e-3 if logits_N1V.dtype.itemsize > 2 else 3e-2  # rounding alone is some of the last bits
        error, largest = (made_N1V.float() - logits_N1V.float()).abs().max(), logits_N1V.float().abs().max()
        if error <= tolerance * largest:
            return None
    return f"the logits of {type(inner).__name__} are not what its head makes of its last hidden states."


def _may_add_in_place(weight: torch.Tensor) -> bool:
    """Whether autograd alone would see the gradient of this weight, which then need not exist a second time.

    With several processes the data-parallel wrapper waits for it, and hooks of an optimizer that steps inside backward do.
    """
    hooks = (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None))  # noqa: SLF001 - no public name
    return weight.requires_grad and weight.is_leaf and num_processes() == 1 and not any(hooks)


def logit_scale(config: Any) -> float:
    """What the logits are multiplied by before a soft cap, as each family names it."""
    for key in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, key, None) is not None:
            return float(getattr(config, key))
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type == "hyperclovax" else 1.0 / float(divisor)
