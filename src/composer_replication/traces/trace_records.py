"""One recorded session, whatever program wrote it: messages, answers with calls, results, and what is known of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from composer_replication.records import ToolCall

Take = Callable[[Any], object]
FLAGS = ("denied", "interrupted", "synthetic", "copied", "compacted", "demo", "injected")
"""What a step may be besides a plain one: refused by the user, stopped by the user, written by the program and not by a
model, repeated from another session, a summary that replaces what came before, an example, put in by the program."""
DENIED = ("The user doesn't want to ", "exec command rejected by user", "patch rejected by user")
"""How results of Claude Code and of Codex begin where the user refused the call."""
NOT_LEARNED = frozenset({"synthetic", "copied", "demo"})  # answers that are no choice of this session's model


@dataclass(slots=True)
class StepResult:
    """What came back for one call; ``is_error`` and ``exit_code`` are None where the format does not say."""

    call_id: str
    text: str
    is_error: bool | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        return bool(self.is_error) or self.exit_code not in (None, 0)


@dataclass(slots=True)
class TraceStep:
    """A message that was added, or an answer with its calls and their results.

    ``parent`` is the step before it in its conversation, -1 where a conversation begins; ``sealed`` has the signed or encrypted
    forms of ``reasoning``, byte for byte.
    """

    source: Literal["system", "user", "agent"]
    text: str = ""
    parent: int = -1
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    model: str = ""
    flags: set[str] = field(default_factory=set)
    sealed: list[str] = field(default_factory=list)

    def say(self, text: str, reasoning: str) -> None:
        """Add to both what is said, on a line of its own."""
        self.text = f"{self.text}\n{text}" if self.text and text else self.text or text
        self.reasoning = "\n".join(filter(None, (self.reasoning, reasoning))) if reasoning else self.reasoning

    def join(self, other: TraceStep) -> None:
        """Say what the other step says, too, texts a line each."""
        self.say(other.text, other.reasoning)
        self.calls += other.calls
        self.results += other.results
        self.sealed += other.sealed
        self.flags |= other.flags


@dataclass(slots=True)
class Trace:
    """One conversation with one model, put together in the order of its records: results find the step of their call by its id.

    ``task_id``, ``repository``, ``commit`` and ``folder`` are what is known of the tree in which it began. A sub-agent's
    ``parent`` is (trace id, call id). ``passed`` says whether the session's own tests passed at its end, None where nobody ran
    them. While it is read, ``answered`` is the step that the last result went to, and ``answers`` has the places of answers by
    their ids; "" is the one that items without an id continue. ``lost`` says why parts of records that were mapped are not in it.
    """

    trace_id: str
    format: str
    version: str = ""
    agent: str = ""
    model: str = ""
    steps: list[TraceStep] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    prompt_origin: Literal["recorded", "rebuilt"] = "rebuilt"
    task_id: str = ""
    repository: str = ""
    commit: str = ""
    folder: str = ""
    parent: tuple[str, str] | None = None
    passed: bool | None = None
    answered: TraceStep | None = field(default=None, init=False)
    answers: dict[str | None, int] = field(default_factory=dict, init=False)
    lost: list[str] = field(default_factory=list, init=False)
    _step_of_call: dict[str, TraceStep] = field(default_factory=dict, init=False)

    def agent_steps(self) -> list[tuple[int, TraceStep]]:
        """Answers of the model with their places."""
        return [(idx, step) for idx, step in enumerate(self.steps) if step.source == "agent"]

    def path_to(self, idx: int) -> list[int]:
        """The steps of the conversation before step ``idx``, from its beginning."""
        path = []
        while (idx := self.steps[idx].parent) >= 0:
            path.append(idx)
        return path[::-1]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Answers, calls, results, failed results."""
        steps = [step for _, step in self.agent_steps()]
        results = [result for step in steps for result in step.results]
        return len(steps), sum(len(s.calls) for s in steps), len(results), sum(r.failed for r in results)

    @property
    def waits(self) -> bool:
        """Whether the last step is an answer of which a call has no result yet."""
        return any(len(last.results) < len(last.calls) for last in self.steps[-1:])

    def interrupt(self) -> None:
        """The user stopped the model's last answer."""
        for _, step in self.agent_steps()[-1:]:
            step.flags.add("interrupted")

    def add(
        self, step: TraceStep, *, key: str | None = None, parent: int | None = None, model: Any = ""
    ) -> int:
        """Add what was said, called and shown; the place of the step to which it went.

        An answer with the id ``key`` is continued; with "" it is the one before, unless something came between; None is a new
        one. ``parent`` is the place of the step before it, by default the last one. Results answer earlier calls, beside an
        answer its own. ``Dropped`` is raised for nothing but results, of which one answers no call or a second time.
        """
        (results, step.results), (calls, step.calls) = (step.results, []), (step.calls, [])
        has_words = bool(calls or step.text or step.reasoning or step.sealed)
        is_answer = step.source == "agent" and (has_words or not results)
        problems = [] if is_answer else [*filter(None, map(self.answer, results))]
        self.lost += problems if has_words else problems[:-1]
        step.parent = len(self.steps) - 1 if parent is None else parent
        if results and not has_words:
            if problems:
                raise Dropped(problems[-1])
            return step.parent
        if (place := self.answers.get(key) if is_answer else None) is None:
            place = len(self.steps)
            self.steps.append(step)
            self.answers.pop("", None)
        else:
            self.steps[place].join(step)
            step = self.steps[place]
        for call in calls:
            named = call
            if not call.call_id or call.call_id in self._step_of_call:  # it gets an id of its own
                named = replace(call, call_id=f"{call.call_id or 'call'}-{len(self._step_of_call)}")
            step.calls.append(named)
            self._step_of_call[named.call_id] = step
        if is_answer:
            self.lost += filter(None, map(self.answer, results))
            self.answers |= {key or "": place, "": place}
            step.model = step.model or (model if isinstance(model, str) else "")
            self.model = self.model or ("" if "synthetic" in step.flags else step.model)
        elif step.source == "system":
            self.prompt_origin = "recorded"
        return place

    def answer(self, result: StepResult) -> str:
        """Put a result to its call, and say what is wrong with it; without an id it answers the first call that waits."""
        self.answers.pop("", None)  # what comes next is another answer
        step = self._step_of_call.get(result.call_id)
        if not result.call_id and self.steps:
            last = self.steps[-1]
            answered = {each.call_id for each in last.results}
            result.call_id = next((c.call_id for c in last.calls if c.call_id not in answered), "")
            step = last if result.call_id or (last.source == "agent" and not last.calls) else None
        if step is None:
            return "a result without its call"
        if any(each.call_id == result.call_id for each in step.results if result.call_id):
            return "a second result of one call"
        step.results.append(result)
        step.flags |= {"denied"} if result.text.startswith(DENIED) else set()
        self.answered = step
        return ""


class Dropped(Exception):
    """A record that becomes no part of a trace; its message says why."""


@dataclass(slots=True)
class Ledger:
    """Every record that was read, by what became of it; ``is_balanced`` says that none is missing.

    Keys of ``counts``: ``mapped``, ``kept: WHY`` (it is no step, and its content stands in the trace), ``dropped: WHY``.
    """

    num_records: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    num_without_answer: int = 0

    def take(self, take: Take, records: Iterable[Any], *, are_inner: bool = False) -> None:
        """Hand each record to ``take``, and count it as the text that gives or as mapped, those inside a record beside it."""
        for record in records:
            self.num_records += are_inner
            try:
                outcome = found if isinstance(found := take(record), str) else "mapped"
            except Dropped as reason:
                outcome = f"dropped: {reason}"
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError):
                outcome = "dropped: a record of another shape"  # foreign files hold anything anywhere
            self.counts[outcome] += 1

    def dropped(self, *reasons: str) -> None:
        self.num_records += len(reasons)
        self.counts.update(f"dropped: {why}" for why in reasons)

    @property
    def is_balanced(self) -> bool:
        return self.num_records == self.counts.total()
