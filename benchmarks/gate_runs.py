"""The runs that judge a candidate task: each in a sandbox of its own, against all in one batch.

    python benchmarks/gate_runs.py [SOURCE …] [--candidates 5] [--repeats 3] [--seed 0]

For each repository (two source distributions by default) it draws functions whose body,
taken out, makes some tests fail and not all, and does eight runs for each: the whole suite
without the body; the failing tests, parted in two, with the golden body; and these without it
(both parts) and with ``return None``, ``return True`` and ``return ''``. First ``run_tests``
one after the other, then ``run_batch``, turn by turn, writing of the trees included. All
reports must be equal but for their seconds. Prints the sum over the candidates of the quickest
of the repeats of each, since other work on the machine only ever adds, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.environment import Environment, open_environment
from composer_replication.tasks.intake.lock import resolve
from composer_replication.tasks.intake.requirements import read_requirements
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.intake.tree_rules import is_subject_path
from composer_replication.tasks.planning.body_cuts import (
    STUB_EXPRESSIONS,
    BodyCut,
    fill,
    find_body_cuts,
    stub_answer,
)
from composer_replication.tasks.running.test_batch import BatchRun, run_batch
from composer_replication.tasks.test_run import TestReport, run_tests
from composer_replication.tasks.views import write_files

SOURCES = ("sdist:toolz==1.2.0", "sdist:semver==3.1.1")
SUITE_SECONDS = 180.0
TEST_SECONDS = 20.0


def alone(run: BatchRun, environment: Environment, *, with_contexts: bool = False) -> TestReport:
    """One run in a sandbox of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=process_folder()) as folder:
        tree = Path(folder) / "tree"
        write_files(tree, run.files)
        return run_tests(
            tree, environment, run.node_ids, timeout_seconds=run.timeout_seconds,
            stop_at_first_failure=run.stop_at_first_failure, with_contexts=with_contexts,
        )  # fmt: skip


def broken(files: Mapping[str, bytes], cut: BodyCut, answer: str | None = None) -> dict[str, bytes]:
    """The tree without the body, or with an answer in its place."""
    text = cut.break_text(files[cut.path].decode())
    return {**files, cut.path: (text if answer is None else fill(text, cut.hole, answer)).encode()}


def candidates(
    source: RepositorySource, environment: Environment, number: int, seed: int
) -> Iterator[tuple[BodyCut, list[str]]]:
    """Functions with the tests that fail without their body, in an order drawn by the seed."""
    baseline = alone(BatchRun(source.files, None, SUITE_SECONDS), environment, with_contexts=True)
    called = {place for test, places in baseline.contexts.items() if test for place in places}
    cuts = [
        cut
        for path, data in sorted(source.files.items())
        if is_subject_path(path)
        for cut in find_body_cuts(path, data.decode())
        if (cut.path, cut.first_line) in called
    ]
    random.Random(seed).shuffle(cuts)
    for cut in cuts:
        report = alone(BatchRun(broken(source.files, cut), None, SUITE_SECONDS), environment)
        failing = sorted(baseline.passed - report.passed)
        if (
            report.error
            or report.collected != baseline.collected
            or not 2 <= len(failing) < len(baseline.passed)
        ):
            continue
        yield cut, failing
        number -= 1
        if number == 0:
            return


def gate_runs(source: RepositorySource, cut: BodyCut, failing: Sequence[str]) -> list[BatchRun]:
    """The eight runs of one candidate."""
    visible, hidden = list(failing[::2]), list(failing[1::2])
    open_tree = broken(source.files, cut)
    text = open_tree[cut.path].decode()
    stubs = [broken(source.files, cut, stub_answer(text, cut.hole, words)) for words in STUB_EXPRESSIONS]
    return [
        BatchRun(open_tree, None, SUITE_SECONDS),
        BatchRun(broken(source.files, cut, cut.golden_body), visible, TEST_SECONDS),
        BatchRun(source.files, hidden, TEST_SECONDS),
        BatchRun(open_tree, hidden, TEST_SECONDS),
        *(BatchRun(tree, visible, TEST_SECONDS, stop_at_first_failure=True) for tree in (open_tree, *stubs)),
    ]


def said(report: TestReport) -> TestReport:
    """All that must be equal: not the seconds, and not the place of the tree in a message."""
    return replace(report, seconds=0.0, error=re.sub(r"/[^ ]*/", "", report.error))


def timed(work: Callable[[], list[TestReport]]) -> tuple[float, list[TestReport]]:
    """Wall-clock seconds and what came out."""
    started = time.perf_counter()
    reports = work()
    return time.perf_counter() - started, reports


def measure(text: str, num_candidates: int, repeats: int, seed: int) -> tuple[float, float, int]:
    """Seconds alone, seconds in batches, and how many reports were equal, of one repository."""
    source = open_source(text)
    lock = resolve(list(read_requirements(source).required.values()), source.repository)
    environment = open_environment(lock)
    sums, num_equal = [0.0, 0.0], 0
    for cut, failing in candidates(source, environment, num_candidates, seed):
        runs = gate_runs(source, cut, failing)
        best = [float("inf"), float("inf")]
        for _ in range(repeats):
            one, expected = timed(lambda runs=runs: [alone(run, environment) for run in runs])  # type: ignore[misc]
            both, found = timed(lambda runs=runs: run_batch(runs, environment))  # type: ignore[misc]
            if [said(report) for report in found] != [said(report) for report in expected]:
                raise SystemExit(f"{cut.pin}: the batch says something else than the runs alone")
            num_equal += len(found)
            best = [min(best[0], one), min(best[1], both)]
        sums = [total + seconds for total, seconds in zip(sums, best, strict=True)]
        print(f"{source.repository:<20}{cut.symbol:<32}{len(failing):>5}{best[0]:>8.2f}{best[1]:>8.2f}{best[0] / best[1]:>7.1f}", flush=True)  # fmt: skip
    return sums[0], sums[1], num_equal


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="*", default=SOURCES, metavar="SOURCE")
    parser.add_argument("--candidates", type=int, default=5, help="of each repository")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'repository':<20}{'function':<32}{'tests':>5}{'alone':>8}{'batch':>8}{'ratio':>7}")
    figures: dict[str, dict[str, float]] = {}
    for text in args.sources:
        alone_seconds, batch_seconds, num_equal = measure(text, args.candidates, args.repeats, args.seed)
        figures[text] = {
            "alone_seconds": round(alone_seconds, 2),
            "batch_seconds": round(batch_seconds, 2),
            "ratio": round(alone_seconds / batch_seconds, 2),
            "equal_reports": num_equal,
        }
        print(f"{text:<57}{alone_seconds:>8.2f}{batch_seconds:>8.2f}{alone_seconds / batch_seconds:>7.1f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
