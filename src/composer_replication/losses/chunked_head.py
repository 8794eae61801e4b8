"""Log-probabilities of a linear head without its logits.

The logits of 4,096 tokens over 151,665 words take 2.5 GB in float32, and their softmax and its gradient as
much again each. Here they exist as one tile of ``chunk_tokens`` by ``chunk_vocab`` (8 MB), in forward and
again in backward. Results equal the plain head up to rounding, for values and gradients.

All functions take the hidden states of the positions to score as a flat list: a caller selects them, so
that prompts and padding never meet the head. A position's hidden state predicts the token after it. A model
that scales its logits by a constant is served by scaling its hidden states.

Precision: logits are rounded to the precision of the head (or of autocast) as the head itself rounds them;
everything after that, gradients included, is summed in float32 (float64 for float64).

Letters: N tokens in a flat list, H hidden size, V vocabulary, K tokens picked for each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

from composer_replication.errors import InputError
from composer_replication.losses.argument_checks import require, require_positive
from composer_replication.losses.gathered_weight import gathered, gathered_again_for_backward
from composer_replication.losses.head_tiles import HeadTiles, TileSettings

if TYPE_CHECKING:
    import torch


class HeadSettings(TypedDict, total=False):
    """Keywords that every function here takes."""

    bias_V: torch.Tensor | None
    """Added to the logits; -inf closes a word."""
    temperature: float
    """Divides the logits after the soft cap; above 0; default 1."""
    softcap: float | None
    """cap tanh(z / cap) as in Gemma; above 0; default None."""
    chunk_tokens: int
    """Tokens of a tile; default 256."""
    chunk_vocab: int | None
    """Words of a tile; default None: 8192 on CPU (with 256 tokens 8 MiB, near what its caches hold), fewer for
    half precision and wide hidden states, whose slice of the weight is widened; 32768 on an accelerator."""
    adds_to_weight_grad: bool
    """During backward the gradient of the weight is added to ``weight.grad`` in place (made where there is none), and
    autograd gets none; default False. It saves a tensor of V H numbers for each backward pass. The weight is then a leaf
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
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, target_N: torch.Tensor, **settings: Unpack[HeadSettings]
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
        UsageError: CR0722, a temperature, soft cap or chunk that is not above 0.
        InputError: CR0782, shapes that do not fit; CR0782, a token id outside the vocabulary.
    """
    _require_flat(target_N, hidden_NH, 1, where="sampled_logp")
    logp_NK, _, _, entropy_N = _sweep(
        hidden_NH, weight_VH, target_N[:, None], settings, where="sampled_logp", with_entropy=True
    )
    return logp_NK[:, 0], entropy_N


def logp_at(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, index_NK: torch.Tensor, **settings: Unpack[HeadSettings]
) -> torch.Tensor:
    """Log-probabilities (over the whole vocabulary) of the given words at each position; with gradient.

    Raises:
        UsageError: CR0722, as in ``sampled_logp``.
        InputError: CR0782, shapes that do not fit; CR0782, a token id outside the vocabulary.
    """
    _require_flat(index_NK, hidden_NH, 2, where="logp_at")
    return _sweep(hidden_NH, weight_VH, index_NK, settings, where="logp_at")[0]


def sampled_and_top_k_logp(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_N: torch.Tensor,
    *,
    k: int,
    **settings: Unpack[HeadSettings],
) -> HeadScores:
    """What ``sampled_logp`` gives, and the k likeliest words, in one pass and with gradient.

    For the student of a distillation: one forward and one backward pass over the head serve its sampled
    tokens (importance weights) and its support.

    Raises:
        UsageError: CR0722, k outside 1 to V, or as in ``sampled_logp``.
        InputError: CR0782, shapes that do not fit; CR0782, a token id outside the vocabulary.
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
    index_NK: torch.Tensor,
    settings: HeadSettings,
    *,
    where: str,
    top_k: int | None = None,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_words_at_once = settings.get("chunk_vocab")
    if num_words_at_once is None:
        num_words_at_once = _words_of_a_tile(hidden_NH)
    tile_settings = TileSettings(
        temperature=settings.get("temperature", 1.0),
        softcap=settings.get("softcap"),
        chunk_tokens=settings.get("chunk_tokens", 256),
        chunk_vocab=num_words_at_once,
        top_k=top_k or 0,
        with_entropy=with_entropy,
    )
    _check_settings(tile_settings, where=where)
    bias_V, adds_to_grad = settings.get("bias_V"), settings.get("adds_to_weight_grad", False)
    whole_VH, bias_V = gathered(weight_VH), None if bias_V is None else gathered(bias_V)
    _check_shapes(hidden_NH, whole_VH, bias_V, where=where)
    require(
        not adds_to_grad or (whole_VH.is_leaf and whole_VH.requires_grad),
        "adds_to_weight_grad is set for a weight that takes no gradient, or is no leaf (a sharded one is not).",
        where=where,
        fix="leave it out where the head is frozen, sharded or computed.",
    )
    num_words = weight_VH.size(0)
    require(
        top_k is None or 1 <= top_k <= num_words,
        f"k is {top_k!r} and must be between 1 and the vocabulary's {num_words}.",
        where=where,
    )
    _check_index(index_NK, num_words, where=where)
    with gathered_again_for_backward(weight_VH, whole_VH):
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = HeadTiles.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            hidden_NH, whole_VH, bias_V, index_NK, adds_to_grad, tile_settings
        )
    return result


def _words_of_a_tile(hidden_NH: torch.Tensor) -> int:
    if hidden_NH.device.type != "cpu":
        return 32768  # launches cost more than memory there
    if hidden_NH.element_size() > 2 or hidden_NH.dim() < 2:
        return 8192
    return min(8192, max(1024, 2**21 // max(1, hidden_NH.size(1))))  # a float32 slice of the weight: 8 MiB


def _check_settings(settings: TileSettings, *, where: str) -> None:
    require_positive(settings.temperature, "temperature", where=where)
    if settings.softcap is not None:
        require_positive(settings.softcap, "softcap", where=where)
    for name, size in (("chunk_tokens", settings.chunk_tokens), ("chunk_vocab", settings.chunk_vocab)):
        require(size >= 1, f"{name} is {size!r} and must be at least 1.", where=where)


def _check_shapes(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, *, where: str
) -> None:
    shapes = {"hidden_NH": hidden_NH, "weight_VH": weight_VH}
    fits = hidden_NH.dim() == weight_VH.dim() == 2 and hidden_NH.size(1) == weight_VH.size(1) > 0
    fits = fits and weight_VH.size(0) > 0
    if bias_V is not None:
        shapes["bias_V"] = bias_V
        fits = fits and bias_V.shape == weight_VH.shape[:1]
    if not fits:
        found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shapes.items())
        raise InputError(
            "CR0782",
            f"hidden states and head do not fit together: {found}.",
            where=where,
            fix="pass hidden states as (N, H) and the head's weight as (V, H), as torch.nn.Linear has it.",
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
            "CR0782",
            f"token id {int(index_NK[row, column])} of position {row} is not among {num_words} words.",
            where=where,
            fix="drop padding and ignored labels (-100) before the head.",
        )
