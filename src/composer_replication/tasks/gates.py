"""The proofs that a deletion is a task; each can fail, and each failure has a name that is counted (the table of ``docs/tasks.md``).

The last two (``check_secrecy``) read the task as its store would give it, before it is written. A build and ``validate`` make the same proofs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, product

from composer_replication.errors import InputError
from composer_replication.records import Edit, Task, TestSplit
from composer_replication.tasks.instructions import (
    plain_instruction,
    read_secrets,
    refusal,
    written_instruction,
)
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.environment import Refused
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.leaks.leak_scan import leaks_of
from composer_replication.tasks.leaks.shown_code import copied_share
from composer_replication.tasks.patches import apply_patch, make_patch
from composer_replication.tasks.planning.body_cuts import MARKER_STATEMENT, STUB_EXPRESSIONS, Deletion
from composer_replication.tasks.planning.edits import (
    Changes,
    edited_files,
    line_edits,
    shifted_line,
    view_files,
)
from composer_replication.tasks.repository import make_bench
from composer_replication.tasks.running.bench import Bench, noticing_seconds
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.test_functions import (
    Place,
    deleted_texts,
    deleted_words,
    hold_back,
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


# --- What the gates judge: a deletion, its tests and how they are parted, and every tree that follows from them.


class GateFailed(Refused):
    """A candidate that is no task."""


_NOT_PARTED = TestSplit((), (), ())


@dataclass(frozen=True, slots=True)
class Subject:
    """A deletion and the tests that part it from the original.

    ``stub_edits`` are the cuts of all functions inside the deleted code, in original offsets.
    """

    changes: Changes
    stub_edits: tuple[Edit, ...]
    is_whole: bool
    tests: TestSplit = _NOT_PARTED
    withheld: tuple[str, ...] = ()

    @property
    def own_tests(self) -> tuple[str, ...]:
        """All tests that must fail without the code, and pass with it."""
        return tuple(sorted({*self.tests.visible, *self.tests.hidden}))

    @property
    def sides(self) -> dict[str, tuple[str, ...]]:
        """The sets of tests of which each must tell the code from a stub; without the empty ones."""
        sides = {"visible": self.tests.visible, "paid": self.tests.paid, "hidden": self.tests.hidden}
        return {kind: tests for kind, tests in sides.items() if tests}

    def broken(self, original: Mapping[str, bytes], view: str) -> dict[str, bytes]:
        """A view of the tree with the code taken out."""
        return view_files(original, self.changes, view)

    def golden(self, original: Mapping[str, bytes], view: str) -> dict[str, bytes]:
        """The same view with the code back."""
        restored = {path: original[path] for path in self.changes.source_files}
        return {**self.broken(original, view), **restored}

    def golden_patch(self, original: Mapping[str, bytes]) -> str:
        """The unified diff that puts the code back; the files that lost code are enough of ``original``."""
        restored = {path: original[path] for path in self.changes.source_files}
        edits = tuple(edit for edit in self.changes.edits_of_tests("rollout") if edit.path in restored)
        broken = view_files(restored, replace(self.changes, shown_edits=edits), "rollout")
        return make_patch(broken, restored)

    def stubbed(self, original: Mapping[str, bytes], expression: str) -> dict[str, bytes]:
        """The tree of the hidden tests with every function only returning ``expression``, or without the code ("")."""
        if not expression:
            return self.broken(original, "hidden")
        stubs = [
            Edit(edit.path, edit.start, edit.end, edit.text.replace(MARKER_STATEMENT, f"return {expression}"))
            for edit in self.stub_edits
        ]
        return {**self.golden(original, "hidden"), **edited_files(original, stubs)}


def subject_of(store: TaskStore, task: Task) -> Subject:
    """A stored task as the gates see it."""
    record, secret = store.record(task.task_id), store.secret(task.task_id)
    return Subject(
        changes=record.changes,
        stub_edits=record.stub_edits or record.edits,
        is_whole=record.removal == "whole",
        tests=task.tests,
        withheld=secret.withheld,
    )


def golden_patch(store: TaskStore, task: Task) -> str:
    """The unified diff that puts the code back. Never to be shown to a policy."""
    subject, record = subject_of(store, task), store.record(task.task_id)
    return subject.golden_patch({path: store.original(record, path) for path in subject.changes.source_files})


def bench_of(store: TaskStore, task: Task) -> Bench:
    """Where a stored task is tried out, with the time that its build gave to a whole suite."""
    slug = store.record(task.task_id).repository_record
    record, files = store.repository(slug), store.repository_files(slug)
    return make_bench(files, store.environment(task), store.backend, record.suite_seconds, record.left_out)


# --- Which of a deletion's failing tests a solver sees, which are paid but not shown, and which are hidden.

PAID_SHARE = 1 / 3
"""Of the visible test functions of a task, those that are paid but not shown."""
MIN_VISIBLE_FUNCTIONS = 3
"""With fewer of them all are shown: a policy needs tests to work with."""


@dataclass
class Parting:
    """Draws apart the tests of one deletion, always the same for a seed and a salt; another salt gives another draw.

    What would not be fair or not be hidden (``places_to_show``) stays with the others, and others are drawn in its place.
    ``given`` are names that a rollout is told besides its tree.
    """

    unsplit: Subject
    repository: RepositoryRecord
    original: Mapping[str, bytes]
    seed: int
    given: Collection[str]

    def __post_init__(self) -> None:
        self._words = deleted_words(self.unsplit.changes, self.original)
        self._texts = deleted_texts(self.unsplit.changes, self.original)

    def hide(self, failing: frozenset[str], *, share: float, salt: str) -> Subject:
        """Part the failing tests into visible and hidden ones, and the trees with them; all visible ones are shown."""
        hidden, changes = self._draw(
            "visible_edits", self.unsplit.changes, self._places_of(failing), share=share, salt=salt
        )
        out = {test for test, place in self.repository.places.items() if place in hidden}
        tests = TestSplit(tuple(sorted(failing - out)), tuple(sorted(failing & out)), ())
        return replace(self.unsplit, changes=changes, tests=tests, withheld=tuple(sorted(out - failing)))

    def pay(self, subject: Subject, *, salt: str) -> Subject:
        """Take some visible test functions out of what a rollout sees: the reward counts them all the same.

        The subject as it is where fewer than ``MIN_VISIBLE_FUNCTIONS`` are visible, where none can go, or where a
        hidden test would need what only they tell.
        """
        tests = subject.tests
        visible, hidden = self._places_of(tests.visible), self._places_of(tests.hidden)
        if len(visible) < MIN_VISIBLE_FUNCTIONS:
            return subject
        paid, changes = self._draw(
            "shown_edits", subject.changes, visible, share=PAID_SHARE, salt=salt, gone=hidden
        )
        if not paid or self._to_show(hidden, changes):
            return subject
        own = tuple(test for test in tests.visible if self.repository.places[test] in paid)
        return replace(subject, changes=changes, tests=replace(tests, paid=own))

    def _places_of(self, tests: Iterable[str]) -> frozenset[Place]:
        return frozenset(self.repository.places[test] for test in tests)

    def _to_show(self, places: Collection[Place], changes: Changes) -> frozenset[Place]:
        """Which of some functions that rollouts do not see after these changes must be shown."""
        shown = view_files(self.original, changes, "rollout")
        return places_to_show(places, self.original, shown, self._words, self.given, texts=self._texts)

    def _draw(
        self,
        field: str,
        changes: Changes,
        places: frozenset[Place],
        *,
        share: float,
        salt: str,
        gone: frozenset[Place] = frozenset(),
    ) -> tuple[frozenset[Place], Changes]:
        """A share of the places, and the changes whose edits of that field are without them; ``gone`` are out already.

        All parametrisations of a function stay on one side. At least one function is taken and never all, if they can
        be taken out of their file cleanly; a single one stays.
        """
        at_most = min(max(1, round(len(places) * share)), len(places) - 1) if share > 0 else 0
        paths = {path for path, _, _ in places | gone} & set(self.original)
        texts = {path: self.original[path].decode("utf-8", "replace") for path in paths}
        # Where each stands once imports of its file may fail.
        moves = [edit for edit in changes.test_edits if edit.path in paths]
        moved = {path: data.decode() for path, data in edited_files(self.original, moves).items()}
        now = {place: place for place in places | gone}
        for path, line, name in now:
            if own := [edit for edit in moves if edit.path == path]:
                now[path, line, name] = (path, shifted_line(texts[path], own, line), name)
        back = {there: place for place, there in now.items()}

        def rank(there: Place) -> str:
            path, line, name = there
            return sha256_of(f"{self.seed}/{salt}/{path}/{name}/{line}".encode())

        in_order = sorted((now[place] for place in places), key=rank)
        shown: frozenset[Place] = frozenset()
        while True:
            held_back, files = hold_back(
                [there for there in in_order if back[there] not in shown],
                {path: moved.get(path, text) for path, text in texts.items()},
                at_most,
                gone={now[place] for place in gone},
            )
            untouched = (edit for edit in changes.visible_edits if edit.path not in files)
            shorter = (edit for path in sorted(files) for edit in line_edits(path, texts[path], files[path]))
            drawn = frozenset(back[there] for there in held_back)
            found = replace(changes, **{field: (*untouched, *shorter)})  # type: ignore[arg-type]
            more = self._to_show(drawn, found)
            if not more:
                return drawn, found
            shown |= more


# --- All gates on a candidate.


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
    refused: GateFailed | None = None
    for subject in draws(parting, failing, passed, hidden_share=hidden_share, pin=deletion.pin):
        try:
            return prove(subject, repository, bench, suite=suite, num_golden=NUM_GOLDEN_RUNS, stubs=unclear)
        except GateFailed as error:
            refused = error
    assert refused is not None
    raise refused


def draws(
    parting: Parting, failing: frozenset[str], passed: Passed, *, hidden_share: float, pin: str
) -> Iterator[Subject]:
    """The ways to part the failing tests that are worth a run, the best first: hidden and paid ones, hidden ones, paid ones,
    none; ``GateFailed`` where no way tells the code from a stub.

    The tests that do so may all be on one side, or a file may collect otherwise without the hidden ones: then another draw
    is tried.
    """
    parted = (
        parting.hide(failing, share=hidden_share, salt=f"{pin}/{attempt}") for attempt in range(NUM_DRAWS)
    )
    # What would not be fair to hide depends on what else is hidden, so a draw may hide nothing.
    hidden = (one for one in parted if one.tests.hidden and not passing_stub(one, passed))
    whole = parting.hide(failing, share=0.0, salt=pin)
    for subject in chain(islice(hidden, NUM_TRIES), (whole,)):
        if refused := passing_stub(subject, passed):
            raise refused
        paid = (parting.pay(subject, salt=f"{pin}/paid/{attempt}") for attempt in range(NUM_PAID_DRAWS))
        narrowed = next((one for one in paid if not passing_stub(one, passed)), subject)
        if narrowed.tests.paid:
            yield narrowed
        yield subject


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
    if restored != {path: original[path] for path in touched}:
        raise GateFailed("not-restored", "the golden patch does not give the original files")


def check_no_copy(subject: Subject, original: Mapping[str, bytes]) -> None:
    """Half of the code or less stands a second time, line for line, in what a rollout sees."""
    edits = subject.stub_edits or subject.changes.edits  # where no function is deleted, the deleted spans
    bodies = [original[edit.path].decode()[edit.start : edit.end] for edit in edits]
    share, path = copied_share(bodies, subject.broken(original, "rollout"))
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
    original, tests = bench.original, subject.tests
    broken = Trial(subject.broken(original, "rollout"), tests.shown, stop_at_first_failure=True)
    paid = tests.visible if tests.paid else ()  # together with those that are shown
    sides = (
        ("visible", "rollout", tests.shown),
        ("paid", "visible", paid),
        ("hidden", "hidden", tests.hidden),
    )
    golden = {kind: Trial(subject.golden(original, view), own) for kind, view, own in sides if own}
    for number in range(1, num_golden):
        golden[f"again {number}"] = Trial(subject.golden(original, "hidden"), subject.own_tests)
    trials = [broken, *golden.values()]
    if suite is None:
        suite, without, *reports = bench.run_all([suite_trial(subject, bench), *trials])
        if num_different := len(failing_of(suite, subject, repository) ^ set(subject.own_tests)):
            # No name: a hidden test may be among them.
            raise GateFailed("other-tests-fail", f"{num_different} tests differ from the stored ones")
    else:
        without, *reports = bench.run_all(trials)
    if without.all_passed(tests.shown):
        raise GateFailed("broken-passes", "the visible tests pass without the code")
    seconds = check_golden(golden, dict(zip(golden, reports, strict=True)), bench.test_seconds)
    _check_stubs(subject, bench, seconds, stubs)
    return subject


def check_golden(
    trials: Mapping[str, Trial], reports: Mapping[str, TestReport], test_seconds: float
) -> float:
    """The golden code passes every time, in half of the time that an answer has: a correct one may need twice as much.

    Returns:
        The processor time after which these tests can be said to have noticed a fault.
    """
    failed = [kind for kind, trial in trials.items() if not reports[kind].all_passed(trial.node_ids or ())]
    for kind in failed:
        if kind.startswith("again"):
            num_passed = NUM_GOLDEN_RUNS - len(failed)
            told = f"flaky: with the code back the tests pass in {num_passed} of {NUM_GOLDEN_RUNS} runs"
            raise GateFailed("not-restored", told)
        # Which one of those that are not shown stays unsaid: this text is printed, and a name is a hint.
        detail = f"a {kind} test does not pass with the golden code"
        if kind == "visible":
            report = reports[kind]
            detail = report.error or f"{min(set(report.outcomes) - report.passed)} does not pass"
        raise GateFailed("golden-fails", detail)
    used = {kind: report.cpu_seconds for kind, report in reports.items()}
    if (most := max(used.values())) > GOLDEN_CPU_SHARE * test_seconds:
        told = (
            f"the tests need {most:.0f} s of processor time, more than {GOLDEN_CPU_SHARE * test_seconds:g} s"
        )
        raise GateFailed("golden-fails", told)
    again = (seconds for kind, seconds in used.items() if kind.startswith("again"))
    return noticing_seconds(max(again, default=sum(used.values())), test_seconds)


# --- Constants in the place of the code.


def some_of(tests: Iterable[str]) -> list[str]:
    """Of very many tests a part: to fail one is enough."""
    return sorted(sorted(tests, key=lambda test: (sha256_of(test.encode()), test))[:MAX_STUB_TESTS])


def passed_by_stubs(subject: Subject, tests: Collection[str], bench: Bench) -> Passed:
    """Which of the tests pass without the code ("") and when every function returns one constant.

    How long they may run follows from what they need with the code: with a constant many a loop never ends. Those of
    very many that are not run are taken as passed.
    """
    chosen = some_of(tests)
    (golden,) = bench.run_all([Trial(bench.original, chosen)])
    seconds = 0.0 if golden.error else noticing_seconds(golden.cpu_seconds, bench.test_seconds)
    trials = [Trial(subject.stubbed(bench.original, text), chosen, seconds=seconds) for text in STUBS]
    return {
        text: None if report.error else frozenset(tests) - (report.outcomes.keys() - report.passed)
        for text, report in zip(STUBS, bench.run_all(trials), strict=True)
    }


def passing_stub(subject: Subject, passed: Passed) -> GateFailed | None:
    """The refusal of a deletion of which a side's tests all pass with one constant; ``passed`` is of ``passed_by_stubs``."""
    for text, tests_passed in passed.items():
        for kind, tests in subject.sides.items():
            if tests_passed is not None and tests_passed.issuperset(tests):
                if text:
                    return GateFailed("stub-passes", f"the {kind} tests pass with return {text}")
                return GateFailed("broken-passes", f"the {kind} tests pass without the code")
    return None


