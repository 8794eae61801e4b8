"""One recorded session, whatever program wrote it: messages, answers with calls, results, and what is known of its state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_replication.records import ToolCall

Source = Literal["system", "user", "agent"]
PromptOrigin = Literal["recorded", "rebuilt"]
FLAGS = ("denied", "interrupted", "synthetic", "copied", "compacted", "demo", "injected")
"""What a step may be besides a plain one: refused by the user, stopped by the user, written by the program and not by a
model, repeated from another session, a summary that replaces what came before, an example, put in by the program."""
NOT_LEARNED = frozenset({"synthetic", "copied", "demo"})
"""Answers that are no choice of this session's model at this place."""


@dataclass(slots=True)
class StepResult:
    """What came back for one call; ``is_error`` and ``exit_code`` are None where the format does not say."""

    call_id: str
    text: str
    is_error: bool | None = None
    exit_code: int | None = None
    is_truncated: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.is_error) or self.exit_code not in (None, 0)


@dataclass(slots=True)
class TraceStep:
    """A message that was added, or an answer with its calls and their results.

    ``parent`` is the step before it in its conversation, -1 where a conversation begins. ``sealed`` are signed or encrypted
    thoughts, byte for byte.
    """

    source: Source
    text: str = ""
    parent: int = -1
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    model: str = ""
    timestamp: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    sealed: list[str] = field(default_factory=list)

    @property
    def num_errors(self) -> int:
        return sum(result.failed for result in self.results)


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
    prompt_origin: PromptOrigin = "rebuilt"
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


class Ledger:
    """Every record that was read, by what became of it; ``is_balanced`` says that none is missing.

    Keys of ``counts``: ``mapped``, ``kept: WHY`` (it is no step, and its content stands in the trace), ``dropped: WHY``.
    """

    def __init__(self) -> None:
        self.num_records = 0
        self.counts: Counter[str] = Counter()

    def mapped(self, number: int = 1) -> None:
        self.counts["mapped"] += number

    def kept(self, why: str, number: int = 1) -> None:
        self.counts[f"kept: {why}"] += number

    def dropped(self, why: str, number: int = 1) -> None:
        self.counts[f"dropped: {why}"] += number

    @property
    def is_balanced(self) -> bool:
        return self.num_records == sum(self.counts.values())


class TraceBuilder:
    """Puts a trace together in the order of its records; results find the step of their call by its id."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.open: TraceStep | None = None
        self._step_of_call: dict[str, TraceStep] = {}

    @property
    def last(self) -> int:
        return len(self.trace.steps) - 1

    def add(self, step: TraceStep, parent: int | None = None) -> int:
        """Append a step after ``parent``, by default the last one; its place."""
        step.parent = self.last if parent is None else parent
        self.trace.steps.append(step)
        self.open = step if step.source == "agent" else None
        return self.last

    def message(self, source: Source, text: str, *flags: str, timestamp: str = "") -> int:
        if source == "system":
            self.trace.prompt_origin = "recorded"
        return self.add(TraceStep(source, text, flags=set(flags), timestamp=timestamp))

    def answer(self, timestamp: str = "") -> TraceStep:
        """The answer that is being written, else a new one."""
        if self.open is None:
            self.add(TraceStep("agent", timestamp=timestamp))
        return self.trace.steps[-1] if self.open is None else self.open

    def call(self, step: TraceStep, call: ToolCall) -> None:
        """Add a call; one without an id gets one."""
        if not call.call_id or call.call_id in self._step_of_call:
            call = ToolCall(call.name, call.arguments, f"{call.call_id or 'call'}-{len(self._step_of_call)}")
        step.calls.append(call)
        self._step_of_call[call.call_id] = step

    def result(self, result: StepResult) -> str:
        """Put a result to its call; else why it cannot be kept. Without an id it answers the first call that has none."""
        self.open = None
        step = self._step_of_call.get(result.call_id)
        if not result.call_id and self.trace.steps:
            step = self.trace.steps[-1]
            answered = {each.call_id for each in step.results}
            result.call_id = next((c.call_id for c in step.calls if c.call_id not in answered), "")
            step = step if result.call_id else None
        if step is None:
            return "a result without its call"
        if any(each.call_id == result.call_id for each in step.results):
            return "a second result of one call"
        step.results.append(result)
        return ""


def text_of(value: Any) -> str:
    """Text of a content that is text, a part or a list of parts; what is no text is named in its place."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(part for part in map(text_of, value) if part)
    if isinstance(value, Mapping):
        for key in ("text", "content", "refusal", "output"):
            if isinstance(value.get(key), str | list):
                return text_of(value[key])
        kind = value.get("type")
        return f"[{kind}]" if isinstance(kind, str) and kind not in ("thinking", "reasoning") else ""
    return "" if value is None else str(value)


def has_image(value: Any) -> bool:
    """Whether a content holds an image, which no step keeps."""
    if isinstance(value, list):
        return any(map(has_image, value))
    return isinstance(value, Mapping) and "image" in str(value.get("type", ""))


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is an object, else an empty one: foreign files hold anything anywhere."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def string(value: Any) -> str:
    """The value where it is text, else an empty one."""
    return value if isinstance(value, str) else ""


def integer(value: Any) -> int | None:
    """The value where it is a whole number."""
    return value if type(value) is int else None


def parsed(value: Any) -> Any:
    """What a text of JSON holds; the value itself where it is none."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def arguments_text(value: Any) -> str:
    """Arguments as the model wrote them, or as JSON."""
    return (
        value
        if isinstance(value, str)
        else json.dumps(value if value is not None else {}, ensure_ascii=False)
    )
