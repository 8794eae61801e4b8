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

_FAR_BELOW = -1e4  # exp of it is 0 in float64 too, and 0 times it is 0, which 0 times -inf is not


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Keywords that every function here takes."""

    bias_V: torch.Tensor | None = None
    """Added to the logits; -inf closes a word."""
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


@dataclass(frozen=True, slots=True)
class HeadScores:
    """What one pass over the head gives."""

    logp_N: torch.Tensor
    """Log-probability of the target, nats; carries gradient."""
    entropy_N: torch.Tensor
    """Entropy over the vocabulary, nats; no gradient."""
    top_logp_NK: torch.Tensor
    """Log-probabilities of the k likeliest words, falling; carries gradient."""
    top_index_NK: torch.Tensor


def sampled_logp(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, target_N: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target token, and the entropy at its position.

    logp_n = z_n[y_n] - log sum_v exp z_nv, H_n = -sum_v p_nv log p_nv, in nats;
    z = softcap(hidden weight' + bias) / temperature.

    Args:
        hidden_NH: hidden states; carries gradient.
        weight_VH: weight of the head; carries gradient. A DTensor is gathered, for forward and again for backward; its
            gradient is the mean over the processes (``losses.gathered_weight``).
        target_N: token ids.
        settings: see ``HeadSettings``.

    Returns:
        logp (N,) with gradient for hidden states, weight and bias; entropy (N,) without.

    Raises:
        UsageError: CR0722, other numbers of rows, or ``adds_to_weight_grad`` for a weight that is no leaf or takes no gradient.
        InputError: CR0722, a token id outside the vocabulary.
    """
    logp_NK, _, entropy_N = _sweep(hidden_NH, weight_VH, target_N[:, None], HeadSettings(**settings))
    return logp_NK[:, 0], entropy_N


