"""The proofs that a deletion is a task; each can fail, and each failure has a name that is counted.

breaks-import      without the code other tests are collected than with it
broken-run-fails   the suite of the broken tree ends with an error or runs too long
no-failing-test    no green test fails without the code
breaks-everything  no green test passes without the code
golden-copy        most of the code is still to be read in the tree that a rollout sees
golden-fails       the visible or hidden tests fail although the code is back
broken-passes      the visible or hidden tests pass without the code
stub-passes        the visible or hidden tests pass when every function returns one constant
not-restored       the golden patch, applied by git, does not give the original files, or the task's own
                   tests do not pass every time although the code is back
hidden-shown       a hidden test still stands in the tree that a rollout sees

Two more follow once the task is written (``secrecy``): leak and instruction-leaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from composer_replication.errors import InputError
from composer_replication.records import Edit
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.leaks.copies import copied_share
from composer_replication.tasks.patches import apply_patch
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.planning.edits import edited_text, line_edits, shifted_line
from composer_replication.tasks.running.bench import Bench, Trial
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.subject import Subject, unsplit_subject
from composer_replication.tasks.test_functions import Place, count_functions, part_tests
from composer_replication.tasks.test_run import NOTHING_COLLECTED, TestReport

NUM_DRAWS = 24
"""How many ways to part the tests are looked at; a stub that would pass is known without a run."""
MAX_STUB_TESTS = 40
NUM_TRIES = 3
"""How many of them are run."""
NUM_GOLDEN_RUNS = 3
"""With the code back the tests of a task pass so often in a row, or they are flaky."""
GOLDEN_CPU_SHARE = 0.5
"""Of the processor time that an answer has: a correct one may need twice as much as the golden code."""
MAX_SELECTED_SHARE = 0.5
"""Tests are selected by coverage first only where that leaves out at least half of the suite."""


class GateFailed(Exception):
    """A candidate that is no task; ``gate`` is the short name that is counted."""

    def __init__(self, gate: str, detail: str) -> None:
        super().__init__(gate, detail)  # as they came, so that it can be pickled
        self.gate = gate
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.gate}: {self.detail}"


def judge_deletion(
    deletion: Deletion,
    repository: RepositoryRecord,
    bench: Bench,
    *,
    hidden_share: float,
    seed: int,
    selected: Sequence[str] | None = None,
) -> Subject:
    """Run all gates on a candidate.

    The tests that a coverage map selects are run first, the whole suite once for what
    survives: it has the last word on which tests fail.

    Args:
        deletion: the candidate.
        repository: what its whole suite did.
        bench: where it is tried.
        hidden_share: of the failing test functions, in [0, 1).
        seed: draws the hidden ones.
        selected: the tests that call the deleted code; None: nobody knows.

    Raises:
        GateFailed: the first gate that it does not pass.
        SandboxFailure: the sandbox broke; nothing is known of the candidate.
    """
    unsplit = unsplit_subject(deletion)
    check_restores(unsplit, bench.original)
    check_no_copy(unsplit, bench.original)

    def split_and_check(failing: frozenset[str]) -> Subject:
        return _split_and_check(
            unsplit, failing, repository, bench, hidden_share=hidden_share, seed=seed, pin=deletion.pin
        )

    first = _failing_selected(unsplit, repository, bench, selected)
    subject = split_and_check(first) if first else None
    failing = find_failing(unsplit, repository, bench)
    return subject if subject is not None and failing == first else split_and_check(failing)


def _failing_selected(
    unsplit: Subject, repository: RepositoryRecord, bench: Bench, selected: Sequence[str] | None
) -> frozenset[str]:
    """The selected tests that fail; empty where only the whole suite can tell.

    Raises:
        GateFailed: no-failing-test.
    """
    wanted = sorted(repository.green.intersection(selected or ()))
    if not wanted or len(wanted) > MAX_SELECTED_SHARE * len(repository.green):
        return frozenset()
    report = bench.run(unsplit.broken(bench.original, "hidden"), wanted)
    if report.error:
        return frozenset()
    failing = frozenset(wanted) - report.passed
    if not failing:
        raise GateFailed("no-failing-test", "all tests that call it pass without the code")
    return failing


def _split_and_check(
    unsplit: Subject,
    failing: frozenset[str],
    repository: RepositoryRecord,
    bench: Bench,
    *,
    hidden_share: float,
    seed: int,
    pin: str,
) -> Subject:
    passed = _passed_by_stubs(unsplit, sorted(failing), bench)
    num_tries = 0
    for attempt in range(NUM_DRAWS):
        # The tests that tell a stub from the real code may all be on one side, or a file may
        # collect otherwise without the hidden ones: part them anew, at last not at all.
        subject = _split(
            unsplit, failing, repository, bench, hidden_share=hidden_share, seed=seed, salt=f"{pin}/{attempt}"
        )
        if not subject.hidden or num_tries == NUM_TRIES:
            break
        try:
            _refuse_stubs(subject, passed)
            check_hidden_out(subject, repository, bench.original)
            num_tries += 1
            _check_split(subject, bench, NUM_GOLDEN_RUNS)
        except GateFailed:
            continue
        return subject
    whole = _split(unsplit, failing, repository, bench, hidden_share=0.0, seed=seed, salt=pin)
    _refuse_stubs(whole, passed)
    _check_split(whole, bench, NUM_GOLDEN_RUNS)
    return whole


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
    edits_of: dict[str, list[Edit]] = {}
    for edit in unsplit.changes.test_edits:
        edits_of.setdefault(edit.path, []).append(edit)
    places = {repository.places[test] for test in failing}
    original = {
        path: bench.original[path].decode("utf-8", "replace")
        for path in {p[0] for p in places} & set(bench.original)
    }
    texts = {path: edited_text(text, edits_of.get(path, ())) for path, text in original.items()}
    now = {_moved(place, original, edits_of): place for place in places}
    split = part_tests(sorted(now), texts, hidden_share=hidden_share, seed=seed, salt=salt)
    out = {now[place] for place in split.hidden}
    untouched = tuple(edit for edit in unsplit.changes.test_edits if edit.path not in split.files)
    shorter = (
        edit for path, text in sorted(split.files.items()) for edit in line_edits(path, original[path], text)
    )
    return replace(
        unsplit,
        changes=replace(unsplit.changes, visible_edits=(*untouched, *shorter)),
        visible=tuple(sorted(test for test in failing if repository.places[test] not in out)),
        hidden=tuple(sorted(test for test in failing if repository.places[test] in out)),
        withheld=tuple(sorted(test for test in repository.green - failing if repository.places[test] in out)),
    )


def _moved(place: Place, original: Mapping[str, str], edits_of: Mapping[str, Sequence[Edit]]) -> Place:
    """Where a test function stands once the imports of its file are moved."""
    path, line, name = place
    if not edits_of.get(path) or path not in original:
        return place
    return path, shifted_line(original[path], edits_of[path], line), name


def find_failing(subject: Subject, repository: RepositoryRecord, bench: Bench) -> frozenset[str]:
    """Run the whole suite without the code: which green tests do not pass any more?

    A test file that names the deleted code where it is imported belongs to the feature: all
    its tests may be lost. Any other file must be collected as before.

    Raises:
        GateFailed: breaks-import, broken-run-fails, no-failing-test or breaks-everything.
        SandboxFailure: the sandbox broke.
    """
    report = bench.run(subject.broken(bench.original, "hidden"), None)
    if report.error:
        # A conftest.py that cannot be imported ends the run before anything is collected.
        gate = "breaks-import" if report.error.startswith(NOTHING_COLLECTED) else "broken-run-fails"
        raise GateFailed(gate, report.error)
    new = sorted(set(report.collect_errors) - set(repository.broken_files))
    of_feature = tuple(path for path in new if subject.is_whole and is_test_path(path))
    lost = repository.green - set(report.collected)
    others = sorted(test for test in lost if not test.startswith(tuple(f"{path}::" for path in of_feature)))
    strange = [path for path in new if path not in of_feature]
    if others or strange or set(repository.broken_files) - set(report.collect_errors):
        example = [*strange, *others, ""][0]
        raise GateFailed("breaks-import", f"{len(lost)} tests are no longer collected ({example})")
    failing = repository.green - report.passed
    if not failing:
        raise GateFailed("no-failing-test", "all tests pass without the code")
    if failing == repository.green and len(repository.green) > 1:
        raise GateFailed("breaks-everything", f"all {len(failing)} tests fail without the code")
    return failing


def check_restores(subject: Subject, original: Mapping[str, bytes]) -> None:
    """The golden patch, applied by git to the broken tree, gives the original files, to the byte.

    Raises:
        GateFailed: not-restored.
        MissingError: git is not installed (CR0447).
    """
    touched = subject.changes.source_files
    try:
        broken = subject.broken(original, "rollout")
        restored = apply_patch(
            {path: broken[path] for path in touched if path in broken}, subject.golden_patch(original)
        )
    except (InputError, KeyError, ValueError) as error:
        raise GateFailed("not-restored", str(error)) from error
    for path in touched:
        if restored.get(path) != original.get(path):
            raise GateFailed("not-restored", f"{path} differs from the original")


def check_no_copy(subject: Subject, original: Mapping[str, bytes]) -> None:
    """Half of the code or less stands a second time, line for line, in what a rollout sees.

    Raises:
        GateFailed: golden-copy.
    """
    share, path = copied_share(subject.golden_bodies(original), subject.broken(original, "rollout"))
    if share > 0.5:
        raise GateFailed("golden-copy", f"{path} holds the same lines")


def check_hidden_out(subject: Subject, repository: RepositoryRecord, original: Mapping[str, bytes]) -> None:
    """Each hidden test function is gone from its file in the tree that a rollout sees.

    Raises:
        GateFailed: hidden-shown; which one stays unsaid.
    """
    shown = subject.broken(original, "rollout")
    places = {repository.places[test] for test in subject.hidden if test in repository.places}
    hidden = Counter((path, name) for path, _, name in places)
    for path in sorted({path for path, _ in hidden}):
        before = count_functions(original[path].decode("utf-8", "replace"))
        after = count_functions(shown.get(path, b"").decode("utf-8", "replace"))
        if any(
            after[name] > before[name] - count for (other, name), count in hidden.items() if other == path
        ):
            raise GateFailed("hidden-shown", f"a hidden test still stands in {path}")


def check_tests(subject: Subject, bench: Bench) -> None:
    """The gates that need the task's own tests alone.

    Raises:
        GateFailed: golden-fails, broken-passes or stub-passes.
        SandboxFailure: the sandbox broke.
    """
    _check_split(subject, bench)
    _check_stubs(subject, bench)


def _check_split(subject: Subject, bench: Bench, num_golden_runs: int = 1) -> None:
    """The golden code passes, in as many runs as asked for, and the broken tree does not.

    The runs after the first are of all the task's tests together, in the same sandbox.
    """
    original = bench.original
    own = sorted({*subject.visible, *subject.hidden})
    again = Trial(subject.golden(original, "hidden"), own, is_golden=True)
    trials = [
        Trial(subject.golden(original, "rollout"), subject.visible, is_golden=True),
        Trial(subject.broken(original, "rollout"), subject.visible),
        *[again] * (num_golden_runs - 1),
    ]
    if subject.hidden:
        trials.append(Trial(subject.golden(original, "hidden"), subject.hidden, is_golden=True))
    visible, broken, *rest = bench.run_all(trials)
    repeats, hidden = rest[: num_golden_runs - 1], rest[num_golden_runs - 1 :]
    _check_golden(subject, visible, hidden[0] if hidden else None)
    num_passed = 1 + sum(_all_passed(report, own) for report in repeats)
    if num_passed < num_golden_runs:
        raise GateFailed(
            "not-restored",
            f"flaky: with the code back the tests pass in {num_passed} of {num_golden_runs} runs",
        )
    _check_time([visible, *rest], bench)
    if _all_passed(broken, subject.visible):
        raise GateFailed("broken-passes", "the visible tests pass without the code")


def _check_time(reports: Sequence[TestReport], bench: Bench) -> None:
    limit, needed = GOLDEN_CPU_SHARE * bench.test_seconds, max(report.cpu_seconds for report in reports)
    if needed > limit:
        raise GateFailed(
            "golden-fails", f"the tests need {needed:.0f} s of processor time, more than {limit:g} s"
        )


def _check_stubs(subject: Subject, bench: Bench) -> None:
    """Without the code, and with every constant in its place, a visible and a hidden test fail; the first one is enough.

    Raises:
        GateFailed: broken-passes or stub-passes.
        SandboxFailure: the sandbox broke.
    """
    kinds = {"visible": _some(subject.visible), "hidden": _some(subject.hidden)}
    tried = [
        (text, kind, tree)
        for text, tree in _stub_trees(subject, bench).items()
        for kind, tests in kinds.items()
        if tests
    ]
    reports = bench.run_all([Trial(tree, kinds[kind], stop_at_first_failure=True) for _, kind, tree in tried])
    for (text, kind, _), report in zip(tried, reports, strict=True):
        if _all_passed(report, kinds[kind]):
            raise _stub_passes(text, kind)


def _some(tests: Sequence[str]) -> list[str]:
    """Of very many tests a part: to fail one is enough."""
    return sorted(sorted(tests, key=lambda test: sha256_of(test.encode()))[:MAX_STUB_TESTS])


def _stub_trees(subject: Subject, bench: Bench) -> dict[str, dict[str, bytes]]:
    """The tree without the code ("") and with every function returning one constant."""
    original = bench.original
    trees = {"": subject.broken(original, "hidden")}
    return trees | {text: subject.stubbed(original, "hidden", text) for text in STUB_EXPRESSIONS}


def _passed_by_stubs(subject: Subject, tests: Sequence[str], bench: Bench) -> dict[str, frozenset[str]]:
    """Which of the tests pass without the code ("") and when every function returns one constant.

    Those of very many that are not run are taken as passed.
    """
    trees, tried = _stub_trees(subject, bench), _some(tests)
    reports = bench.run_all([Trial(tree, tried) for tree in trees.values()])
    failed = [frozenset(tried) if report.error else frozenset(tried) - report.passed for report in reports]
    return {text: frozenset(tests) - own for text, own in zip(trees, failed, strict=True)}


def _refuse_stubs(subject: Subject, passed: Mapping[str, frozenset[str]]) -> None:
    for text, tests_passed in passed.items():
        for kind, tests in (("visible", subject.visible), ("hidden", subject.hidden)):
            if tests and tests_passed.issuperset(tests):
                raise _stub_passes(text, kind)


def _stub_passes(text: str, kind: str) -> GateFailed:
    if not text:
        return GateFailed("broken-passes", f"the {kind} tests pass without the code")
    return GateFailed("stub-passes", f"the {kind} tests pass with return {text}")


def _check_golden(subject: Subject, visible: TestReport, hidden: TestReport | None) -> None:
    if not _all_passed(visible, subject.visible):
        detail = visible.error or f"{min(set(visible.outcomes) - visible.passed)} does not pass"
        raise GateFailed("golden-fails", detail)
    if hidden is not None and not _all_passed(hidden, subject.hidden):
        # Which one stays unsaid: this text is printed, and a hidden test's name is a hint.
        raise GateFailed("golden-fails", "a hidden test does not pass with the golden code")


def _all_passed(report: TestReport, tests: Iterable[str]) -> bool:
    return not report.error and report.passed.issuperset(tests)
