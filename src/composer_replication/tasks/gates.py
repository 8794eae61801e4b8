"""The proofs that a deletion is a task; each can fail, and each failure has a name that is counted.

breaks-import      without the code other tests are collected than with it
broken-run-fails   the suite of the broken tree ends with an error or runs too long
no-failing-test    no green test fails without the code
breaks-everything  no green test passes without the code
golden-copy        most of the code is still to be read in the tree that a rollout sees
golden-fails       the visible or hidden tests fail although the code is back
broken-passes      the visible tests that are shown, the paid or the hidden tests pass without the code
stub-passes        the visible, the paid or the hidden tests pass when every function returns one constant
not-restored       the golden patch, applied by git, does not give the original files, or the task's own
                   tests do not pass every time although the code is back
hidden-shown       a hidden or a paid test, or a copy of it, still stands in the tree that a rollout sees
unfair-hidden      a hidden or a paid test, or recorded behaviour, asks for a name or a text that nobody can know
other-tests-fail   other tests fail without the code than a stored task, or a foreign task set, says

Two more follow once the task is written (``check_secrecy``): leak and instruction-leaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.tasks.instructions import (
    plain_instruction,
    read_secrets,
    refusal,
    written_instruction,
)
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.leaks.leak_scan import installed_copies, leaks_in_tree
from composer_replication.tasks.leaks.shown_code import copied_share
from composer_replication.tasks.patches import apply_patch
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS, Deletion
from composer_replication.tasks.running.bench import Bench, noticing_seconds
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.subject import GateFailed, Parting, Subject
from composer_replication.tasks.test_functions import (
    deleted_texts,
    deleted_words,
    is_named,
    places_to_show,
    words_of,
)
from composer_replication.tasks.test_run import Ended, TestReport, Trial

NUM_DRAWS = 24
"""How many ways to part the tests are looked at; a stub that would pass is known without a run."""
NUM_TRIES = 3
"""How many of them are run."""
NUM_PAID_DRAWS = 8
"""How many ways to draw paid tests are looked at; none of them is run."""
NUM_GOLDEN_RUNS = 3
"""With the code back the tests of a task pass so often in a row, or they are flaky."""
GOLDEN_CPU_SHARE = 0.5
"""Of the processor time that an answer has: a correct one may need twice as much as the golden code."""
MAX_STUB_TESTS = 40
STUBS = ("", *STUB_EXPRESSIONS)
"""What stands in the place of the code: nothing, or functions that only return one constant."""
Passed = Mapping[str, frozenset[str] | None]
"""The tests that pass with each constant ("": without the code); None where the run of all came to nothing."""


def judge_deletion(
    deletion: Deletion, repository: RepositoryRecord, bench: Bench, *, hidden_share: float, seed: int
) -> Subject:
    """Run all gates on a candidate; the first that it does not pass is raised as ``GateFailed``.

    The whole suite is run once, and says which tests fail. ``hidden_share`` is of the failing test functions.
    """
    cuts, original = tuple(cut.edit for cut in deletion.bodies), bench.original
    unsplit = Subject(deletion.changes, cuts, deletion.removal == "whole")
    check_restores(unsplit, original)
    check_no_copy(unsplit, original)
    (suite,) = bench.run_all([suite_trial(unsplit, bench)])
    failing = failing_of(suite, unsplit, repository)
    passed = passed_by_stubs(unsplit, failing, bench)
    # Constants with which a run of all came to nothing; without the code ("") each of them was seen to fail.
    unclear = [text for text, tests_passed in passed.items() if text and tests_passed is None]
    given = words_of(f"{deletion.path} {deletion.symbol}")
    parting = Parting(unsplit, repository, original, seed=seed, given=given)
    proven = partial(
        prove, repository=repository, bench=bench, suite=suite, num_golden=NUM_GOLDEN_RUNS, stubs=unclear
    )
    return first_proven_draw(parting, failing, passed, proven, hidden_share=hidden_share, pin=deletion.pin)


def first_proven_draw(
    parting: Parting,
    failing: frozenset[str],
    passed: Passed,
    proven: Callable[[Subject], Subject],
    *,
    hidden_share: float,
    pin: str,
) -> Subject:
    """The first draw of hidden and paid tests with which a deletion passes ``proven``, the gates that need a run."""

    def proven_with_paid(subject: Subject) -> Subject:
        """The subject with paid tests, or as it is where it is a task without them alone."""
        narrowed = draw_paid(subject, passed, parting, pin)
        if narrowed.tests.paid:
            with suppress(GateFailed):
                return proven(narrowed)
        return proven(subject)

    num_tries = 0
    for attempt in range(NUM_DRAWS):
        # The tests that tell a stub from the real code may all be on one side, or a file may
        # collect otherwise without the hidden ones: part them anew, at last not at all.
        subject = parting.hide(failing, share=hidden_share, salt=f"{pin}/{attempt}")
        if not subject.tests.hidden:
            continue  # what would not be fair to hide depends on what else is hidden
        with suppress(GateFailed):
            refuse_stubs(subject, passed)
            num_tries += 1
            return proven_with_paid(subject)
        if num_tries == NUM_TRIES:
            break
    whole = parting.hide(failing, share=0.0, salt=pin)
    refuse_stubs(whole, passed)
    return proven_with_paid(whole)


def draw_paid(subject: Subject, passed: Passed, parting: Parting, pin: str) -> Subject:
    """The subject with paid tests that no constant passes; as it is where none were found."""
    for attempt in range(NUM_PAID_DRAWS):
        narrowed = parting.pay(subject, salt=f"{pin}/paid/{attempt}")
        with suppress(GateFailed):
            refuse_stubs(narrowed, passed)
            return narrowed
    return subject


# --- Which tests fail without the code, and whether what is taken out can be put back and is out.


def suite_trial(subject: Subject, bench: Bench) -> Trial:
    """The run of the whole suite without the code."""
    return Trial(subject.broken(bench.original, "hidden"), None)


def failing_of(report: TestReport, subject: Subject, repository: RepositoryRecord) -> frozenset[str]:
    """Which green tests did not pass any more in the run of ``suite_trial``.

    A test file that names the deleted code where it is imported belongs to the feature: all
    its tests may be lost. Any other file must be collected as before.
    """
    if report.error:
        # A conftest.py that cannot be imported ends the run before anything is collected.
        gate = "breaks-import" if report.ended is Ended.EMPTY else "broken-run-fails"
        raise GateFailed(gate, report.error)
    known, green = set(repository.broken_files), repository.green
    new = sorted(set(report.collect_errors) - known)
    of_feature = tuple(f"{path}::" for path in new if subject.is_whole and is_test_path(path))
    strange = [path for path in new if f"{path}::" not in of_feature]
    lost = sorted(green - set(report.collected))
    others = [test for test in lost if not test.startswith(of_feature)]
    if others or strange or known - set(report.collect_errors):
        example = [*strange, *others, ""][0]
        raise GateFailed("breaks-import", f"{len(lost)} tests are no longer collected ({example})")
    failing = green - report.passed
    if not failing:
        raise GateFailed("no-failing-test", "all tests pass without the code")
    if failing == green and len(green) > 1:
        raise GateFailed("breaks-everything", f"all {len(failing)} tests fail without the code")
    return failing


def check_restores(subject: Subject, original: Mapping[str, bytes]) -> None:
    """The golden patch, applied by git to the broken tree, gives the original files, to the byte."""
    touched = subject.changes.source_files
    try:
        broken, patch = subject.broken(original, "rollout"), subject.golden_patch(original)
        restored = apply_patch({path: broken[path] for path in touched if path in broken}, patch)
    except (InputError, KeyError, ValueError) as error:
        raise GateFailed("not-restored", str(error)) from error
    for path in touched:
        if restored.get(path) != original.get(path):
            raise GateFailed("not-restored", f"{path} differs from the original")


def check_no_copy(subject: Subject, original: Mapping[str, bytes]) -> None:
    """Half of the code or less stands a second time, line for line, in what a rollout sees."""
    share, path = copied_share(subject.golden_bodies(original), subject.broken(original, "rollout"))
    if share > 0.5:
        raise GateFailed("golden-copy", f"{path} holds the same lines")


# --- Runs of the task's own tests, with the code and without it.


def prove(
    subject: Subject,
    repository: RepositoryRecord,
    bench: Bench,
    *,
    suite: TestReport | None = None,
    num_golden: int = 1,
    stubs: Iterable[str] = STUBS,
) -> Subject:
    """The gates that hang on runs of a task's own tests; the subject, if it passes them.

    ``suite`` is the report of ``suite_trial``; where it is None the suite is run too, and the tests that fail must be the
    task's. ``num_golden`` is how often the tests must pass with the code, ``stubs`` are what is put in its place.
    """
    trials = _split_trials(subject, bench, num_golden)
    if suite is None:
        suite, *reports = bench.run_all([suite_trial(subject, bench), *trials.values()])
        if num_different := len(failing_of(suite, subject, repository) ^ set(subject.own_tests)):
            # No name: a hidden test may be among them.
            raise GateFailed("other-tests-fail", f"{num_different} tests differ from the stored ones")
    else:
        reports = bench.run_all(list(trials.values()))
    seconds = judge_split(subject, bench, dict(zip(trials, reports, strict=True)))
    _check_stubs(subject, bench, seconds, stubs)
    return subject


def _split_trials(subject: Subject, bench: Bench, num_golden: int) -> dict[str, Trial]:
    """The runs of a task's own tests by name, for ``judge_split``: without the code, each side with it, then all together
    with it ``num_golden`` - 1 times.
    """
    original, broken = bench.original, subject.broken(bench.original, "rollout")
    trials = {"broken": Trial(broken, subject.tests.shown, stop_at_first_failure=True)}
    for kind, (view, side) in _sides_with_code(subject).items():
        trials[kind] = Trial(subject.golden(original, view), side)
    for number in range(1, num_golden):
        whole = subject.golden(original, "hidden")
        trials[f"again {number}"] = Trial(whole, subject.own_tests)
    return trials


def _sides_with_code(subject: Subject) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The view and the tests of each run with the code back: shown, paid and hidden ones."""
    tests = subject.tests
    sides = {"visible": ("rollout", tests.shown)}
    if tests.paid:
        sides["paid"] = ("visible", tests.visible)
    if tests.hidden:
        sides["hidden"] = ("hidden", tests.hidden)
    return sides


