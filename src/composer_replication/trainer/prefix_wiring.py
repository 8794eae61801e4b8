"""Prefix sharing where TRL computes log-probabilities and where it samples.

Sharing is exact or it is not done: whatever stands against it is said once, by its reason, and TRL's own path runs. Rows are
grouped by content inside a micro-batch, so with ``steps_per_generation = 1`` each prompt is forwarded once, and otherwise,
as TRL shuffles and splits a generation, about once a micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.packed_rows import shared_prefix_logps
from composer_replication.trainer.policy import filters_of, reshapes
from composer_replication.trainer.prefix_generation import sample_shared, text_rule
from composer_replication.trainer.prefix_support import packing_reason, sampling_reason
from composer_replication.trainer.processes import gathered
from composer_replication.trainer.setting_errors import refuse_masked_stops

logger = logging.getLogger(__name__)


class SharedPrompts:
    """Decides per call whether prompts are shared, and computes with shared ones.

    ``off_reasons`` are those met so far for falling back to TRL's path. ``is_finished``: the text so far of one row is
    complete, so the row stops.
    """

    def __init__(self, trainer: Any, is_finished: Callable[[str], bool] | None) -> None:
        self._trainer, self._is_finished = trainer, is_finished
        self.off_reasons: tuple[str, ...] = ()

    def check(self) -> None:
        args: Any = self._trainer.args
        refuse_masked_stops(args, stops_rows=self._is_finished is not None)
        if args.steps_per_generation > 1:
            words = "prefix sharing: TRL shuffles a generation into %d micro-batches of %d rows, which splits groups and loses part "
            words += "of the sharing. Where memory allows, raise per_device_train_batch_size until steps_per_generation is 1."
            logger.warning(words, args.steps_per_generation, args.per_device_train_batch_size)

    def may_score(self, model: Any, *, has_images: bool, other_reason: str) -> bool:
        """Whether rows are scored with shared prompts; a reason against it, ``other_reason`` among them, is logged once."""
        reason = other_reason or ("the rows carry images." if has_images else packing_reason(model))
        return self._may_share("log-probabilities", reason)

    def may_sample(self, images: Any, multimodal_fields: Mapping[str, Any]) -> bool:
        """Whether TRL's model samples with shared prompts; a reason against it is logged once."""
        trainer = self._trainer
        against = {
            "another engine generates.": trainer.use_vllm or trainer.use_transformers_continuous_batching,
            "the prompts carry images.": images is not None or multimodal_fields,
            "tools are in use.": trainer.tools,
            "generation_kwargs are set, which only transformers' generate reads.": trainer.args.generation_kwargs,
        }
        known = next((reason for reason, holds in against.items() if holds), None)
        return self._may_share("sampling", known or sampling_reason(trainer.model_wrapped))

    def _may_share(self, what: str, reason: str | None) -> bool:
        sentence = f"{what}: {reason}"
        if reason is not None and sentence not in self.off_reasons:
            self.off_reasons = (*self.off_reasons, sentence)
            logger.warning("prefix sharing is off for %s", sentence)
        return reason is None

    def logps(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's return value of ``_get_per_token_logps_and_entropies``, prompts forwarded once.

        ``batch_size`` bounds the rows of one forward, as in TRL; rows of a prompt are put side by side
        first, so that a bound which is a multiple of the group size costs no sharing.
        """
        num_rows, split = input_ids.size(0), input_ids.size(1) - logits_to_keep
        order = torch.argsort(torch.unique(input_ids[:, :split], dim=0, return_inverse=True)[1], stable=True)
        answers = []
        for rows in torch.split(order, batch_size or num_rows):
            ids, mask = input_ids[rows], attention_mask[rows]
            parts = (ids[:, :split], mask[:, :split], ids[:, split:], mask[:, split:])
            with self._trainer.accelerator.autocast():
                answers.append(shared_prefix_logps(model, *parts))
        back = torch.argsort(order)
        entropies = [entropies for _, entropies in answers if compute_entropy and entropies is not None]
        logps = torch.cat([logps for logps, _ in answers])[back]
        return logps, torch.cat(entropies)[back] if entropies else None, None

    def completions(
        self, model: Any, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Completion ids, one row a prompt entry, and their log-probabilities.

        These are None where a filter reshapes the distribution: they would not be the model's own. Draws come from torch's
        global generator, whose state is in every checkpoint, so a resumed run samples the same rows.
        """
        trainer = self._trainer
        args, tokenizer = trainer.args, trainer._tokenizer  # noqa: SLF001 - TRL's only name
        is_sharded = weights_are_sharded(trainer.model)
        samples = sample_shared(
            model,
            prompt_ids,
            1,
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            **filters_of(args),
            eos_token_ids=trainer.eos_token_ids,
            pad_token_id=tokenizer.pad_token_id,
            stop=text_rule(tokenizer, self._is_finished),
            goes_on=(lambda runs_here: any(gathered(runs_here))) if is_sharded else bool,
        )
        logps = None if reshapes(args) else [row.logps for (row,) in samples]
        return [row.ids for (row,) in samples], logps
