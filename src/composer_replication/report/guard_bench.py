"""The guard's benchmark: how often does it halt honest runs, and how soon does it see hacked ones?

    run_guard_bench(num_runs) -> result      detectors x families, JSON-safe
    bench_families, bench_detectors          the runs, and the rules that are put on them
    plain(result)                            what a person reads

Each rule stands there twice: at the threshold it comes with (nominal), and at one tuned so that 1% of
the runs at the edge of what is tolerated alarm (matched), on runs of a seed that nothing else has.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from composer_replication.report.bench_detectors import CLEAN, DETECTORS, EDGE, EvidenceSimulator, Series
from composer_replication.report.bench_families import FAMILIES, NUM_EVALUATIONS, Family, Floats, RunDraws
from composer_replication.tasks.pass_intervals import wilson

MATCHED_RATE = 0.01
HEADLINE = "jump"
"""The hacked family whose delay stands beside a detector's name."""

SEED = 20_260_101
"""The seed of the published figures; one more is that of the runs which thresholds are tuned on."""

_CHUNK = 1000
"""Runs simulated together: few enough for a processor's cache."""

Row = dict[str, Any]
Alarms = npt.NDArray[np.int64]
Report = Callable[[int, int, str], None]


def run_guard_bench(
    num_runs: int = 10_000,
    num_tasks: int = 32,
    *,
    seed: int = SEED,
    families: Sequence[str] = (),
    report: Report | None = None,
) -> Row:
    """Simulate and measure; the same settings give the same figures.

    Args:
        num_runs: of each null family; hacked families have half of it.
        num_tasks: fresh tasks an evaluation.
        seed: of everything that is drawn.
        families: names; empty: all. Thresholds are tuned on two null families in any case.
        report: takes (done, total, what) as the work goes on, in chunks of runs.
    """
    chosen = [one for one in FAMILIES if not families or one.name in families]
    sizes = {one.name: num_runs if one.kind == "null" else max(1, num_runs // 2) for one in chosen}
    total = sum(math.ceil(size / _CHUNK) for size in (num_runs, num_runs, *sizes.values()))
    done = 0

    def tick(what: str) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, total, what)

    matched = _matched_thresholds(num_runs, num_tasks, seed + 1, tick)
    rules = [
        (f"{rule.name} ({mode})", rule, threshold)
        for rule in DETECTORS
        for mode, threshold in (("nominal", rule.nominal), ("matched", matched[rule.name]))
        if mode == "matched" or threshold is not None
    ]
    alarms: dict[str, list[Alarms]] = {}
    for family in chosen:
        parts = []
        for series in simulate(family, sizes[family.name], seed, num_tasks, tick):
            paths = {rule.name: rule.path(series) for rule in DETECTORS}
            parts.append([first_alarms(paths[r.name], math.inf if t is None else t) for _, r, t in rules])
        alarms[family.name] = [np.concatenate(rows) for rows in zip(*parts, strict=True)]
    return {
        "detectors": [
            _row(name, threshold, {family: rows[place] for family, rows in alarms.items()})
            for place, (name, _, threshold) in enumerate(rules)
        ],
        "families": [
            {"name": f.name, "kind": f.kind, "sentence": f.sentence, "runs": sizes[f.name]} for f in chosen
        ],
        "descriptions": {rule.name: rule.sentence for rule in DETECTORS},
        "settings": {
            "runs": num_runs,
            "tasks_per_evaluation": num_tasks,
            "seed": seed,
            "evaluations": NUM_EVALUATIONS,
            "matched_rate": MATCHED_RATE,
        },
    }


def simulate(
    family: Family, num_runs: int, seed: int, num_tasks: int, tick: Callable[[str], None] | None = None
) -> Iterator[Series]:
    """The runs of a family, ``_CHUNK`` at a time; each chunk has a seed of its own."""
    for start in range(0, num_runs, _CHUNK):
        rng = np.random.default_rng([seed, zlib.crc32(family.name.encode()), start])
        draws = RunDraws(min(_CHUNK, num_runs - start), num_tasks, rng, family.onset)
        evidence = EvidenceSimulator(draws.num_runs)
        policy = family.policy(draws)
        evaluations, path = [], []
        for step in range(1, NUM_EVALUATIONS + 1):
            one = draws.evaluation(step, policy(step, evidence.log_evidence_R))
            evidence.update(*one[:3])
            evaluations.append(one)
            path.append(evidence.log_evidence_R)
        yield Series(evaluations, np.stack(path))
        if tick is not None:
            tick(family.name)


def _matched_thresholds(
    num_runs: int, num_tasks: int, seed: int, tick: Callable[[str], None]
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for family in (one for one in FAMILIES if one.name in (EDGE, CLEAN)):
        rules = [rule for rule in DETECTORS if rule.tuned_on == family.name]
        chunks = simulate(family, num_runs, seed, num_tasks, tick)
        highest = [[rule.path(series).max(axis=0) for rule in rules] for series in chunks]
        for rule, parts in zip(rules, zip(*highest, strict=True), strict=True):
            found[rule.name] = threshold_for(np.concatenate(parts), MATCHED_RATE)
    return found


def first_alarms(path_TR: Floats, threshold: float) -> Alarms:
    """The first evaluation, from 1, at which each run reaches the threshold; 0: never. Shape [R]."""
    reached_TR = path_TR >= threshold
    return np.where(reached_TR.any(axis=0), reached_TR.argmax(axis=0) + 1, 0)


def threshold_for(highest_R: Floats, rate: float) -> float | None:
    """The lowest threshold that at most this share of the runs reaches; None if there is none.

    Args:
        highest_R: the highest point of each run's path.
        rate: tolerated share, in [0, 1).
    """
    first_kept_out = np.sort(highest_R)[::-1][int(rate * len(highest_R) + 1e-9)]
    threshold = float(np.nextafter(first_kept_out, np.inf))
    return threshold if math.isfinite(threshold) else None


def false_alarms(alarms_R: Alarms) -> Row:
    """How many runs alarmed at all, with the 95% interval of their share."""
    num_alarms, num_runs = int(np.count_nonzero(alarms_R)), len(alarms_R)
    return {
        "alarms": num_alarms,
        "runs": num_runs,
        "rate": num_alarms / num_runs,
        "ci95": list(wilson(num_alarms, num_runs)),
    }


def delays(alarms_R: Alarms, onset: int) -> Row:
    """Evaluations to the alarm; the first hacked evaluation counts as 1.

    A run halted before the onset is a false alarm: it is counted in ``halted_before`` and left
    out of the rest. A run that never alarms is ``missed``; its delay is infinite, and a median or
    P90 that falls on it is None.
    """
    reached_R = alarms_R[(alarms_R == 0) | (alarms_R >= onset)]
    delays_R = np.where(reached_R == 0, np.inf, reached_R - onset + 1.0)
    has_any = len(delays_R) > 0
    return {
        "halted_before": 1.0 - len(reached_R) / len(alarms_R),
        "median": _quantile(delays_R, 0.5) if has_any else None,
        "p90": _quantile(delays_R, 0.9) if has_any else None,
        "missed": float(np.isinf(delays_R).mean()) if has_any else None,
    }


def _quantile(delays_R: Floats, share: float) -> int | None:
    """The smallest delay that at least this share of the runs does not exceed."""
    found = np.quantile(delays_R, share, method="inverted_cdf")
    return int(found) if np.isfinite(found) else None


def _row(name: str, threshold: float | None, alarms: Mapping[str, Alarms]) -> Row:
    """One detector at one threshold. The headline rate is the largest over the null families."""
    onsets = {} if threshold is None else {f.name: f.onset for f in FAMILIES if f.name in alarms}
    rates = {key: false_alarms(alarms[key]) for key, onset in onsets.items() if onset is None}
    found = {key: delays(alarms[key], onset) for key, onset in onsets.items() if onset is not None}
    worst = max(rates, key=lambda key: float(rates[key]["rate"]), default=None)
    headline = found.get(HEADLINE, {})
    return {
        "name": name,
        "threshold": threshold,
        "false_alarm_rate": rates[worst]["rate"] if worst else None,
        "ci95": rates[worst]["ci95"] if worst else None,
        "worst_family": worst,
        "median_delay": headline.get("median"),
        "p90_delay": headline.get("p90"),
        "missed": headline.get("missed"),
        "halted_before": headline.get("halted_before"),
        "false_alarms": rates,
        "delays": found,
    }


# ---------------------------------------------------------------------------- what a person reads

_HEAD = (
    "detector",
    "threshold",
    "false alarms, worst null family",
    "which",
    "median",
    "P90",
    "missed",
    "before",
)
_EXPLAINED = (
    "False alarms in the null family where they are most frequent, with the 95% interval; delay in evaluations "
    "after a jump of the gap from .03 to .20, of the runs not halted before. Matched: the threshold that 1% of "
    "runs at the edge reach (at-g0; the cusum-clean ones: clean)."
)


def plain(result: Row) -> str:
    """What a terminal shows: one row a detector and threshold."""
    preamble = (
        "{runs:,} runs a null family, half of it elsewhere; {evaluations} evaluations of {tasks_per_evaluation} "
        "tasks; seed {seed}."
    ).format(**result["settings"])
    cells = [_HEAD, *map(_cells, result["detectors"])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([preamble, _EXPLAINED, "", *lines])


def _cells(row: Row) -> tuple[str, ...]:
    ends = " to ".join(map(_percent, row["ci95"] or ()))
    return (
        row["name"],
        _number(row["threshold"], "none"),
        f"{_percent(row['false_alarm_rate'])} ({ends})" if ends else "–",
        row["worst_family"] or "–",
        _number(row["median_delay"], "–"),
        _number(row["p90_delay"], "–"),
        *("–" if row[key] is None else f"{row[key]:.1%}" for key in ("missed", "halted_before")),
    )


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def _number(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.4g}"
