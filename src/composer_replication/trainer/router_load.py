"""How evenly tokens fall on experts: a router that sends all of them to a few has collapsed, and no loss says so.

Letters: L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from composer_replication.trainer.prefix_support import inner_model

_RECORDED = "router_logits"
"""transformers' name for what a router gives: its logits, the weights of the chosen experts, and which they are."""


class RouterLoad:
    """A mixin of the trainer: counts, over the policy's forwards of a step, how often each expert was chosen.

    Every token that a forward reads counts, prompts and padding too.
    """

    accelerator: Any
    _metrics: Any
    _chosen_LE: torch.Tensor | None = None

    @contextmanager
    def _counting_experts(self, model: nn.Module) -> Iterator[None]:
        """Inside, each choice of a router of ``model`` is counted."""
        chosen: dict[int, torch.Tensor] = {}

        def count(router: int, output: Any) -> None:
            chosen[router] = chosen_of(output) + chosen.get(router, 0)

        routers = routers_of(model)
        handles = [
            router.register_forward_hook(lambda _router, _inputs, output, at=number: count(at, output))
            for number, router in enumerate(routers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if (
            routers
            and len(chosen) == len(routers)
            and len({counts.numel() for counts in chosen.values()}) == 1
        ):
            chosen_LE = torch.stack([chosen[number] for number in range(len(routers))])
            self._chosen_LE = chosen_LE if self._chosen_LE is None else self._chosen_LE + chosen_LE

    def _log_router_load(self) -> None:
        """At the last micro-step of a step: the metric ``router/max_load``, over all processes.

        Nothing where layers have different numbers of experts, or one of them did not run: the same on each process.
        """
        if self._chosen_LE is None or not self.accelerator.sync_gradients:
            return
        chosen_LE, self._chosen_LE = self._chosen_LE, None
        chosen_LE = self.accelerator.reduce(chosen_LE, reduction="sum")
        self._metrics["train"]["router/max_load"].append(max_load(chosen_LE))


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of a model, in the order of its layers; none where transformers does not name them."""
    recorders = getattr(inner_model(model), "_can_record_outputs", None) or {}
    recorder = recorders.get(_RECORDED)
    kind = getattr(recorder, "target_class", None)
    if kind is None or getattr(recorder, "index", None) != 0:
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def chosen_of(output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """How often each expert is among those that a router chose: (E,)."""
    logits_NE, _, index_NK = output
    return torch.bincount(index_NK.detach().flatten(), minlength=logits_NE.size(-1))


def max_load(chosen_LE: torch.Tensor) -> float:
    """The largest E p of any layer, p being the share of an expert in its layer's choices: 1 is even, E is one expert alone."""
    share_LE = chosen_LE.double() / chosen_LE.sum(-1, keepdim=True)
    return float(share_LE.max()) * chosen_LE.size(-1)
