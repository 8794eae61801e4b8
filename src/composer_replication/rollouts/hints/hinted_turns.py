"""From rollouts to hinted turns: find the fault, write the hint, put it into the prompt's ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from composer_replication.channel_tables import HintWritingSection
from composer_replication.errors import InputError
from composer_replication.interfaces import Tokenizer
from composer_replication.records import Hint, HintedTurn, Rollout
from composer_replication.rollouts.episodes.episode import ObservedTurn
from composer_replication.rollouts.hints.comment_prompts import hint_code_prompt
from composer_replication.rollouts.hints.detector import find_faults
from composer_replication.rollouts.hints.hint_context import (
    HintContext,
    ObservedRollout,
    observe_single_turn,
    successful,
)
from composer_replication.rollouts.hints.hint_prompts import HintedPrompt, hint_chat_prompt
from composer_replication.rollouts.hints.layers import open_layers, write_hint
from composer_replication.rollouts.hints.other_tasks import HintsOfOtherTasks, no_other_tasks

MAX_TURNS = 4
"""Hinted turns of one rollout, the first ones; each costs a pass of the teacher."""
Observe = Callable[[Rollout], ObservedRollout]


class HintedTurnMaker:
    """The ``HintGenerator`` of this folder: gives the hinted turns of a batch of rollouts by row.

    Rollouts of one group, those with the same task and step, are each other's siblings. A turn without sampled
    ids is passed over: there is nothing to score.

    Args:
        tokenizer: the policy's.
        observe: from a rollout to all that is known of it: ``TaskObserver`` for tasks of a store, a function
            of the agent loop for tools. The default knows the rollout alone.
        options: the ``[hints.writing]`` table.
        strict: a turn whose prompt cannot take its hint exactly is an error; False leaves it out and counts it.
        judge_folder: where the judge's answers are kept; None is the cache folder.
        other_tasks: gives the hints in the place of the turns' own, where ``options.from_other_tasks`` is set.

    ``counts`` has ``rollouts``, ``faults``, ``hints``, ``hints/KIND``, ``without_hint``, ``without_ids``,
    ``left_out/CODE`` and ``judge/*`` (see ``HintJudge``) since the start; ``last_hints`` are the hints of the last call by row.

    Raises:
        UsageError: a layer or the judge cannot be used (CR0221), or ``from_other_tasks`` without
            ``other_tasks`` (CR0760).
        InputError (when asked): a hint does not fit its prompt and ``strict`` (CR0430 to
            CR0430).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        observe: Observe = observe_single_turn,
        options: HintWritingSection = HintWritingSection(),  # noqa: B008 - frozen
        strict: bool = True,
        judge_folder: Path | None = None,
        other_tasks: HintsOfOtherTasks | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.observe = observe
        self.options, self.strict = options, strict
        self.other_tasks = other_tasks if self.options.from_other_tasks else None
        if self.options.from_other_tasks and other_tasks is None:
            raise no_other_tasks("none are known here", "pass other_tasks=HintsOfOtherTasks(...)")
        self.counts: Counter[str] = Counter()
        self.last_hints: list[tuple[Hint, ...]] = []
        self._layers = open_layers(self.options, judge_folder=judge_folder, counts=self.counts)

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[tuple[HintedTurn, ...]]:
        observed = [self.observe(rollout) for rollout in rollouts]
        groups: dict[tuple[str, int], list[ObservedRollout]] = {}
        for each in observed:
            groups.setdefault((each.rollout.task_id, each.rollout.step), []).append(each)
        best = {key: tuple(successful(group)) for key, group in groups.items()}
        made = [list(self._hinted(each, best[each.rollout.task_id, each.rollout.step])) for each in observed]
        self.counts["rollouts"] += len(observed)
        self.last_hints = [tuple(hint for hint, _ in row) for row in made]
        return [tuple(turn for _, turn in row) for row in made]

    def _hinted(
        self, observed: ObservedRollout, siblings: tuple[ObservedRollout, ...]
    ) -> Iterator[tuple[Hint, HintedTurn]]:
        num_made = 0
        for fault in find_faults(observed):
            self.counts["faults"] += 1
            if num_made == MAX_TURNS:
                return
            turn = observed.turns[fault.turn_idx]
            if not turn.turn.completion.token_ids:
                self.counts["without_ids"] += 1
                continue
            context = HintContext(observed, fault, siblings)
            hint = write_hint(context, self._layers)
            if hint is not None and self.other_tasks is not None:
                hint = self.other_tasks(context, hint)
            if hint is None:
                self.counts["without_hint"] += 1
                continue
            try:
                record = self._prompt(observed, turn, hint).turn(turn.turn)
            except InputError as error:
                if self.strict:
                    raise
                self.counts[f"left_out/{error.code}"] += 1
                continue
            num_made += 1
            self.counts["hints"] += 1
            self.counts[f"hints/{hint.kind}"] += 1
            yield hint, record

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
