"""Log-probabilities of a linear head without its logits.

The logits of 4,096 tokens over 151,665 words take 2.5 GB in float32, and their softmax and its gradient as
much again each. Here they exist as one tile of ``chunk_tokens`` by ``chunk_vocab`` (8 MB), in forward and
again in backward. Results equal the plain head up to rounding, for values and gradients.

All functions take the hidden states of the positions to score as a flat list: a caller selects them, so
that prompts and padding never meet the head. A position's hidden state predicts the token after it. A model
that scales its logits by a constant is served by scaling its hidden states.

Precision: logits are rounded to the precision of the head (or of autocast) as the head itself rounds them;
everything after that, gradients included, is summed in float32 (float64 for float64).

Letters: N tokens in a flat list, H hidden size, V vocabulary, R rank, K tokens picked for each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import torch

from composer_replication.errors import InputError
from composer_replication.losses.argument_checks import require, require_positive
from composer_replication.losses.head_tiles import HeadTiles, TileSettings


class LowRankUpdate(NamedTuple):
    """A LoRA of the head: weight + scale up @ down, never multiplied out. LoRA dropout must be 0."""

    down_RH: torch.Tensor
    up_VR: torch.Tensor
    scale: float


class HeadSettings(TypedDict, total=False):
    """Keywords that every function here takes."""

    bias_V: torch.Tensor | None
    """Added to the logits; -inf closes a word."""
    low_rank: LowRankUpdate | None
    """LoRA of the head; ``weight_VH`` is then the frozen part."""
    temperature: float
    """Divides the logits after the soft cap; above 0; default 1."""
    softcap: float | None
    """cap tanh(z / cap) as in Gemma; above 0; default None."""
    chunk_tokens: int
    """Tokens of a tile; default 256."""
    chunk_vocab: int
    """Words of a tile; default 8192: with 256 tokens 8 MB, which stays in a CPU's cache."""
    weight_grad_VH: torch.Tensor | None
    """A buffer, usually ``weight.grad``: the gradient of the weight is added to it in place during backward,
    and autograd gets none. It saves a tensor of V H numbers for each backward pass. Only where nothing else
    waits for that gradient: DDP, FSDP, DeepSpeed and gradient hooks do."""


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
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, target_N: torch.Tensor, **settings: Unpack[HeadSettings]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target token, and the entropy at its position.

    logp_n = z_n[y_n] - log sum_v exp z_nv, H_n = -sum_v p_nv log p_nv, in nats;
    z = softcap(hidden weight' + bias) / temperature.

    Args:
        hidden_NH: hidden states; carries gradient.
        weight_VH: weight of the head; carries gradient. A DTensor is gathered first.
        target_N: token ids.
        settings: see ``HeadSettings``.

    Returns:
        logp (N,) with gradient for hidden states, weight, bias and low-rank factors; entropy (N,) without.

    Raises:
        UsageError: CR0781, a temperature, soft cap or chunk that is not above 0.
        InputError: CR0782, shapes that do not fit; CR0784, a token id outside the vocabulary.
    """
    _require_flat(target_N, hidden_NH, 1, where="sampled_logp")
    logp_NK, _, _, entropy_N = _sweep(
        hidden_NH, weight_VH, target_N[:, None], settings, where="sampled_logp", with_entropy=True
    )
    return logp_NK[:, 0], entropy_N


def top_k_logp(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, *, k: int, **settings: Unpack[HeadSettings]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the k likeliest words at each position, falling, and their ids; no gradient.

    Raises:
        UsageError: CR0781, k outside 1 to V, or as in ``sampled_logp``.
        InputError: CR0782, shapes that do not fit.
    """
    with torch.no_grad():
        logp_NK, index_NK, _, _ = _sweep(hidden_NH, weight_VH, None, settings, where="top_k_logp", top_k=k)
    return logp_NK, index_NK


def logp_at(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, index_NK: torch.Tensor, **settings: Unpack[HeadSettings]
) -> torch.Tensor:
    """Log-probabilities (over the whole vocabulary) of the given words at each position; with gradient.

    Raises:
        UsageError: CR0781, as in ``sampled_logp``.
        InputError: CR0782, shapes that do not fit; CR0784, a token id outside the vocabulary.
    """
    _require_flat(index_NK, hidden_NH, 2, where="logp_at")
    return _sweep(hidden_NH, weight_VH, index_NK, settings, where="logp_at")[0]


def log_sum_exp(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, **settings: Unpack[HeadSettings]
) -> torch.Tensor:
    """log sum_v exp z_nv at each position, shape (N,); with gradient.

    Raises:
        UsageError: CR0781, as in ``sampled_logp``.
        InputError: CR0782, shapes that do not fit.
    """
    return _sweep(hidden_NH, weight_VH, None, settings, where="log_sum_exp")[2]


def sampled_and_top_k_logp(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_N: torch.Tensor,
    *,
    k: int,
    **settings: Unpack[HeadSettings],
) -> HeadScores:
    """What ``sampled_logp`` and ``top_k_logp`` give, in one pass, the top k with gradient.

    For the student of a distillation: one forward and one backward pass over the head serve its sampled
    tokens (importance weights) and its support.

    Raises:
        UsageError: CR0781, k outside 1 to V, or as in ``sampled_logp``.
        InputError: CR0782, shapes that do not fit; CR0784, a token id outside the vocabulary.
    """
    where = "sampled_and_top_k_logp"
    _require_flat(target_N, hidden_NH, 1, where=where)
    logp_NK, index_NK, _, entropy_N = _sweep(
        hidden_NH, weight_VH, target_N[:, None], settings, where=where, top_k=k, with_entropy=True
    )
    return HeadScores(
        logp_N=logp_NK[:, 0], entropy_N=entropy_N, top_logp_NK=logp_NK[:, 1:], top_index_NK=index_NK[:, 1:]
    )


def _sweep(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    index_NK: torch.Tensor | None,
    settings: HeadSettings,
    *,
    where: str,
    top_k: int | None = None,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tile_settings = TileSettings(
        temperature=settings.get("temperature", 1.0),
        softcap=settings.get("softcap"),
        chunk_tokens=settings.get("chunk_tokens", 256),
        chunk_vocab=settings.get("chunk_vocab", 8192),
        top_k=top_k or 0,
        with_entropy=with_entropy,
    )
    _check_settings(tile_settings, where=where)
    bias_V, low_rank, buffer_VH = (
        settings.get("bias_V"),
        settings.get("low_rank"),
        settings.get("weight_grad_VH"),
    )
    weight_VH, bias_V = _gathered(weight_VH), None if bias_V is None else _gathered(bias_V)
    _check_shapes(hidden_NH, weight_VH, bias_V, low_rank, buffer_VH, where=where)
    num_words = weight_VH.size(0)
    require(
        top_k is None or 1 <= top_k <= num_words,
        f"k is {top_k!r} and must be between 1 and the vocabulary's {num_words}.",
        where=where,
    )
    if index_NK is None:
        index_NK = torch.empty(hidden_NH.size(0), 0, dtype=torch.long, device=hidden_NH.device)
    _check_index(index_NK, num_words, where=where)
    low_NR = up_VR = None
    if low_rank is not None:
        # in the adapter's own precision, which is often float32 beside a half-precision model
        low_NR = low_rank.scale * (hidden_NH.to(low_rank.down_RH.dtype) @ low_rank.down_RH.t())
        up_VR = low_rank.up_VR
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = HeadTiles.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden_NH, weight_VH, bias_V, low_NR, up_VR, index_NK, buffer_VH, tile_settings
    )
    return result


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor (FSDP2); gathered once, not once for each tile."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    whole: torch.Tensor = gather()
    return whole


def _check_settings(settings: TileSettings, *, where: str) -> None:
    require_positive(settings.temperature, "temperature", where=where)
    if settings.softcap is not None:
        require_positive(settings.softcap, "softcap", where=where)
    for name, size in (("chunk_tokens", settings.chunk_tokens), ("chunk_vocab", settings.chunk_vocab)):
        require(size >= 1, f"{name} is {size!r} and must be at least 1.", where=where)


def _check_shapes(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    low_rank: LowRankUpdate | None,
    buffer_VH: torch.Tensor | None,
    *,
    where: str,
) -> None:
    shapes = {"hidden_NH": hidden_NH, "weight_VH": weight_VH}
    fits = hidden_NH.dim() == weight_VH.dim() == 2 and hidden_NH.size(1) == weight_VH.size(1) > 0
    fits = fits and weight_VH.size(0) > 0
    if bias_V is not None:
        shapes["bias_V"] = bias_V
        fits = fits and bias_V.shape == weight_VH.shape[:1]
    if low_rank is not None:
        shapes |= {"down_RH": low_rank.down_RH, "up_VR": low_rank.up_VR}
        fits = fits and low_rank.up_VR.shape == (weight_VH.size(0), low_rank.down_RH.size(0))
        fits = fits and low_rank.down_RH.shape[1:] == hidden_NH.shape[1:]
    if buffer_VH is not None:
        shapes["weight_grad_VH"] = buffer_VH
        fits = fits and buffer_VH.shape == weight_VH.shape
    if not fits:
        found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shapes.items())
        raise InputError(
            "CR0782",
            f"hidden states and head do not fit together: {found}.",
            where=where,
            fix="pass hidden states as (N, H) and the head's weight as (V, H), as torch.nn.Linear has it.",
        )
    require(
        buffer_VH is None or weight_VH.requires_grad,
        "weight_grad_VH was given for a weight that takes no gradient.",
        where=where,
        fix="leave it out where the head is frozen.",
    )


def _require_flat(index: torch.Tensor, hidden_NH: torch.Tensor, dims: int, *, where: str) -> None:
    if index.dim() != dims or index.size(0) != hidden_NH.size(0):
        raise InputError(
            "CR0782",
            f"token ids of shape {tuple(index.shape)} do not fit hidden states of shape {tuple(hidden_NH.shape)}.",
            where=where,
            fix="select the positions first: one row of hidden states for each row of ids.",
        )


def _check_index(index_NK: torch.Tensor, num_words: int, *, where: str) -> None:
    """A wrong id lies in no tile, and its log-probability would be wrong without a word."""
    is_wrong_NK = (index_NK < 0) | (index_NK >= num_words)
    if bool(is_wrong_NK.any()):
        row, column = is_wrong_NK.nonzero()[0].tolist()
        raise InputError(
            "CR0784",
            f"token id {int(index_NK[row, column])} of position {row} is not among {num_words} words.",
            where=where,
            fix="drop padding and ignored labels (-100) before the head.",
        )
