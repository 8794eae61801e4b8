"""One generation between TRL and the loss: fresh prompts, terms in the reward, importance weights.

Groups that teach nothing, since their rewards are all equal, are replaced by fresh prompts (dynamic sampling, DAPO,
2503.14476, section 3.2). With ``PolicyOptions()`` as it stands nothing here touches what TRL made.

Letters: B rollouts, T completion tokens, N rollouts of all processes, K groups, F reward functions.
"""

from __future__ import annotations

import inspect
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad

from composer_replication.losses import policy_terms as losses
from composer_replication.trainer import preset_settings
from composer_replication.trainer.generation import ROUTED_EXPERTS, Generation, loss_mask, temporarily
from composer_replication.trainer.processes import from_first, gathered, num_processes, process_rank

Generate = Callable[[Any], Generation]
PUNISHMENT = "soft_overlong_punishment_reward"  # TRL's name of DAPO's: it gives every row a number, whatever became of it
EFFORT_SCALE, EFFORT_CURVATURE = 1e-3, 2.0
"""k and q of ``effort_cost``, which stays below 1 / k with them: no saving of effort outweighs a passed test in ``composer``."""


def without_lone_punishments(rewards_NF: Tensor, names: Sequence[str]) -> Tensor:
    """A row that no other function scored is not scored by its length: NaN there, so that it is left out and not 0."""
    is_punishment_F = torch.tensor([name == PUNISHMENT for name in names], device=rewards_NF.device)
    if is_punishment_F.all() or not is_punishment_F.any():
        return rewards_NF
    is_lone_N = rewards_NF[:, ~is_punishment_F].isnan().all(dim=1)
    return rewards_NF.masked_fill(is_lone_N[:, None], torch.nan)


