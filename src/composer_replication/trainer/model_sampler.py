"""The model of this process as a blocking sampler of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.batching_policy import SampleOptions
from composer_replication.trainer.prefix_generation import sample_shared


class SamplingArguments(Protocol):
    """What is read of TRL's arguments."""

    top_p: float
    top_k: int | None
    min_p: float | None
    repetition_penalty: float


def filters_of(sampling: SamplingArguments) -> dict[str, Any]:
    """The filters, as ``sample_shared`` takes them."""
    return {
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }


def reshapes(sampling: SamplingArguments) -> bool:
    """Whether filters reshape the distribution: its log-probabilities would not be the model's own."""
    off = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    return filters_of(sampling) != off


class ModelSampler:
    """Continues token ids by a model in this process; each row by a generator of its own.

    What a row says depends on its prompt and seed, and but for the last bits of arithmetic on nothing else of its batch.

    Args:
        model: causal language model.
        sampling: TRL's arguments, for the filters.
        tokenizer: the model's; it writes the text of an answer, for people and hints. Ids stay as they were sampled.
        eos_token_ids: end an answer.
    """

    def __init__(
        self, model: Any, sampling: SamplingArguments, tokenizer: Any, *, eos_token_ids: Sequence[int]
    ) -> None:
        self.model, self.sampling, self.tokenizer = model, sampling, tokenizer
        self.eos_token_ids = tuple(eos_token_ids)

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        """One completion for each prompt."""
        (temperature,) = {each.temperature for each in options}
        rows = sample_shared(
            self.model,
            prompts,
            1,
            max_new_tokens=max(each.max_new_tokens for each in options),
            temperature=temperature,
            **filters_of(self.sampling),
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            generator=[torch.Generator().manual_seed(each.seed) for each in options],
            row_limits=[each.max_new_tokens for each in options],
        )
        return [self.completion(row.ids, row.logps) for (row,) in rows]

    def completion(self, ids: list[int], logps: list[float]) -> Completion:
        """An answer of these ids, as it ended."""
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        reason = StopReason.FINISHED if ids[-1] in self.eos_token_ids else StopReason.LENGTH
        return Completion(tuple(ids), text, reason, () if reshapes(self.sampling) else tuple(logps))
