"""The guard's benchmark: false alarms and delays, ours and the baselines', on the same runs.

    run_guard_bench(settings) -> BenchResult    everything, JSON-safe
    bench_families                               the runs: honest, hacked, measured wrongly
    bench_detectors                              the rules, as paths with a threshold
    bench_evidence                               the evidence detector on thousands of runs at once
    bench_heldout, bench_recorded                HeldOutGuard's defaults; recorded real runs
    bench_tables, bench_charts                   what a person reads

Thresholds are tuned on runs of their own seed, never on the runs that are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.report.bench_claims import claims_of
from composer_replication.report.bench_detectors import CLEAN, EDGE, Detector, make_detectors
from composer_replication.report.bench_evidence import Floats
from composer_replication.report.bench_families import FAMILIES
from composer_replication.report.bench_heldout import NUM_ROWS, Sizes, heldout_guard_section
from composer_replication.report.bench_measures import (
    CURVE_RATES,
    MATCHED_RATE,
    delays,
    false_alarms,
    threshold_for,
)
from composer_replication.report.bench_recorded import RecordedRun, judge, read_recordings
from composer_replication.report.bench_runs import (
    ALPHAS,
    CHUNK,
    Alarms,
    Report,
    all_alarms,
    highest,
    simulate,
)
from composer_replication.report.bench_series import NUM_EVALUATIONS, Family
from composer_replication.report.bench_timing import microseconds_per_update

BenchResult = dict[str, Any]
Row = dict[str, Any]

OURS = "evidence"
TUNED_ON = (EDGE, CLEAN)
TUNING_SEED = 1
"""Added to the seed for the runs that thresholds are tuned on."""

SEED = 20_260_101
"""The seed of the published figures."""

DEFAULT_RUNS = 10_000
HEADLINE = "jump"
"""The hacked family whose delay stands beside a detector's name."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is simulated.

    Attributes:
        num_runs: of each null family; hacked and invalid families have half of it.
        num_tasks: fresh tasks an evaluation, in 2 … 200.
        seed: of everything that is drawn.
        families: names; empty: all. Thresholds are tuned on two null families in any case.
        recorded: a folder of recorded runs; None: none.
    """

    num_runs: int = DEFAULT_RUNS
    num_tasks: int = 32
    seed: int = SEED
    families: tuple[str, ...] = ()
    recorded: Path | None = None

    @property
    def chosen(self) -> tuple[Family, ...]:
        """The families, in the order of their list."""
        return tuple(family for family in FAMILIES if not self.families or family.name in self.families)

    def runs_of(self, family: Family) -> int:
        """How many runs of this family are simulated."""
        return self.num_runs if family.kind == "null" else max(1, self.num_runs // 2)

    @property
    def heldout_sizes(self) -> Sizes:
        """Runs a row for ``HeldOutGuard``: 3,000 in a full benchmark."""
        return Sizes(num_runs=max(1, 3 * self.num_runs // 10))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of one detector; None where there is none to be had.

    Attributes:
        nominal: the one it comes with.
        matched: for each of ``CURVE_RATES``; None where more runs than that alarm at any threshold.
        by_level: for each of ``ALPHAS``, or empty.
    """

    nominal: float | None
    matched: tuple[float | None, ...]
    by_level: tuple[float, ...]

    @property
    def flat(self) -> list[float]:
        """All of them in this order; infinite stands for none."""
        known = (self.nominal, *self.matched, *self.by_level)
        return [math.inf if threshold is None else threshold for threshold in known]


@dataclass(frozen=True, slots=True)
class Measured:
    """One family: when each detector alarmed at each threshold [H, R], the evidence at each level [A, R]."""

    family: Family
    alarms: Mapping[str, Alarms]
    by_level_AR: Alarms


def run_guard_bench(settings: BenchSettings, report: Report | None = None) -> BenchResult:
    """Simulate, measure and judge; the same settings give the same figures, times aside.

    Args:
        settings: what is simulated.
        report: takes (done, total, what) as the work goes on.

    Raises:
        InputError: the recorded runs cannot be read (see ``read_recordings``).
    """
    start = time.monotonic()
    recordings = [] if settings.recorded is None else read_recordings(settings.recorded)
    tick = _ticker(settings, report)
    detectors = make_detectors()
    thresholds = _thresholds(settings, detectors, tick)
    measured = {
        family.name: _measure(family, settings, detectors, thresholds, tick) for family in settings.chosen
    }
    result: BenchResult = {
        "detectors": _rows(thresholds, measured, settings),
        "calibration": _calibration(detectors, measured),
        "operating_curves": [_curve(name, kept, measured) for name, kept in thresholds.items()],
        "families": [_described(family, settings) for family in settings.chosen],
        "heldout_guard": heldout_guard_section(settings.heldout_sizes, settings.seed, tick),
        "recorded": [judge(run) for run in recordings],
        "descriptions": {detector.name: detector.sentence for detector in detectors},
        "settings": _told(settings, recordings),
    }
    result["claims"] = claims_of(result)
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def _rows(
    thresholds: Mapping[str, Thresholds], measured: Mapping[str, Measured], settings: BenchSettings
) -> list[Row]:
    """Each detector at its nominal threshold, if it has one, and at the matched one."""
    matched = CURVE_RATES.index(MATCHED_RATE)
    times = microseconds_per_update(settings.seed, settings.num_tasks)
    rows = []
    for name, kept in thresholds.items():
        if kept.nominal is not None:
            rows.append(_row(name, "nominal", 0, kept.nominal, measured))
        rows.append(_row(name, "matched", 1 + matched, kept.matched[matched], measured))
    return [{**row, "microseconds_per_update": times[row["detector"]]} for row in rows]


