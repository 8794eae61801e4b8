"""One recorded session, whatever program wrote it: messages, answers with calls, results, and what is known of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from composer_replication.records import ToolCall

Source = Literal["system", "user", "agent"]
FLAGS = ("denied", "interrupted", "synthetic", "copied", "compacted", "demo", "injected")
"""What a step may be besides a plain one: refused by the user, stopped by the user, written by the program and not by a
model, repeated from another session, a summary that replaces what came before, an example, put in by the program."""
NOT_LEARNED = frozenset({"synthetic", "copied", "demo"})
"""Answers that are no choice of this session's model at this place."""
_SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)
"""What a record raises that is not as its format says: foreign files hold anything anywhere."""


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


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning; ``sealed`` is its signed or encrypted form, byte for byte."""

    text: str
    sealed: str = ""


Part = str | Thought | ToolCall | StepResult


@dataclass(slots=True)
class TraceStep:
    """A message that was added, or an answer with its calls and their results.

    ``parent`` is the step before it in its conversation, -1 where a conversation begins.
    """

    source: Source
    text: str = ""
    parent: int = -1
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    model: str = ""
    flags: set[str] = field(default_factory=set)
    sealed: list[str] = field(default_factory=list)

    @property
    def num_errors(self) -> int:
        return sum(result.failed for result in self.results)

    def extend(self, part: str | Thought | ToolCall) -> None:
        """Add a text, a thought or a call."""
        if isinstance(part, str):
            self.text = f"{self.text}\n{part}" if self.text and part else self.text or part
        elif isinstance(part, ToolCall):
            self.calls.append(part)
        else:
            self.reasoning = "\n".join(filter(None, (self.reasoning, part.text)))
            self.sealed += [part.sealed] if part.sealed else []


@dataclass(frozen=True, slots=True)
class RepositoryState:
    """What is known of the tree in which a session began; empty fields are not known."""

    task_id: str = ""
    repository: str = ""
    commit: str = ""
    folder: str = ""


@dataclass(slots=True)
class Trace:
    """One conversation with one model. A sub-agent's is a trace of its own, whose ``parent`` is (trace id, call id).

    ``passed`` says whether the session's own tests passed at its end, None where nobody ran them.
    """

    trace_id: str
    format: str
    version: str = ""
    agent: str = ""
    model: str = ""
    steps: list[TraceStep] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    prompt_origin: Literal["recorded", "rebuilt"] = "rebuilt"
    state: RepositoryState = field(default_factory=RepositoryState)
    parent: tuple[str, str] | None = None
    passed: bool | None = None

    def agent_steps(self) -> Iterator[tuple[int, TraceStep]]:
        """Answers of the model with their places."""
        return ((idx, step) for idx, step in enumerate(self.steps) if step.source == "agent")

    def path_to(self, idx: int) -> list[int]:
        """The steps of the conversation before step ``idx``, from its beginning."""
        path = []
        while (idx := self.steps[idx].parent) >= 0:
            path.append(idx)
        return path[::-1]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Answers, calls, results, failed results."""
        answers = [step for step in self.steps if step.source == "agent"]
        calls, results = (sum(len(getattr(step, name)) for step in answers) for name in ("calls", "results"))
        return len(answers), calls, results, sum(step.num_errors for step in answers)


class Dropped(Exception):
    """A record that becomes no part of a trace; its message says why."""


class Ledger:
    """Every record that was read, by what became of it; ``is_balanced`` says that none is missing.

    Keys of ``counts``: ``mapped``, ``kept: WHY`` (it is no step, and its content stands in the trace), ``dropped: WHY``.
    """

    def __init__(self) -> None:
        self.num_records = 0
        self.counts: Counter[str] = Counter()

    def put(self, take: Callable[[Any], Any], record: Any) -> None:
        """Hand one record to ``take`` and count it: as what it returns where that is a text, as mapped otherwise."""
        try:
            outcome = take(record)
        except Dropped as reason:
            outcome = f"dropped: {reason}"
        except _SHAPE:
            outcome = "dropped: a record of another shape"
        self.counts[outcome if isinstance(outcome, str) else "mapped"] += 1

    def put_inner(self, take: Callable[[Any], Any], records: Iterable[Any]) -> None:
        """The records inside a document, which count one by one."""
        for record in records:
            self.num_records += 1
            self.put(take, record)

    def dropped(self, why: str) -> None:
        """Count one record that nobody takes."""
        self.num_records += 1
        self.counts[f"dropped: {why}"] += 1

    @property
    def is_balanced(self) -> bool:
        return self.num_records == sum(self.counts.values())