def judge_split(subject: Subject, bench: Bench, reports: Mapping[str, TestReport]) -> float:
    """The golden code passes every time, and the broken tree does not; ``reports`` are of ``_split_trials``.

    Returns:
        The processor time after which these tests can be said to have noticed a fault.
    """
    sides = _sides_with_code(subject)
    for kind, (_, tests) in sides.items():
        report = reports[kind]
        if not report.all_passed(tests):
            # Which one of those that are not shown stays unsaid: this text is printed, and a name is a hint.
            detail = f"a {kind} test does not pass with the golden code"
            if kind == "visible":
                detail = report.error or f"{min(set(report.outcomes) - report.passed)} does not pass"
            raise GateFailed("golden-fails", detail)
    golden = [reports[kind] for kind in sides]
    check_time(golden, bench)
    if reports["broken"].all_passed(subject.tests.shown):
        raise GateFailed("broken-passes", "the visible tests pass without the code")
    repeats = [report for name, report in reports.items() if name.startswith("again")]
    num_runs = 1 + len(repeats)
    if num_failed := sum(not report.all_passed(subject.own_tests) for report in repeats):
        told = f"flaky: with the code back the tests pass in {num_runs - num_failed} of {num_runs} runs"
        raise GateFailed("not-restored", told)
    check_time(repeats, bench)
    used = [report.cpu_seconds for report in repeats] or [sum(report.cpu_seconds for report in golden)]
    return noticing_seconds(max(used), bench.test_seconds)


