"""Keys, tokens, e-mail addresses and home folders leave a trace before it is written.

A placeholder stands for one value throughout a trace, is a plain word (a shell and a path take it), and the map from placeholder
to value is handed back for a file that stays on the machine. Signed and encrypted thoughts are not touched: a key's pattern
meets base64 by chance.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_UNTOUCHED = frozenset(
    {"sealed", "tool_call_id", "source_call_id", "source", "function_name", "schema_version", "model_name"}
)
_OURS = re.compile(r"REDACTED_\w+?_\d+|person-\d+@redacted\.invalid|user-\d+")


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern that is only tried where one of its literals stands; group 1, where there is one, is what is taken out."""

    name: str
    literals: tuple[str, ...]
    pattern: re.Pattern[str]
    placeholder: str = "REDACTED_key_{}"


def _rule(name: str, literals: str, pattern: str, placeholder: str = "REDACTED_key_{}") -> Rule:
    return Rule(name, tuple(literals.split()), re.compile(pattern), placeholder)


RULES = (
    _rule(
        "private-key",
        "-----BEGIN",
        r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----[\s\S]{0,8000}?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|$)",
    ),
    _rule("anthropic", "sk-", r"\bsk-ant-[\w-]{20,}"),
    _rule("langfuse", "sk-", r"\bsk-lf-[\w-]{10,}"),
    _rule("openai", "sk-", r"\bsk-(?!ant-)(?:proj-|svcacct-|or-v1-)?[A-Za-z0-9_-]{20,}"),
    _rule(
        "github",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,})",
    ),
    _rule("gitlab", "glpat-", r"\bglpat-[\w-]{20,}"),
    _rule("aws-id", "AKIA ASIA", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    _rule("aws-secret", "_secret _SECRET", r"(?i)aws_secret_access_key\W{1,5}([A-Za-z0-9/+]{40})"),
    _rule("google", "AIza", r"\bAIza[\w-]{35}"),
    _rule("google-oauth", "ya29.", r"\bya29\.[\w-]{20,}"),
    _rule("slack", "xox xapp-", r"\bx(?:ox[bpars]|app)-[\w-]{10,}"),
    _rule("slack-hook", "hooks.slack.com", r"hooks\.slack\.com/services/([\w/]{20,})"),
    _rule("hugging-face", "hf_", r"\bhf_[A-Za-z]{30,}\b"),
    _rule("stripe", "k_live_ k_test_", r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    _rule("npm", "npm_", r"\bnpm_[A-Za-z0-9]{36}\b"),
    _rule("pypi", "pypi-", r"\bpypi-AgE[\w-]{50,}"),
    _rule("sendgrid", "SG.", r"\bSG\.[\w-]{16,}\.[\w-]{16,}"),
    _rule("groq-xai", "gsk_ xai-", r"\b(?:gsk_|xai-)[A-Za-z0-9]{40,}"),
    _rule("jwt", "eyJ", r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    _rule("bearer", "earer", r"[Bb]earer ([\w.~+/-]{20,}=*)"),
    _rule("url-password", "://", r"://[^\s/:@'\"]{1,64}:([^\s/@'\"]{3,128})@"),
    _rule(
        "assigned",
        "_KEY _TOKEN _SECRET PASSWORD assword api_key apiKey _secret _token",
        r"(?:KEY|TOKEN|SECRET|PASSWORD|assword|api_key|apiKey|_secret|_token)[\"']?\s{0,2}[:=]\s{0,2}[\"']"
        r"((?=[^\"'\n]{0,128}\d)[A-Za-z0-9_\-/+.=!$%&*#]{12,128})[\"']",
    ),
    _rule(
        "env-file",
        "_KEY _TOKEN _SECRET PASSWORD",
        r"(?:_KEY|_TOKEN|_SECRET|PASSWORD)=((?=[^\s]{0,200}\d)[A-Za-z0-9_\-/+.=]{12,200})",
    ),
    _rule("e-mail", "@", r"@(?=[A-Za-z0-9-]+\.[A-Za-z])", "person-{}@redacted.invalid"),
    _rule("home-folder", "/Users/ /home/", r"/(?:Users|home)/([^/\s\"'\\:<>|,;)\]}`]{1,64})", "user-{}"),
    _rule("windows-home", "\\Users\\", r"(?i)[a-z]:\\{1,2}Users\\{1,2}([^\\\s\"'/:<>|]{1,64})", "user-{}"),
)
_LITERALS = tuple(dict.fromkeys(literal for rule in RULES for literal in rule.literals))
_SHORTEST = 8
"""No text that is shorter holds anything."""
_LOCAL = re.compile(r"[A-Za-z0-9._%+-]{1,64}$")
_DOMAIN = re.compile(r"@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,24}")
_COMMON = frozenset({"git@github.com", "git@gitlab.com", "noreply@anthropic.com"})


class Redactor:
    """The placeholders of one trace; ``counts`` says how often each rule found something, ``values`` what each stands for."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.values: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def row(self, row: Any) -> Any:
        """A row with its texts redacted; keys and what is sealed stay.

        Which rules can find anything is asked once of all texts together: one by one the literals take longer than the rest.
        """
        texts: list[str] = []
        _collect(row, texts)
        return self._walk(row, _rules_for("\n".join(texts)))

    def text(self, text: str) -> str:
        """The text without secrets and names."""
        return self._text(text, _rules_for(text))

    def _walk(self, row: Any, rules: Sequence[Rule]) -> Any:
        if isinstance(row, str):
            return self._text(row, rules) if len(row) >= _SHORTEST else row
        if isinstance(row, dict):
            return {
                key: value if key in _UNTOUCHED else self._walk(value, rules) for key, value in row.items()
            }
        return [self._walk(each, rules) for each in row] if isinstance(row, list) else row

    def _text(self, text: str, rules: Sequence[Rule]) -> str:
        for rule in rules:
            if any(literal in text for literal in rule.literals):
                text = (
                    _without_addresses(text, self._replace)
                    if rule.name == "e-mail"
                    else self._apply(rule, text)
                )
        return text

    def _apply(self, rule: Rule, text: str) -> str:
        def placeholder(found: re.Match[str]) -> str:
            value = found[1] if rule.pattern.groups else found[0]
            whole = found[0]
            return whole.replace(value, self._replace(rule.name, value, rule.placeholder))

        return rule.pattern.sub(placeholder, text)

    def _replace(self, name: str, value: str, placeholder: str) -> str:
        if _OURS.fullmatch(value):
            return value
        self.counts[name] += 1
        if value not in self._known:
            self._numbers[placeholder] += 1
            self._known[value] = placeholder.format(self._numbers[placeholder])
            self.values[self._known[value]] = value
        return self._known[value]


def _collect(row: Any, texts: list[str]) -> None:
    if isinstance(row, str):
        if len(row) >= _SHORTEST:
            texts.append(row)
    elif isinstance(row, dict):
        for key, value in row.items():
            if key not in _UNTOUCHED:
                _collect(value, texts)
    elif isinstance(row, list):
        for each in row:
            _collect(each, texts)


def _rules_for(text: str) -> list[Rule]:
    present = {literal for literal in _LITERALS if literal in text}
    return [rule for rule in RULES if not present.isdisjoint(rule.literals)]


def _without_addresses(text: str, replace: Callable[[str, str, str], str]) -> str:
    """E-mail addresses are found from their @ on, both ways: a pattern that begins with a name would try every word."""
    pieces, place = [], 0
    for found in _DOMAIN.finditer(text):
        local = _LOCAL.search(text, max(place, found.start() - 64), found.start())
        if local is None or (address := local[0] + found[0]) in _COMMON:
            continue
        pieces += [text[place : local.start()], replace("e-mail", address, "person-{}@redacted.invalid")]
        place = found.end()
    return "".join((*pieces, text[place:])) if pieces else text


def merged_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by rule, all rules named, in their order: a rule that found nothing says so."""
    return {rule.name: counts.get(rule.name, 0) for rule in RULES}
