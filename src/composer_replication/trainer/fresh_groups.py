"""Dynamic sampling: groups that teach nothing, since their rewards are all equal, are replaced by fresh prompts.

A mixin of the trainer. Reference: DAPO (2503.14476), section 3.2.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.nn.functional import pad

from composer_replication.interfaces import PromptChooser, PromptSource
from composer_replication.trainer.metrics_log import TrlSurface
from composer_replication.trainer.policy_options import PolicyOptions
from composer_replication.trainer.processes import gathered, num_processes, process_rank
from composer_replication.trainer.router_replay import ROUTED_EXPERTS, UNKNOWN
from composer_replication.trainer.setting_errors import TrainerSettingError

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
        seed: of the order. Epoch e is shuffled by ``random.Random(f"{seed}/{e}")``, whatever the machine.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order: list[int] = []

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """See ``PromptSource``; fewer than ``num_rows`` where all others were passed over."""
        dull = [row.get("prompt", row) for row in without_signal]
        found: list[Mapping[str, Any]] = []
        for _ in range(len(self._rows)):
            if len(found) == num_rows:
                break
            row = self._rows[self._next_number()]
            if row.get("prompt", row) not in dull:
                found.append(row)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "num_rows": len(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position, self._order = int(state["epoch"]), int(state["position"]), []

    def _next_number(self) -> int:
        if not self._order or self._position == len(self._order):
            if self._order:
                self._epoch, self._position = self._epoch + 1, 0
            self._order = list(range(len(self._rows)))
            random.Random(f"{self._seed}/{self._epoch}").shuffle(self._order)  # noqa: S311 - an order, no secret
            if self._position == len(self._order):
                return self._next_number()
        self._position += 1
        return self._order[self._position - 1]
