"""The state of one build: its candidates, what was decided about each (so that it can go on), and what is left at the end."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import islice, product, zip_longest
from pathlib import Path, PurePosixPath
from typing import TypeVar

from composer_replication.errors import InputError, UsageError
from composer_replication.run_folder import append_jsonl, read_jsonl, rewrite_jsonl
from composer_replication.sandbox import runs_interrupted
from composer_replication.tasks.gates import check_secrecy, judge_deletion
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.environment import UnusableRepository
from composer_replication.tasks.intake.sources import NOT_FETCHED, RepositorySource
from composer_replication.tasks.planning.body_cuts import Deletion, Granularity, Removal
from composer_replication.tasks.planning.candidates import nothing_found
from composer_replication.tasks.planning.edits import edited_files
from composer_replication.tasks.repository import PreparedRepository, prepare, slug_of, sweep_unused
from composer_replication.tasks.running.context_recorder import EVERY_TEST
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import packed_path, read_content, sandbox_in_force, write_file
from composer_replication.tasks.store_records import SUITE_SECONDS, RepositoryRecord, SecretRecord, TaskRecord
from composer_replication.tasks.subject import GateFailed, Subject
from composer_replication.tasks.truth import ValidTask, add_truth
from composer_replication.tasks.workers import Workers

# --- What was decided about each candidate, kept so that a build that was cut off goes on.

GATES_VERSION = 15
"""Raised when the gates judge otherwise, so that older answers are not taken over."""
_UNDECIDED = ("truth-unknown",)
"""Reasons that say nothing of the candidate; a later build judges it again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One candidate: its task, or the gate that it did not pass. ``key`` covers all that it depends on."""

    key: str
    repository: str
    pin: str
    task_id: str = ""
    reason: str = ""
    detail: str = ""

    @property
    def is_valid(self) -> bool:
        return bool(self.task_id)


class Journal:
    """Decisions by key in one JSONL file; appended as they fall, sorted and compressed at the end.

    Candidates whose decision can no longer be read are judged again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            found = [Decision(**row) for row in read_journal(path)]
        except (InputError, ValueError, TypeError, RecursionError):
            found = []
        self._decisions = {one.key: one for one in found if one.reason not in _UNDECIDED}
        if path.is_file():  # a crash can leave half a line, to which nothing may be appended
            self._rewrite()

    def find(self, key: str) -> Decision | None:
        return self._decisions.get(key)

    def add(self, decision: Decision) -> None:
        with self._lock:
            self._decisions[decision.key] = decision
            if self._path.is_file():
                append_jsonl(self._path, asdict(decision))
            else:
                self._rewrite()

    def _rewrite(self) -> None:
        rewrite_jsonl(self._path, map(asdict, self._decisions.values()))
        packed_path(self._path).unlink(missing_ok=True)

    def keep(self, decisions: Iterable[Decision]) -> None:
        """Replace the whole file by these decisions, compressed, in an order that does not depend on time."""
        rows = sorted(map(asdict, decisions), key=lambda row: (row["repository"], row["pin"]))
        write_file(self._path, "".join(f"{json.dumps(row, sort_keys=True)}\n" for row in rows).encode())


def read_journal(path: Path) -> list[dict[str, str]]:
    """The rows of a journal, of a build that goes on or of a finished one; where a crash left both, of the first.

    Raises:
        InputError: a line before the last is not JSON (CR0401), or the compressed form cannot be read (CR0411).
    """
    packed = packed_path(path)
    if path.is_file() or not packed.is_file():
        return read_jsonl(path)
    return [json.loads(line) for line in read_content(packed).splitlines()]


# --- In which order the candidates of a repository are tried.

Item = TypeVar("Item")
_HOW_TO_NAME = "write PATH::NAME, or PATH::NAME@SIZE/WAY: SIZE one of function, class, module, feature, WAY body or whole."


def drawn(repository: PreparedRepository, seed: int) -> tuple[list[Deletion], list[Deletion]]:
    """All candidates in an order drawn by the seed, and apart from them the doubtful ones; sizes and ways take turns.

    Of features those come first that delete functions in several files: nothing smaller asks for that, and they
    are rare.
    """

    def rank(deletion: Deletion) -> tuple[bool, str]:
        is_in_one_file = len({cut.path for cut in deletion.bodies}) < 2
        drawn_place = hashlib.sha256(f"{seed}/{repository.slug}/{deletion.pin}".encode()).hexdigest()
        return deletion.granularity == "feature" and is_in_one_file, drawn_place

    groups: dict[bool, dict[tuple[str, str], list[Deletion]]] = {False: {}, True: {}}
    for one in sorted(repository.deletions, key=rank):
        of_size = groups[is_doubtful(repository.record, one)]
        of_size.setdefault((one.granularity, one.removal), []).append(one)
    usual, doubtful = (in_turn(of_size[key] for key in sorted(of_size)) for of_size in groups.values())
    return usual, doubtful


