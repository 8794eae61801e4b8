"""Log-probabilities of a linear head without its logits.

The logits of 4,096 tokens over 151,665 words take 2.5 GB in float32, and their softmax and its gradient as
much again each. Here they exist as one tile of ``chunk_tokens`` by ``chunk_vocab`` (8 MB). Forward folds tiles into
a running log-sum-exp; backward computes each tile again, turns it into the gradient of its logits in place and adds
it to the gradients of hidden states and weight. The vocabulary is the outer loop, so that a tile of the
weight is converted once and its gradient is finished, in float32, before the next one begins. Results equal the plain
head up to rounding, for values and gradients.

All functions take the hidden states of the positions to score as a flat list: a caller selects them, so
that prompts and padding never meet the head. A position's hidden state predicts the token after it. A model
that scales its logits by a constant is served by scaling its hidden states.

Precision: logits are rounded to the precision of the head (or of autocast) as the head itself rounds them;
everything after that, gradients included, is summed in float32 (float64 for float64).

Letters: N tokens in a flat list, H hidden size, V vocabulary, K tokens picked for each position;
n and c are the tokens and words of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from composer_replication.errors import InputError
from composer_replication.losses.argument_checks import require
from composer_replication.losses.gathered_weight import gathered, gathered_again_for_backward


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Keywords that every function here takes."""

    temperature: float = 1.0
    """Divides the logits after the soft cap; above 0."""
    softcap: float | None = None
    """cap tanh(z / cap) as in Gemma; above 0."""
    chunk_tokens: int = 256
    """Tokens of a tile."""
    chunk_vocab: int | None = None
    """Words of a tile; None: 8192 on CPU (with 256 tokens 8 MiB, near what its caches hold), fewer for
    half precision and wide hidden states, whose slice of the weight is widened; 32768 on an accelerator."""
    adds_to_weight_grad: bool = False
    """During backward the gradient of the weight is added to ``weight.grad`` in place (made where there is none), and
    autograd gets none. It saves a tensor of V H numbers for each backward pass. The weight is then a leaf
    that takes gradient, a shared one (tied embeddings) too. Only where nothing else waits for that gradient: DDP,
    FSDP, DeepSpeed and gradient hooks do, and ``torch.autograd.grad`` does not see it."""


