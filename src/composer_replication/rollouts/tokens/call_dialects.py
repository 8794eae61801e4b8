"""Which tools does a reply call? Read in the way of writing calls that its chat template teaches.

| dialect | what a call looks like |
|---|---|
| ``hermes`` | ``<tool_call>`` and JSON (Hermes, Qwen), ``<function=…>`` (Qwen 3.5, Nemotron) or ``<arg_key>`` (GLM) |
| ``llama`` | a JSON object with ``parameters`` on a line of its own, or what follows ``<|python_tag|>`` |
| ``mistral`` | ``[TOOL_CALLS]`` and a JSON list, or name and JSON |
| ``deepseek`` | ``<｜tool▁call▁begin｜>`` to ``<｜tool▁call▁end｜>`` |
| ``kimi`` | ``<|tool_call_begin|>functions.NAME:0`` to ``<|tool_call_end|>`` |
| ``harmony`` | a message to ``functions.NAME`` (GPT-OSS) |
| ``fenced`` | a code block in plain text: for models and templates without tools |

The text is for reading alone; the ids stay what was sampled. What is meant as a call and is none becomes a call with the
raw text as its arguments (and no name where none can be read): the environment refuses it in words that teach.
Nothing here raises for what a model wrote. Calls inside of a ``<think>`` block are thoughts, not calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from composer_replication.errors import InputError, UsageError
from composer_replication.interfaces import Tokenizer
from composer_replication.records import ToolCall, ToolSpec
from composer_replication.rollouts.tokens.call_pieces import (
    BAD_JSON,
    behind_blanks,
    call_of_pairs,
    calls_of,
    items_of,
    json_at,
    make_call,
    object_at,
    pairs_between,
    place_before,
    raw_call,
    until,
)
from composer_replication.rollouts.tokens.chat import decode
from composer_replication.rollouts.tokens.thoughts import thought_is_open

FENCES: Final[Mapping[str, tuple[str, str]]] = {
    "bash": ("bash", "command"),
    "sh": ("bash", "command"),
    "shell": ("bash", "command"),
    "python": ("answer", "code"),
    "py": ("answer", "code"),
    "submit": ("submit", ""),
}
"""Of the fenced dialect: from a block's language to a tool and the argument that takes the block; empty: none does."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """What is read: the text, the schemas of arguments by tool, and what code blocks mean."""

    text: str
    properties: Mapping[str, Mapping[str, Any]]
    fences: Mapping[str, tuple[str, str]]


_Parsed = tuple[tuple[ToolCall, ...], int]
"""The calls that begin at one place, and where reading goes on."""
_Dialect = tuple[re.Pattern[str], Callable[[_Reply, re.Match[str]], _Parsed]]
_KEYWORD = re.compile(r'(\w++)="([^"]*+)"')
_KEYWORDS = re.compile(r'(?:\w++="[^"]*+"(?:, (?!$)|$))*+')
_MISTRAL_CALL = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
_HARMONY_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
# nothing is given back in these, so that a long line costs its length alone
_FENCE = re.compile(r"^ {0,3}(`{3,}+)[ \t]*+([\w+\-]*+)[^\n`]*+$", re.MULTILINE)


def dialect_of(template: str | Mapping[str, str] | None) -> str:
    """The dialect that a chat template writes calls in; ``fenced`` for one that knows no tools.

    Of several templates by name, transformers takes ``tool_use`` where there are tools, else ``default``.

    Raises:
        InputError: it knows tools and writes calls in a way that is not known here (CR0818); there is no
            template (CR0810).
    """
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    template_text = template or ""
    if not template_text:
        raise InputError(
            "CR0810",
            "the tokenizer has no chat template.",
            where="chat template",
            fix="take the tokenizer of an instruction-tuned model, or set its chat_template.",
        )
    for name, signs in _SIGNS.items():
        if all(sign in template_text for sign in signs):
            return name
    if "tool_call" in template_text:
        raise InputError(
            "CR0818",
            "the chat template writes calls of tools in a way that is not known.",
            where="chat template",
            fix=f"name a dialect: {', '.join(sorted(DIALECTS))}.",
        )
    return "fenced"


def require_dialect(name: str, *, where: str = "dialect") -> None:
    """Refuse a name that is none in ``DIALECTS``.

    Raises:
        UsageError: there is no such dialect (CR0818).
    """
    if name not in DIALECTS:
        raise UsageError(
            "CR0818",
            f"there is no dialect {name!r}.",
            where=where,
            fix=f"take one of: {', '.join(sorted(DIALECTS))}.",
        )


