"""Which experts a generation engine chose for each token: the column of a rollout function, checked and padded.

Letters: B rows, P prompt columns, T completion columns, L routers of the model, K experts a token, E experts of a router.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from trl.trainer.utils import pad

from composer_replication.errors import InputError
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


COLUMN = "routed_experts"
"""Under this name a rollout function returns, for each row, an array (tokens, layers, K) of expert numbers, or None."""
UNKNOWN = -1
"""In the place of K experts: there the router chooses itself."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Routers:
    """What the routers of a model choose from.

    Attributes:
        num_experts: E of each router.
        top_k: K.
        layers: the layer in which each router stands; empty where their names do not say so.
        num_layers: all layers, those without experts too.
    """

    num_experts: tuple[int, ...]
    top_k: int
    layers: tuple[int, ...]
    num_layers: int

    @classmethod
    def of(cls, model: nn.Module) -> Routers:
        """Read them off a model.

        Raises:
            InputError: there is none (CR0777), or they do not say how many experts they choose from (CR0757).
        """
        inner = inner_model(model)
        routers = routers_of(model)
        if not routers:
            raise refusal(f"transformers names no router of {type(inner).__name__}")
        sizes = [(_size(each, "num_experts"), _size(each, "top_k", "top_k_experts")) for each in routers]
        if not all(num_experts and top_k for num_experts, top_k in sizes):
            raise unknown_router(routers[0])
        top_ks = {top_k for _, top_k in sizes}
        if len(top_ks) > 1:
            raise refusal(f"the routers of {type(inner).__name__} choose {sorted(top_ks)} experts a token")
        names = {id(module): name for name, module in model.named_modules()}
        found = [_LAYER.search(names[id(router)]) for router in routers]
        layers = tuple(int(match.group(1)) for match in found if match)
        return cls(
            tuple(num_experts for num_experts, _ in sizes),
            top_ks.pop(),
            layers if len(set(layers)) == len(routers) else (),
            int(inner.config.get_text_config().num_hidden_layers),
        )


def _size(router: nn.Module, *names: str) -> int:
    places = (router, getattr(router, "config", None))
    found = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in found if isinstance(value, int)), 0)


def refusal(problem: str) -> InputError:
    """The error for a column that cannot be followed."""
    return InputError(
        "CR0777",
        f"routed_experts cannot be replayed: {problem}.",
        where="the rollout function's routed_experts",
        fix="give, for each row, (tokens, layers, experts a token) over prompt_ids and completion_ids, "
        "-1 where the routing is unknown.",
    )


def unknown_router(router: nn.Module) -> InputError:
    """The error for a router that makes its choice in another way."""
    return InputError(
        "CR0757",
        f"{type(router).__name__} does not choose its experts by one top-k over all of them, so its routing cannot be replayed.",
        where="the rollout function's routed_experts",
        fix="leave routed_experts out for this model.",
    )


def laid_out(
    routing: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    routers: Routers,
    *,
    pad_to_multiple_of: int | None = None,
) -> torch.Tensor:
    """The rows in the columns of TRL's batch: (B, P + T, L, K), int16.

    A row has P + T places, or P + T - 1: engines do not read the last token that they sampled, and what they give for it,
    if anything, is not looked at. Its layers are those with experts, or all layers of the model, of which those without
    experts are not looked at. Prompts are padded on the left, completions on the right, with -1.

    Args:
        routing: for each row an array, a tensor or nested lists; None for a row of which nothing is known.
        prompt_ids: before padding.
        completion_ids: before padding.
        routers: of the model that is trained.
        pad_to_multiple_of: TRL's.

    Raises:
        InputError: CR0777.
    """
    if len(routing) != len(completion_ids):
        raise refusal(f"there are {len(routing)} arrays for {len(completion_ids)} completions")
    prompts, completions = [], []
    for row, (choices, prompt, completion) in enumerate(
        zip(routing, prompt_ids, completion_ids, strict=True)
    ):
        whole_SLK = _checked(choices, row, len(prompt) + len(completion), routers)
        prompts.append(whole_SLK[: len(prompt)])
        completions.append(whole_SLK[len(prompt) :])
    parts = (
        pad(rows, padding_value=UNKNOWN, padding_side=side, pad_to_multiple_of=pad_to_multiple_of)
        for rows, side in ((prompts, "left"), (completions, "right"))
    )
    return torch.cat(list(parts), dim=1)


def _checked(choices: Any, row: int, num_tokens: int, routers: Routers) -> torch.Tensor:
    """One row (num_tokens, L, K), its last token unknown."""
    num_routers = len(routers.num_experts)
    laid_SLK = np.full((num_tokens, num_routers, routers.top_k), UNKNOWN, dtype=np.int16)
    if choices is not None:
        array = _as_array(choices, row)
        if problem := _shape_problem(array, num_tokens, routers):
            raise refusal(f"row {row} {problem}")
        array = array[: num_tokens - 1]
        if array.shape[1] != num_routers:
            array = array[:, list(routers.layers)]
        if problem := _choice_problem(array, routers):
            raise refusal(f"row {row} {problem}")
        laid_SLK[: num_tokens - 1] = array
    return torch.from_numpy(laid_SLK)


def _as_array(choices: Any, row: int) -> Any:
    if isinstance(choices, torch.Tensor):
        choices = choices.detach().cpu()
    try:
        array = np.asarray(choices)
    except ValueError:  # nested lists of different lengths
        raise refusal(f"row {row} is no array: its lists have different lengths") from None
    if array.dtype.kind not in "iu":
        raise refusal(f"row {row} has other things than whole numbers ({array.dtype})")
    return array


def _shape_problem(array: Any, num_tokens: int, routers: Routers) -> str:
    num_routers = len(routers.num_experts)
    depths = {num_routers, routers.num_layers} if routers.layers else {num_routers}
    if array.ndim != 3:
        return f"has {array.ndim} dimensions and not 3 (tokens, layers, experts a token)"
    if array.shape[0] not in (num_tokens - 1, num_tokens):
        return f"has {array.shape[0]} tokens, and its prompt and completion have {num_tokens}"
    if array.shape[1] not in depths:
        return f"has {array.shape[1]} layers, and the model {' or '.join(map(str, sorted(depths)))}"
    if array.shape[2] != routers.top_k:
        return f"has {array.shape[2]} experts a token, and the model {routers.top_k}"
    return ""


def _choice_problem(array_SLK: Any, routers: Routers) -> str:
    """What is wrong with one of the choices; each is -1 throughout or K different experts."""
    is_unknown_SL = (array_SLK == UNKNOWN).all(-1)
    limit_LK = np.asarray(routers.num_experts)[:, None]
    outside_SL = ((array_SLK < 0) | (array_SLK >= limit_LK)).any(-1) & ~is_unknown_SL
    if outside_SL.any():
        token, router = (int(place) for place in np.argwhere(outside_SL)[0])
        found = array_SLK[token, router].tolist()
        return f"has the experts {found} at token {token}, and the router has {routers.num_experts[router]} experts"
    ordered_SLK = np.sort(array_SLK, axis=-1)
    twice_SL = (ordered_SLK[..., 1:] == ordered_SLK[..., :-1]).any(-1) & ~is_unknown_SL
    if twice_SL.any():
        token, router = (int(place) for place in np.argwhere(twice_SL)[0])
        return f"has an expert twice at token {token}: {array_SLK[token, router].tolist()}"
    return ""
