"""The tables of the page: key figures, before and after, settings, environment."""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.report.run_data import NUM_LAST_STEPS, RunData, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_VALUE_CHARACTERS = 300
MAX_TABLE_ROWS = 200
DASH = "\N{EN DASH}"

_SECRET_KEY = re.compile(r"(^|_)(token|secret|password|passwd|key|credentials?|auth|cookie)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_\-]{8,}")
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")
_ENVIRONMENT_KEY = re.compile(r"[A-Z][A-Z0-9_]*|env|environ|environment_?variables|variables")
_FINGERPRINT_KEY = re.compile(r"fingerprint|sha256|revision", re.IGNORECASE)
HIDDEN = "(hidden)"


class Fact(NamedTuple):
    """One line of a table of names and values."""

    name: str
    value: str


class Rate(NamedTuple):
    """A rate and its 95% interval as text; the interval may be empty."""

    value: str
    interval: str = ""


class Comparison(NamedTuple):
    """One rate before and after training; rows of one ``side`` follow each other."""

    side: str
    measure: str
    before: Rate
    after: Rate
    change: str


def key_figures(run: RunData) -> tuple[Fact, ...]:
    """Steps, reward, held-out score, time; forged reports where there were some.

    Rewards are means of five steps at either end.
    """
    rewards = _known(run, "reward")
    heldout = _known(run, "heldout/score")
    first = statistics.fmean(rewards[:NUM_LAST_STEPS]) if rewards else None
    last = statistics.fmean(rewards[-NUM_LAST_STEPS:]) if rewards else None
    seconds = number((run.summary or {}).get("seconds"))
    step_seconds = _known(run, "step_seconds")
    if seconds is None and step_seconds:
        seconds = sum(step_seconds)
    forged = sum(_known(run, "rollouts/forgeries"))
    return (
        Fact("Steps", str(run.steps[-1].step)),
        Fact(f"In-loop reward, {NUM_LAST_STEPS}-step means", _arrow(first, last)),
        Fact("Held-out score", _arrow(*((heldout[0], heldout[-1]) if heldout else (None, None)))),
        Fact("Time", DASH if seconds is None else _duration(seconds)),
        *([Fact("Answers that forged their tests' report, unpaid", f"{forged:g}")] if forged else []),
    )


_MEASURES = {
    "shown_pass": "visible pass, of the tests that are shown",
    "paid_pass": "visible pass, of the tests that are paid but not shown",
    "visible_pass": "visible pass",
    "hidden_pass": "hidden pass",
}
"""By key of a run's rates; a rate that was not measured has no line."""


def before_and_after(run: RunData) -> tuple[Comparison, ...]:
    """Pass rates with their 95% intervals on both sides; empty where neither was measured."""
    rows = []
    for side, title in (("train", "Train tasks"), ("heldout", "Held-out tasks")):
        old, new = table_of((run.before or {}).get(side)), table_of((run.after or {}).get(side))
        for key, measure in _MEASURES.items():
            low, high = number(old.get(key)), number(new.get(key))
            if low is None and high is None:
                continue
            change = DASH if low is None or high is None else _signed(high - low)
            rows.append(Comparison(title, measure, _rate(old, key), _rate(new, key), change))
    return tuple(rows)


def isolation_note(run: RunData) -> str:
    """One sentence where somebody accepted to do without a guard of the sandbox; else empty.

    From what the run recorded; before it did, from its recipe.
    """
    recorded = table_of((run.environment or {}).get("sandbox"))
    recipe = table_of((run.recipe or {}).get("sandbox"))
    names = recorded.get("accepted_no_isolation") or recipe.get("accept_no_isolation")
    if not isinstance(names, list) or not names:
        return ""
    backend = str(recorded.get("backend") or recipe.get("backend") or "of this machine")
    missing = recorded.get("not_effective")
    broken = ", ".join(str(name) for name in missing) if isinstance(missing, list) and missing else ""
    ends = f"these guards did not hold: {broken}" if broken else "no guard was found missing"
    return (
        f"The policy's code ran in the sandbox {backend}, and somebody accepted to do without "
        f"{', '.join(str(name) for name in names)}; {ends}. The rewards are worth what the policy's honesty is worth."
    )


