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
leans-on-hidden    a test passes without the code, but not where the hidden and paid test functions are gone too

Two more follow once the task is written (``check_secrecy``): leak and instruction-leaks.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.tasks.deleted_texts import deleted_texts
from composer_replication.tasks.fair_split import deleted_words, is_named, places_to_show, words_of
from composer_replication.tasks.instructions.writing import write_instruction
from composer_replication.tasks.instructions.written_instructions import (
    read_secrets,
    refusal,
    written_instruction,
)
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.leaks.leak_scan import installed_copies, leaks_in_tree
from composer_replication.tasks.leaks.shown_code import copied_share
from composer_replication.tasks.part_subject import part_subject, with_paid
from composer_replication.tasks.patches import apply_patch
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.running.bench import Bench, Trial
from composer_replication.tasks.running.whole_suite import IDLE_SECONDS
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.stub_gate import (
    STUBS,
    Passed,
    passed_by_stubs,
    passed_in,
    refuse_apart,
    refuse_stubs,
    some_of,
    stub_trials,
)
from composer_replication.tasks.subject import GateFailed, Subject, unsplit_subject
from composer_replication.tasks.test_functions import Place, count_functions
from composer_replication.tasks.test_run import Ended, TestReport

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

    The whole suite is run once, and has the last word on which tests fail. How long the tests that call the code need
    with it is learned in the same sandbox, so that constants can be tried next.

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
    wanted = some_of(sorted(repository.green.intersection(selected or ())))
    golden = [Trial(bench.original, wanted, is_golden=True)] if wanted else []
    suite, *timed = bench.run_all([suite_trial(unsplit, bench), *golden])
    failing = failing_of(suite, unsplit, repository)
    is_timed = bool(timed) and set(some_of(sorted(failing))).issubset(wanted)
    passed = passed_by_stubs(unsplit, sorted(failing), bench, timed[0] if is_timed else None)
    return _split_and_check(
        unsplit,
        failing,
        passed,
        repository,
        bench,
        suite=suite,
        hidden_share=hidden_share,
        seed=seed,
        pin=deletion.pin,
        given=words_of(f"{deletion.path} {deletion.symbol}"),
    )


def _split_and_check(
    unsplit: Subject,
    failing: frozenset[str],
    passed: Passed,
    repository: RepositoryRecord,
    bench: Bench,
    *,
    suite: TestReport,
    hidden_share: float,
    seed: int,
    pin: str,
    given: frozenset[str],
) -> Subject:
    """The first draw of hidden and paid tests with which the deletion passes all gates that hang on them."""
    # Without the code ("") each of them was seen to fail.
    unclear: dict[str, Sequence[str]] = {
        text: () for text, tests_passed in passed.items() if text and tests_passed is None
    }

    def checked(subject: Subject) -> Subject:
        """The subject with paid tests, or as it is where it is a task without them alone."""
        narrowed = _draw_paid(subject, passed, repository, bench.original, seed=seed, pin=pin, given=given)
        if narrowed.paid:
            with contextlib.suppress(GateFailed):
                refuse_apart(narrowed, unclear, bench, _check_split(narrowed, suite, repository, bench))
                return narrowed
        refuse_apart(subject, unclear, bench, _check_split(subject, suite, repository, bench))
        return subject

    num_tries = 0
    for attempt in range(NUM_DRAWS):
        # The tests that tell a stub from the real code may all be on one side, or a file may
        # collect otherwise without the hidden ones: part them anew, at last not at all.
        subject = part_subject(
            unsplit,
            failing,
            repository,
            bench.original,
            hidden_share=hidden_share,
            seed=seed,
            salt=f"{pin}/{attempt}",
            given=given,
        )
        if num_tries == NUM_TRIES:
            break
        if not subject.hidden:
            continue  # what would not be fair to hide depends on what else is hidden
        try:
            refuse_stubs(subject, passed)
            check_hidden_out(subject, repository, bench.original)
            num_tries += 1
            return checked(subject)
        except GateFailed:
            continue
    whole = part_subject(unsplit, failing, repository, bench.original, hidden_share=0.0, seed=seed, salt=pin)
    refuse_stubs(whole, passed)
    return checked(whole)


