"""From rollouts to hinted turns: find the fault, write the hint, put it into the prompt's ids.

A finding needs evidence in the record: a tool says by ``ToolResult.fault`` what failed. What is normal work is none: a
command that ends with an exit code, a search that finds nothing, the same test run again after an edit. Failing tests at
the end of the rollout belong to the last turn that changed something. Where the sandbox failed nothing is found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from composer_replication.errors import InputError
from composer_replication.interfaces import Tokenizer
from composer_replication.records import HintedTurn, Rollout, StopReason, ToolResult
from composer_replication.rollouts.hints.hint_context import Fault, ObservedRollout
from composer_replication.rollouts.hints.hint_prompts import HintedPrompt, hint_chat_prompt, hint_code_prompt
from composer_replication.rollouts.hints.hint_texts import write_hint
from composer_replication.rollouts.tokens.chat import ObservedTurn
from composer_replication.tasks.syntax_trees import parse_syntax

MAX_TURNS = 4
"""Hinted turns of one rollout, the first ones; each costs a pass of the teacher."""
EDIT_TOOLS = frozenset({"write_file", "str_replace"})
_SHELL_WRITE = re.compile(
    r"(?<![\d&<>=-])>>?(?!\s*/dev/null)\s*[\w./\"'$~]"  # a file, not 2>&1
    r"|\btee\b|\bsed\b[^|;&]*-i|\bgit apply\b|\bpatch\b|\b(?:cp|mv)\b|write_text|\.write\("
)
_NUM_NAMED_TESTS = 3


def find_faults(observed: ObservedRollout) -> list[Fault]:
    """The turns that went wrong, first turn first, at most one fault each.

    Within a turn what a tool says comes before what the turn shows as a whole, and both before what only the
    end of the rollout shows.
    """
    rollout = observed.rollout
    if rollout.stop_reason is StopReason.INFRASTRUCTURE or (rollout.reward is None and rollout.score is None):
        return []
    by_turn: dict[int, Fault] = {}
    for fault in (*_call_faults(observed), *_turn_faults(observed), *_final_faults(observed)):
        by_turn.setdefault(fault.turn_idx, fault)
    return [by_turn[idx] for idx in sorted(by_turn)]


def _call_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """Faults of single calls, in order."""
    last: tuple[str, str, ToolResult] | None = None
    for turn_idx, turn in enumerate(observed.turns):
        for call_idx, (call, result) in enumerate(zip(turn.calls, turn.results, strict=False)):
            kind, action = fault_kind(result), (call.name, call.arguments, result)
            if kind:
                evidence = next((line.strip() for line in result.text.splitlines() if line.strip()), kind)
                yield Fault(turn_idx, kind, evidence[:200], call.name, call_idx)
            elif last == action and call.name not in EDIT_TOOLS:
                evidence = f"{call.name} {call.arguments[:160]}"
                yield Fault(turn_idx, "repeated-action", evidence, call.name, call_idx)
            last = action


def fault_kind(result: ToolResult) -> str:
    """What the tool itself says that failed; empty where it says nothing, whatever stands in its text."""
    if result.timed_out:
        return "time-out"
    kind = {"invalid": "invalid-call", "refused": "tool-error"}.get(result.fault, result.fault)
    return kind or ("tool-error" if result.is_error else "")


def _turn_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """Faults that a turn shows as a whole: cut off, or nothing said. A single answer is judged by its code."""
    if _is_single_answer(observed):
        return
    score, reward = observed.rollout.score, observed.rollout.reward
    is_solved = score.all_passed if score is not None else reward is not None and reward >= 1
    for idx, turn in enumerate(observed.turns[:-1] if is_solved else observed.turns):
        completion = turn.turn.completion
        if completion.stop_reason is StopReason.LENGTH:
            cut = f"stopped after {len(completion.token_ids)} tokens: {completion.text[-60:]!r}"
            yield Fault(idx, "truncated", cut)
        elif not completion.text.strip() and not turn.calls:
            yield Fault(idx, "empty-answer", "the answer has no text and no call")


def _final_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """What the tests say of the rollout as a whole, told of the turn that it comes from."""
    score = observed.rollout.score
    if score is None or score.all_passed or not observed.turns:
        return
    if _is_single_answer(observed) and (fault := _answer_fault(observed)) is not None:
        yield fault
        return
    named = [test.node_id for test in observed.failed_tests] or sorted(
        node_id
        for node_id, outcome in score.outcomes.items()
        if str(outcome) in {"failed", "error"} and node_id not in score.paid
    )
    if named or observed.run_error:
        evidence = observed.run_error or f"{len(named)} failed: {', '.join(named[:_NUM_NAMED_TESTS])}"
        yield Fault(_last_change(observed), "test-failure", evidence[:200], named[0] if named else "")


def _is_single_answer(observed: ObservedRollout) -> bool:
    return len(observed.turns) == 1 and not observed.turns[0].calls


def _answer_fault(observed: ObservedRollout) -> Fault | None:
    """What is wrong with a single answer before any test looks at it."""
    completion = observed.turns[0].turn.completion
    is_cut = completion.stop_reason is StopReason.LENGTH
    if not completion.text.strip() or (observed.answer is not None and not observed.answer.strip()):
        if is_cut and completion.text.strip():
            return Fault(0, "truncated", f"no whole answer in {len(completion.token_ids)} tokens")
        return Fault(0, "empty-answer", "the answer has no usable code")
    problem = "" if observed.answered_text is None else _syntax_problem(observed.answered_text)
    if is_cut and (problem or observed.answered_text is None):
        return Fault(0, "truncated", problem or f"stopped after {len(completion.token_ids)} tokens")
    return Fault(0, "syntax-error", problem, observed.path) if problem else None


def _syntax_problem(text: str) -> str:
    """The message of Python's parser with the line; empty for good code."""
    try:
        parse_syntax(text)
    except SyntaxError as error:
        lines = text.splitlines()
        at = (error.lineno or 1) - 1
        shown = lines[at].strip()[:100] if 0 <= at < len(lines) else ""
        return f"{type(error).__name__}: {error.msg}" + (f" at `{shown}`" if shown else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: the file cannot be read as Python"
    return ""


def _last_change(observed: ObservedRollout) -> int:
    """The last turn that changed a file, as far as its calls show; else the last turn."""
    for idx in reversed(range(len(observed.turns))):
        turn = observed.turns[idx]
        for call, result in zip(turn.calls, turn.results, strict=False):
            is_shell_write = call.name == "bash" and _SHELL_WRITE.search(call.arguments) is not None
            if (call.name in EDIT_TOOLS or is_shell_write) and not result.failed:
                return idx
    return len(observed.turns) - 1


class HintedTurnMaker:
    """The ``HintGenerator`` of this folder: gives the hinted turns of a batch of rollouts by row.

    A turn without sampled ids is passed over: there is nothing to score.

    Args:
        tokenizer: the policy's.
        observe: from a rollout to all that is known of it: ``TaskObserver`` for tasks of a store, a function
            of the agent loop for tools.
        strict: a turn whose prompt cannot take its hint exactly is an error (CR0430); False leaves it out and counts it.

    ``counts`` has ``rollouts``, ``faults``, ``hints``, ``hints/KIND``, ``without_hint``, ``without_ids`` and
    ``left_out/CODE`` since the start.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, observe: Callable[[Rollout], ObservedRollout], strict: bool = True
    ) -> None:
        self.tokenizer, self.observe, self.strict = tokenizer, observe, strict
        self.counts: Counter[str] = Counter()

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[tuple[HintedTurn, ...]]:
        observed = [self.observe(rollout) for rollout in rollouts]
        self.counts["rollouts"] += len(observed)
        return [tuple(turn for _, turn in self.hinted(each)) for each in observed]

    def hinted(self, observed: ObservedRollout) -> Iterator[tuple[Fault, HintedTurn]]:
        """The turns of one rollout that went wrong, each with what is wrong with it."""
        num_made = 0
        for fault in find_faults(observed):
            self.counts["faults"] += 1
            if num_made == MAX_TURNS:
                return
            said = observed.turns[fault.turn_idx].turn.completion
            hint = write_hint(observed, fault) if said.token_ids else None
            if hint is None:
                self.counts["without_hint" if said.token_ids else "without_ids"] += 1
                continue
            try:
                prompt = self._prompt(observed, observed.turns[fault.turn_idx], hint)
            except InputError as error:
                if self.strict:
                    raise
                self.counts[f"left_out/{error.code}"] += 1
                continue
            num_made += 1
            self.counts["hints"] += 1
            self.counts[f"hints/{fault.kind}"] += 1
            yield fault, HintedTurn(prompt.prompt_ids, prompt.hinted_ids, said.token_ids, said.token_logp)

    def _prompt(self, observed: ObservedRollout, turn: ObservedTurn, hint: str) -> HintedPrompt:
        if turn.chat is not None:
            return hint_chat_prompt(self.tokenizer, turn.turn.prompt_ids, turn.chat, hint)
        return hint_code_prompt(
            self.tokenizer,
            turn.turn,
            hint,
            path=observed.path,
            indent=observed.indent,
            function_start=observed.function_start,
        )
