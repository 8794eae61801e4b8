"""Where trees of one repository are tried out: each run has a fresh tree, a batch shares a sandbox."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.environment import Environment
from composer_replication.tasks.test_run import TestReport, run_tests
from composer_replication.tasks.views import write_files


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
        return [self._run(trial) for trial in trials]

    def _run(self, trial: Trial) -> TestReport:
        with tempfile.TemporaryDirectory(prefix="gate-", dir=process_folder()) as folder:
            tree = Path(folder) / "tree"
            write_files(tree, trial.files)
            return run_tests(
                tree,
                self.environment,
                trial.node_ids,
                backend=self.backend,
                timeout_seconds=self.suite_seconds if trial.node_ids is None else self.test_seconds,
                stop_at_first_failure=trial.stop_at_first_failure,
            )