def _draw_paid(
    subject: Subject,
    passed: Passed,
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    *,
    seed: int,
    pin: str,
    given: frozenset[str],
) -> Subject:
    """The subject with paid tests that no constant passes; as it is where none were found."""
    for attempt in range(NUM_PAID_DRAWS):
        salt = f"{pin}/paid/{attempt}"
        narrowed = with_paid(subject, repository, original, seed=seed, salt=salt, given=given)
        with contextlib.suppress(GateFailed):
            refuse_stubs(narrowed, passed)
            check_hidden_out(narrowed, repository, original)
            return narrowed
    return subject


def suite_trial(subject: Subject, bench: Bench) -> Trial:
    """The run of the whole suite without the code; one that waits as no test of the suite does will not end."""
    return Trial(subject.broken(bench.original, "hidden"), None, idle_seconds=IDLE_SECONDS)


def failing_of(report: TestReport, subject: Subject, repository: RepositoryRecord) -> frozenset[str]:
    """Which green tests did not pass any more in the run of ``suite_trial``.

    A test file that names the deleted code where it is imported belongs to the feature: all
    its tests may be lost. Any other file must be collected as before.

    Raises:
        GateFailed: breaks-import, broken-run-fails, no-failing-test or breaks-everything.
    """
    if report.error:
        # A conftest.py that cannot be imported ends the run before anything is collected.
        gate = "breaks-import" if report.ended is Ended.EMPTY else "broken-run-fails"
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
        MissingError: git is not installed (CR0440).
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


