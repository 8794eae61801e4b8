"""The outer step of DiLoCo (2311.08105), in fragments (2501.18512): pure numbers, no network.

    Delta_i = theta_outer - theta_i                      what replica i learned since the last step (fp32)
    sent_i  = Q(Delta_i + e_i),  e_i = Delta_i + e_i - sent_i          error feedback
    g       = sum_i tokens_i sent_i / sum_i tokens_i     a mean over tokens, in the order of the replicas' numbers
    b       = momentum b + g                             Nesterov: theta_outer -= lr (g + momentum b)
    theta_i = theta_outer + (theta_i - theta_i when it was sent)       what was trained while the sum was under way stays

Every replica takes the same sums in the same order, so that ``theta_outer`` and ``b`` are equal bit for bit on all
of them, which ``fingerprint`` shows. The live weights are equal only for the fragment just merged, without delay.
Defaults of the paper: lr 0.7, momentum 0.9. The outer weights stay in float32 in the processor's memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from composer_replication.config import ReplicasSection
from composer_replication.replicas.outer_precision import decode, encode
from composer_replication.replicas.replica_errors import damaged
from composer_replication.replicas.rounds import Contribution

Named = tuple[str, torch.nn.Parameter]


class Fragment:
    """Part of the weights: their outer value, the outer optimiser's momentum and what rounding has left."""

    outer_lr, outer_momentum = 0.7, 0.9

    def __init__(self, parameters: Sequence[Named], options: ReplicasSection) -> None:
        self.parameters = list(parameters)
        self._options = options
        self.outer = _flat(self.parameters)
        self.momentum = torch.zeros_like(self.outer)
        self._left = torch.zeros_like(self.outer)
        # the weights when sent; what is left once merged
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None

    def offer(self) -> bytes:
        """What this replica learned since the last merge, as bytes; refused where it is not finite (CR1107)."""
        live = _flat(self.parameters)
        wanted = self.outer - live + self._left
        if not bool(torch.isfinite(wanted).all()):
            raise damaged("this replica's weights are not finite")
        payload = encode(wanted, self._options.precision)
        self._sent = (live, wanted - decode(payload, wanted.numel(), self._options.precision))
        return payload

    def merge(
        self, contributions: Iterable[Contribution], *, is_included: bool, is_last: bool = False
    ) -> tuple[float, float]:
        """Take the outer step; the live weights follow. ``is_last``: the plain mean, since momentum would run on after the training.

        Contributions without tokens count nothing. Where this replica's newest offer is not among them its work is dropped.
        Returns how far the replicas' updates lie from their mean, in lengths of that mean (0: all alike), and that length.
        """
        ordered = sorted((c for c in contributions if c.tokens > 0), key=lambda c: c.replica)
        total = sum(c.tokens for c in ordered)
        mean, square = torch.zeros_like(self.outer), 0.0
        for contribution in ordered:
            update = decode(contribution.payload, mean.numel(), self._options.precision)
            share = contribution.tokens / total
            mean.add_(update, alpha=share)
            square += share * float(update.square().sum(dtype=torch.float64))
        if ordered:  # as torch.optim.SGD(nesterov=True), whose momentum begins as the first gradient
            lr, decay = (1.0, 0.0) if is_last else (self.outer_lr, self.outer_momentum)
            self.momentum.mul_(decay).add_(mean)
            self.outer.sub_(mean.add(self.momentum, alpha=decay), alpha=lr)
        self._follow(is_included=is_included)
        norm = math.sqrt(float(mean.square().sum(dtype=torch.float64)))
        spread = math.sqrt(max(square - norm * norm, 0.0))
        return (spread / norm if norm else 0.0), norm

    def take_outer(self) -> None:
        """The live weights become the outer ones; what was not sent is dropped."""
        self._sent = None
        _write(self.parameters, self.outer)

    def load(self, outer: torch.Tensor, momentum: torch.Tensor) -> None:
        """Take over both from elsewhere; what rounding has left is dropped."""
        self.outer.copy_(outer)
        self.momentum.copy_(momentum)
        self._left.zero_()
        self.take_outer()

    def _follow(self, *, is_included: bool) -> None:
        sent, self._sent = self._sent, None
        if sent is None or not is_included:
            _write(self.parameters, self.outer)
            return
        live_when_sent, self._left = sent
        trained_since = _flat(self.parameters) - live_when_sent
        _write(self.parameters, self.outer + trained_since if trained_since.any() else self.outer)