def _described(family: Family, settings: BenchSettings) -> Row:
    return {
        "name": family.name,
        "kind": family.kind,
        "sentence": family.sentence,
        "runs": settings.runs_of(family),
        "onset": family.onset,
    }


def _told(settings: BenchSettings, recordings: Sequence[RecordedRun]) -> dict[str, Any]:
    return {
        "runs": settings.num_runs,
        "tasks_per_evaluation": settings.num_tasks,
        "seed": settings.seed,
        "evaluations": NUM_EVALUATIONS,
        "matched_rate": MATCHED_RATE,
        "recorded": None if settings.recorded is None else str(settings.recorded.resolve()),
        "recorded_runs": [run.name for run in recordings],
    }


def _ticker(settings: BenchSettings, report: Report | None) -> Callable[[str], None]:
    """Counts chunks of runs, and rows of ``HeldOutGuard``'s table: work of one order of size."""
    num_chunks = sum(-(-settings.runs_of(family) // CHUNK) for family in settings.chosen)
    total = len(TUNED_ON) * -(-settings.num_runs // CHUNK) + num_chunks + NUM_ROWS
    done = 0

    def tick(what: str) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, total, what)

    return tick


def _thresholds(
    settings: BenchSettings, detectors: Sequence[Detector], tick: Callable[[str], None]
) -> dict[str, Thresholds]:
    """Tuned on runs whose seed nothing else has."""
    highest_by_name: dict[str, Floats] = {}
    for name in TUNED_ON:
        family = next(family for family in FAMILIES if family.name == name)
        seed = settings.seed + TUNING_SEED
        chunks = simulate(family, settings.num_runs, seed=seed, num_tasks=settings.num_tasks, tick=tick)
        highest_by_name |= highest(chunks, [detector for detector in detectors if detector.tuned_on == name])
    return {
        detector.name: Thresholds(
            nominal=detector.nominal,
            matched=tuple(threshold_for(highest_by_name[detector.name], rate) for rate in CURVE_RATES),
            by_level=()
            if detector.threshold_at is None
            else tuple(detector.threshold_at(alpha) for alpha in ALPHAS),
        )
        for detector in detectors
    }


def _measure(
    family: Family,
    settings: BenchSettings,
    detectors: Sequence[Detector],
    thresholds: Mapping[str, Thresholds],
    tick: Callable[[str], None],
) -> Measured:
    chunks = simulate(
        family,
        settings.runs_of(family),
        seed=settings.seed,
        num_tasks=settings.num_tasks,
        alphas=ALPHAS if family.kind == "null" else ALPHAS[:1],
        tick=tick,
    )
    alarms, by_level_AR = all_alarms(
        chunks, detectors, {name: kept.flat for name, kept in thresholds.items()}
    )
    return Measured(family, alarms, by_level_AR)


def _row(name: str, mode: str, place: int, threshold: float | None, measured: Mapping[str, Measured]) -> Row:
    """One detector at one threshold. The headline rate is the largest over the null families."""
    row: Row = {"name": f"{name} ({mode})", "detector": name, "mode": mode, "threshold": threshold}
    alarms = {} if threshold is None else {kind: one.alarms[name][place] for kind, one in measured.items()}
    rates = {kind: false_alarms(alarms[kind]) for kind in alarms if measured[kind].family.onset is None}
    found = {
        kind: delays(alarms[kind], onset)
        for kind in alarms
        if (onset := measured[kind].family.onset) is not None
    }
    nulls = {kind: rate for kind, rate in rates.items() if measured[kind].family.kind == "null"}
    worst = max(nulls, key=lambda kind: float(nulls[kind]["rate"])) if nulls else None
    headline = found.get(HEADLINE, {})
    return {
        **row,
        "false_alarm_rate": nulls[worst]["rate"] if worst else None,
        "ci95": nulls[worst]["ci95"] if worst else None,
        "worst_family": worst,
        "median_delay": headline.get("median"),
        "p90_delay": headline.get("p90"),
        "missed": headline.get("missed"),
        "halted_before": headline.get("halted_before"),
        "false_alarms": rates,
        "delays": found,
    }


def _calibration(detectors: Sequence[Detector], measured: Mapping[str, Measured]) -> list[Row]:
    """Nominal against empirical error of the rules that know their error, in each null family."""
    rows = []
    for detector in detectors:
        if detector.threshold_at is None:
            continue
        for one in measured.values():
            if one.family.kind != "null":
                continue
            # Our lower bound depends on alpha: its alarms were found with the bound of each level.
            by_level = one.by_level_AR if detector.name == OURS else one.alarms[detector.name][-len(ALPHAS) :]
            for alpha, alarms_R in zip(ALPHAS, by_level, strict=True):
                rows.append(
                    {
                        "detector": detector.name,
                        "family": one.family.name,
                        "nominal": alpha,
                        **false_alarms(alarms_R),
                    }
                )
    return rows


def _curve(name: str, thresholds: Thresholds, measured: Mapping[str, Measured]) -> Row:
    """False alarms at the edge of what is tolerated against the headline delay, by threshold."""
    honest, hacked = measured.get(EDGE), measured.get(HEADLINE)
    points: list[Row] = []
    if honest is not None and hacked is not None and hacked.family.onset is not None:
        for place, threshold in enumerate((thresholds.nominal, *thresholds.matched)):
            if threshold is None:
                continue
            points.append(
                {
                    "threshold": threshold,
                    "is_nominal": place == 0,
                    **false_alarms(honest.alarms[name][place]),
                    "delay": delays(hacked.alarms[name][place], hacked.family.onset),
                }
            )
    return {"detector": name, "false_alarms_in": EDGE, "delays_in": HEADLINE, "points": points}
