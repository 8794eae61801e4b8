"""Terms of the reward that policy-gradient training folds in."""

from __future__ import annotations

import torch


def effort_cost(effort_B: torch.Tensor, *, k: float, q: float) -> torch.Tensor:
    if q == 1.0:
        return torch.log1p(k * effort_B) / k
    return torch.expm1((1 - q) * torch.log1p(k * effort_B)) / (k * (1 - q))


def centre_in_group(values_N: torch.Tensor, group_size: int, is_counted_N: torch.Tensor) -> torch.Tensor:
    values_KG = values_N.view(-1, group_size)
    counted_KG = is_counted_N.view(-1, group_size).to(values_N.dtype)
    mean_K1 = (values_KG * counted_KG).sum(-1, keepdim=True) / counted_KG.sum(-1, keepdim=True).clamp(min=1)
    return ((values_KG - mean_K1) * counted_KG).view(-1)