def check_time(reports: Sequence[TestReport], bench: Bench) -> None:
    """Runs with the golden code leave time for an answer that needs more of it."""
    limit = GOLDEN_CPU_SHARE * bench.test_seconds
    needed = max((report.cpu_seconds for report in reports), default=0.0)
    if needed > limit:
        told = f"the tests need {needed:.0f} s of processor time, more than {limit:g} s"
        raise GateFailed("golden-fails", told)


# --- Constants in the place of the code.


def some_of(tests: Iterable[str]) -> list[str]:
    """Of very many tests a part: to fail one is enough."""
    return sorted(sorted(tests, key=lambda test: (sha256_of(test.encode()), test))[:MAX_STUB_TESTS])


def _stub_tree(subject: Subject, bench: Bench, text: str) -> dict[str, bytes]:
    """The tree without the code (""), or with every function returning one constant."""
    original = bench.original
    return subject.stubbed(original, "hidden", text) if text else subject.broken(original, "hidden")


def passed_by_stubs(subject: Subject, tests: Collection[str], bench: Bench) -> Passed:
    """Which of the tests pass without the code ("") and when every function returns one constant.

    How long they may run follows from what they need with the code: with a constant many a loop never ends. Those of
    very many that are not run are taken as passed.
    """
    chosen = some_of(tests)
    (golden,) = bench.run_all([Trial(bench.original, chosen)])
    seconds = 0.0 if golden.error else noticing_seconds(golden.cpu_seconds, bench.test_seconds)
    trials = [Trial(_stub_tree(subject, bench, text), chosen, seconds=seconds) for text in STUBS]
    return {
        text: None if report.error else frozenset(tests) - (report.outcomes.keys() - report.passed)
        for text, report in zip(STUBS, bench.run_all(trials), strict=True)
    }


