"""An oracle that shares nothing with the trainer: one row at a time, no padding, whole vocabulary, plain formulas."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from composer_replication.config import HintsSection, ReplaySection
from composer_replication.records import HintedTurn, PreferencePair
from composer_replication.trainer import loss_channels


def token_logps(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Log-softmax over the whole vocabulary before each completion id: (T, V)."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
    return functional.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)


def answer_logp(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Sum of the log-probabilities of the ids."""
    return token_logps(model, prompt, completion)[range(len(completion)), list(completion)].sum()


def support(student: torch.Tensor, teacher: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the student's top k and of all the rest together, for both: (T, k + 1) each."""
    top = student.detach().topk(k, dim=-1).indices
    parts = [side.exp().gather(-1, top) for side in (student, teacher)]
    wholes = [torch.cat([part, 1.0 - part.sum(-1, keepdim=True)], dim=-1) for part in parts]
    return wholes[0], wholes[1]


def jensen_shannon(p: torch.Tensor, q: torch.Tensor, a: float) -> torch.Tensor:
    """(1 - a) KL(p || m) + a KL(q || m), m = (1 - a) p + a q; the ends are KL(q || p) and KL(p || q)."""
    if a == 0.0:
        return (q * (q / p).log()).sum(-1)
    if a == 1.0:
        return (p * (p / q).log()).sum(-1)
    m = (1 - a) * p + a * q
    return (1 - a) * (p * (p / m).log()).sum(-1) + a * (q * (q / m).log()).sum(-1)


def expected_hint_loss(
    student: Any, teacher: Any, turns: Sequence[HintedTurn], settings: HintsSection
) -> torch.Tensor:
    """Hint distillation's formula over plain forwards of single rows."""
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for turn in turns:
        s = token_logps(student, turn.prompt_ids, turn.completion_ids)
        with torch.no_grad():
            t = token_logps(teacher, turn.hinted_prompt_ids, turn.completion_ids)
        # with all words in the support the tail is 0, whose logarithm does not exist: one word is the tail
        p, q = support(s, t, min(loss_channels.TOP_K, s.size(-1) - 1))
        d = jensen_shannon(p, q, settings.jsd_alpha)
        ratio = torch.ones(len(turn.completion_ids), dtype=torch.float64)
        if turn.sampled_logp:
            now = s.detach()[range(len(turn.completion_ids)), list(turn.completion_ids)]
            ratio = (now - torch.tensor(turn.sampled_logp, dtype=torch.float64)).exp()
            ratio = ratio.clamp(max=2.0)
        total = total + turn.weight * (ratio * d).sum()
        num_tokens += len(turn.completion_ids)
    return total / num_tokens


def expected_pair_loss(
    policy: Any, reference: Any, pairs: Sequence[PreferencePair], settings: ReplaySection, beta: float
) -> torch.Tensor:
    """The preference loss over plain forwards of single rows."""

    def score(model: Any, pair: PreferencePair, ids: tuple[int, ...]) -> torch.Tensor:
        return answer_logp(model, pair.prompt_ids, ids) / len(ids)

    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for pair in pairs:
        gap = score(policy, pair, pair.chosen_ids) - score(policy, pair, pair.rejected_ids)
        if settings.kind != "simpo":
            with torch.no_grad():
                of_reference = score(reference, pair, pair.chosen_ids) - score(
                    reference, pair, pair.rejected_ids
                )
            gap = gap - of_reference
        if settings.kind == "ipo":
            loss = (gap - 1 / (2 * beta)) ** 2
        else:
            loss = -functional.logsigmoid(beta * gap)
        total, weights = total + pair.weight * loss, weights + pair.weight
    return total / weights


def plain_copy(model: Any) -> Any:
    """A copy with transformers' own forward: the one that TRL puts on an instance stays bound to the original."""
    twin = copy.deepcopy(model)
    vars(twin).pop("forward", None)
    return twin.eval()


def moved(model: Any, by: float = 0.3) -> None:
    """Weights away from where they began, the same for the same model."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((by * noise * parameter.detach().std().clamp(min=0.02)).to(parameter.dtype))


def sharpened(model: Any, factor: float = 6.0) -> None:
    """Larger matrices: a random model is nearly indifferent between words, and so are its divergences."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float
) -> None:
    """Equal within ``tolerance`` times the norm of them all, which must not be zero."""
    assert found.keys() == expected.keys()
    norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in expected.values()))
    assert norm > 1e-6
    for name, gradient in expected.items():
        assert torch.linalg.vector_norm(found[name] - gradient) <= tolerance * norm, name
