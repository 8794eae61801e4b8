"""Log-probability and entropy of tokens, from logits where they are small, else from what the head reads.

The logits of 8 rows of 4,096 tokens over 151,665 words take 20 GB in float32. Above ``MAX_LOGITS_BYTES`` they are never
held: the model runs without its head, which is then applied in tiles (``losses.chunked_head``) to the positions that
are scored. Below it the plain way is faster, for backward computes no tile a second time.

Letters: B rows, T columns, N positions in a flat list, V vocabulary, H hidden size, X one of the two last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from composer_replication.losses.chunked_head import sampled_logp
from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.output_head import Head, head_of, states_before_head, states_problem
from composer_replication.trainer.prefix_support import inner_model
from composer_replication.trainer.processes import gathered

MAX_LOGITS_BYTES = 2**28
_PROBLEMS: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()
_POSITIONS_AT_ONCE = 128  # rows of logits upcast together; bounds the float32 copy


@dataclass(frozen=True, slots=True)
class TokenScorer:
    """How scores are taken from a forward.

    Attributes:
        temperature: divides the logits.
        with_entropy: the entropy, too.
        head: of the model, where it is applied apart from it; None: the forward gives logits.
    """

    temperature: float
    with_entropy: bool
    head: Head | None = None

    def forward(self, model: nn.Module, arguments: dict[str, Any], *, logits_to_keep: int) -> torch.Tensor:
        """What ``of`` takes, at the last positions (0: all): logits (B, T, V), or what the head reads (B, T, H)."""
        if self.head is None:
            logits_BTV: torch.Tensor = model(**arguments, logits_to_keep=logits_to_keep).logits
            return logits_BTV
        states_BTH, _ = states_before_head(model, arguments)
        return states_BTH[:, -logits_to_keep:]

    def of(
        self, outputs_NX: torch.Tensor, targets_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities (N,) in nats, with gradient, and entropies (N,); theirs has gradient from logits alone."""
        if self.head is None:
            logps_N, entropies_N = TokenStatistics.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                outputs_NX, targets_N, self.temperature, self.with_entropy
            )
        else:
            logps_N, entropies_N = sampled_logp(
                outputs_NX * self.head.scale,
                self.head.weight_VH,
                targets_N,
                bias_V=self.head.bias_V,
                softcap=self.head.softcap,
                temperature=self.temperature,
            )
        return logps_N, entropies_N if self.with_entropy else None


def head_apart(model: nn.Module, num_positions: int) -> Head | None:
    """The head to be applied apart from the model, where its logits at so many positions would be too large.

    None as well where the head cannot be applied apart (``states_problem``). Where weights are spread over processes
    the largest number of all counts, since each has to gather the head when another does: a collective call then.
    """
    head = inner_model(model).get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        return None
    if weights_are_sharded(model):
        num_positions = max(gathered(num_positions))
    if num_positions * weight.size(0) * weight.element_size() <= MAX_LOGITS_BYTES:
        return None
    if model not in _PROBLEMS:  # asking forwards a few ids
        _PROBLEMS[model] = states_problem(model)
    return None if _PROBLEMS[model] is not None else head_of(model)


class TokenStatistics(torch.autograd.Function):
    """Log-probability and entropy of flat logits, a slice at a time.

    With p = softmax(z / c): d logp / dz = (onehot - p) / c and
    dH / dz = (-p log p - p H) / c. Plain autograd would keep several float32 copies of the
    (N, V) logits for the entropy; this keeps the logits alone and recomputes p.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float, compute_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        logps_N = torch.empty(targets_N.shape, dtype=dtype, device=logits_NV.device)
        log_norms_N, entropies_N = torch.empty_like(logps_N), torch.zeros_like(logps_N)
        for start in range(0, targets_N.numel(), _POSITIONS_AT_ONCE):
            part = slice(start, start + _POSITIONS_AT_ONCE)
            scaled = logits_NV[part].to(dtype) / temperature
            log_norms_N[part] = scaled.logsumexp(-1)
            logps_N[part] = scaled.gather(-1, targets_N[part, None])[:, 0] - log_norms_N[part]
            if compute_entropy:
                probs = scaled.sub_(log_norms_N[part, None]).exp_()
                entropies_N[part] = torch.special.entr(probs).sum(-1)
        ctx.save_for_backward(logits_NV, targets_N, log_norms_N, entropies_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logps_N, entropies_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logps_N: torch.Tensor | None, grad_entropies_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        logits_NV, targets_N, log_norms_N, entropies_N = ctx.saved_tensors
        grad_NV = torch.zeros_like(logits_NV)
        for start in range(0, targets_N.numel(), _POSITIONS_AT_ONCE):
            part = slice(start, start + _POSITIONS_AT_ONCE)
            scaled = logits_NV[part].to(log_norms_N.dtype) / ctx.temperature
            probs = scaled.sub_(log_norms_N[part, None]).exp_()
            grad = torch.zeros_like(probs)
            if grad_entropies_N is not None:
                slope = torch.special.entr(probs) - probs * entropies_N[part, None]
                grad += grad_entropies_N[part, None] * slope
            if grad_logps_N is not None:
                grad -= grad_logps_N[part, None] * probs
                grad.scatter_add_(1, targets_N[part, None], grad_logps_N[part, None])
            grad_NV[part] = grad.div_(ctx.temperature)
        return grad_NV, None, None, None
