"""Keys, tokens, e-mail addresses and home folders leave a trace before it is written.

A placeholder stands for one value throughout a trace, is a plain word (a shell and a path take it), and the map from placeholder
to value is handed back for a file that stays on the machine. Signed and encrypted thoughts are not touched: a key's pattern
meets base64 by chance.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.traces.json_values import arguments_text, parsed
from composer_replication.traces.trace_records import Trace

_OURS = re.compile(r"REDACTED_\w+?_\d+|person-\d+@redacted\.invalid|user-\d+")
_BORDER = "\n\0\1\0\n"
"""Between texts that are looked through together: no rule reaches across it."""
_LOCAL = re.compile(r"[A-Za-z0-9._%+-]{1,64}$")
_COMMON = frozenset({"git@github.com", "git@gitlab.com", "noreply@anthropic.com"})


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern that is tried where one of its literals stands: they are found a hundred times faster than a pattern is.

    It begins ``back`` characters before its literal. Group 1, where there is one, is what is taken out.
    """

    name: str
    literals: tuple[str, ...]
    pattern: re.Pattern[str]
    placeholder: str = "REDACTED_key_{}"
    back: int = 0

    def span(self, text: str, place: int) -> tuple[int, int] | None:
        """Where what is to be taken out begins and ends, around a literal at ``place``."""
        match = self.pattern.match(text, place - self.back) if place >= self.back else None
        if match is None:
            return None
        start, stop = match.span(1 if self.pattern.groups else 0)
        if self.name != "e-mail":
            return start, stop
        # its name is looked for backwards: a pattern that begins with it would try every word
        local = _LOCAL.search(text, max(0, place - 64), place)
        return None if local is None or text[local.start() : stop] in _COMMON else (local.start(), stop)


def _read_rules() -> Iterator[Rule]:
    path = Path(__file__).with_name("redaction_rules.toml")
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["rule"]:
        yield Rule(**{**row, "literals": tuple(row["literals"]), "pattern": re.compile(row["pattern"])})


RULES = tuple(_read_rules())
_RULES_OF: dict[str, list[tuple[int, Rule]]] = {}
for _number, _each in enumerate(RULES):
    for _literal in _each.literals:
        _RULES_OF.setdefault(_literal, []).append((_number, _each))


def _searches() -> Iterator[str | re.Pattern[str]]:
    """Literals that share a rare first letter are looked for by one pattern, which skips to that letter; others one by one."""
    for first in sorted({literal[0] for literal in _RULES_OF}):
        own = [literal for literal in _RULES_OF if literal[0] == first]
        if first in "g_Ax":
            yield re.compile("|".join(map(re.escape, own)))
        else:
            yield from own


_SEARCHES = tuple(_searches())


def _spans(text: str) -> list[tuple[int, int, int]]:
    """What is to be taken out: where it begins and ends, and the rule's number; in the order of the text, and none overlap."""
    found = []
    for search in _SEARCHES:
        for place, literal in _places(text, search):
            spans = ((rule.span(text, place), number) for number, rule in _RULES_OF[literal])
            found += [
                (*span, n) for span, n in spans if span is not None and not _OURS.fullmatch(text, *span)
            ]
    merged: list[tuple[int, int, int]] = []
    for start, end, number in sorted(found, key=lambda each: (each[0], each[2])):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2])
        else:
            merged.append((start, end, number))
    return merged


def _places(text: str, search: str | re.Pattern[str]) -> Iterator[tuple[int, str]]:
    if not isinstance(search, str):
        yield from ((match.start(), match[0]) for match in search.finditer(text))
        return
    place = text.find(search)
    while place >= 0:
        yield place, search
        place = text.find(search, place + 1)


class Redactor:
    """The placeholders of one trace; ``counts`` says how often each rule found something, ``values`` what each stands for."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.values: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def trace(self, trace: Trace) -> None:
        """Redact a trace in its place; what is sealed stays."""
        texts = [trace.trace_id, *(trace.parent or ("", "")), trace.state.folder, trace.state.repository]
        for step in trace.steps:
            texts += (step.text, step.reasoning, *(result.text for result in step.results))
        arguments = [call.arguments for step in trace.steps for call in step.calls]
        # JSON's escapes hide where a word begins: texts with some are looked through one by one, as they were meant
        values = [_object(text) if "\\" in text else text for text in arguments]
        inner = [text for value in (*values, trace.tools) for text in _strings(value)]
        found = self.texts([*texts, *inner])
        clean = iter(found)
        trace.trace_id, *parent, folder, repository = (next(clean) for _ in range(5))
        trace.parent = None if trace.parent is None else (parent[0], parent[1])
        trace.state = replace(trace.state, folder=folder, repository=repository)
        for step in trace.steps:
            step.text, step.reasoning = next(clean), next(clean)
            for result in step.results:
                result.text = next(clean)
        given = iter(values)
        for step in trace.steps:
            step.calls = [replace(c, arguments=arguments_text(_with(next(given), clean))) for c in step.calls]
        trace.tools = _with(trace.tools, clean)

    def texts(self, texts: list[str]) -> list[str]:
        """The texts without secrets and names; all are looked through together, which is one search a literal."""
        whole = _BORDER.join(texts)
        if whole.count(_BORDER) != len(texts) - 1:
            return [self.text(text) for text in texts]
        clean = self.text(whole)
        return texts if clean is whole else clean.split(_BORDER)

    def text(self, text: str) -> str:
        """One text likewise."""
        pieces, place = [], 0
        for start, end, number in _spans(text):
            pieces += [text[place:start], self._placeholder(RULES[number], text[start:end])]
            place = end
        return "".join((*pieces, text[place:])) if pieces else text

    def _placeholder(self, rule: Rule, value: str) -> str:
        self.counts[rule.name] += 1
        if value not in self._known:
            self._numbers[rule.placeholder] += 1
            self._known[value] = rule.placeholder.format(self._numbers[rule.placeholder])
            self.values[self._known[value]] = value
        return self._known[value]


def _object(text: str) -> Any:
    value = parsed(text)
    return value if isinstance(value, dict) else text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _with(value: Any, texts: Iterator[str]) -> Any:
    """The value with its texts, in their order, replaced by others."""
    if isinstance(value, dict):
        return {key: _with(each, texts) for key, each in value.items()}
    if isinstance(value, list):
        return [_with(each, texts) for each in value]
    return next(texts) if isinstance(value, str) else value