class PolicyTerms:
    """What happens to one generation before the loss sees it, by the trainer's ``policy_options`` and ``prompt_source``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.kl_beta = 0.0  # the weight of the KL in the reward

    @property
    def _metrics(self) -> dict[str, list[float]]:
        metrics: dict[str, list[float]] = self._trainer._metrics["train"]  # noqa: SLF001 - TRL's only name
        return metrics

    def take_kl_out_of_the_loss(self) -> None:
        """TRL has built its reference by ``beta``; from here on it weighs the term in the reward."""
        if self._trainer.policy_options.kl_in_reward:
            self.kl_beta, self._trainer.beta = float(self._trainer.beta), 0.0

    def check_settings(self) -> None:
        trainer = self._trainer
        if not trainer.policy_options.dynamic_sampling_rounds:
            return
        if trainer.prompt_source is None and not hasattr(trainer.train_dataset, "__len__"):
            words = "dynamic sampling needs a prompt_source where the training data is a stream."
            fix = "pass a PromptSource, or set trainer.dynamic_sampling_rounds = 0."
            where = "ComposerReplicationTrainer(prompt_source=)"
            raise preset_settings.TrainerSettingError("CR0760", words, where=where, fix=fix)
        preset_settings.refuse_split_groups(trainer.args, num_processes=num_processes())

    def apply(self, generate: Generate, inputs: Any) -> Generation:
        """TRL's generation with our terms, of the prompt source's rows where it chooses; its rows are then what was trained on."""
        trainer = self._trainer
        inputs = chosen_inputs(trainer.prompt_source, inputs, trainer.num_generations, self._metrics)
        generation = self._with_terms(generate, inputs)
        if trainer.policy_options.dynamic_sampling_rounds:
            self._replace_dull_groups(generate, inputs, generation)
        return generation

    def _with_terms(self, generate: Generate, inputs: Any) -> Generation:
        trainer, options = self._trainer, self._trainer.policy_options
        # With a beta TRL computes the reference's part.
        with temporarily(trainer, beta=trainer.beta or self.kl_beta):
            generation = generate(inputs)
        batch = generation.batch
        sampled_BT, old_BT = batch.get("sampling_per_token_logps"), batch.get("old_per_token_logps")
        has_sampler = trainer.rollout_func is not None and not trainer.use_vllm and sampled_BT is not None
        corrects = has_sampler and options.importance_clip > 0
        if (self.kl_beta != 0.0 or corrects) and old_BT is None:
            # images are among what it takes
            taken = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters  # noqa: SLF001
            more = {name: batch[name] for name in taken if name in batch}
            more["batch_size"] = trainer.args.per_device_train_batch_size
            with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
                old_BT = trainer.logps_of(batch, Generation.of_batch(batch), **more)
        if options.kl_in_reward or options.effort_weight != 0.0:
            self._fold_reward_terms(generation, old_BT)
        if sampled_BT is not None and old_BT is not None:
            self._weigh_by_importance(generation, old_BT, sampled_BT, corrects=corrects)
        generation.is_dull_G = self._dull_groups(generation)
        return generation

    def _dull_groups(self, generation: Generation) -> list[bool]:
        """For each group, over all processes, whether its rewards are all equal.

        A group that has earned something (a reward above 0) and differs in its price of effort teaches that price. The KL in
        the reward teaches nothing of the task and does not count.
        """
        rewards_N, group_size = generation.totals(self._trainer.reward_weights), self._trainer.num_generations
        if rewards_N is None:
            return []
        highest_K, is_dull_K = losses.equal_in_groups(rewards_N, group_size)
        if generation.efforts_N is not None:
            priced_N = generation.efforts_N.masked_fill(rewards_N.isnan(), torch.nan)
            is_dull_K &= (highest_K <= 0.0) | losses.equal_in_groups(priced_N, group_size)[1]
        return [*is_dull_K.tolist()]

    def _replace_dull_groups(self, generate: Generate, inputs: Any, generation: Generation) -> None:
        """At most ``dynamic_sampling_rounds`` times; a fresh group that is dull too is dropped."""
        trainer, group = self._trainer, self._trainer.num_generations
        batch, is_dull_K = generation.batch, generation.is_dull_G
        num_rounds, num_dull, num_local = 0, sum(is_dull_K), len(inputs) // group
        first = process_rank() * num_local  # of this process's groups among those of all
        while any(is_dull_K) and num_rounds < trainer.policy_options.dynamic_sampling_rounds:
            dull_here = [k for k in range(num_local) if is_dull_K[first + k]]
            rows = self._fresh_rows(gathered([dict(inputs[k * group]) for k in dull_here]), num_rounds)
            if not rows:
                break
            num_rounds += 1
            fresh = [dict(row) for row in rows for _ in range(group)]
            newer = self._on_the_side(generate, fresh)
            generation.importance += newer.importance
            good = [n for n in range(len(rows)) if not newer.is_dull_G[process_rank() * len(rows) + n]]
            pairs = list(zip(dull_here, good, strict=False))
            places = [(k * group + i, n * group + i) for k, n in pairs for i in range(group)]
            pad_id = trainer._tokenizer.pad_token_id  # noqa: SLF001 - TRL's only name
            batch = generation.batch = merge_rows(batch, newer.batch, places, pad_token_id=pad_id)
            for old, new in places:
                inputs[old] = fresh[new]
            for k in chain.from_iterable(gathered([first + k for k, _ in pairs])):
                is_dull_K[k] = False
        batch["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(batch).sum()).sum()
        counts = {"replaced_groups": num_dull - sum(is_dull_K), "rounds": num_rounds}
        for name, count in (counts | {"groups_without_signal": sum(is_dull_K)}).items():
            self._metrics[f"dynamic_sampling/{name}"].append(float(count))

    def _fresh_rows(
        self, dull_by_process: list[list[dict[str, Any]]], num_rounds: int
    ) -> list[Mapping[str, Any]]:
        """Fresh rows for this process, equally many on each, as collectives need; empty when there are no more."""
        trainer, each = self._trainer, max(len(rows) for rows in dull_by_process)
        dull, num_rows = [row for rows in dull_by_process for row in rows], each * len(dull_by_process)
        if trainer.prompt_source is not None:
            found = list(trainer.prompt_source.fresh_rows(num_rows, without_signal=dull))
        else:
            # by micro-step: a step may have several generations
            place = f"{trainer.args.seed} {trainer._step} {num_rounds}"  # noqa: SLF001 - TRL's only name
            found = other_rows(trainer.train_dataset, num_rows, without_signal=dull, place=place)
        rows = from_first(found)
        each = min(each, len(rows) // len(dull_by_process))
        return rows[process_rank() * each : (process_rank() + 1) * each]

    def _on_the_side(self, generate: Generate, fresh: list[dict[str, Any]]) -> Generation:
        """A generation whose numbers stay out of the log.

        The logged reward is that of prompts nobody chose: a batch that was filled up with groups of mixed success has a mean
        near one half whatever the policy does.
        """
        kept, aside = self._metrics, defaultdict[str, list[float]](list)
        with temporarily(self._trainer, _metrics={**self._trainer._metrics, "train": aside}):  # noqa: SLF001 - TRL's only name
            newer = self._with_terms(generate, fresh)
        kept["num_tokens"] = aside["num_tokens"]
        return newer

    def _fold_reward_terms(self, generation: Generation, old_BT: Tensor | None) -> None:
        """``A_i <- A_i - (P_i - mean_j P_j)`` with ``P = beta K + weight C``; rows nobody scored keep advantage 0."""
        trainer, batch, mask_BT = self._trainer, generation.batch, loss_mask(generation.batch)
        gather = trainer.accelerator.gather
        penalty_B = torch.zeros(mask_BT.size(0), dtype=torch.float32, device=mask_BT.device)
        if self.kl_beta != 0.0 and old_BT is not None:
            kl_B = losses.k1_per_rollout(old_BT, batch.pop("ref_per_token_logps"), mask_BT)
            penalty_B += self.kl_beta * kl_B
            self._log_mean("kl", kl_B.sum(), mask_BT.sum())
        if (weight := trainer.policy_options.effort_weight) != 0.0:
            # from the counts that a row's rollout brought, else from lengths and masks
            masks = generation.sampled_masks or [[1] * len(ids) for ids in generation.sampled_ids]
            units = []
            for row, mask in zip(generation.rows, masks, strict=True):
                lengths = {"tool_output_token": len(mask) - sum(mask), "final_token": sum(mask), "turn": 1}
                units.append(preset_settings.effort_units(row.get(preset_settings.EFFORT_COLUMN) or lengths))
            units_B = penalty_B.new_tensor(units)
            cost_B = weight * losses.effort_cost(units_B, scale=EFFORT_SCALE, curvature=EFFORT_CURVATURE)
            penalty_B += cost_B
            generation.efforts_N = gather(cost_B)
            self._log_mean("effort/cost", cost_B.sum(), torch.ones_like(cost_B).sum())
        penalty_N = gather(penalty_B)
        scores_NF = penalty_N[:, None] if generation.rewards_NF is None else generation.rewards_NF
        is_scored_N = ~scores_NF.isnan().all(dim=1)
        options: dict[str, Any] = {"group_size": trainer.num_generations, "valid_B": is_scored_N}
        options["beta"] = 1.0  # the penalty is weighted already
        advantage_N = losses.fold_kl_into_advantages(gather(batch["advantages"]), penalty_N, **options)
        start = trainer.accelerator.process_index * mask_BT.size(0)
        batch["advantages"] = advantage_N[start : start + mask_BT.size(0)]

    def _weigh_by_importance(
        self, generation: Generation, old_BT: Tensor, sampled_BT: Tensor, *, corrects: bool
    ) -> None:
        """Log how far sampler and trainer are apart; with a rollout function weigh each token by the ratio.

        The weight is not negative, so that times the advantage it is what it is times the token's loss.
        """
        trainer, batch = self._trainer, generation.batch
        of_vllm = trainer.args.vllm_importance_sampling_clip_max
        clip = trainer.policy_options.importance_clip if corrects else of_vllm
        given, clip = (old_BT, sampled_BT, loss_mask(batch)), math.inf if clip is None else clip
        ratio_BT, figures = losses.truncated_importance_weights(*given, clip=clip)
        truncated, effective = float(figures.masked_share), float(figures.effective_sample_share)
        self._metrics["sampling/truncated_share"].append(truncated)
        self._metrics["sampling/effective_sample_size"].append(effective)
        generation.importance.append({"truncated_share": truncated, "sampling_effective_share": effective})
        if corrects and trainer.loss_type == "vespo":  # it reads the ratio itself
            batch["importance_sampling_ratio"] = ratio_BT
        elif corrects:
            batch["advantages"] = batch["advantages"].reshape(ratio_BT.size(0), -1) * ratio_BT

    def _log_mean(self, name: str, total: Tensor, count: Tensor) -> None:
        both = torch.stack([total.float(), count.float()])
        sum_of_all, num_of_all = self._trainer.accelerator.reduce(both, reduction="sum").tolist()
        self._metrics[name].append(sum_of_all / max(num_of_all, 1.0))


def merge_rows(
    old: Mapping[str, Any], new: Mapping[str, Any], places: Sequence[tuple[int, int]], *, pad_token_id: int
) -> dict[str, Any]:
    """``old`` with row ``a`` replaced by row ``b`` of ``new`` for each ``(a, b)`` of ``places``.

    Both are as TRL's ``_generate_and_score_completions`` gives them: prompts padded on the left and everything else on the
    right, ids with ``pad_token_id``, masks and numbers with 0. ``num_items_in_batch`` stays as it was and is for the caller
    to count again.
    """
    merged, num_rows = dict(old), [(len(batch["prompt_ids"]),) for batch in (old, new)]
    for name in (old.keys() | new.keys()) - {"num_items_in_batch"}:
        lengths = [tuple(getattr(batch.get(name), "shape", ()))[:1] for batch in (old, new)]
        if name == ROUTED_EXPERTS or lengths != num_rows:
            words = f"dynamic sampling cannot replace rollouts whose batches carry {name}."
            where, fix = "trainer.dynamic_sampling_rounds", "set it to 0 for such data."
            raise preset_settings.TrainerSettingError("CR0760", words, where=where, fix=fix)
        rows: Any = list(old[name])
        for old_row, new_row in places:
            rows[old_row] = new[name][new_row]
        fill = pad_token_id if name.endswith("_ids") else 0
        side = "left" if name.startswith("prompt_") else "right"
        is_flat = old[name].dim() == 1
        merged[name] = torch.stack(rows) if is_flat else pad(rows, padding_value=fill, padding_side=side)
    return merged


def other_rows(
    dataset: Any, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]], place: str
) -> list[Mapping[str, Any]]:
    """Rows of the training data with other prompts than those, fewer where there are no more.

    Their order depends on the ``place`` in the run alone, so that a resumed one draws the same.
    """
    dull = [row.get("prompt", row) for row in without_signal]
    order = random.Random(place).sample(range(len(dataset)), len(dataset))  # noqa: S311  an order, no secret
    others = (row for row in map(dataset.__getitem__, order) if row.get("prompt", row) not in dull)
    return list(islice(others, num_rows))


def chosen_inputs(chooser: Any, inputs: Any, group_size: int, metrics: dict[str, list[float]]) -> Any:
    """This process's part of the rows that a prompt source chose, each once a rollout of its group; ``inputs`` where it chooses none.

    Every process chooses, so that their states stay alike, and the first one's choice counts.
    TRL puts the rows of all processes one after the other and cuts groups out of them, so a group may lie
    across two processes; it has one prompt there too.
    """
    if not hasattr(chooser, "chosen_rows"):
        return inputs
    rows = from_first(list(chooser.chosen_rows(len(inputs) * num_processes() // group_size)))
    for name, value in chooser.figures().items():
        metrics[name].append(value)
    first = process_rank() * len(inputs)
    return [dict(rows[(first + n) // group_size]) for n in range(len(inputs))]


def learn_outcomes(chooser: Any, *, is_training: bool) -> None:
    """Tell a prompt source that chooses what came of its prompts, replacements included; what an evaluation brought is dropped."""
    if hasattr(chooser, "chosen_rows"):
        outcomes = chooser.take_outcomes()
        if is_training:
            chooser.learn([outcome for part in gathered(outcomes) for outcome in part])