class TraceBuilder:
    """Puts a trace together in the order of its records; results find the step of their call by its id.

    ``answered`` is the step that the last result went to. ``answers`` has the places of answers by their ids; "" is the one that
    items without an id continue.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.answered: TraceStep | None = None
        self.answers: dict[str | None, int] = {}
        self._step_of_call: dict[str, TraceStep] = {}

    def add(
        self,
        source: Source,
        parts: Iterable[Part],
        *flags: str,
        key: str | None = None,
        parent: int | None = None,
        model: Any = "",
    ) -> int:
        """Add a message, an answer or results; the place of its step.

        Args:
            source: who wrote it; that of results does not matter.
            parts: texts, thoughts, calls and results.
            flags: of ``FLAGS``.
            key: an answer with this id is continued; "": the one before it, unless something came between. None: a new one.
            parent: place of the step before it; by default the last one.
            model: as the record has it.

        Raises:
            Dropped: nothing but results that answer no call, or a call that has a result.
        """
        place, why, has_results = None, "", False
        for part in parts:
            if isinstance(part, StepResult):
                has_results = True
                why = self._answer(part) or why
                continue
            place = self._place(source, key, parent) if place is None else place
            step = self.trace.steps[place]
            step.extend(part)
            if isinstance(part, ToolCall):
                if not part.call_id or part.call_id in self._step_of_call:
                    own_id = f"{part.call_id or 'call'}-{len(self._step_of_call)}"
                    step.calls[-1] = replace(part, call_id=own_id)
                self._step_of_call[step.calls[-1].call_id] = step
        if place is None and has_results:
            if why:
                raise Dropped(why)
            return self.last if parent is None else parent
        place = self._place(source, key, parent) if place is None else place
        step = self.trace.steps[place]
        step.flags.update(flags)
        if source == "agent":
            self.answers[""] = place  # also after results of its own, of tools that the model's server runs
            step.model = step.model or (model if isinstance(model, str) else "")
            self.trace.model = self.trace.model or ("" if "synthetic" in step.flags else step.model)
        return place

    @property
    def last(self) -> int:
        return len(self.trace.steps) - 1

    def last_answer(self) -> TraceStep:
        """The model's last answer; a step that stands nowhere where there is none."""
        steps = reversed(self.trace.steps)
        return next((step for step in steps if step.source == "agent"), TraceStep("agent"))

    def waits(self) -> bool:
        """Whether the last step is an answer of which a call has no result yet."""
        return any(len(last.results) < len(last.calls) for last in self.trace.steps[-1:])

    def close(self) -> None:
        """What comes next is another answer."""
        self.answers.pop("", None)

    def _place(self, source: Source, key: str | None, parent: int | None) -> int:
        if source == "agent" and key in self.answers:
            return self.answers[key]
        self.trace.steps.append(TraceStep(source, parent=self.last if parent is None else parent))
        self.close()
        if source == "system":
            self.trace.prompt_origin = "recorded"
        elif source == "agent" and key:
            self.answers[key] = self.last
        return self.last

    def _answer(self, result: StepResult) -> str:
        """Put a result to its call; without an id it answers the first call of the last step that has none."""
        last = self.trace.steps[-1] if self.trace.steps else None
        step = self._step_of_call.get(result.call_id)
        self.close()
        if not result.call_id and last is not None:
            answered = {each.call_id for each in last.results}
            result.call_id = next((c.call_id for c in last.calls if c.call_id not in answered), "")
            step = last if result.call_id or (last.source == "agent" and not last.calls) else None
        if step is None:
            return "a result without its call"
        if any(each.call_id == result.call_id for each in step.results if result.call_id):
            return "a second result of one call"
        step.results.append(result)
        self.answered = step
        return ""