def read_calls(
    text: str,
    dialect: str,
    *,
    tools: Sequence[ToolSpec] = (),
    thought_is_open: bool = False,
    fences: Mapping[str, tuple[str, str]] = FENCES,
) -> tuple[ToolCall, ...]:
    """The calls of a reply, in order.

    Args:
        text: with the control tokens in it.
        dialect: a name from ``DIALECTS``; ``dialect_of`` finds it.
        tools: their schemas say which of the arguments between tags are texts and which are JSON; the other
            dialects need none.
        thought_is_open: the prompt ends with ``<think>``, so that the reply begins as a thought.
        fences: of the fenced dialect.

    Raises:
        UsageError: there is no such dialect (CR0818).
    """
    require_dialect(dialect)
    properties = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
    text = f"<think>{text}" if thought_is_open else text
    return tuple(_scan(_Reply(text, properties, fences), *DIALECTS[dialect]))


def read_completion(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    dialect: str,
    *,
    tools: Sequence[ToolSpec] = (),
    fences: Mapping[str, tuple[str, str]] = FENCES,
) -> tuple[ToolCall, ...]:
    """The calls of a completion; its prompt says whether it begins within a thought. Raises as ``read_calls``."""
    is_open = thought_is_open(tokenizer, prompt_ids)
    # No dialect of plain text has control tokens; one right behind a closing fence would hide it.
    text = decode(tokenizer, completion_ids, skip_special_tokens=dialect == "fenced")
    return read_calls(text, dialect, tools=tools, thought_is_open=is_open, fences=fences)


def _scan(
    reply: _Reply, opening: re.Pattern[str], parse: Callable[[_Reply, re.Match[str]], _Parsed]
) -> Iterator[ToolCall]:
    """Parse at each place where a call opens, but for thoughts."""
    place = 0
    while found := opening.search(reply.text, place):
        thought = reply.text.find("<think>", place, found.start())
        if thought >= 0:
            end = reply.text.find("</think>", thought)
            if end < 0:
                return
            place = end + len("</think>")
            continue
        try:
            calls, place = parse(reply, found)
        except RecursionError:  # JSON nested so deeply that it can be read and not compared or written
            calls, place = (raw_call(reply.text[found.start() :]),), len(reply.text)
        yield from calls
        place = max(place, found.end(), found.start() + 1)


# ---- one function a dialect: from the text and the place where a call opens ----------------------------


def _tagged(reply: _Reply, found: re.Match[str]) -> _Parsed:
    """``<tool_call>`` … ``</tool_call>``; the tag may stand in a JSON string, and may be missing at the end."""
    text = reply.text
    read = object_at(text, found.end())
    if read is not None:
        value, begin, stop = read
        behind = behind_blanks(text, stop)
        if behind == len(text) or text.startswith(("</tool_call>", "<tool_call>", "<|"), behind):
            return calls_of(value, text[begin:stop]), stop
    body, stop = until(text, found.end(), "</tool_call>")
    if "<function=" in body:
        name, _, rest = body.partition("<function=")[2].partition(">")
        pairs = pairs_between(rest, "<parameter=", ">", "</parameter>") if "</function>" in rest else None
        return (call_of_pairs(reply.properties, name, pairs, body),), stop
    if "<arg_key>" in body:
        pairs = pairs_between(body, "<arg_key>", "<arg_value>", "</arg_value>")
        return (call_of_pairs(reply.properties, body.partition("<arg_key>")[0], pairs, body),), stop
    is_name = re.fullmatch(r"[\w.\-]+", body.strip()) and text.endswith("</tool_call>", 0, stop)
    return ((make_call(body, "{}") if is_name else raw_call(body)),), stop


def _llama(reply: _Reply, found: re.Match[str]) -> _Parsed:
    """JSON, ``name.call(key="value")`` after the python tag, or code for the interpreter after it."""
    text, is_tagged = reply.text, found[0].startswith("<|python_tag|>")
    read = object_at(text, found.end())
    if read is not None:
        value, begin, stop = read
        if is_tagged or (isinstance(value.get("name"), str) and value.keys() & {"parameters", "arguments"}):
            return calls_of(value, text[begin:stop]), stop
        return (), stop  # JSON that is an answer
    body, stop = until(text, found.end(), "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")
    if not is_tagged or body.lstrip().startswith("{"):
        return (raw_call(body),), stop
    name, is_call, rest = body.strip().partition(".call(")
    if not (is_call and rest.endswith(")") and re.fullmatch(r"[\w.]+", name)):
        return (make_call("code_interpreter", body),), stop
    rest = rest[:-1]
    is_whole = _KEYWORDS.fullmatch(rest)
    return (make_call(name, json.dumps(dict(_KEYWORD.findall(rest))) if is_whole else rest),), stop


