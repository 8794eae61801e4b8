"""From rollouts to hinted turns: find the fault, say what a hint may say of it, put that into the prompt's ids.

A finding needs evidence in the record: a tool says by ``ToolResult.fault`` what failed. What is normal work is none: a
command that ends with an exit code, a search that finds nothing, the same test run again after an edit. Failing tests at
the end of the rollout belong to the last turn that changed something. Where the sandbox failed nothing is found.

What a tool said of its failure is the hint, since its refusals teach already; a text of ours says what no tool has said.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from composer_replication.errors import InputError
from composer_replication.records import HintedTurn, Rollout, StopReason, ToolResult
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn
from composer_replication.rollouts.hints.hint_prompts import hint_chat_prompt, hint_code_prompt
from composer_replication.rollouts.tokens.token_ledger import Tokenizer
from composer_replication.tasks.syntax_trees import parse_syntax

MAX_TURNS = 4
"""Hinted turns of one rollout, the first ones; each costs a pass of the teacher."""
MAX_CHARACTERS = 400
"""Of a hint, cut at a word: about 100 tokens."""
PREFIX = "Hint: "
MAX_TESTS = 2
MAX_ASSERTION_CHARACTERS = 160
EDIT_TOOLS = frozenset({"write_file", "str_replace"})
_SHELL_WRITE = re.compile(
    r"(?<![\d&<>=-])>>?(?!\s*/dev/null)\s*[\w./\"'$~]"  # a file, not 2>&1
    r"|\btee\b|\bsed\b[^|;&]*-i|\bgit apply\b|\bpatch\b|\b(?:cp|mv)\b|write_text|\.write\("
)
_CONTROL = re.compile(
    r"<(?=[|｜][^<>\s]{0,60}[|｜]>)"  # <|im_end|>, <｜Assistant｜>
    r"|<(?=/?(?:s|bos|eos|pad|unk|sep|cls|mask|think|thinking|tool_call|tool_calls|tool_response|tools"
    r"|start_of_turn|end_of_turn|end_of_utterance|arg_key|arg_value|image|sop|eop|[a-z]+_token)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|gMASK|ARGS|IMG)\])"
    r"|<(?=<SYS>>|</SYS>>)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ObservedRollout:
    """A rollout with everything that a hint may be made of: no golden code, and no hidden test.

    A single answer is an ``episode`` of one turn. ``answered_text`` is its file with the answer spliced in, empty where the answer
    holds no code, ``indent`` the indentation of the body. ``failed_tests`` are visible tests only, by node id, with their
    assertions as they stand in the source. ``is_leak`` tells whether a text shows what must stay hidden: it is asked about every
    hint, and it is all that this side knows of the golden code.
    """

    episode: Episode
    answered_text: str | None = None
    indent: str = ""
    failed_tests: Mapping[str, str] = field(default_factory=dict)
    is_leak: Callable[[str], bool] = field(default=lambda _: False, repr=False, compare=False)

    @property
    def run_error(self) -> str:
        """Why the test run itself failed; empty where that tells of a forgery, or names a test that the policy cannot read."""
        score = self.episode.score
        if score is None or score.is_forged:
            return ""
        paid = (test.partition("[")[0].rpartition("::")[2] for test in score.paid)
        return "" if any(name in score.error for name in paid) else score.error


@dataclass(frozen=True, slots=True)
class Fault:
    """A turn that went wrong: ``kind`` is one of docs/hints.md, ``texts`` are what a hint may say of it, the best first."""

    turn_idx: int
    kind: str
    texts: tuple[str, ...]


def find_faults(observed: ObservedRollout) -> list[Fault]:
    """The turns that went wrong, first turn first, at most one fault each.

    Within a turn what a tool says comes before what the turn shows as a whole, and both before what only the
    end of the rollout shows.
    """
    episode = observed.episode
    if episode.stop_reason is StopReason.INFRASTRUCTURE or (episode.reward is None and episode.score is None):
        return []
    by_turn: dict[int, Fault] = {}
    is_single_answer = len(episode.turns) == 1 and not episode.turns[0].calls
    whole = _answer_faults if is_single_answer else _turn_faults
    for fault in (*_call_faults(episode.turns), *whole(observed), *_test_failures(observed)):
        by_turn.setdefault(fault.turn_idx, fault)
    return [by_turn[idx] for idx in sorted(by_turn)]


def _call_faults(turns: Sequence[EpisodeTurn]) -> Iterator[Fault]:
    """Faults of single calls, in order."""
    last: tuple[str, str, ToolResult] | None = None
    for turn_idx, turn in enumerate(turns):
        for call, result in zip(turn.calls, turn.results, strict=False):
            kind, said = fault_kind(result), answered(result.text)
            action = (call.name, call.arguments, result)
            if kind:
                yield Fault(turn_idx, kind, (said,))
            elif last == action and call.name not in EDIT_TOOLS:
                again = f"{call.name} again tells nothing new: take another step."
                known = f"This very call was made right before, and its result is known. {again}"
                yield Fault(turn_idx, "repeated-action", (known, said))
            last = action


def fault_kind(result: ToolResult) -> str:
    """What the tool itself says that failed; empty where it says nothing, whatever stands in its text."""
    if result.timed_out:
        return "time-out"
    kind = {"invalid": "invalid-call", "refused": "tool-error"}.get(result.fault, result.fault)
    return kind or ("tool-error" if result.is_error else "")


def _turn_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """Faults that a turn shows as a whole: cut off, or nothing said."""
    turns, score, reward = observed.episode.turns, observed.episode.score, observed.episode.reward
    is_solved, said = score.all_passed if score else (reward or 0) >= 1, answered(observed.run_error)
    for idx, turn in enumerate(turns[:-1] if is_solved else turns):
        if turn.completion.stop_reason is StopReason.LENGTH:
            yield Fault(idx, "truncated", (_shorter(observed, idx), said))
        elif not turn.completion.text.strip() and not turn.calls:
            yield Fault(idx, "empty-answer", (_expected(observed, idx), said))


def _answer_faults(observed: ObservedRollout) -> Iterator[Fault]:
    """What is wrong with a single answer that failed, before any test looks at it: it is judged by its code."""
    [turn], score, code = observed.episode.turns, observed.episode.score, observed.answered_text
    if score is None or score.all_passed:
        return
    is_blank, said = not turn.completion.text.strip(), answered(observed.run_error)
    is_cut = turn.completion.stop_reason is StopReason.LENGTH and not is_blank
    problem = "" if code is None else _syntax_problem(code)
    if is_cut and (not code or problem):  # code that is whole is judged by its tests
        yield Fault(0, "truncated", (_shorter(observed, 0), said))
    elif is_blank or code == "":
        yield Fault(0, "empty-answer", (_expected(observed, 0), said))
    elif problem:
        told = f"What was written does not parse: {problem}. Keep brackets, quotes and indentation whole."
        yield Fault(0, "syntax-error", (told, said))


def _shorter(observed: ObservedRollout, turn_idx: int) -> str:
    turns = observed.episode.turns
    num_tokens = len(turns[turn_idx].completion.token_ids)
    if turns[turn_idx].chat is None or len(turns) == 1:
        return f"The whole answer has to fit into {num_tokens} tokens: write the shortest code that does it, without comments."
    return f"The answer was cut off after {num_tokens} tokens: think less, and make one short call."


def _expected(observed: ObservedRollout, turn_idx: int) -> str:
    if observed.episode.tools:
        names = ", ".join(tool.name for tool in observed.episode.tools)
        return f"The answer was empty. Call one of the tools: {names}."
    if observed.episode.turns[turn_idx].chat is None:
        return "The body goes on the next line, indented below the function's header."
    return "The answer held no code: give the whole body in one fenced block."


def _test_failures(observed: ObservedRollout) -> Iterator[Fault]:
    """What the tests say of the rollout as a whole, told of the turn that it comes from."""
    episode, score, error = observed.episode, observed.episode.score, observed.run_error
    if score is None or score.all_passed or not episode.turns:
        return
    others = sorted(
        node_id
        for node_id, outcome in score.outcomes.items()
        if str(outcome) in {"failed", "error"} and node_id not in score.paid
    )
    tests = observed.failed_tests or dict.fromkeys(others[:1], "")
    if error:
        yield Fault(_last_change(episode.turns), "test-failure", (answered(error),))
    elif tests:
        more = f" And {len(tests) - MAX_TESTS} more." if len(tests) > MAX_TESTS else ""
        told = "\n".join(_told(*test) for test in [*tests.items()][:MAX_TESTS])
        yield Fault(_last_change(episode.turns), "test-failure", (told + more,))


def _told(node_id: str, assertion: str) -> str:
    shown = textwrap.shorten(assertion, MAX_ASSERTION_CHARACTERS, placeholder="...")
    return f"{node_id.rpartition('::')[2]} fails" + (f": it checks `{shown}`." if shown else ".")


def _syntax_problem(text: str) -> str:
    """The message of Python's parser with the line, on one line; empty for good code."""
    problem = ""
    try:
        parse_syntax(text)
    except SyntaxError as error:
        shown = (error.text or "").strip()[:100]
        problem = f"{type(error).__name__}: {error.msg}" + (f" at `{shown}`" if shown else "")
    except (ValueError, RecursionError, MemoryError) as error:
        problem = f"{type(error).__name__}: the file cannot be read as Python"
    return " ".join(problem.split())


