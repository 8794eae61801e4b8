"""One generation between TRL and the loss: fresh prompts, terms in the reward, importance weights.

Groups that teach nothing, since their rewards are all equal, are replaced by fresh prompts (dynamic sampling, DAPO,
2503.14476, section 3.2). A mixin of the trainer. With ``PolicyOptions()`` as it stands nothing here touches what TRL made.

Letters: B rollouts, T completion tokens, N rollouts of all processes, K groups, F reward functions.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.nn.functional import pad
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_replication.config import EffortSection
from composer_replication.errors import InputError
from composer_replication.interfaces import PromptChooser, PromptSource
from composer_replication.losses.policy_terms import (
    effort_cost,
    fold_kl_into_advantages,
    k1_per_rollout,
    truncated_importance_weights,
)
from composer_replication.trainer.chained_rows import SEGMENT_STARTS, CheckedRollouts
from composer_replication.trainer.channel_step import RecordDraws
from composer_replication.trainer.metrics_log import TrlSurface
from composer_replication.trainer.preset_settings import EFFORT_COLUMN, PolicyOptions, effort_units
from composer_replication.trainer.processes import gathered, num_processes, process_rank
from composer_replication.trainer.router_replay import ROUTED_EXPERTS, UNKNOWN
from composer_replication.trainer.setting_errors import TrainerSettingError, refuse_split_groups

Generate = Callable[[Any], dict[str, Any]]
NOT_BY_ROW = "num_items_in_batch"


def loss_mask(output: Mapping[str, Any]) -> torch.Tensor:
    """The tokens (B, T) that carry loss: the policy's own, not those of tools."""
    mask: torch.Tensor = output["completion_mask"]
    return mask * output["tool_mask"] if "tool_mask" in output else mask


PUNISHMENT = "soft_overlong_punishment_reward"
"""TRL's name of DAPO's punishment: it gives every row a number, whatever became of it."""