class OuterState:
    """The trainable parameters of a model in fragments, contiguous parts of about equal size; tied ones count once."""

    def __init__(self, model: torch.nn.Module, options: ReplicasSection) -> None:
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        parts = divided(trained, options.fragments)
        check_cover(parts, model)
        self.fragments = [Fragment(part, options) for part in parts]

    def fingerprint(self) -> str:
        """Hex sha256 of all outer weights and momenta: equal bits, equal fingerprint."""
        digest = hashlib.sha256()
        for tensor in self._tensors().values():
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def take_outer(self) -> None:
        """The live weights of all fragments become the outer ones."""
        for fragment in self.fragments:
            fragment.take_outer()

    def dump(self) -> bytes:
        """The whole outer state as safetensors."""
        return save(self._tensors())

    def load(self, data: bytes) -> None:
        """Take over what another replica dumped; refused where it is none of this model in these fragments (CR1107)."""
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise damaged(f"the outer state cannot be read: {error}") from error
        wanted = self._tensors()
        if {k: v.shape for k, v in tensors.items()} != {k: v.shape for k, v in wanted.items()}:
            raise damaged("the outer state is of another model or in other fragments")
        for n, fragment in enumerate(self.fragments):
            fragment.load(tensors[f"outer.{n}"], tensors[f"momentum.{n}"])

    def _tensors(self) -> dict[str, torch.Tensor]:
        parts = list(enumerate(self.fragments))
        return {f"outer.{n}": p.outer for n, p in parts} | {f"momentum.{n}": p.momentum for n, p in parts}


def divided(parameters: Sequence[Named], num_fragments: int) -> list[list[Named]]:
    """Contiguous parts of about equal size; as many as asked for, unless there are fewer tensors."""
    num_parts = max(min(num_fragments, len(parameters)), 1)
    parts: list[list[Named]] = [[] for _ in range(num_parts)]
    total, seen, current = sum(p.numel() for _, p in parameters), 0, 0
    for index, (name, parameter) in enumerate(parameters):
        is_full = seen >= total * (current + 1) / num_parts
        must_move = len(parameters) - index <= num_parts - 1 - current
        if parts[current] and (is_full or must_move) and current < num_parts - 1:
            current += 1
        parts[current].append((name, parameter))
        seen += parameter.numel()
    return parts


def check_cover(parts: Sequence[Sequence[Named]], model: torch.nn.Module) -> None:
    """Every trainable parameter stands in exactly one part (``ValueError``): one left out would never be averaged."""
    seen = [id(parameter) for part in parts for _, parameter in part]
    wanted = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for key, name in wanted.items() if key not in seen]
    if missing or len(seen) != len(set(seen)) or set(seen) - set(wanted):
        first = f"{missing[0]} is in none" if missing else "one is in two, or is not trained"
        raise ValueError(f"the fragments do not cover every trained parameter exactly once: {first}")


def _flat(parameters: Iterable[Named]) -> torch.Tensor:
    """float32, in the processor's memory, never a view of the parameters."""
    parts = [p.detach().to(device="cpu", dtype=torch.float32).reshape(-1) for _, p in parameters]
    return torch.cat(parts) if len(parts) > 1 else parts[0].clone()


def _write(parameters: Iterable[Named], flat: torch.Tensor) -> None:
    start = 0
    with torch.no_grad():
        for _, parameter in parameters:
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