def own_runs(
    subject: Subject, bench: Bench, repeat: int = 1, beside: Sequence[Trial] = ()
) -> Iterator[list[TestReport]]:
    """``repeat`` times the reports of the task's own tests for ``judge_own``, after those of ``beside``.

    They run with the code and without it, and the first time with every constant in its place: tests that waver are
    found by the code and by its absence. Constants run last: how long they may run follows from what the code needed,
    and one with which a test never ends would else cost all the time there is. Such a run ends when a visible, a paid
    and a hidden test have failed.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    first = [*beside, *_split_trials(subject, bench)]
    reports = bench.run_all(first)
    seconds = _noticing_seconds(reports[len(beside) :], subject, bench)
    sides = [some_of(tests) for tests in subject.sides.values()]
    stubs = stub_trials(subject, sorted({test for side in sides for test in side}), bench, seconds, sides)
    yield [*reports, *bench.run_all(stubs)]
    for _ in range(repeat - 1):
        yield bench.run_all([*first, *stubs[:1]])  # the first one of STUBS is the tree without the code


def judge_own(subject: Subject, bench: Bench, reports: Sequence[TestReport]) -> None:
    """What follows from one of ``own_runs``.

    Raises:
        GateFailed: golden-fails, broken-passes or stub-passes.
        SandboxFailure: the sandbox broke.
    """
    num_split = len(_split_trials(subject, bench))
    _judge_split(subject, bench, reports[:num_split])
    _judge_stubs(subject, bench, reports[num_split:], _noticing_seconds(reports, subject, bench))


def _noticing_seconds(reports: Sequence[TestReport], subject: Subject, bench: Bench) -> float:
    """Of a run of visible and hidden tests; ``reports`` begin with those of ``_split_trials``."""
    _, *golden = reports[: len(_split_trials(subject, bench))]
    return bench.noticing_seconds(sum(report.cpu_seconds for report in golden))


def _check_split(subject: Subject, suite: TestReport, repository: RepositoryRecord, bench: Bench) -> float:
    """The golden code passes, ``NUM_GOLDEN_RUNS`` times, and the broken tree does not; other tests need no hidden one.

    The runs after the first are of all the task's tests together, in the same sandbox. The answer is the processor
    time after which these tests can be said to have noticed a fault (``noticing_seconds``).
    """
    own = sorted({*subject.visible, *subject.hidden})
    again = Trial(subject.golden(bench.original, "hidden"), own, is_golden=True)
    split = _split_trials(subject, bench)
    trials = [*split, *[again] * (NUM_GOLDEN_RUNS - 1)]
    beside = neighbour_trials(subject, repository, bench)
    reports = bench.run_all([*trials, *beside])
    repeats = reports[len(split) : len(trials)]
    _judge_split(subject, bench, reports[: len(split)])
    num_passed = 1 + sum(_all_passed(report, own) for report in repeats)
    if num_passed < NUM_GOLDEN_RUNS:
        raise GateFailed(
            "not-restored",
            f"flaky: with the code back the tests pass in {num_passed} of {NUM_GOLDEN_RUNS} runs",
        )
    _check_time(repeats, bench)
    check_neighbours(subject, bench, suite, zip(beside, reports[len(trials) :], strict=True))
    return bench.noticing_seconds(max(report.cpu_seconds for report in repeats))


def neighbour_trials(subject: Subject, repository: RepositoryRecord, bench: Bench) -> list[Trial]:
    """The run of the other green tests of files that lost a test function: what they find beside them has changed.

    None where there are no such tests.
    """
    unseen = _unseen_places(subject, repository)
    files = {edit.path for edit in subject.changes.edits_of_tests("rollout")} if unseen else set()
    others = repository.green.difference(subject.visible)
    neighbours = sorted(
        test for test in others if (place := repository.places[test])[0] in files and place not in unseen
    )
    return [Trial(subject.broken(bench.original, "rollout"), neighbours)] if neighbours else []


def check_neighbours(
    subject: Subject, bench: Bench, suite: TestReport, runs: Iterable[tuple[Trial, TestReport]]
) -> None:
    """None of these tests fails for want of a hidden one; one may need the files that were not run with it.

    Args:
        subject: the task.
        bench: where it is tried.
        suite: the report of ``suite_trial``.
        runs: those of ``neighbour_trials``.

    Raises:
        GateFailed: leans-on-hidden.
        SandboxFailure: the sandbox broke.
    """
    for trial, report in runs:
        lost = suite.passed.intersection(trial.node_ids or ()) - report.passed
        whole = bench.run(subject.broken(bench.original, "hidden"), trial.node_ids) if lost else report
        leaning = sorted(whole.passed.intersection(lost))
        if leaning:
            raise GateFailed("leans-on-hidden", f"{len(leaning)} tests, such as {leaning[0]}")


def _split_trials(subject: Subject, bench: Bench) -> list[Trial]:
    original = bench.original
    trials = [
        Trial(subject.broken(original, "rollout"), subject.shown, stop_when=[subject.shown]),
        Trial(subject.golden(original, "rollout"), subject.shown, is_golden=True),
    ]
    if subject.paid:
        trials.append(Trial(subject.golden(original, "visible"), subject.visible, is_golden=True))
    if subject.hidden:
        trials.append(Trial(subject.golden(original, "hidden"), subject.hidden, is_golden=True))
    return trials


def _judge_split(subject: Subject, bench: Bench, reports: Sequence[TestReport]) -> None:
    broken, *golden = reports
    _check_golden(subject, golden)
    _check_time(golden, bench)
    if _all_passed(broken, subject.shown):
        raise GateFailed("broken-passes", "the visible tests pass without the code")


def _check_time(reports: Sequence[TestReport], bench: Bench) -> None:
    limit, needed = GOLDEN_CPU_SHARE * bench.test_seconds, max(report.cpu_seconds for report in reports)
    if needed > limit:
        raise GateFailed(
            "golden-fails", f"the tests need {needed:.0f} s of processor time, more than {limit:g} s"
        )


def _judge_stubs(subject: Subject, bench: Bench, reports: Sequence[TestReport], seconds: float) -> None:
    """Without the code, and with every constant in its place, a visible and a hidden test fail.

    A run of both that came to nothing says nothing of either: they are run apart, then, ``seconds`` each.

    Raises:
        GateFailed: broken-passes or stub-passes.
        SandboxFailure: the sandbox broke.
    """
    by_text = dict(zip(STUBS, reports, strict=False))  # of a repeated look the first one alone
    own = (*subject.visible, *subject.hidden)
    refuse_stubs(subject, {text: passed_in(report, own) for text, report in by_text.items()})
    unclear = {text: report.noticed for text, report in by_text.items() if report.error}
    refuse_apart(subject, unclear, bench, seconds)


def _check_golden(subject: Subject, reports: Sequence[TestReport]) -> None:
    """``reports`` are those with the code back, in the order of ``_split_trials``."""
    shown, *others = reports
    if not _all_passed(shown, subject.shown):
        detail = shown.error or f"{min(set(shown.outcomes) - shown.passed)} does not pass"
        raise GateFailed("golden-fails", detail)
    sides = (("paid", subject.paid, subject.visible), ("hidden", subject.hidden, subject.hidden))
    unseen = [(kind, tests) for kind, own, tests in sides if own]
    for (kind, tests), report in zip(unseen, others, strict=True):
        if not _all_passed(report, tests):
            # Which one stays unsaid: this text is printed, and the name of a test that is not shown is a hint.
            raise GateFailed("golden-fails", f"a {kind} test does not pass with the golden code")


def _all_passed(report: TestReport, tests: Iterable[str]) -> bool:
    return not report.error and report.passed.issuperset(tests)


def _unseen_places(subject: Subject, repository: RepositoryRecord) -> set[Place]:
    unseen = (*subject.hidden, *subject.paid)
    return {repository.places[test] for test in unseen if test in repository.places}


def check_hidden_out(subject: Subject, repository: RepositoryRecord, original: Mapping[str, bytes]) -> None:
    """Each hidden or paid test function is gone from its file in the tree that a rollout sees.

    Raises:
        GateFailed: hidden-shown; which one stays unsaid.
    """
    shown = subject.broken(original, "rollout")
    hidden = Counter((path, name) for path, _, name in _unseen_places(subject, repository))
    for path in sorted({path for path, _ in hidden}):
        before = count_functions(original[path].decode("utf-8", "replace"))
        after = count_functions(shown.get(path, b"").decode("utf-8", "replace"))
        if any(
            after[name] > before[name] - count for (other, name), count in hidden.items() if other == path
        ):
            raise GateFailed("hidden-shown", f"a hidden or paid test still stands in {path}")


def check_fair(
    subject: Subject,
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    twins: Iterable[tuple[str, str]],
    given: Collection[str],
) -> None:
    """Hidden and paid tests and recorded behaviour ask for nothing that only the deleted code says, and no copy shows them.

    Args:
        subject: the task.
        repository: where its tests stand.
        original: the files with the code.
        twins: path and symbol of each function with recorded behaviour.
        given: names that a rollout is told besides its tree.

    Raises:
        GateFailed: hidden-shown or unfair-hidden; which test it is stays unsaid.
    """
    shown = subject.broken(original, "rollout")
    places = _unseen_places(subject, repository)
    if places_to_show(places, original, shown, frozenset(), given):
        raise GateFailed("hidden-shown", "a copy of a hidden or paid test stands in the tree")
    deleted, texts = deleted_words(subject.changes, original), deleted_texts(subject.changes, original)
    if places_to_show(places, original, shown, deleted, given, texts=texts):
        raise GateFailed(
            "unfair-hidden", "a hidden or paid test asks for a name or a text that only the deleted code says"
        )
    if subject.is_whole and not all(is_named(path, symbol, shown, given) for path, symbol in twins):
        raise GateFailed(
            "unfair-hidden", "recorded behaviour is that of a function whose name nobody can know"
        )


def check_secrecy(store: TaskStore, task: Task) -> None:
    """Search the tree of a task, installed sources, its instruction and what a model wrote of it for its golden code.

    Raises:
        GateFailed: leak, or instruction-leaks.
        InputError: the store is damaged (CR0411).
    """
    leaks = leaks_in_tree(store, task) or installed_copies(store, task)
    if leaks:
        raise GateFailed("leak", f"{_shown(leaks[0].path)} tells the code ({leaks[0].channel})")
    try:
        plain = write_instruction(store, task)
    except InputError as error:
        if error.code != "CR0429":
            raise
        raise GateFailed("instruction-leaks", "the instruction would contain the deleted code") from error
    written = written_instruction(store, task.task_id)
    reason = refusal(written.text, read_secrets(store, task, plain)) if written is not None else ""
    if reason:
        raise GateFailed("instruction-leaks", f"the instruction that a model wrote does not pass: {reason}")


def _shown(path: str) -> str:
    """As it is imported: where this machine keeps its packages is nobody's business."""
    return re.split(r"/(?:site-packages|lib/python[0-9.]+|lib)/", path, maxsplit=1)[-1]
