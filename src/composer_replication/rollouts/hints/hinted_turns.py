"""From rollouts to hinted turns: find the fault, write the hint, put it into the prompt's ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from composer_replication.channel_tables import HintWritingSection
from composer_replication.errors import InputError
from composer_replication.interfaces import Tokenizer
from composer_replication.records import Hint, HintedTurn, Rollout
from composer_replication.rollouts.episodes.episode import ObservedTurn
from composer_replication.rollouts.hints.comment_prompts import hint_code_prompt
from composer_replication.rollouts.hints.detector import find_faults
from composer_replication.rollouts.hints.hint_context import HintContext, ObservedRollout
from composer_replication.rollouts.hints.hint_prompts import HintedPrompt, hint_chat_prompt
from composer_replication.rollouts.hints.layers import open_layers, write_hint

MAX_TURNS = 4
"""Hinted turns of one rollout, the first ones; each costs a pass of the teacher."""
Observe = Callable[[Rollout], ObservedRollout]


class HintedTurnMaker:
    """The ``HintGenerator`` of this folder: gives the hinted turns of a batch of rollouts by row.

    A turn without sampled ids is passed over: there is nothing to score.

    Args:
        tokenizer: the policy's.
        observe: from a rollout to all that is known of it: ``TaskObserver`` for tasks of a store, a function
            of the agent loop for tools.
        options: the ``[hints.writing]`` table.
        strict: a turn whose prompt cannot take its hint exactly is an error; False leaves it out and counts it.

    ``counts`` has ``rollouts``, ``faults``, ``hints``, ``hints/KIND``, ``without_hint``, ``without_ids`` and
    ``left_out/CODE`` since the start; ``last_hints`` are the hints of the last call by row.

    Raises:
        UsageError: a layer cannot be used (CR0221).
        InputError (when asked): a hint does not fit its prompt and ``strict`` (CR0430).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        observe: Observe,
        options: HintWritingSection = HintWritingSection(),  # noqa: B008 - frozen
        strict: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.observe = observe
        self.options, self.strict = options, strict
        self.counts: Counter[str] = Counter()
        self.last_hints: list[tuple[Hint, ...]] = []
        self._layers = open_layers(self.options)

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[tuple[HintedTurn, ...]]:
        observed = [self.observe(rollout) for rollout in rollouts]
        made = [list(self._hinted(each)) for each in observed]
        self.counts["rollouts"] += len(observed)
        self.last_hints = [tuple(hint for hint, _ in row) for row in made]
        return [tuple(turn for _, turn in row) for row in made]

    def _hinted(self, observed: ObservedRollout) -> Iterator[tuple[Hint, HintedTurn]]:
        num_made = 0
        for fault in find_faults(observed):
            self.counts["faults"] += 1
            if num_made == MAX_TURNS:
                return
            turn = observed.turns[fault.turn_idx]
            if not turn.turn.completion.token_ids:
                self.counts["without_ids"] += 1
                continue
            context = HintContext(observed, fault)
            hint = write_hint(context, self._layers)
            if hint is None:
                self.counts["without_hint"] += 1
                continue
            try:
                prompt = self._prompt(observed, turn, hint)
            except InputError as error:
                if self.strict:
                    raise
                self.counts[f"left_out/{error.code}"] += 1
                continue
            num_made += 1
            self.counts["hints"] += 1
            self.counts[f"hints/{hint.kind}"] += 1
            said = turn.turn.completion
            yield (
                hint,
                HintedTurn(prompt.prompt_ids, prompt.hinted_ids, said.token_ids, said.token_logp, 1.0),
            )

    def _prompt(self, observed: ObservedRollout, turn: ObservedTurn, hint: Hint) -> HintedPrompt:
        if turn.chat is not None:
            return hint_chat_prompt(self.tokenizer, turn.turn.prompt_ids, turn.chat, hint.text)
        return hint_code_prompt(
            self.tokenizer,
            turn.turn.prompt_ids,
            turn.turn.prompt_text,
            hint.text,
            path=observed.path,
            completion_text=turn.turn.completion.text,
            indent=observed.indent,
        )
