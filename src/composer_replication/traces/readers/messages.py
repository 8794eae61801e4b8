"""Messages however chats, Responses, Anthropic's blocks, OpenTelemetry and ATIF spell them, and the logs that consist of them.

Rows and spans that repeat the history of others become one conversation with them. ATIF, the interchange format of the Harbor
project, is read leniently; a line of ours holds in ``extra`` what the format has no field for, so that it is read back as it was.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tokens.call_dialects import read_calls
from composer_replication.traces import json_values as values
from composer_replication.traces.json_values import at, first_at, first_text, items_at, text_at, text_of
from composer_replication.traces.trace_records import FLAGS, Dropped, Ledger, StepResult, Trace, TraceStep

NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
_CALLS, _RESULTS, _THOUGHTS = (frozenset(NAMES["blocks"][kind]) for kind in ("calls", "results", "thoughts"))
_KEYS = NAMES["keys"]
_INJECTED = tuple(NAMES["codex"]["injected"])
_CALL_IN_TEXT = "<function="  # how models without tools call; what the user says next is the result
_CODE_BEFORE, _CODE_BEHIND = (re.compile(each, re.MULTILINE) for each in NAMES["exit_codes"])


def is_item(value: Any) -> bool:
    """Whether it is a message or an item that stands in the place of one."""
    kind = at(value, "type")
    return at(value, "role") is not None or kind == "message" or kind in _CALLS | _RESULTS | _THOUGHTS


def add_message(trace: Trace, message: Any, *flags: str, **known: Any) -> int:
    """Add a message of a chat, or one of the items of Responses over which an answer is spread; its place, else ``Dropped``."""
    role = at(message, "role")
    if not is_item(message) or (role is not None and role not in NAMES["roles"]):
        raise Dropped(f"a message of the kind {role or at(message, 'type')!r:.40}")
    step = said_in(message)
    text = step.text if step.source == "user" else ""
    if role == "user" and trace.waits and _CALL_IN_TEXT in trace.steps[-1].text:
        step = TraceStep("user", results=[StepResult("", text.removeprefix("OBSERVATION:").lstrip())])
    step.flags |= {*flags, "injected"} if text.startswith(_INJECTED) else {*flags}
    return trace.add(step, key="" if "type" in message else None, **known)


def said_in(value: Any, step: TraceStep | None = None) -> TraceStep:
    """What a message, an item, a block, a content, or a list of them says, calls and shows, added to a step."""
    step = TraceStep("agent") if step is None else step
    if isinstance(value, list):
        for each in value:
            said_in(each, step)
        return step
    kind, role, text, thought = text_at(value, "type"), text_at(value, "role"), "", ""
    if kind in _RESULTS or (role in ("tool", "function") and "parts" not in value):
        step.results.append(result_in(value))
        step.source = "user" if role else step.source
    elif kind in _THOUGHTS:
        thought = text_of(value.get("summary") or value.get("thinking") or value.get("content"))
        step.sealed += filter(None, [first_text(value, *_KEYS["sealed"])])
    elif kind in _CALLS:
        step.calls += _calls_in(value, kind)
        if kind in ("mcp_call", "web_search_call") and value.get("output") is not None:
            call_id, failed = first_text(value, *_KEYS["id"]), value.get("error") is not None
            step.results.append(StepResult(call_id, text_of(value["output"]), failed))
    elif not role and kind != "message":
        text = text_of(value)
    else:
        thought = text_of(value.get("reasoning_content") or value.get("reasoning"))
        said_in(first_at(value, *_KEYS["said"]), step)
        step.source = NAMES["roles"].get(role, "agent")
        signatures = (text_at(each, "signature") for each in items_at(value, "thinking_blocks"))
        step.sealed += filter(None, signatures)
        calls = [*items_at(value, "tool_calls"), value.get("function_call")]  # the second is of 2023
        step.calls += [call for each in calls if isinstance(each, dict) for call in _calls_in(each, "")]
        if role == "assistant" and not step.calls and _CALL_IN_TEXT in step.text:
            called = step.text[step.text.index(_CALL_IN_TEXT) :]
            step.calls += read_calls(f"<tool_call>{called}</tool_call>", "hermes")
    step.say(text, thought)
    return step


def _calls_in(block: dict[str, Any], kind: str) -> Iterator[ToolCall]:
    function = values.typed(dict, block.get("function"))
    own = block | function if function else block  # arguments may stand beside it
    written = at(block, "extra", "arguments_text")  # of a line of ours, where they are no JSON
    given = first_at(own, *_KEYS["given"]) if written is None else written
    name = first_text(own, "name", "function_name") or kind.removesuffix("_call")
    if name or "function_name" in own:  # a step of ATIF keeps what it has
        arguments = values.json_text({"input": given} if kind == "custom_tool_call" else given)
        yield ToolCall(name, arguments, first_text(block, *_KEYS["id"]))


def result_in(block: dict[str, Any]) -> StepResult:
    """What a block, an item or a message shows of a call."""
    kind, content = text_at(block, "type"), first_at(block, *_KEYS["seen"])
    is_json = isinstance(content, dict) and not {"content", "type"} & content.keys()
    is_text = kind != "tool_call_response" and not is_json
    text = text_of(content) if is_text else values.json_text(content)
    is_error, code = values.typed(bool, block.get("is_error")), values.typed(int, block.get("exit_code"))
    if kind == "tool_result":  # one that does not say that it failed did not
        is_error = bool(is_error)
    if kind.endswith("_output"):
        success, code = values.typed(bool, at(content, "success")), exit_code_in(text)
        is_error = not success if success is not None else None if code is None else code != 0
    ids = _KEYS["id"] if kind else _KEYS["id"][:-1]  # "id" of a message is its own
    return StepResult(first_text(block, *ids), text, is_error, code)


def exit_code_in(text: str) -> int | None:
    """The exit code that Codex and others write into the text of a result, or behind it in JSON."""
    found = _CODE_BEHIND.match(text) or _CODE_BEFORE.search(text[:2000])
    return int(found[1]) if found else None


def note_facts(trace: Trace, record: Any, kind: str = "") -> None:
    """Set what a record says of its session, at the places that ``names.toml`` has for a format, by default the trace's."""
    for name, places in NAMES["facts"][kind or trace.format].items():
        if found := next(filter(None, (text_at(record, *place.split(".")) for place in places)), ""):
            setattr(trace, name, found)