def refuse_stubs(subject: Subject, passed: Passed) -> None:
    """Refuse a deletion of which a side's tests all pass with one constant; ``passed`` is of ``passed_by_stubs``."""
    for text, tests_passed in passed.items():
        for kind, tests in subject.sides.items():
            if tests_passed is not None and tests_passed.issuperset(tests):
                raise _stub_passes(text, kind)


def _check_stubs(subject: Subject, bench: Bench, seconds: float, texts: Iterable[str]) -> None:
    """Without the code ("") and with every constant in its place some visible, some paid and some hidden test fails.

    Each side is run on its own: one test that never ends, or one file that is not collected, is no reason for the others
    to fail. ``seconds`` is the processor time of a run.
    """
    trials: dict[tuple[str, str], Trial] = {}
    for text in texts:
        tree = _stub_tree(subject, bench, text)
        for kind, tests in subject.sides.items():
            trials[text, kind] = Trial(tree, some_of(tests), stop_at_first_failure=True, seconds=seconds)
    for ((text, kind), trial), report in zip(trials.items(), bench.run_all([*trials.values()]), strict=True):
        if report.all_passed(trial.node_ids or ()):
            raise _stub_passes(text, kind)


def _stub_passes(text: str, kind: str) -> GateFailed:
    if not text:
        return GateFailed("broken-passes", f"the {kind} tests pass without the code")
    return GateFailed("stub-passes", f"the {kind} tests pass with return {text}")


# --- What is not shown is out of the tree, can be met by an honest answer, and nothing tells the code.


def check_fair(
    subject: Subject,
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    twins: Iterable[tuple[str, str]],
    given: Collection[str],
) -> None:
    """Hidden and paid tests and recorded behaviour ask for nothing that only the deleted code says, and no copy shows them.

    ``twins`` are path and symbol of each function with recorded behaviour, ``given`` names that a rollout is told
    besides its tree.
    """
    shown, changes = subject.broken(original, "rollout"), subject.changes
    places = {repository.places[test] for test in subject.tests.unseen if test in repository.places}
    if places_to_show(places, original, shown, frozenset(), given):
        raise GateFailed("hidden-shown", "a hidden or paid test, or a copy of it, stands in the tree")
    deleted, texts = deleted_words(changes, original), deleted_texts(changes, original)
    if places_to_show(places, original, shown, deleted, given, texts=texts):
        told = "a hidden or paid test asks for a name or a text that only the deleted code says"
        raise GateFailed("unfair-hidden", told)
    if subject.is_whole and not all(is_named(path, symbol, shown, given) for path, symbol in twins):
        told = "recorded behaviour is that of a function whose name nobody can know"
        raise GateFailed("unfair-hidden", told)


def check_secrecy(store: TaskStore, task: Task) -> None:
    """Search the tree of a task, installed sources, its instruction and what a model wrote of it for its golden code."""
    if leaks := leaks_in_tree(store, task) or installed_copies(store, task):
        # As it is imported: where this machine keeps its packages is nobody's business.
        place = re.split(r"/(?:site-packages|lib/python[0-9.]+|lib)/", leaks[0].path, maxsplit=1)[-1]
        raise GateFailed("leak", f"{place} tells the code ({leaks[0].channel})")
    plain = plain_instruction(store, task)
    if plain is None:
        raise GateFailed("instruction-leaks", "the instruction would contain the deleted code")
    written = written_instruction(store, task.task_id)
    if written and (reason := refusal(written.text, read_secrets(store, task, plain))):
        raise GateFailed("instruction-leaks", f"the instruction that a model wrote does not pass: {reason}")
