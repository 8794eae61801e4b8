"""Where trees of one repository are tried out: each run has a fresh tree, a batch shares a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.running.test_batch import BatchRun, run_batch
from composer_replication.tasks.test_run import TestReport


@dataclass(frozen=True, slots=True)
class Trial:
    """One run to make: a tree, and the tests of it (None: all)."""

    files: Mapping[str, bytes]
    node_ids: Sequence[str] | None
    stop_at_first_failure: bool = False


@dataclass(frozen=True, slots=True)
class Bench:
    """One repository, its environment, and how long its runs may take."""

    original: Mapping[str, bytes]
    environment: Environment
    backend: str | None
    suite_seconds: float
    test_seconds: float

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

    def run_all(self, trials: Sequence[Trial]) -> list[TestReport]:
        """Reports in the order of the trials.

        Raises:
            SandboxFailure: the sandbox broke; nothing is known of the tests.
        """
        runs = [
            BatchRun(
                trial.files,
                trial.node_ids,
                self.suite_seconds if trial.node_ids is None else self.test_seconds,
                trial.stop_at_first_failure,
            )
            for trial in trials
        ]
        return run_batch(runs, self.environment, backend=self.backend)
