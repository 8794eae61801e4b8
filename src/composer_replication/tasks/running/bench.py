"""Where trees of one repository are tried out: each run has a fresh tree, a batch shares a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.running.test_batch import BatchRun, run_batch
from composer_replication.tasks.test_run import TestReport

PATIENCE = 10
WALL_FACTOR = 4
"""The limit of a run is processor time, which a busy machine hardly changes; by the clock it may be so many times
as long, for a run that waits for something that never comes."""
SLOWER = 10.0
MIN_SECONDS = 2.0
"""A fault with which the tests need ten times the golden code's time, and more than this, is noticed."""
IDLE_SECONDS = 5.0
"""So is one with which everything waits so long at a stretch for something that does not come. Where tests of the
golden code sleep as long themselves this is too strict: a constant that they would let pass counts as noticed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run to make: a tree, and the tests of it (None: all).

    ``is_golden``: it should pass, so where it runs out of time the machine may be to blame. ``seconds``: its
    processor time; None for what the bench gives. ``stop_when``: groups of tests; the run may end when one of each
    did not pass. ``idle_seconds``: it ends when all of it has waited so long at a stretch; seen only where the sandbox
    has a ``/proc``.
    """

    files: Mapping[str, bytes]
    node_ids: Sequence[str] | None
    stop_at_first_failure: bool = False
    is_golden: bool = False
    seconds: float | None = None
    stop_when: Sequence[Sequence[str]] = ()
    idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """One repository, its environment, and how long its runs may take, in processor time.

    ``left_out`` are tests and files that no run of the whole suite has: they end the run, or take too long.
    """

    original: Mapping[str, bytes]
    environment: Environment
    backend: str | None
    suite_seconds: float
    test_seconds: float
    left_out: tuple[str, ...] = ()

    def run(
        self,
        files: Mapping[str, bytes],
        node_ids: Sequence[str] | None,
        *,
        stop_at_first_failure: bool = False,
    ) -> TestReport:
        """One run.

        Raises:
            SandboxFailure: the sandbox broke; nothing is known of the tests.
        """
        return self.run_all([Trial(files, node_ids, stop_at_first_failure)])[0]

    def noticing_seconds(self, golden_seconds: float) -> float:
        """``noticing_seconds``, at most what a run of this repository is given."""
        return noticing_seconds(golden_seconds, self.test_seconds)

    def run_all(self, trials: Sequence[Trial]) -> list[TestReport]:
        """Reports in the order of the trials.

        A golden run that ran out of time is made once more, alone and with ``PATIENCE`` times as
        much, so that what becomes of a candidate does not hang on how busy the machine was.

        Raises:
            SandboxFailure: the sandbox broke; nothing is known of the tests.
        """
        reports = run_batch([self._of(trial) for trial in trials], self.environment, backend=self.backend)
        return [
            self._again(trial) if trial.is_golden and report.ran_out_of_time else report
            for trial, report in zip(trials, reports, strict=True)
        ]

    def _again(self, trial: Trial) -> TestReport:
        run = self._of(trial)
        patient = replace(run, timeout_seconds=PATIENCE * run.timeout_seconds, wall_factor=None)
        return run_batch([patient], self.environment, backend=self.backend)[0]

    def _of(self, trial: Trial) -> BatchRun:
        usual = self.suite_seconds if trial.node_ids is None else self.test_seconds
        seconds = usual if trial.seconds is None else trial.seconds
        wall_factor = (
            WALL_FACTOR * usual / seconds
        )  # less processor time is no less patience with a busy machine
        return BatchRun(
            trial.files,
            trial.node_ids,
            seconds,
            trial.stop_at_first_failure,
            wall_factor,
            trial.stop_when,
            trial.idle_seconds,
            self.left_out if trial.node_ids is None else (),
        )


def noticing_seconds(golden_seconds: float, most: float) -> float:
    """The processor time after which tests have noticed a fault; with golden code they need ``golden_seconds``."""
    return min(max(SLOWER * golden_seconds, MIN_SECONDS), most)