def without_lone_punishments(rewards_NF: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """A row that no other function scored is not scored by its length: NaN there, so that it is left out and not 0."""
    is_punishment_F = torch.tensor([name == PUNISHMENT for name in names], device=rewards_NF.device)
    if is_punishment_F.all() or not is_punishment_F.any():
        return rewards_NF
    is_lone_N = rewards_NF[:, ~is_punishment_F].isnan().all(dim=1)
    return rewards_NF.masked_fill(is_lone_N[:, None], torch.nan)


class FreshGroups(TrlSurface):
    """Finds groups without signal and fills their places.

    Attributes:
        num_groups_replaced: groups that were replaced, this run long.
    """

    policy_options: PolicyOptions = PolicyOptions()
    prompt_source: PromptSource | None = None
    num_groups_replaced: int = 0
    _newest_rewards: torch.Tensor | None = None
    _newest_efforts: torch.Tensor | None = None

    def _dull_groups(self) -> list[bool]:
        """For each group, over all processes, whether its rewards are all equal.

        A group that has earned something (a reward above 0) and differs in its price of effort teaches that price. The KL in
        the reward teaches nothing of the task and does not count.
        """
        if self._newest_rewards is None:
            return []
        weights = self.reward_weights.to(self._newest_rewards.device)
        rewards_N = (self._newest_rewards * weights).nansum(dim=1)
        nobody_N = torch.isnan(self._newest_rewards).all(dim=1)  # rows that nobody scored teach nothing
        highest_K, is_dull_K = _alike(rewards_N, nobody_N, self.num_generations)
        if self._newest_efforts is not None:
            is_dull_K &= (highest_K <= 0.0) | _alike(self._newest_efforts, nobody_N, self.num_generations)[1]
        is_dull: list[bool] = is_dull_K.tolist()
        return is_dull

    def _with_fresh_groups(
        self, generate: Generate, inputs: Any, output: dict[str, Any], is_dull_K: list[bool]
    ) -> tuple[dict[str, Any], list[bool]]:
        """Replace dull groups, at most ``dynamic_sampling_rounds`` times; a fresh group that is dull too is dropped."""
        group, rank = self.num_generations, process_rank()
        num_local = len(inputs) // group
        num_replaced = num_rounds = 0
        while any(is_dull_K) and num_rounds < self.policy_options.dynamic_sampling_rounds:
            dull_here = [k for k in range(num_local) if is_dull_K[rank * num_local + k]]
            dull_by_process = gathered([dict(inputs[k * group]) for k in dull_here])
            rows = self._fresh_rows(dull_by_process)
            if not rows:
                break
            num_rounds += 1
            fresh = [dict(row) for row in rows[rank] for _ in range(group)]
            newer = self._generation_on_the_side(generate, fresh)
            is_bad = self._dull_groups()[rank * len(rows[rank]) : (rank + 1) * len(rows[rank])]
            good = [n for n, bad in enumerate(is_bad) if not bad][: len(dull_here)]
            pairs = list(zip(dull_here, good, strict=False))
            places = [(k * group + i, n * group + i) for k, n in pairs for i in range(group)]
            output = merge_rows(output, newer, places, pad_token_id=self._tokenizer.pad_token_id)
            for old, new in places:
                inputs[old] = fresh[new]
            replaced = gathered([rank * num_local + k for k, _ in pairs])
            for k in (k for part in replaced for k in part):
                is_dull_K[k] = False
                num_replaced += 1
        output["num_items_in_batch"] = self.accelerator.gather(loss_mask(output).sum()).sum()
        self.num_groups_replaced += num_replaced
        metrics = self._metrics["train"]
        metrics["dynamic_sampling/replaced_groups"].append(float(num_replaced))
        metrics["dynamic_sampling/rounds"].append(float(num_rounds))
        metrics["dynamic_sampling/groups_without_signal"].append(float(sum(is_dull_K)))
        return output, is_dull_K

    def _fresh_rows(self, dull_by_process: list[list[dict[str, Any]]]) -> list[list[Mapping[str, Any]]]:
        """For each process equally many fresh rows, as its collectives need; empty when there are no more."""
        if self.prompt_source is None:
            return []
        each = max(len(rows) for rows in dull_by_process)
        dull = [row for rows in dull_by_process for row in rows]
        rows = list(self.prompt_source.fresh_rows(each * len(dull_by_process), without_signal=dull))
        each = min(each, len(rows) // len(dull_by_process))
        return [rows[n * each : (n + 1) * each] for n in range(len(dull_by_process))] if each else []

    def _generation_on_the_side(self, generate: Generate, fresh: list[dict[str, Any]]) -> dict[str, Any]:
        """A generation whose numbers stay out of the log: the logged reward is that of prompts nobody chose.

        A batch that was filled up with groups of mixed success has a mean near one half whatever the policy does.
        """
        kept, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        try:
            newer: dict[str, Any] = self._generation_with_terms(generate, fresh)
        finally:
            aside, self._metrics["train"] = self._metrics["train"], kept
        kept["num_tokens"] = aside["num_tokens"]
        return newer


def _alike(
    values_N: torch.Tensor, is_left_out_N: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group its highest value, and whether all are equal; so are none."""
    highest_K = values_N.masked_fill(is_left_out_N, -torch.inf).view(-1, group_size).amax(-1)
    lowest_K = values_N.masked_fill(is_left_out_N, torch.inf).view(-1, group_size).amin(-1)
    return highest_K, (highest_K < lowest_K) | torch.isclose(highest_K, lowest_K)


def merge_rows(
    old: Mapping[str, Any], new: Mapping[str, Any], places: Sequence[tuple[int, int]], *, pad_token_id: int
) -> dict[str, Any]:
    """``old`` with row ``a`` replaced by row ``b`` of ``new`` for each ``(a, b)`` of ``places``.

    Prompts are padded on the left and everything else on the right: ids with ``pad_token_id``, routed experts with -1,
    masks and numbers with 0. ``num_items_in_batch`` stays as it was and is for the caller to count again.

    Args:
        old: tensors with one row a rollout, as TRL's ``_generate_and_score_completions`` gives them.
        new: the same names; other widths are fine.
        places: pairs of row numbers; row numbers of ``old`` must differ.
        pad_token_id: of the tokenizer.

    Raises:
        TrainerSettingError: a part is not one row a rollout (images), or is missing in one of them (CR0760).
    """
    num_old, num_new = old["prompt_ids"].size(0), new["prompt_ids"].size(0)
    merged: dict[str, Any] = {}
    for name in old.keys() | new.keys():
        mine, theirs = old.get(name), new.get(name)
        if name == NOT_BY_ROW:
            merged[name] = mine
            continue
        if not (_is_by_row(mine, num_old) and _is_by_row(theirs, num_new)):
            raise TrainerSettingError(
                "CR0760",
                f"dynamic sampling cannot replace rollouts whose batches carry {name}.",
                where="trainer.dynamic_sampling_rounds",
                fix="set trainer.dynamic_sampling_rounds = 0 for such data.",
            )
        merged[name] = _replaced(name, mine, theirs, places, pad_token_id)
    return {name: merged[name] for name in old if name in merged} | merged


def _is_by_row(part: Any, num_rows: int) -> TypeGuard[torch.Tensor]:
    return isinstance(part, torch.Tensor) and part.dim() >= 1 and part.size(0) == num_rows


def _replaced(
    name: str,
    old: torch.Tensor,
    new: torch.Tensor,
    places: Sequence[tuple[int, int]],
    pad_token_id: int,
) -> torch.Tensor:
    if old.dim() > 1 and old.size(1) != new.size(1):
        width = max(old.size(1), new.size(1))
        fill = pad_token_id if name.endswith("_ids") else UNKNOWN if name.endswith(ROUTED_EXPERTS) else 0
        is_left = name.startswith("prompt_")
        old, new = (_widened(part, width, fill, is_left=is_left) for part in (old, new))
    result = old.clone()
    if places:
        rows_old, rows_new = (torch.tensor(rows, device=old.device) for rows in zip(*places, strict=True))
        result[rows_old] = new[rows_new]
    return result


def _widened(part: torch.Tensor, width: int, fill: int, *, is_left: bool) -> torch.Tensor:
    missing = width - part.size(1)
    before = [0, 0] * (part.dim() - 2)
    return pad(part, [*before, missing, 0] if is_left else [*before, 0, missing], value=fill)


def chosen_inputs(
    chooser: PromptSource | None, inputs: Any, group_size: int, metrics: dict[str, list[float]]
) -> Any:
    """This process's part of the rows that a ``PromptChooser`` chose, each once a rollout of its group; else ``inputs``.

    TRL puts the rows of all processes one after the other and cuts groups out of them, so a group may lie
    across two processes; it has one prompt there too.

    Raises:
        TrainerSettingError: the processes chose different rows (CR0849).
    """
    if not isinstance(chooser, PromptChooser):
        return inputs
    rows = chooser.chosen_rows(len(inputs) * num_processes() // group_size)
    _refuse_different(rows)
    for name, value in chooser.figures().items():
        metrics[name].append(value)
    first = process_rank() * len(inputs)
    return [dict(rows[(first + n) // group_size]) for n in range(len(inputs))]


def learn_outcomes(chooser: PromptSource | None, *, is_training: bool) -> None:
    """Tell a ``PromptChooser`` what came of its prompts, replacements included; what an evaluation brought is dropped."""
    if isinstance(chooser, PromptChooser):
        outcomes = chooser.take_outcomes()
        if is_training:
            chooser.learn([outcome for part in gathered(outcomes) for outcome in part])


def _refuse_different(rows: Sequence[Mapping[str, Any]]) -> None:
    chosen = gathered([str(row.get("task_id", row.get("prompt"))) for row in rows])
    if any(other != chosen[0] for other in chosen):
        raise TrainerSettingError(
            "CR0849",
            "the trainer processes chose different tasks for the same generation.",
            where="ComposerReplicationTrainer(prompt_source=)",
            fix="construct it alike on every process, over the same task store with the same recorded pass rates.",
        )


class ShuffledPrompts:
    """Rows of a data set in shuffled order, epoch after epoch: the default ``PromptSource``.

    A row whose prompt has just given no signal is passed over, as long as there are others.

    Args:
        rows: the training data; anything with a length and rows by number.
        seed: of the order, which is the same on any machine.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
        self._rows, self._position = rows, 0
        self._draws = RecordDraws(rows, per_step=1, seed=seed)

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """See ``PromptSource``; fewer than ``num_rows`` where all others were passed over."""
        dull = [row.get("prompt", row) for row in without_signal]
        found: list[Mapping[str, Any]] = []
        for _ in range(len(self._rows)):
            if len(found) == num_rows:
                break
            row = self._rows[self._draws.of_step(self._position)[0]]
            self._position += 1
            if row.get("prompt", row) not in dull:
                found.append(row)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "epoch" in state:  # its order was another one
            raise InputError(
                "CR0884",
                "the checkpoint's place in the training data is of an earlier version.",
                where="trainer.dynamic_sampling_rounds",
                fix="begin a new run, from this one's model if need be.",
            )
        self._position = int(state["position"])


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
        taken = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters  # noqa: SLF001 - images are among them
        images = {name: output[name] for name in taken if name in output}
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
