"""Which tools does a reply call? The tokenizer's response template says it where it has one, else our reader of the dialect.

| dialect | what a call looks like |
|---|---|
| ``hermes`` | ``<tool_call>`` and JSON (Hermes, Qwen), ``<function=…>`` (Qwen 3.5, Nemotron) or ``<arg_key>`` (GLM) |
| ``llama`` | a JSON object with ``parameters`` on a line of its own, or what follows ``<|python_tag|>`` |
| ``mistral`` | ``[TOOL_CALLS]`` and a JSON list, or name and JSON |
| ``deepseek`` | ``<｜tool▁call▁begin｜>`` to ``<｜tool▁call▁end｜>`` |
| ``kimi`` | ``<|tool_call_begin|>functions.NAME:0`` to ``<|tool_call_end|>`` |
| ``harmony`` | a message to ``functions.NAME`` (GPT-OSS) |
| ``fenced`` | a code block in plain text: for models and templates without tools |
| ``own`` | none of these: the tokenizer's response template alone |

The text is for reading alone; the ids stay what was sampled. What is meant as a call and is none becomes a call with the
raw text as its arguments (and no name where none can be read): the environment refuses it in words that teach.
Nothing here raises for what a model wrote. Calls inside of a ``<think>`` block are thoughts, not calls.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from composer_replication.errors import InputError
from composer_replication.records import ToolCall, ToolSpec
from composer_replication.rollouts.tokens.token_ledger import Tokenizer, decode
from composer_replication.rollouts.tools.tool_context import function_schema

OPENS, CLOSES = "<think>", "</think>"
_NUM_TAIL_IDS = 16
"""So many ids at the end of a prompt hold its last mark, also where that is several ids."""
_JSON = json.JSONDecoder()
_BAD_JSON = (ValueError, RecursionError)
_BLANKS = re.compile(r"\s*")
_NAME_IN_RAW = re.compile(r'"name"\s*:\s*"([^"\\]{1,200})"')
_XML = ("<parameter=", ">", "</parameter>")
_PAIRS = ("<arg_key>", "<arg_value>", "</arg_value>")
_SHELLS = frozenset({"bash", "sh", "shell"})
Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of arguments by tool."""
_Parsed = tuple[tuple[ToolCall, ...], int]
"""The calls that begin at one place, and where reading goes on."""
_Parser = Callable[[str, re.Match[str], Schemas], _Parsed]
_MISTRAL_CALL = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
_HARMONY_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def thought_is_open(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends with ``<think>``, so that the answer begins as a thought."""
    return decode(tokenizer, prompt_ids[-_NUM_TAIL_IDS:]).rstrip().endswith(OPENS)


def num_thinking_ids(tokenizer: Tokenizer, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> int:
    """Sampled ids of thoughts, marks included; a thought without an end reaches to the end of the answer.

    An id that a mark shares with other text counts as thought.
    """
    text, places, num = decode(tokenizer, completion_ids), range(len(completion_ids) + 1), 0

    def num_characters(num_ids: int) -> int:
        return len(decode(tokenizer, completion_ids[:num_ids]))

    start = 0 if thought_is_open(tokenizer, prompt_ids) else text.find(OPENS)
    while start >= 0 and text:
        close = text.find(CLOSES, start)
        end = len(text) if close < 0 else close + len(CLOSES)
        first = bisect_right(places, start, key=num_characters) - 1
        num += bisect_left(places, end, key=num_characters) - first
        start = text.find(OPENS, end)
    return num


def _behind_blanks(text: str, place: int) -> int:
    return _BLANKS.match(text, place).end()  # type: ignore[union-attr]  # matches the empty string too


def _json_at(text: str, place: int, openings: tuple[str, ...] = ("{",)) -> tuple[Any, int, int] | None:
    """The JSON object (or list, by ``openings``) that begins there behind blanks, and where it begins and ends."""
    begin = _behind_blanks(text, place)
    if not text.startswith(openings, begin):
        return None
    try:
        value, stop = _JSON.raw_decode(text, begin)
    except _BAD_JSON:
        return None
    return value, begin, stop


def _until(text: str, place: int, *ends: str) -> tuple[str, int]:
    """The text up to the nearest end, and the place behind that end; one search, which an end that never comes costs once."""
    found = re.compile("|".join(map(re.escape, ends))).search(text, place)
    return (text[place : found.start()], found.end()) if found else (text[place:], len(text))


def _call_of(value: object, raw: str) -> ToolCall:
    """The call that a JSON value is: ``name`` beside ``arguments`` or ``parameters``, perhaps within ``function``."""
    outer = value if isinstance(value, dict) else {}
    inner = outer.get("function")
    fields = {**inner, "id": outer.get("id", inner.get("id"))} if isinstance(inner, dict) else outer
    name, call_id = fields.get("name"), fields.get("id")
    if not isinstance(name, str):
        return _raw_call(raw)
    arguments = fields.get("arguments", fields.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return _call(name, text, call_id if isinstance(call_id, str) else "")


def _raw_call(body: str) -> ToolCall:
    """What is meant as a call and is none."""
    named = _NAME_IN_RAW.search(body)
    return _call(named[1] if named else "", body.strip())


def _call(name: str, arguments: str, call_id: str = "") -> ToolCall:
    """Half of a surrogate pair may stand in JSON, but in no text that is stored."""
    parts = (part.encode("utf-8", "replace").decode("utf-8") for part in (name.strip(), arguments, call_id))
    return ToolCall(*parts)


def _tagged_call(schemas: Schemas, name: str, text: str, tags: tuple[str, str, str], body: str) -> ToolCall:
    """The call of keys and values between tags; with a tag missing its arguments are all of ``body``. A text stays one."""
    name, arguments, place = name.strip(), dict[str, Any](), 0
    begin, middle, end = tags
    while (at := text.find(begin, place)) >= 0:
        value_at = text.find(middle, at)
        stop = text.find(end, value_at) if value_at >= 0 else -1
        if stop < 0:
            return _call(name, body)
        key = text[at + len(begin) : value_at].strip().removesuffix("</arg_key>")
        value = text[value_at + len(middle) : stop]
        arguments[key] = value.removeprefix("\n").removesuffix("\n") if tags is _XML else value
        place = stop + len(end)
    for key, value in arguments.items():
        kind = schemas.get(name, {}).get(key, {}).get("type", "string")
        if "string" not in (kind if isinstance(kind, list) else [kind]):
            with suppress(*_BAD_JSON):
                arguments[key] = json.loads(value)
    return _call(name, json.dumps(arguments))


def dialect_of(
    template: str | Mapping[str, str] | None, tokenizer: object = None, *, refuses: bool = True
) -> str:
    """The dialect that a chat template writes calls in; ``fenced`` for one that knows no tools, or, where it ``refuses`` nothing,
    none that is known here.

    Of several templates by name, transformers takes ``tool_use`` where there are tools, else ``default``. ``own`` is one that
    no reader here knows, beside a response template that tells of calls.

    Raises:
        InputError: it knows tools and writes calls in a way that is not known here, and ``tokenizer`` has no
            ``response_template`` that tells of calls (CR0818); there is no template (CR0810).
    """
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    if not template:
        fix = "take the tokenizer of an instruction-tuned model, or set its chat_template."
        raise InputError("CR0810", "the tokenizer has no chat template.", where="chat template", fix=fix)
    for name, (signs, _, _) in DIALECTS.items():
        if signs and all(sign in template for sign in signs):
            return name
    if _has_response_template(tokenizer):
        return "own"
    if refuses and "tool_call" in template:
        problem = "the chat template writes calls of tools in a way that is not known."
        fix = "give the tokenizer its response_template (transformers), or a template that writes calls as Qwen or Llama 3."
        raise InputError("CR0818", problem, where="chat template", fix=fix)
    return "fenced"


def _has_response_template(tokenizer: object) -> bool:
    """Whether the tokenizer says how transformers reads calls of tools."""
    return "tool_calls" in (getattr(tokenizer, "response_template", None) or {}).get("fields", ())


def read_calls(
    text: str, dialect: str, *, tools: Sequence[ToolSpec] = (), thought_is_open: bool = False
) -> tuple[ToolCall, ...]:
    """The calls of a reply (with its control tokens) in one of the ``DIALECTS``, in order.

    The schemas of ``tools`` say which of the arguments between tags are texts and which are JSON; the other dialects need
    none. With ``thought_is_open`` the prompt ends with ``<think>``, so that the reply begins as a thought.
    """
    schemas = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
    _, opening, parse = DIALECTS[dialect]
    return tuple(_scan(f"{OPENS}{text}" if thought_is_open else text, opening, parse, schemas))


def read_completion(
    tokenizer: Any,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    dialect: str,
    *,
    tools: Sequence[ToolSpec] = (),
) -> tuple[ToolCall, ...]:
    """The calls of a completion; its prompt says whether it begins within a thought.

    Where the tokenizer has a response template, what transformers reads by it counts, as long as every call is well-formed. Over
    a malformed one it raises, takes it for text, or drops the arguments that it cannot read (and may search hours for the end
    of one that was cut off among blank lines). So ours is asked first, and counts where it finds such a call, or more calls, or
    the same ones with the blanks around texts that a template may strip: an edit of Python needs them. Where it finds none and
    transformers raises, only what names a tool is a malformed call. Where we have no reader (``own``) that is whatever
    transformers raises over, and text that is left with a control token before the answer's end.
    """
    text = decode(tokenizer, completion_ids)
    plain = decode(tokenizer, completion_ids, skip_special_tokens=True)
    ours: tuple[ToolCall, ...] = ()
    if dialect != "own":
        is_open = thought_is_open(tokenizer, prompt_ids)
        # No dialect of plain text has control tokens; one right behind a closing fence would hide it.
        shown = plain if dialect == "fenced" else text
        ours = read_calls(shown, dialect, tools=tools, thought_is_open=is_open)
        if not _has_response_template(tokenizer) or not all(map(_bare, ours)):
            return ours
    prompt, schemas = decode(tokenizer, prompt_ids), [function_schema(tool) for tool in tools]
    try:
        said = tokenizer.parse_response(text, prefix=prompt, tools=schemas)
        calls = tuple(_call_of(call, json.dumps(call)) for call in said.get("tool_calls") or ())
    except Exception:  # noqa: BLE001  it may raise anything over what a model wrote
        is_meant = dialect == "own" or _NAME_IN_RAW.search(text.rpartition(CLOSES)[2])
        return (_raw_call(text),) if is_meant and not ours else ours
    if dialect != "own":
        return ours if len(calls) < len(ours) or [*map(_bare, calls)] == [*map(_bare, ours)] else calls
    left = str(said.get("content") or "").removesuffix(decode(tokenizer, completion_ids[-1:])).strip()
    return calls if left in plain else (*calls, _raw_call(left))


def _bare(call: ToolCall) -> str:
    """Name and arguments without the blanks around texts; empty for a malformed call."""
    with suppress(*_BAD_JSON):
        if call.name and isinstance(arguments := json.loads(call.arguments), dict):
            texts = {key: value.strip() for key, value in arguments.items() if isinstance(value, str)}
            return json.dumps([call.name, arguments | texts])
    return ""


def _scan(text: str, opening: re.Pattern[str], parse: _Parser, schemas: Schemas) -> Iterator[ToolCall]:
    """Parse at each place where a call opens, but for thoughts."""
    place = 0
    while found := opening.search(text, place):
        thought = text.find(OPENS, place, found.start())
        if thought >= 0:
            end = text.find(CLOSES, thought)
            if end < 0:
                return
            place = end + len(CLOSES)
            continue
        try:
            calls, place = parse(text, found, schemas)
        except RecursionError:  # JSON nested so deeply that it can be read and not compared or written
            calls, place = (_raw_call(text[found.start() :]),), len(text)
        yield from calls
        place = max(place, found.end(), found.start() + 1)


# ---- one function a dialect: from the text and the place where a call opens ----------------------------


def _tagged(text: str, found: re.Match[str], schemas: Schemas) -> _Parsed:
    """``<tool_call>`` … ``</tool_call>``; the tag may stand in a JSON string, and may be missing at the end."""
    read = _json_at(text, found.end())
    if read is not None:
        value, begin, stop = read
        behind = _behind_blanks(text, stop)
        if behind == len(text) or text.startswith(("</tool_call>", "<tool_call>", "<|"), behind):
            return (_call_of(value, text[begin:stop]),), stop
    body, stop = _until(text, found.end(), "</tool_call>")
    if "<function=" in body:
        name, _, rest = body.partition("<function=")[2].partition(">")
        if "</function>" not in rest:
            return (_call(name, body),), stop
        return (_tagged_call(schemas, name, rest, _XML, body),), stop
    if "<arg_key>" in body:
        name = body.partition("<arg_key>")[0]
        return (_tagged_call(schemas, name, body, _PAIRS, body),), stop
    is_name = re.fullmatch(r"[\w.\-]+", body.strip()) and text.endswith("</tool_call>", 0, stop)
    return ((_call(body, "{}") if is_name else _raw_call(body)),), stop


def _llama(text: str, found: re.Match[str], _: Schemas) -> _Parsed:
    """JSON; after the python tag whatever else stands there is meant as a call, too."""
    is_tagged = found[0].startswith("<|python_tag|>")
    read = _json_at(text, found.end())
    if read is not None:
        value, begin, stop = read
        if is_tagged or (isinstance(value.get("name"), str) and value.keys() & {"parameters", "arguments"}):
            return (_call_of(value, text[begin:stop]),), stop
        return (), stop  # JSON that is an answer
    body, stop = _until(text, found.end(), "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")
    return (_raw_call(body),), stop


def _mistral(text: str, found: re.Match[str], _: Schemas) -> _Parsed:
    """A JSON list of calls, or a name, perhaps an id, and the arguments as JSON."""
    named = _MISTRAL_CALL.match(text, found.end())
    place = named.end() if named else found.end()
    read = _json_at(text, place, ("{",) if named else ("[", "{"))
    if read is None:
        body, _end = _until(text, place, "[TOOL_CALLS]", "</s>")
        call = _call(named[1], body, named[2] or "") if named else _raw_call(body)
        return (call,), place + len(body)
    value, begin, stop = read
    if named:
        return (_call(named[1], text[begin:stop], named[2] or ""),), stop
    items = value if isinstance(value, list) else [value]
    return tuple(_call_of(item, json.dumps(item)) for item in items), stop


def _deepseek(text: str, found: re.Match[str], _: Schemas) -> _Parsed:
    """V3: kind, separator, name, fenced JSON. V3.1: name, separator, JSON."""
    body, stop = _until(text, found.end(), "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    before, separator, after = body.partition("<｜tool▁sep｜>")
    if not separator:
        return (_raw_call(body),), stop
    name, fence, rest = after.partition("\n```json\n")
    if fence and before.strip() == "function":
        return (_call(name, rest.rstrip().removesuffix("```").rstrip("\n")),), stop
    return (_call(before, after),), stop


def _kimi(text: str, found: re.Match[str], _: Schemas) -> _Parsed:
    """The id, which holds the name, and the arguments."""
    body, stop = _until(text, found.end(), "<|tool_call_end|>", "<|tool_calls_section_end|>")
    call_id, separator, arguments = body.partition("<|tool_call_argument_begin|>")
    if not separator:
        return (_raw_call(body),), stop
    call_id = call_id.strip()
    name = re.sub(r":\d+$", "", call_id.removeprefix("functions."))
    return (_call(name, arguments, call_id),), stop


def _harmony(text: str, found: re.Match[str], _: Schemas) -> _Parsed:
    """A whole message: its header says to whom it goes; one without a recipient is no call."""
    body, stop = _until(text, found.end(), "<|call|>", "<|end|>", "<|return|>", "<|start|>")
    # a header is short: what stands before the body, behind the message before
    header = text[max(0, found.start() - 400) : found.start()]
    header = re.split(r"<\|(?:start|end|call|return|message)\|>", header)[-1]
    recipient = _HARMONY_TO.search(header)
    return ((_call(recipient[1], body),) if recipient else ()), stop


def _fenced(text: str, found: re.Match[str], _: Schemas) -> _Parsed:
    """A block up to a line of at least as many backticks; one that is not closed is no JSON, and so is refused."""
    closing = re.compile(rf"^ {{0,3}}`{{{len(found[1])},}}+[ \t]*+$", re.MULTILINE).search(text, found.end())
    body = text[found.end() + 1 : closing.start() if closing else len(text)]
    stop = closing.end() if closing else len(text)
    language = found[2].lower()
    if language in _SHELLS:
        return (_call("bash", json.dumps({"command": body}) if closing else body),), stop
    return ((_call("submit", "{}"),) if language == "submit" else ()), stop


DIALECTS: Final[Mapping[str, tuple[tuple[str, ...], re.Pattern[str], _Parser]]] = {
    "deepseek": (("<｜tool▁call▁begin｜>",), re.compile(r"<｜tool▁call▁begin｜>"), _deepseek),
    "kimi": (("<|tool_call_begin|>",), re.compile(r"<\|tool_call_begin\|>"), _kimi),
    "harmony": (("<|channel|>", "<|message|>"), re.compile(r"<\|message\|>"), _harmony),
    "mistral": (("[TOOL_CALLS]",), re.compile(r"\[TOOL_CALLS\]"), _mistral),
    "hermes": (("<tool_call>",), re.compile(r"<tool_call>"), _tagged),
    "llama": (
        ('"parameters"', "ipython"),
        re.compile(r'<\|python_tag\|>|(?:^[ \t]*|(?<=;)\s*)(?=\{\s*"(?:type|name)"\s*:)', re.MULTILINE),
        _llama,
    ),
    # nothing is given back in this one, so that a long line costs its length alone
    "fenced": ((), re.compile(r"^ {0,3}(`{3,}+)[ \t]*+([\w+\-]*+)[^\n`]*+$", re.MULTILINE), _fenced),
}
"""By name, the most certain first: what a template holds that teaches it, how a call opens, and how it is read from there."""
