"""Sampling from weights that are spread over processes, while each process has prompts at times of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from composer_replication.errors import ComposerError, UsageError
from composer_replication.records import Completion
from composer_replication.rollouts.episodes.batching_policy import SampleOptions
from composer_replication.trainer.model_modes import fsdp_plugin, weights_are_sharded
from composer_replication.trainer.model_sampler import ModelSampler
from composer_replication.trainer.prefix_support import unsupported_reason
from composer_replication.trainer.processes import gathered, portable

logger = logging.getLogger(__name__)

_WHERE = "ComposerReplicationTrainer(rollout_func=EpisodeRollouts)"
_WHOLE = "launch with whole weights on each process (accelerate's MULTI_GPU)"


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

    Between two forwards there is one all-gather, always of the same kind, so that an error of ours (``ComposerError``) amid a
    batch is heard by the others where they wait, and they raise it. Any other may come from within a forward, where the
    others wait for weights and cannot hear: it is logged and raised here, and the launcher ends the others.

    Call ``meet``, the sampler and, at the end, ``leave`` or ``fail`` in one thread.

    Raises (when made):
        UsageError: the weights are spread in another way than FSDP2's, or cannot be sampled so (CR0873).
    """

    def __init__(self, model: Any, sampling: Any, tokenizer: Any, *, eos_token_ids: Sequence[int]) -> None:
        super().__init__(model, sampling, tokenizer, eos_token_ids=eos_token_ids)
        refuse_unsampled_parts(model)
        self._num_steps = 0
        self._error: BaseException | None = None
        self._has_left = False

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
        except ComposerError as error:
            self.fail(error)
            raise
        except BaseException as error:
            self._error = error
            logger.exception("amid the forwards of several processes; the others wait until they are ended")
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
        self._has_left = True

    def fail(self, error: BaseException) -> None:
        """Tell the others, who wait; once, and not of an error that they told or after all have left."""
        if self._error is None and not self._has_left:
            self._error = error
            with self._own_device():
                gathered(_Word(error=portable(error)))

    def _runs_anywhere(self, runs_here: bool) -> bool:
        return any(word.runs for word in self._exchanged(_Word(runs=runs_here)))

    def _exchanged(self, word: _Word) -> list[_Word]:
        if self._error is not None:
            raise self._error
        words: list[Any] = gathered(word)
        for rank, each in enumerate(words):
            if not isinstance(each, _Word):
                self._error = RuntimeError(f"process {rank} does not sample here: it went another way.")
                raise self._error
            if each.error is not None:
                self._error = each.error
                each.error.add_note(f"raised on process {rank}")
                raise each.error
        return words

    def _own_device(self) -> AbstractContextManager[Any]:
        """A new thread begins on the first GPU, whatever this process has."""
        device = next(self.model.parameters()).device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forwards_need_others(model: Any) -> bool:
    """Whether FSDP2 has spread the weights already, or something else has or will.

    accelerate is told of FSDP2 from the start and spreads when training begins; until then each process has them whole.
    """
    if has_fsdp2(model):
        return True
    plugin = fsdp_plugin()
    return weights_are_sharded(model) and (plugin is None or plugin.fsdp_version != 2)


def has_fsdp2(model: Any) -> bool:
    """Whether FSDP2 has spread it; parameters may be whole for a while after a forward."""
    return any(isinstance(part, FSDPModule) for part in model.modules())


def refuse_unsampled_parts(model: Any) -> None:
    """Stop where processes cannot forward such a model together, once a token.

    Raises:
        UsageError: so it is (CR0873).
    """
    if not has_fsdp2(model):
        raise other_than_fsdp2(_WHERE)
    if all(each.device.type == "cpu" for each in model.parameters()) and torch.accelerator.is_available():
        raise offloaded(_WHERE)
    refuse_uncached(model)


def refuse_uncached(model: Any) -> None:
    """Stop where a model cannot be sampled behind a cache.

    Raises:
        UsageError: so it is (CR0873).
    """
    reason = unsupported_reason(model, training=False)
    if reason is not None:
        raise _refused(reason, _WHERE, f"take another model, or {_WHOLE}.")


def other_than_fsdp2(where: str) -> UsageError:
    """FSDP 1 or ZeRO-3."""
    return _refused("they are not spread by FSDP2", where, f"launch with fsdp_version: 2, or {_WHOLE}.")


def offloaded(where: str) -> UsageError:
    """FSDP2 whose parts wait in the processor's memory."""
    return _refused(
        "FSDP2 keeps them in the processor's memory", where, f"set fsdp_offload_params: false, or {_WHOLE}."
    )


def lone_forwards() -> UsageError:
    """A sampler of which each process would forward at times of its own."""
    return _refused(
        "the sampler that make_sampler made forwards alone",
        _WHERE,
        "make a JointSampler, or a subclass of it.",
    )


def _refused(reason: str, where: str, fix: str) -> UsageError:
    sentence = f"the agent loop cannot sample weights that are spread over processes here: {reason}."
    return UsageError("CR0873", sentence, where=where, fix=fix)
