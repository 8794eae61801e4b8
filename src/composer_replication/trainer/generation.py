"""What one generation knows of its rows, under which names it travels with them, and who is asked for rows and hints.

TRL shuffles and splits every tensor of a batch along its first dimension, which is therefore the row.

Letters: B rows of this process, N of all processes, F reward functions, S later conversations of a row, W columns of prompt
and completion, L routers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_replication.interfaces import Stateful
from composer_replication.records import HintedTurn, Rollout

SEGMENT_STARTS = "segment_starts"
"""Under this name a rollout function returns, for each row, where in its completion the later conversations begin."""
ROUTED_EXPERTS = "routed_experts"
"""Under this name a rollout function returns, for each row, an array (tokens, layers, K) of expert numbers, or None."""


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

    def travel_with(self, batch: dict[str, Any]) -> None:
        """Put beside TRL's tensors what ``of_batch`` finds again."""
        columns = {SEGMENT_STARTS: self.starts_BS, ROUTED_EXPERTS: self.routing_BWLK}
        batch.update({name: column for name, column in columns.items() if column is not None})


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