def settings(run: RunData) -> tuple[Fact, ...]:
    """Every key of the recipe as resolved, secrets hidden."""
    return tuple(_facts(run.recipe or {}))


def environment(run: RunData) -> tuple[Fact, ...]:
    """Versions, seeds and notes; no environment variable, no fingerprint."""
    return tuple(fact for fact in _environment_facts(run) if not _FINGERPRINT_KEY.search(fact.name))


def fingerprints(run: RunData) -> tuple[Fact, ...]:
    """What identifies tasks, split, code and final weights."""
    found = [f for f in _environment_facts(run) if _FINGERPRINT_KEY.search(f.name) and f.value != DASH]
    weights = (run.summary or {}).get("parameter_sha256")
    if isinstance(weights, str) and weights:
        found.append(Fact("parameter_sha256", weights))
    return tuple(found)


def numbers_table(run: RunData) -> tuple[tuple[str, ...], ...]:
    """Step, reward, held-out score, gap, KL, streak: the charts as text, last rows only."""
    updates = {u.step: (u.proxy_real_gap, u.kl_ema, u.decline_streak) for u in run.guard_updates}
    return tuple(
        (
            str(row.step),
            *map(_decimal, (row.values.get("reward"), row.values.get("heldout/score")), (3, 3)),
            *map(_decimal, updates.get(row.step, (None, None, None)), (3, 4, 0)),
        )
        for row in run.steps[-MAX_TABLE_ROWS:]
    )


def _decimal(value: float | None, digits: int) -> str:
    """Fixed digits, so that columns align; a dash for what is missing."""
    return DASH if value is None else f"{value:.{digits}f}"


def _signed(value: float) -> str:
    """A change with its sign; the minus is a minus, not a hyphen."""
    text = f"{value:+.2f}"
    return "0.00" if text in {"+0.00", "-0.00"} else text.replace("-", "\N{MINUS SIGN}")


def _duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 12 min 5 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _known(run: RunData, key: str) -> list[float]:
    return [value for _, value in run.column(key) if value is not None]


def _arrow(first: float | None, last: float | None) -> str:
    return "not measured" if first is None or last is None else f"{first:.2f} → {last:.2f}"


def table_of(value: object) -> Mapping[str, Any]:
    """A table of a recipe or a summary; empty where it is something else."""
    return value if isinstance(value, dict) else {}


def _rate(table: Mapping[str, Any], key: str) -> Rate:
    value = number(table.get(key))
    if value is None:
        return Rate("not measured")
    return Rate(f"{value:.2f}", _interval(table.get(f"{key.removesuffix('_pass')}_ci95")))


def _interval(value: object) -> str:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return ""
    low, high = number(value[0]), number(value[1])
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _environment_facts(run: RunData) -> Iterator[Fact]:
    table = {key: value for key, value in (run.environment or {}).items() if key != "schema_version"}
    yield from _facts(table, is_environment=True)


def _facts(table: Mapping[str, Any], prefix: str = "", *, is_environment: bool = False) -> Iterator[Fact]:
    for key, value in table.items():
        if is_environment and _ENVIRONMENT_KEY.fullmatch(str(key)):
            continue
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _facts(value, f"{name}.", is_environment=is_environment)
        elif _SECRET_KEY.search(str(key)) and isinstance(value, str) and value:
            yield Fact(name, HIDDEN)
        else:
            yield Fact(name, _text(value))


def _text(value: object) -> str:
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, (list, tuple)):
        text = ", ".join(_text(item) for item in value) or "none"
    elif value is None or value == "":
        text = DASH
    else:
        text = str(value)
    text = _USER_IN_ADDRESS.sub("", _SECRET_VALUE.sub(HIDDEN, text))
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]} … (cut)"