def _mistral(reply: _Reply, found: re.Match[str]) -> _Parsed:
    """A JSON list of calls, or a name, perhaps an id, and the arguments as JSON."""
    text, begin = reply.text, behind_blanks(reply.text, found.end())
    try:
        value, stop = json_at(text, begin) if text[begin : begin + 1] in ("[", "{") else (None, begin)
    except BAD_JSON:
        value = None
    if value is not None:
        return tuple(
            call for item, raw in items_of(value, text, begin, stop) for call in calls_of(item, raw)
        ), stop
    named = _MISTRAL_CALL.match(text, begin)
    body, end = until(text, named.end() if named else begin, "[TOOL_CALLS]", "</s>")
    if named is None:
        return (raw_call(body),), place_before(text, end, "[TOOL_CALLS]")
    read = object_at(text, named.end())
    if read is not None:
        return (make_call(named[1], text[read[1] : read[2]], named[2] or ""),), read[2]
    return (make_call(named[1], body, named[2] or ""),), place_before(text, end, "[TOOL_CALLS]")


def _deepseek(reply: _Reply, found: re.Match[str]) -> _Parsed:
    """V3: kind, separator, name, fenced JSON. V3.1: name, separator, JSON."""
    body, stop = until(reply.text, found.end(), "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    before, separator, after = body.partition("<｜tool▁sep｜>")
    if not separator:
        return (raw_call(body),), stop
    name, fence, rest = after.partition("\n```json\n")
    if fence and before.strip() == "function":
        return (make_call(name, rest.rstrip().removesuffix("```").rstrip("\n")),), stop
    return (make_call(before, after),), stop


def _kimi(reply: _Reply, found: re.Match[str]) -> _Parsed:
    """The id, which holds the name, and the arguments."""
    body, stop = until(reply.text, found.end(), "<|tool_call_end|>", "<|tool_calls_section_end|>")
    call_id, separator, arguments = body.partition("<|tool_call_argument_begin|>")
    if not separator:
        return (raw_call(body),), stop
    call_id = call_id.strip()
    name = re.sub(r":\d+$", "", call_id.removeprefix("functions."))
    return (make_call(name, arguments, call_id),), stop


def _harmony(reply: _Reply, found: re.Match[str]) -> _Parsed:
    """A whole message: its header says to whom it goes; one without a recipient is no call."""
    body, stop = until(reply.text, found.end(), "<|call|>", "<|end|>", "<|return|>", "<|start|>")
    # a header is short: what stands before the body, behind the message before
    header = reply.text[max(0, found.start() - 400) : found.start()]
    header = re.split(r"<\|(?:start|end|call|return|message)\|>", header)[-1]
    recipient = _HARMONY_TO.search(header)
    return ((make_call(recipient[1], body),) if recipient else ()), stop


def _fenced(reply: _Reply, found: re.Match[str]) -> _Parsed:
    """A block up to a line of at least as many backticks; one that is not closed is no JSON, and so is refused."""
    text, fences = reply.text, reply.fences
    closing = re.compile(rf"^ {{0,3}}`{{{len(found[1])},}}+[ \t]*+$", re.MULTILINE).search(text, found.end())
    body = text[found.end() + 1 : closing.start() if closing else len(text)]
    stop = closing.end() if closing else len(text)
    if found[2].lower() not in fences:
        return (), stop
    name, argument = fences[found[2].lower()]
    if not argument:
        return (make_call(name, "{}"),), stop
    return (make_call(name, json.dumps({argument: body}) if closing else body),), stop


DIALECTS: Final[Mapping[str, _Dialect]] = {
    "hermes": (re.compile(r"<tool_call>"), _tagged),
    "llama": (
        re.compile(r'<\|python_tag\|>|(?:^[ \t]*|(?<=;)\s*)(?=\{\s*"(?:type|name)"\s*:)', re.MULTILINE),
        _llama,
    ),
    "mistral": (re.compile(r"\[TOOL_CALLS\]"), _mistral),
    "deepseek": (re.compile(r"<｜tool▁call▁begin｜>"), _deepseek),
    "kimi": (re.compile(r"<\|tool_call_begin\|>"), _kimi),
    "harmony": (re.compile(r"<\|message\|>"), _harmony),
    "fenced": (_FENCE, _fenced),
}
"""By name: how a call opens, and how it is read from there."""
_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "kimi": ("<|tool_call_begin|>",),
    "harmony": ("<|channel|>", "<|message|>"),
    "mistral": ("[TOOL_CALLS]",),
    "hermes": ("<tool_call>",),
    "llama": ('"parameters"', "ipython"),
}
"""What a template holds that teaches a dialect, the most certain first."""
