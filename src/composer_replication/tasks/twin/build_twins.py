"""Truth beyond the repository's own tests: what the deleted function did, call by call.

    found = build_twins(bench, cuts)          # where the golden code is known
    score = judge_twin(candidate_files, environment, found.twins[pin], timeout_seconds=60)

Record real calls in one run of the suite, replay them through the golden code, change them a
little, keep what is the same in fresh processes, and refuse a twin that a stub or a table
of the recorded calls passes. Method: differential testing (McKeeman, 1998) with recorded
inputs; see ``canonical_encoding`` for when two outcomes are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import PurePosixPath
from typing import Any

from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.twin.twin_run import (
    CALL_SECONDS,
    CONSTANTS,
    GOLDEN_CALL_SECONDS,
    TABLE,
    Job,
    JobReport,
    Twin,
    Vector,
    pickler_fingerprint,
    play_apart,
    record_calls,
    score_digests,
    solver_that_passes,
)

MIN_BODY_LINES = 4
"""A public function with fewer lines is as a rule one expression, and its name says all of it."""
MIN_RECORDED, MIN_MUTATED = 2, 10
NUM_MUTATED, NUM_MUTATED_TEXT = 60, 200
"""60 calls kill as many mutants as 200, except in functions that work on text."""
TRIES_PER_MUTATED = 7  # about 400 for 60
GOLDEN_SECONDS = 5.0
"""Processor time of the golden code in all calls of a twin; a candidate has several times as much."""
_FILTER_SEEDS = ("1", "4242")
_GATE_SEEDS = ("0", "7", "123")
_TEXT_WORK = re.compile(
    r"\bre\.\w|\.(sub|match|fullmatch|search|finditer|findall|split|rsplit|splitlines|replace|join|lower|upper|strip"
    r"|lstrip|rstrip|title|capitalize|startswith|endswith|translate|zfill|ljust|rjust|casefold|encode|decode)\("
)


@dataclass(frozen=True, slots=True)
class TwinSearch:
    """By pin: the twins, and why a function has none."""

    twins: Mapping[str, Twin]
    without: dict[str, str]


def is_candidate(cut: BodyCut, *, is_eager: bool = False) -> bool:
    """Whether a function may get a twin: public, long enough unless ``is_eager``, defined once.

    Names that begin with an underscore are left out, dunder methods too: honest candidates choose other arguments.
    """
    *around, name = [*PurePosixPath(cut.path).with_suffix("").parts, *cut.symbol.split(".")]
    is_private = any(part.startswith("_") for part in [*(one for one in around if one != "__init__"), name])
    is_long = cut.num_body_lines >= (1 if is_eager else MIN_BODY_LINES)
    return is_long and not is_private and "#" not in cut.symbol


def build_twins(
    bench: Bench, cuts: Sequence[BodyCut], *, seed: int = 0, eager: Collection[str] = ()
) -> TwinSearch:
    """Record and check the twins of functions of one repository.

    The same bench, cuts and seed give the same bytes (``twin_bytes``), unless a function itself depends on time or
    place. ``eager`` are pins of functions that get a twin however short they are, and with one recorded call: nothing
    else is hidden from whoever writes them. Every other gate holds for them too. The answer has the twins that passed
    every gate, in the order of ``cuts``, and the reason for every other function.
    """
    build = _Build(bench, seed, eager)
    twins = build.with_green_golden(build.without_weak(build.stable(build.drafts(cuts))))
    return TwinSearch({twin.pin: twin for twin in twins}, build.without)


class _Build:
    """The steps between recording and a proven twin; each is one sandbox for all functions."""

    def __init__(self, bench: Bench, seed: int, eager: Collection[str]) -> None:
        self.bench, self.seed, self.eager = bench, seed, eager
        self.without: dict[str, str] = {}

    def sift(
        self, jobs: Sequence[Job], check: Callable[[Twin, JobReport], Twin | str], **limits: Any
    ) -> list[Twin]:
        """What a check makes of each job that came to its end; where that is no twin, why is noted."""
        kept = []
        reports = play_apart(self.bench, jobs, **{"call_seconds": GOLDEN_CALL_SECONDS, **limits})
        for job, report in zip(jobs, reports, strict=True):
            found = report.error or check(job.twin, report)
            if isinstance(found, Twin):
                kept.append(found)
            else:
                self.without[job.twin.pin] = found
        return kept

    def drafts(self, cuts: Sequence[BodyCut]) -> list[Twin]:
        """Record calls in one run of the suite, replay and mutate them."""
        chosen = [cut for cut in cuts if is_candidate(cut, is_eager=cut.pin in self.eager)]
        calls, problem = record_calls(self.bench, chosen) if chosen else ({}, "")
        if problem:  # what follows from it is final, and the machine may only have been busy
            calls, problem = record_calls(self.bench, chosen)
        jobs = []
        for cut in cuts:
            kept = calls.get(cut.pin, [])
            if cut not in chosen:
                self.without[cut.pin] = "not public, too short, or defined twice"
            elif problem:
                self.without[cut.pin] = problem
            elif len(kept) < (wanted := self._min_recorded(cut.pin)):
                self.without[cut.pin] = f"fewer than {wanted} recorded calls"
            else:
                vectors = tuple(Vector(blob, "") for blob in kept)
                twin = Twin(cut.pin, cut.path, cut.symbol, vectors, (), pickler_fingerprint())
                wanted = NUM_MUTATED_TEXT if _TEXT_WORK.search(cut.golden_body) else NUM_MUTATED
                options = {"mode": "mutate", "wanted": wanted, "tries": TRIES_PER_MUTATED * wanted}
                jobs.append(Job(twin, {**options, "seed": f"{self.seed}/{cut.pin}"}))
        first_lines = {cut.pin: cut.first_line for cut in cuts}

        def draft(twin: Twin, report: JobReport) -> Twin | str:
            if report.line != first_lines[twin.pin]:
                return "its name leads to another definition"
            # Two pickles may be one input: their bytes differ, their encoding does not.
            by_input: dict[str, Vector] = {}
            for index, (vector, told) in enumerate(zip(twin.recorded, report.inputs, strict=False)):
                if told is not None and report.digests.get(index):
                    by_input.setdefault(told, Vector(vector.blob, report.digests[index]))
            recorded, mutated = tuple(by_input.values()), tuple(report.mutated)
            return self._large(replace(twin, recorded=recorded, mutated=mutated))

        return self.sift(jobs, draft)

    def _min_recorded(self, pin: str) -> int:
        return 1 if pin in self.eager else MIN_RECORDED

    def _large(self, twin: Twin) -> Twin | str:
        """The twin, or why it has too few calls."""
        wanted = self._min_recorded(twin.pin)
        if len(twin.recorded) < wanted:
            return f"fewer than {wanted} recorded calls have a result that can be compared"
        return twin if len(twin.mutated) >= MIN_MUTATED else "fewer than 10 mutated calls return"

    def stable(self, twins: list[Twin]) -> list[Twin]:
        """Keep the calls with the same outcome under two other hash seeds, once in reverse order."""

        def steady(twin: Twin, report: JobReport) -> Twin | str:
            return self._large(_steady_part(twin, report))

        for hash_seed, backwards in zip(_FILTER_SEEDS, (False, True), strict=True):
            jobs = [Job(twin, {"backwards": backwards}) for twin in twins]
            twins = self.sift(jobs, steady, hash_seed=hash_seed)
        return twins

    def without_weak(self, twins: list[Twin]) -> list[Twin]:
        """Leave out twins that a constant passes, or a table of all recorded calls."""

        def strong(twin: Twin, report: JobReport) -> Twin | str:
            solver = solver_that_passes(twin, report)
            return f"{solver if solver == TABLE else 'a stub'} passes" if solver else twin

        return self.sift([Job(twin, CONSTANTS) for twin in twins], strong)

    def with_green_golden(self, twins: list[Twin]) -> list[Twin]:
        """Keep twins with which the golden code agrees in every call, three times."""

        def green(twin: Twin, report: JobReport) -> Twin | str:
            score = score_digests(twin, report.digests)
            is_green = score.passed and score.mutated_agree == score.num_mutated
            return twin if is_green else "the golden code does not agree with itself"

        for hash_seed in _GATE_SEEDS:
            jobs = [Job(twin) for twin in twins]
            twins = self.sift(jobs, green, hash_seed=hash_seed, call_seconds=CALL_SECONDS)
        return twins


def _steady_part(twin: Twin, report: JobReport) -> Twin:
    """A twin without the calls that had another outcome, and whose calls need no more than ``GOLDEN_SECONDS``."""
    split, num_mutated, seconds = len(twin.recorded), len(twin.mutated), report.seconds
    while num_mutated and seconds > GOLDEN_SECONDS:
        num_mutated, seconds = num_mutated // 2, seconds / 2
    same = [vector.digest == report.digests.get(index) for index, vector in enumerate(twin.vectors)]
    recorded = tuple(compress(twin.recorded, same[:split]))
    return replace(twin, recorded=recorded, mutated=tuple(compress(twin.mutated[:num_mutated], same[split:])))