def sampled_logp(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, target_N: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Log-probability of each target token, (N,), with gradient for hidden states and weight.

    logp_n = z_n[y_n] - log sum_v exp z_nv, in nats; z = softcap(hidden weight') / temperature.

    Args:
        hidden_NH: hidden states; carries gradient.
        weight_VH: weight of the head; carries gradient. A DTensor is gathered, for forward and again for backward; its
            gradient is the mean over the processes (``losses.gathered_weight``).
        target_N: token ids.
        settings: see ``HeadSettings``.

    Raises:
        UsageError: CR0722, other numbers of rows, or ``adds_to_weight_grad`` for a weight that is no leaf or takes no gradient.
        InputError: CR0722, a token id outside the vocabulary.
    """
    return logp_at(hidden_NH, weight_VH, target_N[:, None], **settings)[:, 0]


def logp_at(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, index_NK: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Log-probabilities (over the whole vocabulary) of the given words at each position; with gradient.

    Raises:
        UsageError, InputError: as ``sampled_logp``.
    """
    return _sweep(hidden_NH, weight_VH, index_NK, HeadSettings(**settings))[0]


def sampled_and_top_k_logp(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_N: torch.Tensor,
    *,
    k: int,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``sampled_logp`` gives, and log-probabilities, falling, and ids of the k likeliest words, both (N, K).

    In one pass and with gradient, for the student of a distillation: its sampled tokens (importance weights) and its support.

    Raises:
        UsageError, InputError: as ``sampled_logp``.
    """
    logp_NK, index_NK = _sweep(hidden_NH, weight_VH, target_N[:, None], HeadSettings(**settings), top_k=k)
    return logp_NK[:, 0], logp_NK[:, 1:], index_NK[:, 1:]


def _sweep(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    index_NK: torch.Tensor,
    settings: HeadSettings,
    *,
    top_k: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    whole_VH = gathered(weight_VH)
    require(
        not settings.adds_to_weight_grad or (whole_VH.is_leaf and whole_VH.requires_grad),
        "adds_to_weight_grad is set for a weight that takes no gradient, or is no leaf (a sharded one is not).",
        where="losses.chunked_head",
        fix="leave it out where the head is frozen, sharded or computed.",
    )
    require(
        index_NK.size(0) == hidden_NH.size(0),
        f"{index_NK.size(0)} rows of token ids do not fit {hidden_NH.size(0)} hidden states.",
        where="losses.chunked_head",
        fix="select the positions first: one row of hidden states for each row of ids.",
    )
    _check_index(index_NK, weight_VH.size(0))
    with gathered_again_for_backward(weight_VH, whole_VH):
        result: tuple[torch.Tensor, torch.Tensor] = HeadTiles.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            hidden_NH, whole_VH, index_NK, settings, top_k
        )
    return result


def _words_of_a_tile(hidden_NH: torch.Tensor) -> int:
    if hidden_NH.device.type != "cpu":
        return 32768  # launches cost more than memory there
    if hidden_NH.element_size() > 2:
        return 8192
    return min(8192, max(1024, 2**21 // max(1, hidden_NH.size(1))))  # a float32 slice of the weight: 8 MiB


def _check_index(index_NK: torch.Tensor, num_words: int) -> None:
    """A wrong id lies in no tile, and its log-probability would be wrong without a word."""
    is_wrong_NK = (index_NK < 0) | (index_NK >= num_words)
    if bool(is_wrong_NK.any()):
        row, column = is_wrong_NK.nonzero()[0].tolist()
        raise InputError(
            "CR0722",
            f"token id {int(index_NK[row, column])} of position {row} is not among {num_words} words.",
            where="losses.chunked_head",
            fix="drop padding and ignored labels (-100) before the head.",
        )


class HeadTiles(torch.autograd.Function):
    """Log-probabilities of softmax(z / c), z = softcap(hidden weight'), tile by tile.

    Returns them at the picked indices (N, K), and those indices: the given ones, followed by the top k.
    With g the gradient of the picked log-probabilities, dz = (scatter(g) - sum_k g_k p) / c, times 1 - tanh^2 under a
    soft cap. Indices carry no gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes by position
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        index_NK: torch.Tensor,
        settings: HeadSettings,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        tiles = _Tiles(hidden_NH, weight_VH, settings, _compute_dtype(hidden_NH, weight_VH))
        num_tokens = hidden_NH.size(0)
        log_norm_N = tiles.zeros(num_tokens).fill_(-torch.inf)
        picked_NK = tiles.zeros(*index_NK.shape)
        top_NK = tiles.zeros(num_tokens, top_k).fill_(-torch.inf)
        top_index_NK = torch.zeros_like(top_NK, dtype=torch.long)
        for words, weight_cH in tiles.words():
            for tokens in tiles.tokens():
                logits_nc = tiles.logits(tokens, weight_cH)
                if settings.temperature != 1:
                    logits_nc.div_(settings.temperature)
                local_nK, is_inside_nK = _local(index_NK[tokens], words)
                picked_NK[tokens] = logits_nc.gather(1, local_nK).where(is_inside_nK, picked_NK[tokens])
                if top_k:
                    best = logits_nc.topk(min(top_k, logits_nc.size(1)), dim=1)
                    values = torch.cat([top_NK[tokens], best.values], dim=1)
                    indices = torch.cat([top_index_NK[tokens], best.indices + words.start], dim=1)
                    top_NK[tokens], places = values.topk(top_k, dim=1)
                    top_index_NK[tokens] = indices.gather(1, places)
                log_norm_N[tokens] = torch.logaddexp(log_norm_N[tokens], logits_nc.logsumexp(1))
        index_NK = torch.cat([index_NK, top_index_NK], dim=1)
        ctx.save_for_backward(hidden_NH, weight_VH, index_NK, log_norm_N)
        ctx.settings, ctx.dtype = settings, tiles.dtype
        ctx.mark_non_differentiable(index_NK)
        return torch.cat([picked_NK, top_NK], dim=1) - log_norm_N[:, None], index_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: torch.Tensor | None, _index: None) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, index_NK, log_norm_N = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        tiles = _Tiles(hidden_NH, weight_VH, settings, ctx.dtype)
        grad_NK = tiles.zeros(*index_NK.shape) if grad_NK is None else grad_NK / settings.temperature
        grad_NK, share_N = grad_NK.to(tiles.wide), -grad_NK.sum(1)
        hidden_grad_NH = tiles.zeros(*hidden_NH.shape) if ctx.needs_input_grad[0] else None
        weight_grad_VH = _weight_gradient(weight_VH, settings) if ctx.needs_input_grad[1] else None
        for words, weight_cH in tiles.words():
            part_cH = None
            if weight_grad_VH is not None:  # summed in the result itself, or in float32 beside a narrower one
                part_cH = weight_grad_VH[words]
                part_cH = part_cH if part_cH.dtype == tiles.wide else tiles.zeros(*part_cH.shape)
            for tokens in tiles.tokens():
                grad_nc = tiles.logits(tokens, weight_cH)
                slope_nc = None
                if settings.softcap is not None:
                    slope_nc = torch.div(grad_nc, settings.softcap).square_().neg_().add_(1)
                if settings.temperature != 1:
                    grad_nc.div_(settings.temperature)
                grad_nc.sub_(log_norm_N[tokens, None]).exp_().mul_(share_N[tokens, None])
                local_nK, is_inside_nK = _local(index_NK[tokens], words)
                grad_nc.scatter_add_(1, local_nK, grad_NK[tokens] * is_inside_nK)
                if slope_nc is not None:
                    grad_nc.mul_(slope_nc)
                if hidden_grad_NH is not None:
                    _add_product(hidden_grad_NH[tokens], grad_nc, weight_VH[words], tiles.dtype)
                if part_cH is not None:
                    _add_product(part_cH, grad_nc.t(), hidden_NH[tokens], tiles.dtype)
            if part_cH is not None and weight_grad_VH is not None and part_cH.dtype != weight_grad_VH.dtype:
                weight_grad_VH[words] += part_cH
        return (
            None if hidden_grad_NH is None else hidden_grad_NH.to(hidden_NH.dtype),
            None if settings.adds_to_weight_grad else weight_grad_VH,
            *[None] * 3,
        )


class _Tiles:
    """The logits of a head, one tile at a time; a tile lives until the next one is asked for."""

    def __init__(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        settings: HeadSettings,
        dtype: torch.dtype,
    ) -> None:
        self.hidden_NH, self.weight_VH, self.settings, self.dtype = hidden_NH, weight_VH, settings, dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.chunk_vocab = settings.chunk_vocab or _words_of_a_tile(hidden_NH)
        area = min(hidden_NH.size(0), settings.chunk_tokens) * min(weight_VH.size(0), self.chunk_vocab)
        self._tile = torch.empty(area, dtype=dtype, device=hidden_NH.device)

    def words(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Each part of the vocabulary, and its weight in the head's own precision."""
        for words in _slices(self.weight_VH.size(0), self.chunk_vocab):
            yield words, self.weight_VH[words].to(self.dtype)

    def tokens(self) -> Iterator[slice]:
        return _slices(self.hidden_NH.size(0), self.settings.chunk_tokens)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.wide, device=self.hidden_NH.device)

    def logits(self, tokens: slice, weight_cH: torch.Tensor) -> torch.Tensor:
        """Capped logits of a tile in at least float32, rounded to the head's own precision as the head would."""
        hidden_nH, cap = self.hidden_NH[tokens].to(self.dtype), self.settings.softcap
        shape = (hidden_nH.size(0), weight_cH.size(0))
        tile_nc = torch.mm(hidden_nH, weight_cH.t(), out=self._tile[: shape[0] * shape[1]].view(shape))
        logits_nc = tile_nc.to(self.wide)
        return logits_nc if cap is None else logits_nc.div_(cap).tanh_().mul_(cap)


def _weight_gradient(weight_VH: torch.Tensor, settings: HeadSettings) -> torch.Tensor:
    """Where the weight's gradient is summed; one in place is looked up now: it may have been set to None since forward."""
    if not settings.adds_to_weight_grad:
        return torch.zeros_like(weight_VH)
    if weight_VH.grad is None:
        weight_VH.grad = torch.zeros_like(weight_VH)
    return weight_VH.grad


def _add_product(sum_ab: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    """Add left @ right without rounding the product to half precision first.

    Rounding each tile's product before the sum biases training. On an accelerator half precision enters the
    multiplication and float32 leaves it; elsewhere the factors are widened, which CPUs do faster.
    """
    if dtype in (torch.float16, torch.bfloat16) and sum_ab.is_cuda:
        sum_ab += torch.mm(left.to(dtype), right.to(dtype), out_dtype=torch.float32)
    else:
        sum_ab.addmm_(left, right.to(sum_ab.dtype))


def _compute_dtype(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.dtype:
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden_NH.dtype, weight_VH.dtype)


def _local(index_nK: torch.Tensor, words: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the picks inside a tile (clamped to it), and which of them are inside."""
    is_inside_nK = (index_nK >= words.start) & (index_nK < words.stop)
    return (index_nK - words.start).clamp(0, words.stop - words.start - 1), is_inside_nK


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
