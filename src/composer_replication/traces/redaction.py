"""Keys, tokens, e-mail addresses and home folders leave a trace before it is written.

A placeholder stands for one value throughout a trace, is a plain word (a shell and a path take it), and the map from placeholder
to value is handed back for a file that stays on the machine. Signed and encrypted thoughts are not touched.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import SchemaValidator, core_schema

from composer_replication.records import ToolCall
from composer_replication.traces.json_values import json_text, parsed
from composer_replication.traces.trace_records import Trace

_LEFT = re.compile(
    r"REDACTED_\w+?_\d+|person-\d+@redacted\.invalid|user-\d+|git@git(?:hub|lab)\.com|noreply@anthropic\.com"
)
"""Placeholders, and addresses that are nobody's."""


class Rule(NamedTuple):
    """A pattern that is tried where ``is_hinted`` holds of a text, which takes a hundredth of the time.

    Group 1, where there is one, is what is taken out.
    """

    name: str
    is_hinted: Callable[[str], bool]
    pattern: re.Pattern[str]
    placeholder: str


def _finder(*hints: str) -> Callable[[str], bool]:
    """Whether one of the hints is found: pydantic's engine looks for all of them in one pass."""
    schema = core_schema.str_schema(pattern="|".join(hints), regex_engine="rust-regex")
    return SchemaValidator(schema).isinstance_python


def _rule(row: dict[str, str]) -> Rule:
    placeholder = row.get("placeholder", "REDACTED_key_{}")
    return Rule(row["name"], _finder(row["hint"]), re.compile(row["pattern"]), placeholder)


_TABLES = tomllib.loads(Path(__file__).with_name("redaction_rules.toml").read_text(encoding="utf-8"))
_GROUPS = [(_finder(*(row["hint"] for row in rows)), [*map(_rule, rows)]) for rows in _TABLES.values()]
"""Keys, which are rare, and names, which stand in every second text: the hints of each are looked for together first."""
RULES = [rule for _, rules in _GROUPS for rule in rules]


class Redactor:
    """The placeholders of one trace; ``counts`` says how often each rule found something, ``values`` what each stands for."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.values: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def trace(self, trace: Trace) -> None:
        """Redact a trace in its place."""
        trace.trace_id = self.text(trace.trace_id)
        if trace.parent is not None:
            trace.parent = (self.text(trace.parent[0]), trace.parent[1])
        trace.folder, trace.repository = self.text(trace.folder), self.text(trace.repository)
        trace.tools = self._value(trace.tools)
        for step in trace.steps:
            step.text, step.reasoning = self.text(step.text), self.text(step.reasoning)
            step.calls = [ToolCall(c.name, self._arguments(c.arguments), c.call_id) for c in step.calls]
            for result in step.results:
                result.text = self.text(result.text)

    def text(self, text: str) -> str:
        """The text without secrets and names; it holds no half of a pair of surrogates, for ``json_value`` reads none."""
        for is_any_hinted, rules in _GROUPS:
            if is_any_hinted(text):
                for rule in rules:
                    if rule.is_hinted(text):
                        text = rule.pattern.sub(partial(self._replaced, rule), text)
        return text

    def _arguments(self, text: str) -> str:
        """JSON's escapes hide where a word begins: arguments with some are looked through as they were meant."""
        value = parsed(text) if "\\" in text else text
        return json_text(self._value(value)) if isinstance(value, dict) else self.text(text)

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.text(key): self._value(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._value(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def _replaced(self, rule: Rule, match: re.Match[str]) -> str:
        start, end = match.span(rule.pattern.groups)
        value = match.string[start:end]
        if _LEFT.fullmatch(value):
            return match[0]
        self.counts[rule.name] += 1
        if value not in self._known:
            self._numbers[rule.placeholder] += 1
            self._known[value] = rule.placeholder.format(self._numbers[rule.placeholder])
            self.values[self._known[value]] = value
        return match.string[match.start() : start] + self._known[value] + match.string[end : match.end()]