def function_tools(tools: Any) -> list[dict[str, Any]]:
    """Definitions of tools in the form of chat completions, whichever of the forms they have."""
    found = []
    for tool in tools if isinstance(tools, list) else ():
        own = at(tool, "function") or tool
        if name := first_text(own, "name", "title"):
            schema = values.typed(dict, first_at(own, "parameters", "input_schema")) or {}
            function = {"name": name, "description": text_at(own, "description"), "parameters": schema}
            found.append({"type": "function", "function": function})
    return found


def chat_messages(row: Any) -> list[Any]:
    """Of the request of a row; none where one of them is none."""
    messages = items_at(request_of(row), "messages")
    return messages if all(at(each, "role") is not None for each in messages) else []


def request_of(row: Any) -> Any:
    """The request of a row, whether it stands in it, beside a response or in a batch."""
    request = at(row, "request") or row
    return values.typed(dict, values.parsed(at(request, "body"))) or request


def read_requests(kind: str, records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of rows ``{messages, …}``, ``{request, response}``, ``{messages, response}``, or with ``input`` (Responses)."""
    joiner = _Joiner(kind, name)
    ledger.take(joiner.row, records)
    yield from joiner.traces


class _Joiner:
    """Conversations by the digest of everything that they hold so far, so that a row extends the one that it repeats."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self._name = kind, name
        self.traces, self._tips = list[Trace](), dict[bytes, Trace]()

    def add(self, messages: Sequence[Any], answers: Sequence[Any], tools: Any, model: Any) -> Trace:
        """Add a row: the messages that were sent, and those that came back."""
        sent = (*messages, *answers)
        chain = step_chain(said_in(each) if is_item(each) else TraceStep("agent") for each in sent)
        known = next((n for n in range(len(messages), 0, -1) if chain[n - 1] in self._tips), 0)
        while known > 1 and chain[known - 2] == chain[known - 1]:
            known -= 1  # thoughts have no digest of their own
        if known:
            trace = self._tips.pop(chain[known - 1])
        else:
            self.traces.append(trace := Trace(f"{self._name}#{len(self.traces)}", self.kind))
        trace.tools = function_tools(tools) or trace.tools
        inside = Ledger()  # what cannot be added leaves the row's other messages where they are
        for group, how in ((messages[known:], {}), (answers, {"model": model})):
            trace.answers.pop("", None)
            inside.take(partial(add_message, trace, **how), group)
        trace.lost += (why.removeprefix("dropped: ") for why in inside.counts.elements() if why != "mapped")
        trace.model = trace.model or (values.typed(str, model) or "")
        self._tips[chain[-1]] = trace
        return trace

    def row(self, row: dict[str, Any]) -> str | None:
        """Add what a row of a log says."""
        request, response, messages = request_of(row), _response(row.get("response")), chat_messages(row)
        if self.kind == "openai-responses":  # rows of chats have keys of these names, too
            if at(request, "previous_response_id"):
                raise Dropped("its context is stored at the provider (previous_response_id)")
            messages = _messages(at(request, "input"), "input", "user") or messages
            if instructions := text_at(request, "instructions"):
                messages = [{"role": "system", "content": instructions}, *messages]
        if not messages:
            raise Dropped("a row without messages")
        answers, tools = _messages(response, "output"), at(request, "tools") or at(row, "kwargs", "tools")
        trace = self.add(messages, answers, tools, text_at(response, "model") or at(request, "model"))
        if task := text_at(row, "instance_id"):  # of SWE-bench, beside the messages
            trace.task_id, trace.passed = task, values.typed(bool, row.get("resolved"))
        trace.lost += ["another choice beside an answer"] * len(items_at(response, "choices")[1:])
        is_lost = row.get("response") and not answers
        return "kept: the request of a row whose response holds no answer" if is_lost else None


def _messages(value: Any, key: str, role: str = "") -> list[Any]:
    """The messages of one side of an exchange: a list, at a key, the first choice, itself or, with a role, what else was said."""
    said = at(value, "choices", "0", "message") or value
    found = [said] if is_item(said) else [{"role": role, "content": value}] * bool(role and value)
    return items_at(value, key) or (found if values.typed(list, value) is None else value)


def _response(response: Any) -> Any:
    """The response's object; of a stream of events the one that completes it, or its pieces."""
    body = values.parsed(at(response, "body") or response)
    if not isinstance(body, str):
        return body
    events = [values.parsed(line[5:].strip()) for line in body.split("\n") if line.startswith("data:")]
    whole = [at(event, "response") for event in events if at(event, "response")]
    choices = [each for event in events for each in items_at(event, "choices")]
    numbers = sorted({at(each, "index") or 0 for each in choices})
    return whole[-1] if whole else {"choices": [{"message": _pieced(choices, number)} for number in numbers]}


def _pieced(choices: list[Any], number: int) -> dict[str, Any] | None:
    """The message that the pieces of a stream of chat completions make."""
    deltas = [at(each, "delta") for each in choices if (at(each, "index") or 0) == number]
    said = {key: "".join(text_at(delta, key) for delta in deltas) for key in _KEYS["pieces"]}
    calls = dict[Any, dict[str, Any]]()
    for piece in (piece for delta in deltas for piece in items_at(delta, "tool_calls")):
        own = at(piece, "function") or {}
        call = calls.setdefault(at(piece, "index"), {**own, "id": at(piece, "id"), "arguments": ""})
        call["arguments"] += text_at(own, "arguments")
    message = _given({**said, "tool_calls": [*calls.values()]})
    return {**message, "role": "assistant"} if message else None


def step_chain(steps: Iterable[TraceStep]) -> tuple[bytes, ...]:
    """For each step a digest of it and of all before it: conversations share their beginning where these are equal.

    Thoughts, results beside calls and searches (of the server's own tools) count nothing: all may be gone where a step is repeated.
    """
    chain, before = [], b""
    for step in steps:
        said = [step.text]
        for call in step.calls:
            given = values.parsed(call.arguments) if call.name != "web_search" else ""
            in_order = sorted(given.items()) if isinstance(given, dict) else given
            said.append(values.json_text([call.name, in_order]))
        said += [result.text for result in step.results if not step.calls]
        if any(said):
            whole = "\0".join([str(step.source == "agent"), *said]).encode("utf-8", "replace")
            before = hashlib.blake2b(before + whole, digest_size=8).digest()
        chain.append(before)
    return tuple(chain)


def read_otel(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of the chat spans, with the results that ``execute_tool`` spans hold."""
    spans, answered, tools = list[Any](), set[str](), dict[str, tuple[str, TraceStep]]()
    for record in records:
        scopes = [each for own in items_at(record, "resourceSpans") for each in items_at(own, "scopeSpans")]
        found = [span for scope in scopes for span in items_at(scope, "spans")]
        ledger.num_records -= 1  # a record counts as its spans, or is the attributes of one
        spans += found or items_at(record, "observations") or [record]
    joiner = _Joiner("otel-genai", name)
    spans.sort(key=lambda span: str(at(span, "startTimeUnixNano") or at(span, "startTime")).zfill(20))
    ledger.take(partial(_span, joiner, tools), spans, are_inner=True)
    for trace in joiner.traces:
        for _, step in trace.agent_steps():
            own = [tools[call.call_id][1].results[0] for call in step.calls if call.call_id in tools]
            step.results = [*{result.call_id: result for result in (*step.results, *own)}.values()]
            answered |= {result.call_id for result in own}
        yield trace
    without_chat: dict[str, Trace] = {}  # one for each trace id of which only the tools were recorded
    for trace_id, step in (found for call_id, found in tools.items() if call_id not in answered):
        without_chat.setdefault(trace_id, Trace(trace_id or name, "otel-genai")).add(step)
    yield from without_chat.values()


def _unboxed(value: Any) -> Any:
    """What OTLP holds beside its type: a list and a map hold others, a whole number is a text."""
    kind, inner = next(iter(value.items()), ("", None)) if isinstance(value, dict) else ("", None)
    pairs = [(text_at(own, "key"), _unboxed(own.get("value", own))) for own in items_at(inner, "values")]
    plain = values.parsed(inner) if kind == "intValue" else inner
    return {"kvlistValue": dict(pairs), "arrayValue": [each for _, each in pairs]}.get(kind, plain)


def _span(joiner: _Joiner, tools: dict[str, tuple[str, TraceStep]], span: dict[str, Any]) -> None:
    pairs = [each for own in (*items_at(span, "events"), span) for each in items_at(own, "attributes")]
    attributes = _unboxed({"kvlistValue": {"values": pairs}})
    own = {**span, **(attributes or at(values.parsed(span.get("metadata")), "attributes") or {})}
    given, answer = (values.parsed(first_at(own, *keys)) for keys in (_KEYS["request"], _KEYS["answer"]))
    kind = own.get("openinference.span.kind") or span.get("type")
    operation = own.get("gen_ai.operation.name") or NAMES["operations"].get(str(kind))
    if operation == "execute_tool":
        call_id = text_at(own, "gen_ai.tool.call.id")
        content = own.get("gen_ai.tool.call.result", own.get("tool_response", answer))
        if not call_id or content is None:
            raise Dropped("a tool's span without the id of its call or without content")
        arguments = values.json_text(own.get("gen_ai.tool.call.arguments", own.get("tool_arguments", given)))
        is_error = True if at(span, "status", "code") in (2, "STATUS_CODE_ERROR") else None
        result = StepResult(call_id, text := values.json_text(content), is_error, exit_code_in(text))
        call = ToolCall(text_at(own, "gen_ai.tool.name"), arguments, call_id)
        tools[call_id] = text_at(span, "traceId"), TraceStep("agent", calls=[call], results=[result])
        return
    if operation not in ("chat", "text_completion", "generate_content"):
        raise Dropped("a span of an agent or of something else")
    messages, answers = _messages(given, "messages", "user"), _messages(answer, "output", "assistant")
    if not messages and not answers:
        raise Dropped(_KEYS["unsaid"][any(key.startswith(tuple(_KEYS["foreign"])) for key in own)])
    if text := text_of(values.parsed(own.get("gen_ai.system_instructions")) or at(answer, "instructions")):
        messages = [{"role": "system", "content": text}, *messages]
    model = own.get("gen_ai.response.model") or own.get("gen_ai.request.model") or span.get("model")
    offered = values.parsed(own.get("gen_ai.tool.definitions")) or at(answer, "tools")
    joiner.add(messages, answers, offered, model)


_TRACE, _EPISODE = "composer_replication_trace", "composer_replication"
_RAW_CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_calls?_|<｜tool▁call")
"""Where the markup of a call begins in an answer of our own loop, which keeps what was sampled as it is."""
_END_TOKENS = re.compile(r"\s*<\|(?:im_end|eot_id|eom_id|endoftext|end)\|>\s*$")


def trace_row(trace: Trace, redact: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
    """A trace as an ATIF object, valid for the models of Harbor 0.26; ``redact`` is given what a session may hold of anybody."""
    name, parent = redact(trace.trace_id), trace.parent and (redact(trace.parent[0]), trace.parent[1])
    state = {key: redact(getattr(trace, key)) for key in ("task_id", "repository", "commit", "folder")}
    agent: dict[str, Any] = {"name": trace.agent or trace.format, "version": trace.version or "unknown"}
    agent = redact(agent | _given({"model_name": trace.model, "tool_definitions": trace.tools}))
    steps = [_step_row(step, idx, redact) for idx, step in enumerate(trace.steps)]
    ours: dict[str, Any] = {"format": trace.format, "prompt_origin": trace.prompt_origin, "parent": parent}
    ours |= {"passed": trace.passed, "format_version": trace.version, "state": state}
    row = {"schema_version": "ATIF-v1.7", "session_id": name, "trajectory_id": name}
    return {**row, "agent": agent, "steps": steps, "extra": {_TRACE: ours}}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing: false and 0 say something."""
    return {key: value for key, value in fields.items() if value or value == 0}


def _step_row(step: TraceStep, idx: int, redact: Callable[[Any], Any]) -> dict[str, Any]:
    row = {"step_id": idx + 1, "source": step.source, "message": redact(step.text)}
    answer = {"model_name": redact(step.model), "reasoning_content": redact(step.reasoning)}
    calls, results = list[dict[str, Any]](), list[dict[str, Any]]()
    for call in step.calls:
        given = values.typed(dict, values.parsed(call.arguments))
        extra = {"arguments_text": redact(call.arguments)} if given is None else {}
        own = {"tool_call_id": call.call_id, "function_name": call.name, "arguments": redact(given or {})}
        calls.append(own | _given({"extra": extra}))
    for result in step.results:
        extra = _given({"is_error": result.is_error, "exit_code": result.exit_code})
        known = _given({"source_call_id": result.call_id, "extra": extra})
        results.append({"content": redact(result.text)} | known)
    parent = step.parent + 1 if step.parent != idx - 1 else None
    others = {
        **(answer | {"tool_calls": calls} if step.source == "agent" else {}),
        "observation": _given({"results": results}),
        "extra": _given({"parent": parent, "flags": sorted(step.flags), "sealed": step.sealed}),
        "is_copied_context": "copied" in step.flags or None,
    }
    return row | _given(others)


def read_atif(
    documents: Iterator[Any], ledger: Ledger, name: str, parent: tuple[str, str] | None = None
) -> Iterator[Trace]:
    """One conversation of each document or line, and of each sub-agent that is embedded in it."""
    for number, document in enumerate(documents):
        ledger.take(lambda _: "kept: the document", [document])
        ours, episode = at(document, "extra", _TRACE), at(document, "extra", _EPISODE)
        trace_id = first_text(document, "trajectory_id", "session_id") or f"{name}#{number}"
        trace = Trace(trace_id, text_at(ours, "format") or "atif")
        trace.tools = function_tools(at(document, "agent", "tool_definitions"))
        trace.version = text_at(ours, "format_version") if ours else text_at(document, "schema_version")
        take = partial(_add_step, trace, has_raw_calls=bool(episode))
        ledger.take(take, items_at(document, "steps"), are_inner=True)
        note_facts(trace, document, "atif")
        origin = at(ours, "prompt_origin") if ours else trace.tools and trace.prompt_origin
        trace.prompt_origin = "recorded" if origin == "recorded" or (episode and not ours) else "rebuilt"
        own, trace.passed = items_at(ours, "parent"), values.typed(bool, at(ours, "passed"))
        trace.parent = (str(own[0]), str(own[1])) if len(own) == 2 else parent
        if isinstance(outcomes := at(episode, "score", "outcomes"), dict) and outcomes:
            trace.passed = set(outcomes.values()) == {"passed"} and not at(episode, "score", "error")
        yield trace
        inner = items_at(document, "subagent_trajectories")
        ledger.num_records += len(inner)
        yield from read_atif(iter(inner), ledger, f"{name}#{number}", (trace.trace_id, ""))


def _add_step(trace: Trace, row: dict[str, Any], *, has_raw_calls: bool) -> None:
    source, extra = row.get("source"), row.get("extra") or {}
    if source not in ("system", "user", "agent"):
        raise Dropped("a step without a source")
    said = {"role": source, "content": row.get("message")}
    step = said_in(row | said if source == "agent" else said)
    step.sealed += filter(None, (values.typed(str, each) for each in items_at(extra, "sealed")))
    if has_raw_calls:
        text = _RAW_CALL.split(step.text)[0].rstrip() if step.calls else step.text
        step.text = _END_TOKENS.sub("", text)
    step.flags = {each for each in items_at(extra, "flags") if each in FLAGS}
    step.flags |= {"copied"} if row.get("is_copied_context") is True else set()
    number = values.typed(int, at(extra, "parent"))
    parent = number - 1 if number is not None and 0 <= number <= len(trace.steps) else None
    trace.add(step, parent=parent, model=row.get("model_name"))
    for result in items_at(row, "observation", "results"):  # an answer without words has some, too
        call_id, text = text_at(result, "source_call_id"), text_of(at(result, "content"))
        is_error, code = (at(result, "extra", key) for key in ("is_error", "exit_code"))
        shown = StepResult(call_id, text, values.typed(bool, is_error), values.typed(int, code))
        if (problem := trace.answer(shown)) and source == "agent":
            trace.lost.append(problem)
        elif problem:
            step.say(text, "")  # what the user or the program was shown
