"""The losses of the GRPO family written down once more, row by row in float64, from the papers and nothing of ours.

A row is forwarded alone, without padding. Lengths come from the first end token, advantages from the rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Method:
    """One method; ``ratio`` is token or sequence, ``average`` how tokens are averaged."""

    ratio: str = "token"
    average: str = "rows"
    is_scaled: bool = True
    clip: tuple[float, float] | None = (0.2, 0.2)
    largest_ratio: float | None = None
    drops_truncated: bool = False
    overlong: tuple[int, int] | None = None
    kl_weight: float = 0.0
    effort: tuple[float, float, float] | None = None


METHODS = {
    "grpo": Method(),
    "dr_grpo": Method(average="constant", is_scaled=False),
    "dapo": Method(average="tokens", clip=(0.2, 0.28), drops_truncated=True, overlong=(8, 2)),
    "gspo": Method(ratio="sequence", clip=(3e-4, 4e-4)),
    "cispo": Method(average="tokens", clip=None, largest_ratio=5.0),
    "composer": Method(average="constant", is_scaled=False, kl_weight=0.3, effort=(0.05, 0.001, 2.0)),
}
MAX_LENGTH = 8


@dataclass(frozen=True)
class Row:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    is_truncated: bool


def logps(model: Any, row: Row) -> torch.Tensor:
    ids = torch.tensor([[*row.prompt, *row.answer]])
    logits = model(input_ids=ids).logits[0].double()
    table = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    first = len(row.prompt) - 1
    return torch.stack([table[first + t, token] for t, token in enumerate(row.answer)])


def advantages(
    method: Method, rows: Sequence[Row], reward: Callable[[Sequence[int]], float], kl_B: Sequence[float]
) -> list[float]:
    values = []
    for row, kl in zip(rows, kl_B, strict=True):
        value = reward(row.answer)
        if method.overlong is not None:
            longest, cache = method.overlong
            value += min(0.0, (longest - cache - len(row.answer)) / cache)
        value -= method.kl_weight * kl
        if method.effort is not None:
            weight, k, q = method.effort
            units = 1.0 * len(row.answer) + 20.0 * 1  # its tokens, and one turn
            value -= weight * ((1 + k * units) ** (1 - q) - 1) / (k * (1 - q))
        values.append(value)
    result = []
    for row, value in zip(rows, values, strict=True):
        group = [v for r, v in zip(rows, values, strict=True) if r.prompt == row.prompt]
        mean = sum(group) / len(group)
        spread = (sum((v - mean) ** 2 for v in group) / (len(group) - 1)) ** 0.5
        result.append((value - mean) / (spread + 1e-4) if method.is_scaled else value - mean)
    return result


def loss(
    method: Method,
    rows: Sequence[Row],
    reward: Callable[[Sequence[int]], float],
    *,
    now: Any,
    old: Any,
    reference: Any,
) -> torch.Tensor:
    """The loss of one batch under the weights ``now``, sampled under ``old``."""
    new_logps = [logps(now, row) for row in rows]
    with torch.no_grad():
        old_logps = [logps(old, row) for row in rows]
        kl_B = [float((o - logps(reference, row)).sum()) for o, row in zip(old_logps, rows, strict=True)]
    terms: list[torch.Tensor] = []
    advantage_B = advantages(method, rows, reward, kl_B)
    for row, new, before, advantage in zip(rows, new_logps, old_logps, advantage_B, strict=True):
        if method.drops_truncated and row.is_truncated:
            terms.append(torch.zeros(0, dtype=torch.float64))
            continue
        log_ratio = new - before
        if method.ratio == "sequence":
            log_ratio = log_ratio.mean().expand(len(row.answer))
        ratio = log_ratio.exp()
        if method.largest_ratio is not None:
            terms.append(-ratio.detach().clamp(max=method.largest_ratio) * advantage * new)
            continue
        assert method.clip is not None
        low, high = method.clip
        clipped = ratio.clamp(1 - low, 1 + high)
        terms.append(-torch.minimum(ratio * advantage, clipped * advantage))
    if method.average == "rows":
        return sum(term.mean() for term in terms) / len(terms)  # type: ignore[return-value]
    total = torch.cat(terms).sum()
    num_tokens = sum(len(term) for term in terms)
    return total / (num_tokens if method.average == "tokens" else len(rows) * MAX_LENGTH)
