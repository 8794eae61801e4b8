"""Prefix sharing where TRL computes log-probabilities and where it samples.

A mixin of the trainer. Sharing is exact or it is not done: whatever stands against it is said
once, by its reason, and TRL's own path runs.

Sharing pays as long as a group stays together. TRL shuffles the rows of a generation and then
splits them into ``steps_per_generation`` micro-batches; rows are grouped by content inside a
micro-batch, so with ``steps_per_generation = 1`` each prompt is forwarded once, and otherwise
about once a micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from trl.models.utils import unwrap_model_for_generation

from composer_replication.trainer.packed_rows import shared_prefix_logps
from composer_replication.trainer.policy import filters_of, reshapes
from composer_replication.trainer.prefix_generation import sample_shared, text_rule
from composer_replication.trainer.prefix_support import packing_reason, sampling_reason
from composer_replication.trainer.processes import gathered
from composer_replication.trainer.setting_errors import refuse_masked_stops
from composer_replication.trainer.trl_surface import TrlSurface

logger = logging.getLogger(__name__)


class PrefixWiring(TrlSurface):
    """Decides per call whether prompts are shared.

    Attributes:
        prefix_sharing_off_reasons: every reason met so far for falling back to TRL's path.
    """

    prefix_sharing: bool = False
    is_finished: Callable[[str], bool] | None = None
    prefix_sharing_off_reasons: tuple[str, ...] = ()
    _weights_are_sharded: bool = False

    def _check_prefix_settings(self) -> None:
        """Refuse what cannot work with a stop rule, and say when groups are split.

        Raises:
            TrainerSettingError: ``is_finished`` with ``mask_truncated_completions`` (CR0760), which would
                mask every row without an end-of-sequence token.
        """
        refuse_masked_stops(self.args, stops_rows=self.prefix_sharing and self.is_finished is not None)
        if self.prefix_sharing and self.args.steps_per_generation > 1:
            logger.warning(
                "prefix sharing: TRL shuffles a generation into %d micro-batches of %d rows, which "
                "splits groups and loses part of the sharing. Where memory allows, raise "
                "per_device_train_batch_size until steps_per_generation is 1.",
                self.args.steps_per_generation,
                self.args.per_device_train_batch_size,
            )

    def _logps_sharing_reason(
        self, model: Any, needs_aux_loss: bool, multimodal: Mapping[str, Any]
    ) -> str | None:
        if needs_aux_loss:
            return "the auxiliary router loss is on."
        if any(value is not None for value in multimodal.values()):
            return "the rows carry images."
        return packing_reason(model)

    def _generation_sharing_reason(self, images: Any, multimodal_fields: Mapping[str, Any]) -> str | None:
        if self.use_vllm or self.use_transformers_continuous_batching:
            return "another engine generates."
        if images is not None or multimodal_fields:
            return "the prompts carry images."
        if self.tools:
            return "tools are in use."
        if self.args.generation_kwargs:
            return "generation_kwargs are set, which only transformers' generate reads."
        return sampling_reason(self.model_wrapped)

    def _may_share(self, what: str, reason: str | None) -> bool:
        """Whether to share; a reason against it is logged once."""
        if reason is None:
            return True
        sentence = f"{what}: {reason}"
        if sentence not in self.prefix_sharing_off_reasons:
            self.prefix_sharing_off_reasons = (*self.prefix_sharing_off_reasons, sentence)
            logger.warning("prefix sharing is off for %s", sentence)
        return False

    def _shared_logps(
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
        logps_parts, entropy_parts = [], []
        for rows in torch.split(order, batch_size or num_rows):
            ids, mask = input_ids[rows], attention_mask[rows]
            with self.accelerator.autocast():
                logps, entropies = shared_prefix_logps(
                    model,
                    ids[:, :split],
                    mask[:, :split],
                    ids[:, split:],
                    mask[:, split:],
                )
            logps_parts.append(logps)
            entropy_parts += [] if entropies is None else [entropies]
        back = torch.argsort(order)
        return (
            torch.cat(logps_parts)[back],
            torch.cat(entropy_parts)[back] if compute_entropy and entropy_parts else None,
            None,
        )

    @contextmanager
    def model_for_generation(self) -> Iterator[Any]:
        """Inside, the bare model with all its weights, as TRL has it for sampling."""
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            yield model

    def _shared_completions(
        self, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Completion ids and their log-probabilities, one row a prompt entry; draws from torch's global generator.

        The log-probabilities are None where a filter reshapes the distribution: they would not be the model's own.

        That generator's state is in every checkpoint, so a resumed run samples the same rows.
        """
        with self.model_for_generation() as model, torch.no_grad():
            samples = sample_shared(
                model,
                prompt_ids,
                1,
                max_new_tokens=self.args.max_completion_length,
                temperature=self.args.temperature,
                **filters_of(self.args),
                eos_token_ids=self.eos_token_ids,
                pad_token_id=self._tokenizer.pad_token_id,
                stop=text_rule(self._tokenizer, self.is_finished),
                generator=None,
                goes_on=self._runs_anywhere if self._weights_are_sharded else bool,
            )
        return [row.ids for (row,) in samples], None if reshapes(self.args) else [
            row.logps for (row,) in samples
        ]

    def _runs_anywhere(self, runs_here: bool) -> bool:
        return any(gathered(runs_here))