def _last_change(turns: Sequence[EpisodeTurn]) -> int:
    """The last turn that changed a file, as far as its calls show; else the last turn."""
    for idx in reversed(range(len(turns))):
        for call, result in zip(turns[idx].calls, turns[idx].results, strict=False):
            is_shell_write = call.name == "bash" and _SHELL_WRITE.search(call.arguments) is not None
            if (call.name in EDIT_TOOLS or is_shell_write) and not result.failed:
                return idx
    return len(turns) - 1


# ---- the text of a hint --------------------------------------------------------------------------------


def answered(text: str) -> str:
    """The last lines of what the environment said, as a hint; empty where it said nothing."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "The environment answered: " + "\n".join(lines[-6:]) if lines else ""


def write_hint(fault: Fault, is_leak: Callable[[str], bool]) -> str | None:
    """The first of its texts that shows nothing that must stay hidden, cleaned, clamped and prefixed."""
    for text in fault.texts:
        clamped = clamp(clean_text(text.strip()), MAX_CHARACTERS)
        if clamped and not is_leak(text) and not is_leak(clamped):
            return f"{PREFIX}{clamped}"
    return None


def clean_text(text: str) -> str:
    """Without control characters, and with a space in whatever chat templates use as control tokens.

    >>> clean_text("end<|im_end|>")
    'end< |im_end|>'
    """
    kept = "".join(sign for sign in text.expandtabs(4) if sign.isprintable() or sign == "\n")
    return _CONTROL.sub(lambda found: f"{found[0]} ", kept)


def clamp(text: str, max_characters: int) -> str:
    """At most so many characters, cut at the end of a word, with three dots where something is left out."""
    text, room = text.strip(), max_characters - 3
    if len(text) <= max_characters or room < 1:
        return text[:max_characters]
    cut = max(text.rfind(" ", 0, room + 1), text.rfind("\n", 0, room + 1))
    return f"{text[: cut if cut > room // 2 else room].rstrip().rstrip(',;')}..."


# ---- all of it, for the trainer ------------------------------------------------------------------------


class HintedTurnMaker:
    """The ``HintGenerator`` of this folder: gives the hinted turns of a batch of rollouts by row.

    A turn without sampled ids is passed over: there is nothing to score.

    Args:
        tokenizer: the policy's.
        observe: from a rollout to all that is known of it, None where nothing is: ``TaskObserver`` for single answers,
            ``ObservedEpisodes`` for episodes.
        strict: a turn whose prompt cannot take its hint exactly is an error (CR0430); False leaves it out and counts it.

    ``counts`` has ``rollouts``, ``faults``, ``hints``, ``hints/KIND``, ``without_hint``, ``without_ids`` and
    ``left_out/CODE`` since the start.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        observe: Callable[[Rollout], ObservedRollout | None],
        strict: bool = True,
    ) -> None:
        self.tokenizer, self.observe, self.strict = tokenizer, observe, strict
        self.counts: Counter[str] = Counter()

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[tuple[HintedTurn, ...]]:
        observed = [self.observe(rollout) for rollout in rollouts]
        self.counts["rollouts"] += len(observed)
        return [() if each is None else tuple(turn for _, turn in self.hinted(each)) for each in observed]

    def hinted(self, observed: ObservedRollout) -> Iterator[tuple[Fault, HintedTurn]]:
        """The turns of one rollout that went wrong, each with what is wrong with it."""
        num_made = 0
        for fault in find_faults(observed):
            self.counts["faults"] += 1
            if num_made == MAX_TURNS:
                return
            told = observed.episode.turns[fault.turn_idx]
            said = told.completion
            hint = write_hint(fault, observed.is_leak) if said.token_ids else None
            if hint is None:
                self.counts["without_hint" if said.token_ids else "without_ids"] += 1
                continue
            ids, indent = observed.episode.prompt_ids(fault.turn_idx), observed.indent
            try:
                if told.chat is not None:
                    hinted_ids = hint_chat_prompt(self.tokenizer, ids, told.chat, hint)
                else:
                    hinted_ids = hint_code_prompt(self.tokenizer, ids, said.text, hint, indent=indent)
            except InputError as error:
                if self.strict:
                    raise
                self.counts[f"left_out/{error.code}"] += 1
                continue
            num_made += 1
            self.counts["hints"] += 1
            self.counts[f"hints/{fault.kind}"] += 1
            yield fault, HintedTurn(ids, hinted_ids, said.token_ids, said.token_logp)