def _check_stubs(subject: Subject, bench: Bench, seconds: float, texts: Iterable[str]) -> None:
    """Without the code ("") and with every constant in its place some visible, some paid and some hidden test fails.

    Each side is run on its own: one test that never ends, or one file that is not collected, is no reason for the others
    to fail. ``seconds`` is the processor time of a run.
    """
    sides, trials = list(product(texts, subject.sides.values())), []
    for text, tests in sides:
        tree = subject.stubbed(bench.original, text)
        trials.append(Trial(tree, some_of(tests), stop_at_first_failure=True, seconds=seconds))
    passed: dict[str, frozenset[str]] = {}
    for (text, tests), trial, report in zip(sides, trials, bench.run_all(trials), strict=True):
        if report.all_passed(trial.node_ids or ()):
            passed[text] = passed.get(text, frozenset()) | set(tests)
    if refused := passing_stub(subject, passed):
        raise refused


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
    if leaks := leaks_of(store, task):
        # As it is imported: where this machine keeps its packages is nobody's business.
        place = re.split(r"/(?:site-packages|lib/python[0-9.]+|lib)/", leaks[0].path, maxsplit=1)[-1]
        raise GateFailed("leak", f"{place} tells the code ({leaks[0].channel})")
    plain = plain_instruction(store, task)
    if plain is None:
        raise GateFailed("instruction-leaks", "the instruction would contain the deleted code")
    written = written_instruction(store, task.task_id)
    if written and (reason := refusal(written.text, read_secrets(store, task, plain))):
        raise GateFailed("instruction-leaks", f"the instruction that a model wrote does not pass: {reason}")
