"""The proofs that a deletion is a task; each can fail, and each failure has a name that is counted.

breaks-import      without the body other tests are collected than with it
broken-run-fails   the suite of the broken tree ends with an error or runs too long
no-failing-test    no green test fails without the body
breaks-everything  no green test passes without the body
golden-copy        the body is still to be read in the tree that a rollout sees
hidden-split       taking the hidden tests out changes what the visible files collect
golden-fails       the visible or hidden tests fail although the body is back
broken-passes      the visible tests pass without the body
stub-passes        the visible tests pass with ``return None``, ``True`` or ``''``
not-restored       the golden body in the hole does not give the original file
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from composer_replication.records import Hole
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.body_cuts import STUB_EXPRESSIONS, Deletion, fill, stub_answer
from composer_replication.tasks.environment import Environment
from composer_replication.tasks.leaks import find_copy
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.test_functions import part_tests
from composer_replication.tasks.test_run import NOTHING_COLLECTED, TestReport, run_tests
from composer_replication.tasks.views import view_files, write_files

NUM_SPLITS = 3


class GateFailed(Exception):
    """A candidate that is no task; ``gate`` is the short name that is counted."""

    def __init__(self, gate: str, detail: str) -> None:
        super().__init__(f"{gate}: {detail}")
        self.gate = gate
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Bench:
    """Where trees of one repository are tried out: each run has a fresh folder and sandbox."""

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
        with tempfile.TemporaryDirectory(prefix="gate-", dir=process_folder()) as folder:
            tree = Path(folder) / "tree"
            write_files(tree, files)
            return run_tests(
                tree,
                self.environment,
                node_ids,
                backend=self.backend,
                timeout_seconds=self.suite_seconds if node_ids is None else self.test_seconds,
                stop_at_first_failure=stop_at_first_failure,
            )


@dataclass(frozen=True, slots=True)
class Subject:
    """What the gates judge: one hole of one file, its golden body, its tests."""

    hole: Hole
    broken_text: str
    golden_body: str
    visible: tuple[str, ...]
    hidden: tuple[str, ...]
    withheld: tuple[str, ...]
    visible_files: Mapping[str, bytes]

    def files(self, original: Mapping[str, bytes], view: str, answer: str | None = None) -> dict[str, bytes]:
        """A view of the tree, with the hole filled by ``answer`` if one is given."""
        text = self.broken_text if answer is None else fill(self.broken_text, self.hole, answer)
        return view_files(original, {self.hole.path: text.encode()}, self.visible_files, view)


def judge_deletion(
    deletion: Deletion, repository: RepositoryRecord, bench: Bench, *, hidden_share: float, seed: int
) -> Subject:
    """Run all gates on a candidate.

    Raises:
        GateFailed: the first gate that it does not pass.
        SandboxFailure: the sandbox broke; nothing is known of the candidate.
    """
    broken_text = deletion.break_text(bench.original[deletion.path].decode())
    unsplit = Subject(deletion.hole, broken_text, deletion.golden_body, (), (), (), {})
    failing = find_failing(unsplit, repository, bench)
    for attempt in range(NUM_SPLITS):
        # The tests that tell a stub from the real body may all have been hidden: part them anew,
        # at last not at all.
        share = hidden_share if attempt < NUM_SPLITS - 1 else 0.0
        salt = f"{deletion.pin}/{attempt}"
        subject = _split(unsplit, failing, repository, bench, hidden_share=share, seed=seed, salt=salt)
        try:
            check_subject(subject, bench)
        except GateFailed as error:
            if error.gate not in ("stub-passes", "broken-passes") or not subject.hidden:
                raise
        else:
            return subject
    raise AssertionError("the last attempt hides nothing, so it returns or raises")


def _split(
    unsplit: Subject,
    failing: frozenset[str],
    repository: RepositoryRecord,
    bench: Bench,
    *,
    hidden_share: float,
    seed: int,
    salt: str,
) -> Subject:
    """Part the failing tests, and the trees with them."""
    groups = sorted({repository.places[test] for test in failing})
    texts = {
        path: bench.original[path].decode("utf-8", "replace")
        for path, _, _ in groups
        if path in bench.original
    }
    split = part_tests(groups, texts, hidden_share=hidden_share, seed=seed, salt=salt)
    out = set(split.hidden)
    return replace(
        unsplit,
        visible=tuple(sorted(test for test in failing if repository.places[test] not in out)),
        hidden=tuple(sorted(test for test in failing if repository.places[test] in out)),
        withheld=tuple(sorted(test for test in repository.green - failing if repository.places[test] in out)),
        visible_files={path: text.encode() for path, text in split.files.items()},
    )


def find_failing(subject: Subject, repository: RepositoryRecord, bench: Bench) -> frozenset[str]:
    """Run the whole suite without the body: which green tests do not pass any more?

    Raises:
        GateFailed: breaks-import, broken-run-fails, no-failing-test or breaks-everything.
        SandboxFailure: the sandbox broke.
    """
    report = bench.run(subject.files(bench.original, "hidden"), None)
    if report.error:
        # A conftest.py that cannot be imported ends the run before anything is collected.
        gate = "breaks-import" if report.error.startswith(NOTHING_COLLECTED) else "broken-run-fails"
        raise GateFailed(gate, report.error)
    lost = repository.green - set(report.collected)
    if lost or set(report.collect_errors) != set(repository.broken_files):
        new = sorted(set(report.collect_errors) - set(repository.broken_files)) or sorted(lost)
        raise GateFailed(
            "breaks-import", f"{len(lost)} tests are no longer collected ({new[0] if new else ''})"
        )
    failing = repository.green - report.passed
    if not failing:
        raise GateFailed("no-failing-test", "all tests pass without the body")
    if failing == repository.green and len(repository.green) > 1:
        raise GateFailed("breaks-everything", f"all {len(failing)} tests fail without the body")
    return failing


def check_subject(subject: Subject, bench: Bench) -> None:
    """The gates that need no whole suite; they need no more than a store keeps.

    Raises:
        GateFailed: golden-copy, not-restored, hidden-split, golden-fails, broken-passes or stub-passes.
        SandboxFailure: the sandbox broke.
    """
    check_restores(subject, bench.original)
    check_no_copy(subject, bench.original)
    check_golden(subject, bench)
    check_stubs(subject, bench)


def check_restores(subject: Subject, original: Mapping[str, bytes]) -> None:
    """The golden body in the hole is the original file, to the byte."""
    if fill(subject.broken_text, subject.hole, subject.golden_body).encode() != original.get(
        subject.hole.path
    ):
        raise GateFailed("not-restored", f"{subject.hole.path} differs from the original")


def check_no_copy(subject: Subject, original: Mapping[str, bytes]) -> None:
    """No file that a rollout sees holds the body line for line."""
    copy = find_copy(subject.golden_body, subject.files(original, "rollout"))
    if copy:
        raise GateFailed("golden-copy", f"{copy} holds the same lines")


def check_golden(subject: Subject, bench: Bench) -> None:
    """With the body back, visible tests pass in the rollout's tree and hidden ones in the original tree."""
    report = bench.run(subject.files(bench.original, "rollout", subject.golden_body), subject.visible)
    if report.error and subject.visible_files:
        raise GateFailed("hidden-split", report.error)
    if report.error or len(report.passed) != len(subject.visible):
        raise GateFailed("golden-fails", report.error or f"{_first_not_passed(report)} does not pass")
    if subject.hidden:
        report = bench.run(subject.files(bench.original, "golden"), subject.hidden)
        if report.error or len(report.passed) != len(subject.hidden):
            # Which one stays unsaid: this text is printed, and a hidden test's name is a hint.
            raise GateFailed("golden-fails", "a hidden test does not pass with the golden body")


def _first_not_passed(report: TestReport) -> str:
    return min(set(report.outcomes) - report.passed)


def check_stubs(subject: Subject, bench: Bench) -> None:
    """Neither the hole left open nor a constant passes the visible tests."""
    if _passes(subject, bench, None):
        raise GateFailed("broken-passes", "the visible tests pass without the body")
    for expression in STUB_EXPRESSIONS:
        if _passes(subject, bench, stub_answer(subject.broken_text, subject.hole, expression)):
            raise GateFailed("stub-passes", f"the visible tests pass with return {expression}")


def _passes(subject: Subject, bench: Bench, answer: str | None) -> bool:
    files = subject.files(bench.original, "rollout", answer)
    report = bench.run(files, subject.visible, stop_at_first_failure=True)
    return not report.error and len(report.passed) == len(subject.visible)
