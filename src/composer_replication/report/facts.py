"""The tables of the page: key figures, before and after, settings, environment."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from composer_replication.report.run_data import NUM_LAST_STEPS, RunData, number, table_of

MAX_VALUE_CHARACTERS = 300
DASH = "\N{EN DASH}"

_SECRET_KEY = re.compile(r"(^|_)(token|secret|password|passwd|key|credentials?|auth|cookie)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_\-]{8,}")
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")
_ENVIRONMENT_KEY = re.compile(r"[A-Z][A-Z0-9_]*|env|environ|environment_?variables|variables")
_FINGERPRINT_KEY = re.compile(r"fingerprint|sha256|revision", re.IGNORECASE)
HIDDEN = "(hidden)"


Fact = tuple[str, str]
"""A name and a value: one line of a table."""

Comparisons = dict[str, list[tuple[str, str, str, str]]]
"""By side, such as training and held-out tasks: what was measured, its value before and after, and the change."""


def key_figures(run: RunData) -> list[Fact]:
    """Steps, reward, held-out score, time; forged reports where there were some.

    Rewards are means of five steps at either end.
    """
    rewards, heldout = run.known("reward"), run.known("heldout/score")
    step_seconds, forged = run.known("step_seconds"), sum(run.known("rollouts/forgeries"))
    seconds = number((run.summary or {}).get("seconds")) or (sum(step_seconds) if step_seconds else None)
    means = [statistics.fmean(part) for part in (rewards[:NUM_LAST_STEPS], rewards[-NUM_LAST_STEPS:]) if part]
    return [
        ("Steps", str(max(run.metrics))),
        (f"In-loop reward, {NUM_LAST_STEPS}-step means", _arrow(means)),
        ("Held-out score", _arrow(heldout)),
        ("Time", DASH if seconds is None else _duration(seconds)),
        *([("Answers that forged their tests' report, unpaid", f"{forged:g}")] if forged else []),
    ]


_MEASURES = {
    "shown_pass": "visible pass, of the tests that are shown",
    "paid_pass": "visible pass, of the tests that are paid but not shown",
    "visible_pass": "visible pass",
    "hidden_pass": "hidden pass",
}
"""By key of a run's rates; a rate that was not measured has no line."""


def before_and_after(run: RunData) -> Comparisons:
    """Pass rates with their 95% intervals on both sides; empty where neither was measured."""
    found: Comparisons = {}
    for side, title in (("train", "Train tasks"), ("heldout", "Held-out tasks")):
        old, new = table_of((run.before or {}).get(side)), table_of((run.after or {}).get(side))
        for key, measure in _MEASURES.items():
            low, high = number(old.get(key)), number(new.get(key))
            if low is None and high is None:
                continue
            change = DASH if low is None or high is None else _signed(high - low)
            found.setdefault(title, []).append((measure, _rate(old, key), _rate(new, key), change))
    return found


def time_by_part(run: RunData) -> list[tuple[str, str, float]]:
    """Where the seconds went, with their percentage, by the clock of the first process; empty where the steps do not say it.

    A checkpoint is written between two steps. What is left of a generation is the log-probabilities of its answers; what
    is left of a step is loss, gradients and optimizer; what is left of the run is the start, pass rates before and after,
    the last checkpoint and the saved model.
    """
    if not run.known("generation_seconds"):
        return []
    names = ("step", "generation", "sampling", "grading", "checkpoint")
    step, generation, sampling, grading, checkpoint = (sum(run.known(f"{name}_seconds")) for name in names)
    readings = sum(run.known("killswitch/eval_seconds"))
    total = max(number((run.summary or {}).get("seconds")) or 0.0, step + checkpoint)
    plays = bool(run.known("rollouts/policy_seconds"))
    parts = {
        "Episodes: sampling, tools and grading" if plays else "Sampling": sampling,
        "Rewards" if plays else "Grading in the sandbox": grading,
        "Log-probabilities of the answers": generation - sampling - grading,
        "Held-out readings": readings,
        "Updating the weights": step - generation - readings,
        "Checkpoints": checkpoint,
        "Before and after the steps": total - step - checkpoint,
    }
    known = [(name, seconds) for name, seconds in parts.items() if seconds > 0.001 * total]
    return [(name, _duration(seconds), 100 * seconds / total) for name, seconds in known]


