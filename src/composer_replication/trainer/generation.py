"""What a generation knows of its rows, and how that travels; what a part of the trainer is; who is asked for rows and hints.

TRL shuffles and splits every tensor of a batch along its first dimension, which is therefore the row.

Letters: B rows of this process, N of all processes, G groups of all processes, F reward functions, S later conversations of a
row, T completion tokens, W columns of prompt and completion, L routers, K experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_replication.interfaces import Stateful
from composer_replication.records import HintedTurn, Rollout
from composer_replication.trainer.processes import process_rank

SEGMENT_STARTS = "segment_starts"
"""Under this name a rollout function returns, for each row, where in its completion the later conversations begin."""
ROUTED_EXPERTS = "routed_experts"
"""Under this name a rollout function returns, for each row, an array (tokens, layers, K) of expert numbers, or None."""
ROW_REWARD = "row_reward"
"""Under this name a batch has each row's weighted reward (B,), NaN where nothing scored it."""


class PromptSource(Stateful, Protocol):
    """Who gives at most ``num_rows`` fresh rows in the place of those ``without_signal``, whose groups had equal rewards.

    The same state and the same calls give the same rows on every process; the state is in every checkpoint.

    A chooser also has ``chosen_rows(num_rows)``, which begins a generation: exactly so many rows, no two of the same task;
    ``fresh_rows`` gives others. Its ``take_outcomes()`` hands over the ``TaskOutcome``s of what was graded in this process,
    ``learn(outcomes)`` gets those of all, and its ``figures()`` are for the log.
    """

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]: ...


class HintGenerator(Protocol):
    """Finds the turns of rollouts that went wrong and puts a hint before each: a trainer's ``hint_source``.

    ``hinted_turns`` answers row by row, in the order of the rollouts, with any number of turns. ``prompt_ids``,
    ``completion_ids`` and ``sampled_logp`` are those of a turn of its rollout, id for id; ``hinted_prompt_ids`` are the same
    prompt with the hint's ids put in at one place. What a source adds to a mapping ``counts`` is logged for each generation.
    """

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> Sequence[Sequence[HintedTurn]]: ...


class Part(Stateful, Protocol):
    """What sees each generation that is trained on, adds to the loss, or both: ``ComposerReplicationTrainer.parts`` is their order.

    ``after_generation`` sees all rows of this process; what it puts into the batch arrives in the micro-batches. ``extra_loss``
    is a micro-batch's share of the part's loss, a scalar before its weight; None where the part has none. A part reads TRL's
    names and the trainer's arguments from its trainer; another part that it needs is an argument of its constructor.
    """

    def after_generation(self, generation: Generation) -> None: ...

    def extra_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor | None: ...


@dataclass(slots=True)
class Generation:
    """One generation, or the part of it that a micro-batch carries."""

    rows: Sequence[Mapping[str, Any]] = ()  # of the training data, for whoever needs more than prompts
    sampled_ids: Sequence[Sequence[int]] = ()  # of each row, before TRL empties any mask
    sampled_masks: Sequence[Sequence[int]] | None = None  # 0 for what a tool said; None without tools
    rewards_NF: Tensor | None = None  # NaN where a function gave none; None before they are known
    efforts_N: Tensor | None = None  # the weighted price of effort, where there is one
    starts_BS: Tensor | None = None  # columns at which later conversations begin, filled up with 0
    routing_BWLK: Tensor | None = None  # the experts that sampled each token, -1 for unknown
    batch: dict[str, Any] = field(default_factory=dict)  # what TRL made of it, by TRL's names
    is_dull_G: list[bool] = field(default_factory=list)  # all rewards of the group are equal
    importance: list[dict[str, float]] = field(default_factory=list)  # how far sampler and trainer are apart

    def own_rewards(self) -> list[float | None]:
        """The weighted reward of each row of the batch, None where nobody scored it."""
        return [None if math.isnan(reward) else reward for reward in self.batch[ROW_REWARD].tolist()]

    def totals(self, weights_F: Tensor) -> Tensor | None:
        """The weighted reward of each row of all processes, NaN where nobody scored it; None before rewards are known."""
        if self.rewards_NF is None:
            return None
        rewards_NF = self.rewards_NF.float()
        totals_N = (rewards_NF * weights_F.to(rewards_NF)).nansum(dim=1)
        return totals_N.masked_fill(rewards_NF.isnan().all(dim=1), torch.nan)

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any]) -> Generation:
        """What a batch carries of the one that it is of."""
        return cls(starts_BS=batch.get(SEGMENT_STARTS), routing_BWLK=batch.get(ROUTED_EXPERTS))

    def take(self, batch: dict[str, Any], weights_F: Tensor) -> None:
        """Keep TRL's batch, with what ``of_batch`` finds again and each row's reward by the functions' weights."""
        columns = {SEGMENT_STARTS: self.starts_BS, ROUTED_EXPERTS: self.routing_BWLK}
        if (totals_N := self.totals(weights_F)) is not None:
            own_B = totals_N[process_rank() * len(self.rows) :][: len(self.rows)]
            columns[ROW_REWARD] = own_B.to(batch["completion_ids"].device)
        self.batch = batch | {name: column for name, column in columns.items() if column is not None}


def loss_mask(batch: Mapping[str, Any]) -> Tensor:
    """The tokens (B, T) that carry loss: the policy's own, not those of tools."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Inside, these attributes of ``owner`` have these values; what its class alone had is its class's again afterwards."""
    own = vars(owner)
    kept = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(kept)
