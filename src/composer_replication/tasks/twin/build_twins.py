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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import PurePosixPath
from typing import Any

from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.twin.twin_run import (
    CALL_SECONDS,
    GOLDEN_CALL_SECONDS,
    Job,
    JobReport,
    Twin,
    Vector,
    pickler_fingerprint,
    play_apart,
    play_stubs,
    record_calls,
    score_digests,
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
    """What was found out about some functions of a repository, by pin.

    ``without`` says why a function has no twin. ``unknown`` says why nothing is known of it: the run itself
    failed, twice or alone in its sandbox, and the same build looks again.
    """

    twins: Mapping[str, Twin] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def is_candidate(cut: BodyCut, *, is_eager: bool = False) -> bool:
    """Whether a function may get a twin: public, long enough unless ``is_eager``, defined once.

    Names that begin with an underscore are left out, dunder methods too: honest candidates choose other arguments.
    """
    parts = [*PurePosixPath(cut.path).with_suffix("").parts, *cut.symbol.split(".")]
    is_public = not any(part.startswith("_") and part != "__init__" for part in parts[:-1])
    is_public = is_public and not parts[-1].startswith("_")
    return "#" not in cut.symbol and cut.num_body_lines >= (1 if is_eager else MIN_BODY_LINES) and is_public


def build_twins(
    bench: Bench, cuts: Sequence[BodyCut], *, seed: int = 0, eager: Collection[str] = ()
) -> TwinSearch:
    """Record and check the twins of functions of one repository.

    The same bench, cuts and seed give the same bytes (``twin_bytes``), unless a
    function itself depends on time or place.

    Args:
        bench: the original tree with all its tests, and what a run of the whole suite does without.
        cuts: the functions; those that are no candidates are passed over.
        seed: draws the mutations.
        eager: pins of functions that get a twin however short they are, and with one recorded call:
            nothing else is hidden from whoever writes them. Every other gate holds for them too.

    Returns:
        Twins in the order of ``cuts`` that passed every gate, and the reason for every other function.
    """
    build = _Build(bench, seed, frozenset(eager))
    twins = build.without_weak(build.stable(build.drafts(cuts)))
    return TwinSearch(
        {twin.pin: twin for twin in build.with_green_golden(twins)}, build.without, build.unknown
    )


class _Build:
    """The steps between recording and a proven twin; each is one sandbox for all functions."""

    def __init__(self, bench: Bench, seed: int, eager: frozenset[str]) -> None:
        self.bench, self.seed, self.eager = bench, seed, eager
        self.play = partial(play_apart, bench, call_seconds=GOLDEN_CALL_SECONDS)
        self.without: dict[str, str] = {}
        self.unknown: dict[str, str] = {}

    def drafts(self, cuts: Sequence[BodyCut]) -> list[Twin]:
        """Record calls in one run of the suite, replay and mutate them."""
        chosen = [cut for cut in cuts if is_candidate(cut, is_eager=cut.pin in self.eager)]
        calls, problem = record_calls(self.bench, chosen) if chosen else ({}, "")
        jobs: list[tuple[BodyCut, Job]] = []
        for cut in cuts:
            kept = list(calls[cut.pin].kept) if cut.pin in calls else []
            if cut not in chosen:
                self.without[cut.pin] = "not public, too short, or defined twice"
            elif problem:
                self.unknown[cut.pin] = problem
            elif len(kept) < (wanted := self._min_recorded(cut.pin)):
                self.without[cut.pin] = f"fewer than {wanted} recorded calls"
            else:
                twin = _twin(cut, [Vector(blob, "") for blob in kept])
                wanted = NUM_MUTATED_TEXT if _TEXT_WORK.search(cut.golden_body) else NUM_MUTATED
                draw = {
                    "wanted": wanted,
                    "tries": TRIES_PER_MUTATED * wanted,
                    "seed": f"{self.seed}/{cut.pin}",
                }
                jobs.append((cut, Job(twin, "mutate", draw)))
        twins = []
        for (cut, job), report in zip(jobs, self.play([job for _, job in jobs]), strict=True):
            if not self._is_whole(cut.pin, report):
                continue
            if report.line != cut.first_line:
                self.without[cut.pin] = "its name leads to another definition"
                continue
            # Two pickles may be one input: their bytes differ, their encoding does not.
            by_input: dict[str, Vector] = {}
            for index, (vector, told) in enumerate(zip(job.twin.recorded, report.inputs, strict=False)):
                if told is not None and report.digests.get(index):
                    by_input.setdefault(told, Vector(vector.blob, report.digests[index]))
            twins.append(_twin(cut, list(by_input.values()), report.mutated))
        return [twin for twin in twins if self._is_large_enough(twin)]

    def _min_recorded(self, pin: str) -> int:
        return 1 if pin in self.eager else MIN_RECORDED

    def _is_whole(self, pin: str, report: JobReport) -> bool:
        """Whether a job came to its end; where not, it is noted."""
        if report.error:
            (self.unknown if report.is_unknown else self.without)[pin] = report.error
        return not report.error

    def _is_large_enough(self, twin: Twin) -> bool:
        wanted = self._min_recorded(twin.pin)
        if len(twin.recorded) < wanted:
            self.without[twin.pin] = f"fewer than {wanted} recorded calls have a result that can be compared"
        elif len(twin.mutated) < MIN_MUTATED:
            self.without[twin.pin] = "fewer than 10 mutated calls return"
        return twin.pin not in self.without

    def _replayed(
        self, twins: Sequence[Twin], options: Mapping[str, Any], **limits: Any
    ) -> list[tuple[Twin, JobReport]]:
        """The twins whose calls were made again to the end, with the report."""
        reports = self.play([Job(twin, options=options) for twin in twins], **limits)
        whole = zip(twins, reports, strict=True)
        return [(twin, report) for twin, report in whole if self._is_whole(twin.pin, report)]

    def stable(self, twins: Sequence[Twin]) -> list[Twin]:
        """Keep the calls with the same outcome under two other hash seeds, once in reverse order."""
        kept = list(twins)
        for hash_seed, backwards in zip(_FILTER_SEEDS, (False, True), strict=True):
            found = self._replayed(kept, {"backwards": backwards}, hash_seed=hash_seed)
            kept = [_steady_part(twin, report) for twin, report in found]
            kept = [twin for twin in kept if self._is_large_enough(twin)]
        return kept

    def without_weak(self, twins: Sequence[Twin]) -> list[Twin]:
        """Leave out twins that a constant passes, or a table of all recorded calls."""
        kept = []
        for twin, scores in zip(twins, play_stubs(twins, self.play), strict=True):
            if scores.passed_by or scores.is_passed_by_table:
                what = "a stub" if scores.passed_by else "a table of the recorded calls"
                self.without[twin.pin] = f"{what} passes"
            elif self._is_whole(twin.pin, scores.report):
                kept.append(twin)
        return kept

    def with_green_golden(self, twins: Sequence[Twin]) -> list[Twin]:
        """Keep twins with which the golden code agrees in every call, three times."""
        kept = list(twins)
        for hash_seed in _GATE_SEEDS:
            found = self._replayed(kept, {}, hash_seed=hash_seed, call_seconds=CALL_SECONDS)
            kept = []
            for twin, report in found:
                score = score_digests(twin, report.digests)
                if score.passed and score.mutated_agree == score.num_mutated:
                    kept.append(twin)
                else:
                    self.without[twin.pin] = "the golden code does not agree with itself"
        return kept


def _twin(cut: BodyCut, recorded: Sequence[Vector], mutated: Sequence[Vector] = ()) -> Twin:
    return Twin(cut.pin, cut.path, cut.symbol, tuple(recorded), tuple(mutated), pickler_fingerprint())


def _steady_part(twin: Twin, report: JobReport) -> Twin:
    """A twin without the calls that had another outcome, and whose calls need no more than ``GOLDEN_SECONDS``."""
    split, num_mutated, seconds = len(twin.recorded), len(twin.mutated), report.seconds
    while num_mutated and seconds > GOLDEN_SECONDS:
        num_mutated, seconds = num_mutated // 2, seconds / 2
    same = [vector.digest == report.digests.get(index) for index, vector in enumerate(twin.vectors)]
    recorded = tuple(compress(twin.recorded, same[:split]))
    return replace(twin, recorded=recorded, mutated=tuple(compress(twin.mutated[:num_mutated], same[split:])))
