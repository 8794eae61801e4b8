"""The policy-gradient channel around TRL's generation: terms in the reward, importance weights, fresh prompts.

A mixin of the trainer. With ``PolicyOptions()`` as it stands nothing here touches what TRL made.

Letters: B rollouts, T completion tokens, R rollouts with a token, N rollouts of all processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing

from composer_replication.config import EffortSection
from composer_replication.losses.policy_terms import (
    effort_cost,
    fold_kl_into_advantages,
    k1_per_rollout,
    truncated_importance_weights,
)
from composer_replication.trainer.chained_rows import SEGMENT_STARTS, CheckedRollouts
from composer_replication.trainer.fresh_groups import (
    FreshGroups,
    Generate,
    ShuffledPrompts,
    loss_mask,
)
from composer_replication.trainer.policy_options import EFFORT_COLUMN, effort_units
from composer_replication.trainer.processes import num_processes
from composer_replication.trainer.setting_errors import TrainerSettingError, refuse_split_groups

_FORWARD_PARTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "num_tiles",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class PolicyTerms(FreshGroups):
    """What happens to one generation before the loss sees it."""

    _kl_beta: float = 0.0
    _in_evaluation: bool = False

    # ---- before the first step ----------------------------------------------------------------------

    def _take_kl_out_of_the_loss(self) -> None:
        """TRL has built its reference by ``beta``; from here on it weighs the term in the reward."""
        if self.policy_options.kl_in_reward:
            self._kl_beta, self.beta = float(self.beta), 0.0

    def _check_policy_settings(self) -> None:
        """Make the default source of prompts; refuse what dynamic sampling cannot do.

        Raises:
            TrainerSettingError: an iterable data set without a ``prompt_source``, or groups that lie across processes (CR0760).
        """
        if self.rollout_func is not None and not isinstance(self.rollout_func, CheckedRollouts):
            self.rollout_func = CheckedRollouts(self.rollout_func)
        if not self.policy_options.dynamic_sampling_rounds:
            return
        if self.prompt_source is None:
            if not hasattr(self.train_dataset, "__len__"):
                raise TrainerSettingError(
                    "CR0760",
                    "dynamic sampling needs a prompt_source where the training data is a stream.",
                    where="ComposerReplicationTrainer(prompt_source=)",
                    fix="pass a PromptSource, or set trainer.dynamic_sampling_rounds = 0.",
                )
            self.prompt_source = ShuffledPrompts(self.train_dataset, int(self.args.seed))
        refuse_split_groups(self.args, self.num_generations, num_processes=num_processes())

    # ---- one generation -------------------------------------------------------------------------------

    def _remember_rewards(self, rewards_NF: torch.Tensor) -> None:
        """What ``_calculate_rewards`` gave: all processes' rewards."""
        self._newest_rewards, self._newest_efforts = rewards_NF, None

    def _with_policy_terms(self, generate: Generate, inputs: Any) -> dict[str, Any]:
        """TRL's generation with our terms; rows of ``inputs`` whose group was replaced become the fresh ones."""
        if not self.model.training:
            return generate(inputs)
        output = self._generation_with_terms(generate, inputs)
        is_dull_K = self._dull_groups()
        num_groups = len(is_dull_K)
        if self.policy_options.dynamic_sampling_rounds:
            output, is_dull_K = self._with_fresh_groups(generate, inputs, output, is_dull_K)
        if self.checks is not None and not self._in_evaluation:
            self.checks.after_generation(output, float(sum(is_dull_K)), float(num_groups))
        self._newest_rewards = None
        return output

    def _generation_with_terms(self, generate: Generate, inputs: Any) -> dict[str, Any]:
        kept_beta, self.beta = self.beta, self.beta or self._kl_beta  # TRL then computes the reference's part
        try:
            output = generate(inputs)
        finally:
            self.beta = kept_beta
        options = self.policy_options
        sampled_BT = output.get("sampling_per_token_logps")
        corrects = options.importance_clip > 0 and self.rollout_func is not None and not self.use_vllm
        needs_logps = (options.kl_in_reward and self._kl_beta != 0.0) or (corrects and sampled_BT is not None)
        old_BT = output.get("old_per_token_logps")
        if needs_logps and old_BT is None:
            old_BT = self._policy_logps(output)
        if options.has_reward_terms:
            self._fold_reward_terms(output, inputs, old_BT)
        if sampled_BT is not None and old_BT is not None:
            self._weigh_by_importance(output, old_BT, sampled_BT, corrects=corrects)
        return output

    def _policy_logps(self, output: Mapping[str, Any]) -> torch.Tensor:
        """Log-probabilities (B, T) of the rollouts under the weights at hand, without gradient."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        images = {name: output[name] for name in _FORWARD_PARTS if name in output}
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
            self.chained_rows.scored_as(output.get(SEGMENT_STARTS)),
            self.router_replay.scored_as(output),
        ):
            logps: torch.Tensor = self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                mask,
                output["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
                **images,
            )[0]
        return logps

    # ---- terms in the reward ----------------------------------------------------------------------------

    def _fold_reward_terms(self, output: dict[str, Any], inputs: Any, old_BT: torch.Tensor | None) -> None:
        """``A_i <- A_i - (P_i - mean_j P_j)`` with ``P = beta K + weight C``; rows nobody scored keep advantage 0."""
        mask_BT = loss_mask(output)
        penalty_B = torch.zeros(mask_BT.size(0), dtype=torch.float32, device=mask_BT.device)
        metrics = self._metrics["train"]
        if self.policy_options.kl_in_reward and self._kl_beta != 0.0 and old_BT is not None:
            kl_B = k1_per_rollout(old_BT, output.pop("ref_per_token_logps"), mask_BT)
            penalty_B += self._kl_beta * kl_B
            total, count = self._summed(kl_B.sum(), mask_BT.sum())
            metrics["kl"].append(total / max(count, 1.0))
        effort = self.policy_options.effort
        if effort is not None and effort.weight != 0.0:
            cost_B = self._effort_costs(effort, inputs, penalty_B)
            penalty_B += effort.weight * cost_B
            self._newest_efforts = self.accelerator.gather(effort.weight * cost_B)
            total, count = self._summed(cost_B.sum(), torch.ones_like(cost_B).sum())
            metrics["effort/cost"].append(effort.weight * total / max(count, 1.0))
        rewards_NF = self._newest_rewards
        penalty_N = self.accelerator.gather(penalty_B)
        is_scored_N = torch.ones_like(penalty_N).bool()
        if rewards_NF is not None:
            is_scored_N = ~torch.isnan(rewards_NF).all(dim=1)
        advantage_N = fold_kl_into_advantages(
            self.accelerator.gather(output["advantages"]),
            penalty_N,
            beta=1.0,  # the penalty is weighted already
            group_size=self.num_generations,
            valid_B=is_scored_N,
        )
        start = self.accelerator.process_index * mask_BT.size(0)
        output["advantages"] = advantage_N[start : start + mask_BT.size(0)]

    def _effort_costs(self, effort: EffortSection, inputs: Any, like_B: torch.Tensor) -> torch.Tensor:
        """C of each row, from the counts that its rollout brought, else from lengths and masks."""
        completion_ids, tool_masks = self._newest_sampled
        units = []
        for row, ids, mask in zip(inputs, completion_ids, tool_masks or completion_ids, strict=True):
            num_own = len(ids) if tool_masks is None else sum(mask)
            counts = row.get(EFFORT_COLUMN) or {
                "tool_output_token": len(ids) - num_own,
                "final_token": num_own,
                "turn": 1,
            }
            units.append(effort_units(counts))
        return effort_cost(like_B.new_tensor(units), scale=effort.k, curvature=effort.q)

    def _weigh_by_importance(
        self, output: dict[str, Any], old_BT: torch.Tensor, sampled_BT: torch.Tensor, *, corrects: bool
    ) -> None:
        """Log how far sampler and trainer are apart; with a rollout function weigh each token by the ratio.

        The weight is not negative, so that times the advantage it is what it is times the token's loss.
        """
        mask_BT = loss_mask(output)
        clip = self.policy_options.importance_clip if corrects else self._vllm_clip()
        ratio_BT, figures = truncated_importance_weights(old_BT, sampled_BT, mask_BT, clip=clip)
        truncated, effective = float(figures.masked_share), float(figures.effective_sample_share)
        metrics = self._metrics["train"]
        metrics["sampling/truncated_share"].append(truncated)
        metrics["sampling/effective_sample_size"].append(effective)
        if self.checks is not None:
            self.checks.note_importance(truncated_share=truncated, effective_share=effective)
        if not corrects:
            return
        if self.loss_type == "vespo":  # it reads the ratio itself
            output["importance_sampling_ratio"] = ratio_BT
        else:
            output["advantages"] = output["advantages"].reshape(ratio_BT.size(0), -1) * ratio_BT

    def _vllm_clip(self) -> float:
        largest = self.args.vllm_importance_sampling_clip_max
        return float("inf") if largest is None else float(largest)

    def _summed(self, *scalars: torch.Tensor) -> list[float]:
        total: list[float] = self.accelerator.reduce(
            torch.stack([scalar.float() for scalar in scalars]), reduction="sum"
        ).tolist()
        return total
