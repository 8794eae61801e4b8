"""Sampling from weights that are spread over processes, while each process has prompts at times of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from composer_replication.errors import UsageError
from composer_replication.losses.gathered_weight import is_spread
from composer_replication.records import Completion
from composer_replication.rollouts.episodes.batching_policy import SampleOptions
from composer_replication.trainer.model_sampler import ModelSampler
from composer_replication.trainer.prefix_support import unsupported_reason
from composer_replication.trainer.processes import gathered, portable


@dataclass(frozen=True, slots=True)
class _Word:
    """What a process tells the others between two forwards."""

    num_steps: int = 0
    """How many tokens its next batch may need; 0: it has played its last episode."""
    runs: bool = False
    error: BaseException | None = None


class JointSampler(ModelSampler):
    """A ``ModelSampler`` whose every forward takes part in those of the other processes (FSDP2).

    A batch begins when every process has one or has no episode left. Then all forward once a token, until no row of any
    process runs; who has no rows forwards a stand-in. What a row says depends on its prompt and seed, as everywhere.

    Between two forwards there is one all-gather, always of the same kind, so a process that fails amid a batch is heard by the others
    where they wait for it. They raise its error.

    Call ``meet``, the sampler and, at the end, ``leave`` or ``fail`` in one thread.

    Raises (when made):
        UsageError: the weights are spread in another way than FSDP2's, or the model cannot be sampled behind a cache (CR0873).
    """

    def __init__(self, model: Any, sampling: Any, tokenizer: Any, *, eos_token_ids: Sequence[int]) -> None:
        super().__init__(model, sampling, tokenizer, eos_token_ids=eos_token_ids)
        reason = _problem(model)
        if reason is not None:
            raise unsampled_parts(reason)
        self._num_steps = 0
        self._error: BaseException | None = None

    def meet(self, options: Sequence[SampleOptions]) -> None:
        """Wait until every process has a batch or nothing left; to be called before each batch.

        Raises:
            BaseException: what another process failed with.
        """
        with self._own_device():
            words = self._exchanged(_Word(num_steps=max(each.max_new_tokens for each in options)))
        self._num_steps = max(word.num_steps for word in words)

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        """One completion for each prompt, after ``meet``."""
        try:
            with self._own_device():
                return self.sampled(prompts, options, num_steps=self._num_steps, goes_on=self._runs_anywhere)
        except BaseException as error:
            self.fail(error)
            raise

    def leave(self) -> None:
        """Forward with the others until nobody has an episode left.

        Raises:
            BaseException: what another process failed with.
        """
        stand_in = (int(self.eos_token_ids[0]),)
        with self._own_device():
            while most := max(word.num_steps for word in self._exchanged(_Word())):
                self.sampled(
                    [stand_in],
                    [SampleOptions(most, 1.0, 0)],
                    num_steps=most,
                    goes_on=lambda _: self._runs_anywhere(False),
                )

    def fail(self, error: BaseException) -> None:
        """Tell the others, who wait; once, and not of an error that they told."""
        if self._error is None:
            self._error = error
            with self._own_device():
                gathered(_Word(error=portable(error)))

    def _runs_anywhere(self, runs_here: bool) -> bool:
        return any(word.runs for word in self._exchanged(_Word(runs=runs_here)))

    def _exchanged(self, word: _Word) -> list[_Word]:
        if self._error is not None:
            raise self._error
        words = gathered(word)
        for rank, each in enumerate(words):
            if each.error is not None:
                self._error = each.error
                each.error.add_note(f"raised on process {rank}")
                raise each.error
        return words

    def _own_device(self) -> AbstractContextManager[Any]:
        """A new thread begins on the first GPU, whatever this process has."""
        device = next(self.model.parameters()).device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _problem(model: Any) -> str | None:
    """Why processes cannot forward such a model together, once a token."""
    parameters = list(model.parameters())
    if not any(map(is_spread, parameters)):
        return "they are not spread by FSDP2"
    if all(each.device.type == "cpu" for each in parameters) and torch.accelerator.is_available():
        return "FSDP2 keeps them in the processor's memory (fsdp_offload_params)"
    return unsupported_reason(model, training=False)


def unsampled_parts(
    reason: str, where: str = "ComposerReplicationTrainer(rollout_func=EpisodeRollouts)"
) -> UsageError:
    """Weights in parts, for which there is no way to sample episodes."""
    return UsageError(
        "CR0873",
        f"the agent loop cannot sample weights that are spread over processes here: {reason}.",
        where=where,
        fix="launch with FSDP2 or with whole weights on each process (accelerate's MULTI_GPU), or train without the agent loop.",
    )