def is_doubtful(record: RepositoryRecord, deletion: Deletion) -> bool:
    """Whether what is known of the tests speaks against a candidate, so that it is tried when the others are used up.

    Fewer than two test functions call it: then none can be hidden. Or it is called for all tests, while modules
    are imported or by fixtures of wider scope: without it no test would be left.
    """
    selected = record.tests_of(deletion)
    if selected is None or record.contexts is None:
        return False
    test_functions = {record.places[test] for test in record.green.intersection(selected)}
    is_for_all = not record.contexts.get(EVERY_TEST, frozenset()).isdisjoint(deletion.functions)
    return len(test_functions) < 2 or is_for_all


def in_turn(columns: Iterable[Sequence[Item]]) -> list[Item]:
    """The first of each column, then the second of each, and so on."""
    return [item for row in zip_longest(*columns) for item in row if item is not None]


def pinned(repository: PreparedRepository, pins: Sequence[str]) -> list[Deletion]:
    """The candidates that pins name, in their order."""
    chosen = []
    for pin in pins:
        deletion = repository.by_pin(pin)
        if deletion is None:
            near = difflib.get_close_matches(pin, [d.pin for d in repository.deletions], n=1, cutoff=0.0)
            raise InputError(
                "CR0402",
                f"{repository.record.repository} has no {pin!r} that can be deleted.",
                where=pin,
                fix=f"the nearest is {near[0]}." if near else _HOW_TO_NAME,
            )
        chosen.append(deletion)
    return chosen


# --- What a foreign task set says of a candidate that it brings along.


