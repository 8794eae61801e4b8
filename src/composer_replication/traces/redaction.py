"""Keys, tokens, e-mail addresses and home folders leave a trace before it is written.

A placeholder stands for one value throughout a trace, is a plain word (a shell and a path take it), and the map from placeholder
to value is handed back for a file that stays on the machine. Signed and encrypted thoughts are not touched: a key's pattern
meets base64 by chance.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import SchemaValidator, core_schema

from composer_replication.traces.json_values import arguments_text, parsed
from composer_replication.traces.trace_records import Trace

_LEFT = re.compile(
    r"REDACTED_\w+?_\d+|person-\d+@redacted\.invalid|user-\d+|git@git(?:hub|lab)\.com|noreply@anthropic\.com"
)
"""Placeholders, and addresses that are nobody's."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern that is tried where ``hint`` holds of a text, which takes a hundredth of the time.

    Group 1, where there is one, is what is taken out.
    """

    name: str
    hint: Callable[[bytes], bool]
    pattern: re.Pattern[str]
    placeholder: str = "REDACTED_key_{}"


def _finder(*patterns: str) -> Callable[[bytes], bool]:
    """Whether one of the patterns is found in UTF-8: pydantic's engine looks for all of them in one pass."""
    schema = core_schema.str_schema(pattern="|".join(patterns), regex_engine="rust-regex")
    return SchemaValidator(schema).isinstance_python


_ROWS = tomllib.loads(Path(__file__).with_name("redaction_rules.toml").read_text(encoding="utf-8"))["rule"]
_ANY_HINT = _finder(*(row["hint"] for row in _ROWS))
RULES = tuple(
    Rule(**{**row, "hint": _finder(row["hint"]), "pattern": re.compile(row["pattern"])}) for row in _ROWS
)


class Redactor:
    """The placeholders of one trace; ``counts`` says how often each rule found something, ``values`` what each stands for."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.values: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def trace(self, trace: Trace) -> None:
        """Redact a trace in its place; what is sealed stays."""
        trace.trace_id = self.text(trace.trace_id)
        if trace.parent is not None:
            trace.parent = (self.text(trace.parent[0]), trace.parent[1])
        folder, repository = self.text(trace.state.folder), self.text(trace.state.repository)
        trace.state = replace(trace.state, folder=folder, repository=repository)
        trace.tools = self._value(trace.tools)
        for step in trace.steps:
            step.text, step.reasoning = self.text(step.text), self.text(step.reasoning)
            step.calls = [replace(call, arguments=self._arguments(call.arguments)) for call in step.calls]
            for result in step.results:
                result.text = self.text(result.text)

    def text(self, text: str) -> str:
        """The text without secrets and names."""
        as_bytes = text.encode("utf-8", "replace")
        if not _ANY_HINT(as_bytes):
            return text
        for rule in RULES:
            if rule.hint(as_bytes):
                text = rule.pattern.sub(partial(self._replaced, rule), text)
        return text

    def _arguments(self, text: str) -> str:
        """JSON's escapes hide where a word begins: arguments with some are looked through as they were meant."""
        value = parsed(text) if "\\" in text else text
        return arguments_text(self._value(value)) if isinstance(value, dict) else self.text(text)

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._value(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._value(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def _replaced(self, rule: Rule, match: re.Match[str]) -> str:
        start, end = match.span(1 if rule.pattern.groups else 0)
        value = match.string[start:end]
        if _LEFT.fullmatch(value):
            return match[0]
        self.counts[rule.name] += 1
        if value not in self._known:
            self._numbers[rule.placeholder] += 1
            self._known[value] = rule.placeholder.format(self._numbers[rule.placeholder])
            self.values[self._known[value]] = value
        return match.string[match.start() : start] + self._known[value] + match.string[end : match.end()]