def logp_at(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, index_NK: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """Log-probabilities (over the whole vocabulary) of the given words at each position; with gradient.

    Raises:
        UsageError, InputError: as ``sampled_logp``.
    """
    return _sweep(hidden_NH, weight_VH, index_NK, HeadSettings(**settings), with_entropy=False)[0]


def sampled_and_top_k_logp(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_N: torch.Tensor,
    *,
    k: int,
    **settings: Any,
) -> HeadScores:
    """What ``sampled_logp`` gives, and the k likeliest words, in one pass and with gradient.

    For the student of a distillation: one forward and one backward pass over the head serve its sampled
    tokens (importance weights) and its support.

    Raises:
        UsageError, InputError: as ``sampled_logp``.
    """
    logp_NK, index_NK, entropy_N = _sweep(
        hidden_NH, weight_VH, target_N[:, None], HeadSettings(**settings), top_k=k
    )
    return HeadScores(
        logp_N=logp_NK[:, 0], entropy_N=entropy_N, top_logp_NK=logp_NK[:, 1:], top_index_NK=index_NK[:, 1:]
    )


def _sweep(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    index_NK: torch.Tensor,
    settings: HeadSettings,
    *,
    top_k: int = 0,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    whole_VH, bias_V = gathered(weight_VH), None if settings.bias_V is None else gathered(settings.bias_V)
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
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = HeadTiles.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            hidden_NH, whole_VH, bias_V, index_NK, settings, top_k, with_entropy
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
    """Statistics of softmax(z / c), z = hidden weight' + bias, tile by tile.

    Returns log-probabilities at the picked indices (N, K), those indices and the entropy (N,). The picks are the
    given indices followed by the top k. With g the gradient of the picked log-probabilities,
    dz = (scatter(g) - sum_k g_k p) / c, times 1 - tanh^2 under a soft cap. Entropy and indices carry no gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  autograd passes by position
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        index_NK: torch.Tensor,
        settings: HeadSettings,
        top_k: int,
        with_entropy: bool,  # noqa: FBT001
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        tiles = _Tiles(hidden_NH, weight_VH, bias_V, settings)
        running = _Running(tiles, index_NK, top_k, with_entropy=with_entropy)
        for words in tiles.words():
            for tokens in tiles.tokens():
                logits_nc = tiles.logits(tokens, words)
                tiles.cap(logits_nc)
                if settings.temperature != 1:
                    logits_nc.div_(settings.temperature)
                running.pick(logits_nc, tokens, words)
                running.fold(logits_nc, tokens)
        log_norm_N = running.maximum_N + running.total_N.log()
        entropy_N = running.total_N.log() - running.weighted_N / running.total_N
        index_NK = torch.cat([index_NK, running.top_index_NK], dim=1)
        logp_NK = torch.cat([running.picked_NK, running.top_NK], dim=1) - log_norm_N[:, None]
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, index_NK, log_norm_N)
        ctx.settings, ctx.dtype = settings, tiles.dtype
        ctx.mark_non_differentiable(index_NK, entropy_N)
        return logp_NK, index_NK, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_NK: torch.Tensor | None, _index: None, _entropy: None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, index_NK, log_norm_N = ctx.saved_tensors
        tiles = _Tiles(hidden_NH, weight_VH, bias_V, ctx.settings, dtype=ctx.dtype)
        gradients = _Gradients(tiles, ctx.needs_input_grad)
        if grad_NK is None:
            grad_NK = tiles.zeros(*index_NK.shape)
        grad_NK = grad_NK.to(tiles.wide)
        temperature = ctx.settings.temperature
        grad_NK, share_N = grad_NK / temperature, -grad_NK.sum(1) / temperature
        for words in tiles.words():
            gradients.begin(words)
            for tokens in tiles.tokens():
                logits_nc = tiles.logits(tokens, words)
                slope_nc = tiles.cap(logits_nc, with_slope=True)
                if temperature != 1:
                    logits_nc.div_(temperature)
                grad_nc = logits_nc.sub_(log_norm_N[tokens, None]).exp_().mul_(share_N[tokens, None])
                local_nK, is_inside_nK = _local(index_NK[tokens], words)
                grad_nc.scatter_add_(1, local_nK, grad_NK[tokens] * is_inside_nK)
                if slope_nc is not None:
                    grad_nc.mul_(slope_nc)
                gradients.add(grad_nc, tokens, words)
            gradients.finish(words)
        return gradients.result()


class _Tiles:
    """The logits of a head, one tile at a time; a tile lives until the next one is asked for."""

    def __init__(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        settings: HeadSettings,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.hidden_NH, self.weight_VH, self.bias_V = hidden_NH, weight_VH, bias_V
        self.settings = settings
        self.chunk_vocab = settings.chunk_vocab or _words_of_a_tile(hidden_NH)
        self.dtype = dtype or _compute_dtype(self.hidden_NH, self.weight_VH)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.num_tokens, self.num_words = self.hidden_NH.size(0), self.weight_VH.size(0)
        area = min(self.num_tokens, settings.chunk_tokens) * min(self.num_words, self.chunk_vocab)
        self._narrow = torch.empty(area, dtype=self.dtype, device=self.hidden_NH.device)
        self._wide = self._narrow if self.dtype == self.wide else self._narrow.to(self.wide)
        self._second: torch.Tensor | None = None
        self._words: slice | None = None
        self._weight_cH = self._bias_c = torch.empty(0)

    def words(self) -> Iterator[slice]:
        return _slices(self.num_words, self.chunk_vocab)

    def tokens(self) -> Iterator[slice]:
        return _slices(self.num_tokens, self.settings.chunk_tokens)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.wide, device=self.hidden_NH.device)

    def logits(self, tokens: slice, words: slice) -> torch.Tensor:
        """Logits of a tile in at least float32, rounded to the head's own precision as the head would."""
        if self._words != words:
            self._words, self._weight_cH = words, self.weight_VH[words].to(self.dtype)
            self._bias_c = self._bias_c if self.bias_V is None else self.bias_V[words].to(self.dtype)
        hidden_nH = self.hidden_NH[tokens].to(self.dtype)
        shape = (hidden_nH.size(0), self._weight_cH.size(0))
        tile_nc = self._narrow[: shape[0] * shape[1]].view(shape)
        if self.bias_V is None:
            torch.mm(hidden_nH, self._weight_cH.t(), out=tile_nc)
        else:
            torch.addmm(self._bias_c, hidden_nH, self._weight_cH.t(), out=tile_nc)
        if self._wide is self._narrow:
            return tile_nc
        return self._wide[: shape[0] * shape[1]].view(shape).copy_(tile_nc)

    def second(self, like_nc: torch.Tensor) -> torch.Tensor:
        """Another tile of the same shape, for what must stand beside the logits."""
        if self._second is None:
            self._second = torch.empty_like(self._wide)
        return self._second[: like_nc.numel()].view_as(like_nc)

    def cap(self, logits_nc: torch.Tensor, *, with_slope: bool = False) -> torch.Tensor | None:
        """Replace z by cap tanh(z / cap); the slope of that, 1 - tanh^2, where it is asked for."""
        cap = self.settings.softcap
        if cap is None:
            return None
        logits_nc.div_(cap).tanh_()
        slope_nc = torch.square(logits_nc, out=self.second(logits_nc)).neg_().add_(1) if with_slope else None
        logits_nc.mul_(cap)
        return slope_nc


class _Running:
    """Log-sum-exp, entropy sum, picks and top k of the words seen so far."""

    def __init__(self, tiles: _Tiles, index_NK: torch.Tensor, top_k: int, *, with_entropy: bool) -> None:
        num_tokens, self._tiles, self._index_NK = tiles.num_tokens, tiles, index_NK
        self._top_k, self._with_entropy = top_k, with_entropy
        self.maximum_N = tiles.zeros(num_tokens).fill_(torch.finfo(tiles.wide).min)
        self.total_N, self.weighted_N = tiles.zeros(num_tokens), tiles.zeros(num_tokens)
        self.picked_NK = tiles.zeros(*index_NK.shape)
        self.top_NK = tiles.zeros(num_tokens, top_k).fill_(-torch.inf)
        self.top_index_NK = torch.zeros_like(self.top_NK, dtype=torch.long)

    def pick(self, logits_nc: torch.Tensor, tokens: slice, words: slice) -> None:
        if self._index_NK.size(1):
            local_nK, is_inside_nK = _local(self._index_NK[tokens], words)
            picked_nK = self.picked_NK[tokens]
            picked_nK.copy_(torch.where(is_inside_nK, logits_nc.gather(1, local_nK), picked_nK))
        if self._top_k:
            best = logits_nc.topk(min(self._top_k, logits_nc.size(1)), dim=1)
            values = torch.cat([self.top_NK[tokens], best.values], dim=1)
            indices = torch.cat([self.top_index_NK[tokens], best.indices + words.start], dim=1)
            kept = values.topk(self._top_k, dim=1)
            self.top_NK[tokens] = kept.values
            self.top_index_NK[tokens] = indices.gather(1, kept.indices)

    def fold(self, logits_nc: torch.Tensor, tokens: slice) -> None:
        """Add a tile, which is overwritten. ``weighted`` is sum_v e_v (z_v - maximum)."""
        maximum_n, total_n, weighted_n = self.maximum_N[tokens], self.total_N[tokens], self.weighted_N[tokens]
        shift_n = maximum_n.clone()
        torch.maximum(maximum_n, logits_nc.amax(1), out=maximum_n)
        shift_n -= maximum_n
        decay_n = shift_n.exp()
        logits_nc.sub_(maximum_n[:, None])
        if self._with_entropy:
            exp_nc = torch.exp(logits_nc, out=self._tiles.second(logits_nc))
            weighted_n.add_(shift_n * total_n).mul_(decay_n)
            weighted_n += logits_nc.clamp_(min=_FAR_BELOW).mul_(exp_nc).sum(1)
        else:
            exp_nc = logits_nc.exp_()
        total_n.mul_(decay_n).add_(exp_nc.sum(1))


class _Gradients:
    """Gradients of the inputs that need one; the weight's goes into ``weight.grad`` where the caller wants it there."""

    def __init__(self, tiles: _Tiles, needs: tuple[bool, ...]) -> None:
        self._tiles, self._owns_weight = tiles, not tiles.settings.adds_to_weight_grad
        self._hidden = tiles.zeros(*tiles.hidden_NH.shape) if needs[0] else None
        self._bias = tiles.zeros(tiles.num_words) if needs[2] else None
        self._weight: torch.Tensor | None = None
        if (
            tiles.settings.adds_to_weight_grad
        ):  # looked up now: what was there in forward may have been set to None since
            if tiles.weight_VH.grad is None:
                tiles.weight_VH.grad = torch.zeros_like(tiles.weight_VH)
            self._weight = tiles.weight_VH.grad
        elif needs[1]:
            self._weight = torch.zeros_like(tiles.weight_VH)
        self._weight_part: torch.Tensor | None = None

    def begin(self, words: slice) -> None:
        self._weight_part = self._part(self._weight, words)

    def add(self, grad_nc: torch.Tensor, tokens: slice, words: slice) -> None:
        tiles = self._tiles
        if self._hidden is not None:
            _add_product(self._hidden[tokens], grad_nc, tiles.weight_VH[words], tiles.dtype)
        if self._weight_part is not None:
            _add_product(self._weight_part, grad_nc.t(), tiles.hidden_NH[tokens], tiles.dtype)
        if self._bias is not None:
            self._bias[words] += grad_nc.sum(0)

    def finish(self, words: slice) -> None:
        whole, part = self._weight, self._weight_part
        if whole is not None and part is not None and part.dtype != whole.dtype:
            whole[words] += part

    def result(self) -> tuple[torch.Tensor | None, ...]:
        tiles = self._tiles
        return (
            None if self._hidden is None else self._hidden.to(tiles.hidden_NH.dtype),
            self._weight if self._owns_weight else None,
            None if self._bias is None or tiles.bias_V is None else self._bias.to(tiles.bias_V.dtype),
            *[None] * 4,
        )

    def _part(self, whole: torch.Tensor | None, words: slice) -> torch.Tensor | None:
        """Where a tile's gradient is summed: the result itself, or float32 beside a narrower one."""
        if whole is None:
            return None
        part = whole[words]
        return part if whole.dtype == self._tiles.wide else torch.zeros_like(part, dtype=self._tiles.wide)


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