@dataclass(frozen=True, slots=True)
class Instance:
    """One row of a SWE-bench set; ``repo`` is ``OWNER/NAME`` or ``NAME``."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    fail_to_pass: frozenset[str]
    pass_to_pass: frozenset[str]
    problem_statement: str

    def check(self, subject: Subject) -> None:
        """The tests that it says fail must all fail, those that it says pass must not."""
        failing = {*subject.tests.visible, *subject.tests.hidden}
        detail = ""
        if broken := self.pass_to_pass & failing:  # which ones stays unsaid: they may be hidden
            detail = f"{len(broken)} tests should pass without the patch and fail"
        if passing := sorted(self.fail_to_pass - failing):
            detail = f"{len(passing)} tests should fail without the patch and do not ({passing[0]})"
        if detail:
            raise GateFailed("other-tests-fail", detail)

    def digest(self, deletion: Deletion) -> str:
        """A hash of everything in it, and in the deletion that it asks for, that a decision depends on."""
        tests = [sorted(self.fail_to_pass), sorted(self.pass_to_pass)]
        stated = [*tests, self.problem_statement, self.instance_id]
        edits = [astuple(edit) for edit in deletion.edits]
        return sha256_of(json.dumps([edits, deletion.removed_files, stated]).encode())


# --- The state of one build: its candidates, what was decided about each, and what is left at the end.

Result = TypeVar("Result")
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is done now) from the calling thread; a new stretch of work begins with fewer done."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deletion to be judged; ``key`` covers all that its decision depends on.

    ``instance`` is what a foreign task set says of it, where it comes from one.
    """

    repository: PreparedRepository
    deletion: Deletion
    is_pinned: bool
    key: str
    instance: Instance | None = None

    @property
    def name(self) -> str:
        """How it is called in the journal and in messages."""
        return self.deletion.pin if self.instance is None else self.instance.instance_id

    def decided(self, **said: str) -> Decision:
        """That it is a task (``task_id``), or why it is none (``reason``, ``detail``)."""
        return Decision(self.key, self.repository.record.repository, self.name, **said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a build was asked for.

    Args:
        symbols: for a source, the functions to delete (``path/inside/tree.py::Qualified.name``);
            a source without an entry gives all its candidates, in an order drawn by ``seed``.
        granularities: what is deleted; the sizes take turns.
        removals: how much of it; see ``body_cuts``.
        with_truth: record what the deleted functions do, as further hidden tests (``twin``), refuse
            tasks that have neither these nor hidden tests, and measure how strong both are.
        max_tasks: stop after so many tasks.
        seed: draws candidates and hidden tests.
        hidden_share: share of a task's test functions that are held back, in [0, 1).
        suite_seconds: how long by the clock one run of a repository's whole suite may take; above 0, at most a day.
    """

    symbols: Mapping[str, Sequence[str]] = field(default_factory=dict)
    granularities: Sequence[Granularity] = ("function",)
    removals: Sequence[Removal] = ("body",)
    with_truth: bool = False
    max_tasks: int | None = None
    seed: int = 0
    hidden_share: float = 0.5
    suite_seconds: float = SUITE_SECONDS

    def decision_key(self, record: RepositoryRecord, pin: str) -> str:
        """A hash of everything that the decision about a candidate depends on."""
        parts = [GATES_VERSION, record.baseline_sha256, pin, self.hidden_share, self.seed, self.with_truth]
        parts += [record.suite_seconds] if record.suite_seconds != SUITE_SECONDS else []
        return sha256_of(json.dumps(parts).encode())[:32]

    def sizes(self, source: str) -> tuple[tuple[str, str], ...]:
        """The (size, way) pairs to plan for a source: those that its pins name, or without pins all that are asked for."""
        pins = self.symbols.get(source)
        if not pins:
            return tuple(product(self.granularities, self.removals))
        named = (pin.rpartition("@")[2].split("/") if "@" in pin else ("function", "body") for pin in pins)
        return tuple(dict.fromkeys((size[0], size[-1]) for size in named))


@dataclass(kw_only=True)
class Build:
    """The state of one build; ``unrecorded`` has, by repository and pin, why a run that records failed."""

    store: TaskStore
    settings: Settings
    pool: ThreadPoolExecutor
    workers: Workers
    jobs: int
    progress: Progress
    started: float
    unusable: dict[str, UnusableRepository] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    slugs: set[str] = field(default_factory=set)
    unrecorded: dict[str, dict[str, str]] = field(default_factory=dict)
    _has_noted_proof: bool = False

    def __post_init__(self) -> None:
        self.journal = Journal(self.store.root / "journal.jsonl")

    def prepare_all(self, opened: Sequence[RepositorySource]) -> dict[str, PreparedRepository]:
        """Prepare every repository; one that cannot be used is noted and left out."""
        self._check_repositories(opened)
        self.store.mark_build(is_complete=False)
        unfetched: list[InputError] = []

        def prepared(source: RepositorySource) -> tuple[str, PreparedRepository | UnusableRepository]:
            try:
                return source.source, prepare(
                    source,
                    self.store,
                    workers=self.workers,
                    sizes=self.settings.sizes(source.source),
                    map_calls=not self.settings.symbols.get(source.source),
                    jobs=max(1, self.jobs // len(opened)),
                    suite_seconds=self.settings.suite_seconds,
                )
            except UnusableRepository as error:
                return source.source, error
            except InputError as error:
                if error.code not in NOT_FETCHED:
                    raise
                unfetched.append(error)
                return source.source, UnusableRepository(error.code, error.message)

        found = dict(self._each(prepared, opened, "repositories"))
        if len(unfetched) == len(opened):
            raise unfetched[0]
        self.unusable |= {name: one for name, one in found.items() if isinstance(one, UnusableRepository)}
        in_order = ((source.source, found[source.source]) for source in opened)
        return {name: one for name, one in in_order if isinstance(one, PreparedRepository)}

    def _check_repositories(self, opened: Sequence[RepositorySource]) -> None:
        first: dict[str, RepositorySource] = {}
        for source in opened:
            other = first.setdefault(slug_of(source.repository), source)
            if other is not source:
                raise UsageError(
                    "CR0206",
                    f"{other.source} and {source.source} are both the repository {source.repository}.",
                    fix="name one of them; the other can be built into a folder of its own.",
                )
        self.slugs = set(first)
        present = {self.store.record(task_id).repository_record for task_id in self.store.task_ids()}
        if present - self.slugs:
            missing = "; ".join(f"{source} cannot be used: {why}" for source, why in self.unusable.items())
            raise UsageError(
                "CR0231",
                f"the folder holds tasks of {min(present - self.slugs)}, which is not among the sources"
                f"{f' ({missing})' if missing else ''}.",
                where=str(self.store.root),
                fix="name that repository too, or choose another --out DIR.",
            )

    def candidates(self, ready: Mapping[str, PreparedRepository]) -> list[Candidate]:
        """Pinned ones in the given order; drawn ones in turn from each repository, the doubtful ones of all last.

        A repository that has none is noted as unusable.
        """
        columns: tuple[list[list[Candidate]], list[list[Candidate]]] = ([], [])
        for source, repository in ready.items():
            if pins := self.settings.symbols.get(source):
                columns[0].append(
                    [self.candidate(repository, one, is_pinned=True) for one in pinned(repository, pins)]
                )
                continue
            helps_tests = repository.record.helps_tests
            in_tests = [one.path for one in repository.deletions if helps_tests(one.path)]
            if len(in_tests) == len(repository.deletions):
                detail = nothing_found(repository.bench.original, self.settings.sizes(source))
                if in_tests:
                    detail = f"all that can be deleted lies in folders of tests (first: {min(in_tests)})"
                self.unusable[source] = UnusableRepository("nothing-to-delete", detail)
            for column, found in zip(columns, drawn(repository, self.settings.seed), strict=True):
                column.append([self.candidate(repository, one) for one in found if not helps_tests(one.path)])
        return [*in_turn(columns[0]), *in_turn(columns[1])]

    def candidate(
        self,
        repository: PreparedRepository,
        deletion: Deletion,
        *,
        is_pinned: bool = False,
        instance: Instance | None = None,
    ) -> Candidate:
        """A deletion to be judged under the settings of this build."""
        pin = deletion.pin if instance is None else f"{deletion.pin}/{instance.digest(deletion)}"
        key = self.settings.decision_key(repository.record, pin)
        return Candidate(repository, deletion, is_pinned, key, instance)

    def decide(self, candidates: Sequence[Candidate]) -> None:
        """Judge candidates in order until there are enough; for each that has no truth, the next one."""
        by_key = {candidate.key: candidate for candidate in candidates}
        self._judge_until_enough(candidates)
        while self.settings.with_truth and self._add_truth(by_key):
            self._judge_until_enough(candidates)

    def _judge_until_enough(self, candidates: Sequence[Candidate]) -> None:
        """Decided in their order, so that the cut does not depend on timing; later ones are judged meanwhile."""
        most = math.inf if self.settings.max_tasks is None else self.settings.max_tasks
        upcoming, in_order = iter(candidates), deque[Future[Decision]]()
        running: set[Future[Decision]] = set()
        self.decisions = []
        num_valid = num_found = 0  # the second counts those that are decided before their turn, too
        while num_valid < most:
            if num_found < most:  # else another one would most likely be dropped
                begun = [
                    self.pool.submit(self._decide, one) for one in islice(upcoming, self.jobs - len(running))
                ]
                in_order.extend(begun)
                running.update(begun)
            self.progress(len(self.decisions), len(candidates), f"{num_valid} tasks")
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            num_found += sum(future.result().is_valid for future in finished)
            while in_order and in_order[0] not in running and num_valid < most:
                decision = in_order.popleft().result()
                self.decisions.append(decision)
                num_valid += decision.is_valid
        if running:
            with runs_interrupted():  # a killed run is no decision, and the journal never hears of it
                wait(running)
        self.progress(len(self.decisions), len(self.decisions), f"{num_valid} tasks")

    def _decide(self, candidate: Candidate) -> Decision:
        return self._known(candidate) or self._judge(candidate)

    def _known(self, candidate: Candidate) -> Decision | None:
        """What the journal says, or what needs no run: no test calls that code, or most of it."""
        earlier = self.journal.find(candidate.key)
        if earlier is not None and (
            not earlier.is_valid or self.store.has_record(f"tasks/{earlier.task_id}.json")
        ):
            return earlier
        record = candidate.repository.record
        selected = record.tests_of(candidate.deletion)
        if candidate.is_pinned or selected is None:
            return None
        if not selected:
            return candidate.decided(reason="untested")
        if record.is_mostly_uncalled(candidate.deletion):
            return candidate.decided(reason="mostly-untested")
        return None

    def _judge(self, candidate: Candidate) -> Decision:
        repository = candidate.repository
        try:
            subject = self.workers.call(
                judge_deletion,
                candidate.deletion,
                repository.record,
                repository.bench,
                hidden_share=self.settings.hidden_share,
                seed=self.settings.seed,
            )
            if candidate.instance is not None:
                candidate.instance.check(subject)
            if not self._has_noted_proof:
                self.store.note_proof(self.workers.call(sandbox_in_force, self.store.backend))
                self._has_noted_proof = True
            decision = candidate.decided(task_id=keep_task(self.store, candidate, subject))
            self._refuse_told(decision.task_id)
        except GateFailed as error:
            decision = candidate.decided(reason=error.reason, detail=error.detail)
        self.journal.add(decision)
        return decision

    def _refuse_told(self, task_id: str) -> None:
        """Take a task whose code is told out of the store again, and raise why."""
        try:
            check_secrecy(self.store, self.store.get(task_id))
        except GateFailed as error:
            # An earlier build may have shown a test that is paid or hidden now: then the text goes, and not the task.
            if error.reason == "instruction-leaks" and self.store.drop_instruction(task_id):
                self._refuse_told(task_id)
            else:
                self.store.drop_task(task_id)
                raise

    def _add_truth(self, by_key: Mapping[str, Candidate]) -> int:
        """Give each task a truth that is not in its reward; refuse those for which there is none.

        Returns:
            How many were refused.
        """
        valid = {decision.task_id: decision for decision in self.decisions if decision.is_valid}
        candidates = {task_id: by_key[decision.key] for task_id, decision in valid.items()}
        tasks = [ValidTask(task_id, one.repository, one.deletion) for task_id, one in candidates.items()]
        refused: list[str] = []

        def refuse(task_id: str, reason: str, detail: str) -> None:
            self.journal.add(replace(valid[task_id], task_id="", reason=reason, detail=detail))
            self.store.drop_task(task_id)
            refused.append(task_id)

        unknown = add_truth(
            self.store, tasks, self.settings.seed, each=self._each, workers=self.workers, refuse=refuse
        )
        for repository, pins in unknown.items():
            self.unrecorded.setdefault(repository, {}).update(pins)
        return len(refused)

    def _each(self, work: Callable[[Item], Result], items: Collection[Item], what: str) -> Iterator[Result]:
        futures = [self.pool.submit(work, item) for item in items]
        self.progress(0, len(futures), what)
        for done, future in enumerate(as_completed(futures), start=1):
            yield future.result()
            self.progress(done, len(futures), what)

    def finish(self) -> None:
        """Leave exactly what was asked for, no task beyond the cut or of an earlier setting, and note that nothing is left."""
        keep: set[str] = set()
        for slug in self.slugs:
            if self.store.has_record(f"repositories/{slug}.json"):
                keep |= {f"repositories/{slug}.json", f"locks/{self.store.repository(slug).environment}.json"}
        for decision in self.decisions:
            keep |= {f"tasks/{decision.task_id}.json", f"secrets/{decision.task_id}.json"}
        self.store.drop_records(keep)
        sweep_unused(self.store.root, self.slugs)
        self.journal.keep(self.decisions)
        self.store.mark_build(is_complete=True)


def keep_task(store: TaskStore, candidate: Candidate, subject: Subject) -> str:
    """Write a candidate that passed all gates into the store; its task id."""
    repository, deletion, instance = candidate.repository, candidate.deletion, candidate.instance
    task_id = make_task_id(repository.slug, deletion, repository.bench.original)
    golden = deletion.changes.golden_code(repository.bench.original)
    record = TaskRecord(
        task_id=task_id,
        repository=repository.record.repository,
        repository_record=repository.slug,
        path=deletion.path,
        symbol=deletion.symbol,
        granularity=deletion.granularity,
        removal=deletion.removal,
        edits=subject.changes.edits,
        stub_edits=() if deletion.removal == "body" else subject.stub_edits,
        removed_files=subject.changes.removed_files,
        test_edits=subject.changes.test_edits,
        visible_edits=subject.changes.visible_edits,
        visible=subject.tests.visible,
        environment=repository.record.environment,
        num_body_lines=sum(bool(line.strip()) for line in golden.splitlines()),
        statement="" if instance is None else instance.problem_statement,
        instance_id="" if instance is None else instance.instance_id,
        paid_tests=subject.tests.paid,
        shown_edits=subject.changes.shown_edits,
    )
    store.put_task(record, SecretRecord(task_id, subject.tests.hidden, subject.withheld))
    return task_id


def make_task_id(slug: str, deletion: Deletion, original: Mapping[str, bytes]) -> str:
    """``toolz-1.2.0--toolz.itertoolz--concatv--1a2b3c4d``: safe in a file name, derived from the content."""
    path = PurePosixPath(deletion.path)
    parts = [part for part in (*path.parts[:-1], path.stem) if part not in ("src", "lib", "__init__")]
    names = [slug, ".".join(parts), deletion.symbol]
    size = f"{deletion.granularity}-{deletion.removal}"
    if size == "function-body":
        broken = edited_files(original, deletion.edits)[deletion.path]
        content: list[object] = [deletion.path, deletion.symbol, sha256_of(broken)]
    else:
        names.append(size)
        content = [deletion.pin, [astuple(edit) for edit in deletion.edits], deletion.removed_files]
    content.append(deletion.changes.golden_code(original))
    readable = re.sub(r"[^A-Za-z0-9._+-]", "-", "--".join(names))[:160]
    return f"{readable}--{sha256_of(json.dumps(content).encode())[:8]}"