_TEST_COLUMNS = {
    "In training": {
        "rollouts/shown_pass": "all tests pass that are shown",
        "rollouts/visible_pass": "all tests pass that are shown or paid",
    },
    "Held-out readings": {
        "heldout/visible": "visible tests, shown or paid",
        "heldout/hidden": "hidden tests, never shown and never paid",
    },
}


def tests_by_kind(run: RunData) -> Comparisons:
    """Shares of answers that pass what is shown, what is paid, and what is neither: means of five values at either end."""
    found: Comparisons = {}
    for side, columns in _TEST_COLUMNS.items():
        for column, measure in columns.items():
            if values := run.known(column):
                low = statistics.fmean(values[:NUM_LAST_STEPS])
                high = statistics.fmean(values[-NUM_LAST_STEPS:])
                row = (measure, f"{low:.2f}", f"{high:.2f}", _signed(high - low))
                found.setdefault(side, []).append(row)
    return found


_PAIR_SOURCES = {
    "executed": "executed: a branch was run, and the tests decided",
    "siblings": "executed: recorded attempts, one passed its tests and one failed",
    "objection": "text only: a person objected to the answer",
}


def pairs(run: RunData) -> list[tuple[str, str, str]]:
    """Preference pairs that were given to the run: where a label comes from, how many, what they weigh together."""
    given = table_of((run.environment or {}).get("pairs"))
    rows = []
    for name, counts in sorted(given.items()):
        count, weight = (number(table_of(counts).get(key)) or 0.0 for key in ("pairs", "weight"))
        rows.append((_PAIR_SOURCES.get(name, f"as the file says: {name}"), f"{count:g}", f"{weight:.2f}"))
    return rows


def isolation_note(run: RunData) -> str:
    """One sentence where somebody accepted to do without a guard of the sandbox; else empty."""
    sandbox = table_of((run.environment or {}).get("sandbox"))
    names, broken = (_text(sandbox.get(key, [])) for key in ("accepted_no_isolation", "not_effective"))
    if names == _text([]):
        return ""
    ends = "no guard was found missing" if broken == _text([]) else f"these guards did not hold: {broken}"
    return (
        f"The policy's code ran in the sandbox {sandbox.get('backend')}, and somebody accepted to do without {names}; "
        f"{ends}. The rewards are worth what the policy's honesty is worth."
    )


def settings(run: RunData) -> list[Fact]:
    """Every key of the recipe as resolved, secrets hidden."""
    return list(_facts(run.recipe or {}))


def environment(run: RunData) -> list[Fact]:
    """Versions, seeds and notes; no environment variable, no fingerprint."""
    return [(name, value) for name, value in _environment_facts(run) if not _FINGERPRINT_KEY.search(name)]


def fingerprints(run: RunData) -> list[Fact]:
    """What identifies tasks, split, code and final weights."""
    weights = (run.summary or {}).get("parameter_sha256")
    known = [*_environment_facts(run), ("parameter_sha256", weights if isinstance(weights, str) else "")]
    return [
        (name, value) for name, value in known if _FINGERPRINT_KEY.search(name) and value not in {"", DASH}
    ]


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _signed(change: float) -> str:
    text = f"{change:+.2f}"
    return "0.00" if text in {"+0.00", "-0.00"} else text.replace("-", "\N{MINUS SIGN}")


def _arrow(values: list[float]) -> str:
    return f"{values[0]:.2f} → {values[-1]:.2f}" if values else "not measured"


def _rate(table: Mapping[str, Any], key: str) -> str:
    value, ends = number(table.get(key)), table.get(f"{key.removesuffix('_pass')}_ci95")
    if value is None:
        return "not measured"
    low, high = map(number, ends) if isinstance(ends, (list, tuple)) and len(ends) == 2 else (None, None)
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} ({low:.2f} to {high:.2f})"


def _environment_facts(run: RunData) -> Iterator[Fact]:
    told_elsewhere = {"schema_version", "pairs"}
    table = {key: value for key, value in (run.environment or {}).items() if key not in told_elsewhere}
    return _facts(table, is_environment=True)


def _facts(table: Mapping[str, Any], prefix: str = "", *, is_environment: bool = False) -> Iterator[Fact]:
    for key, value in table.items():
        if is_environment and _ENVIRONMENT_KEY.fullmatch(str(key)):
            continue
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _facts(value, f"{name}.", is_environment=is_environment)
        elif _SECRET_KEY.search(str(key)) and isinstance(value, str) and value:
            yield name, HIDDEN
        else:
            yield name, _text(value)


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
