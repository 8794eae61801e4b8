"""Cut tasks out of repositories: every candidate through every gate, in parallel, resumable."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import combinations, zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from composer_replication.errors import InputError, NothingToDoError, UsageError
from composer_replication.run_folder import RunFolder, append_jsonl, read_jsonl, rewrite_jsonl
from composer_replication.sandbox import choose_backend, require_selftest, runs_interrupted
from composer_replication.sandbox.supervised_run import interruptible_pool
from composer_replication.tasks.candidate import Candidate, Decision, Settings
from composer_replication.tasks.gates import GateFailed, Subject, check_secrecy, judge_deletion
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.environment import UnusableRepository
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.intake.sources import NOT_FETCHED, RepositorySource, open_sources
from composer_replication.tasks.planning.body_cuts import Deletion
from composer_replication.tasks.planning.edits import edited_files
from composer_replication.tasks.repository import (
    MAX_SUITE_SECONDS,
    PreparedRepository,
    prepare,
    slug_of,
    unused_tests,
)
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import sandbox_in_force, unsettle
from composer_replication.tasks.store_records import SecretRecord, TaskRecord
from composer_replication.tasks.truth import add_truth
from composer_replication.tasks.workers import Workers, open_workers

_HOW_TO_NAME = "write PATH::NAME, or PATH::NAME@SIZE/WAY: SIZE one of function, class, module, feature, WAY body or whole."

Item = TypeVar("Item")
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is done now) from the calling thread; a new stretch of work begins with fewer done."""
_CUT_ONLY = "a file that is not UTF-8, begins with a byte order mark or does not parse cannot be cut"
_UNTESTED = ("untested", "mostly-untested")
MIN_CALLED_SHARE = 0.5
"""Of the deleted lines: where tests call less, who writes one function of five passes."""


# --- In which order the candidates of a repository are tried.


def drawn(repository: PreparedRepository, seed: int) -> list[Deletion]:
    """All candidates in an order drawn by the seed; sizes and ways take turns.

    Of features those come first that delete functions in several files: nothing smaller asks for that, and they
    are rare.
    """

    def rank(deletion: Deletion) -> tuple[bool, str]:
        is_in_one_file = len({cut.path for cut in deletion.bodies}) < 2
        drawn_place = hashlib.sha256(f"{seed}/{repository.slug}/{deletion.pin}".encode()).hexdigest()
        return deletion.granularity == "feature" and is_in_one_file, drawn_place

    of_size: dict[tuple[str, str], list[Deletion]] = {}
    for one in sorted(repository.deletions, key=rank):
        of_size.setdefault((one.granularity, one.removal), []).append(one)
    return in_turn(of_size[key] for key in sorted(of_size))


def in_turn(columns: Iterable[Sequence[Item]]) -> list[Item]:
    """The first of each column, then the second of each, and so on."""
    return [item for row in zip_longest(*columns) for item in row if item is not None]


def pinned(repository: PreparedRepository, pins: Sequence[str]) -> list[Deletion]:
    """The candidates that pins name, in their order, each once."""
    chosen = []
    for pin in dict.fromkeys(pins):
        deletion = repository.by_pin(pin)
        if deletion is None:
            near = difflib.get_close_matches(pin, [d.pin for d in repository.deletions], n=1, cutoff=0.0)
            problem = f"{repository.record.repository} has no {pin!r} that can be deleted."
            fix = f"the nearest is {near[0]}." if near else _HOW_TO_NAME
            raise InputError("CR0402", problem, where=pin, fix=fix)
        chosen.append(deletion)
    return chosen


# --- What was decided about each candidate, kept so that a build that was cut off goes on.


class Journal:
    """Decisions by key in one JSONL file; appended as they fall, sorted at the end.

    Where a line cannot be read, all candidates are judged again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._decisions: dict[str, Decision] = {}
        with suppress(InputError, ValueError, TypeError, RecursionError):
            self._decisions = {one.key: one for one in (Decision(**row) for row in read_jsonl(path))}
        if path.is_file():  # a crash can leave half a line, to which nothing may be appended
            self.keep(self._decisions.values())

    def find(self, key: str) -> Decision | None:
        return self._decisions.get(key)

    def add(self, decision: Decision) -> None:
        with self._lock:
            self._decisions[decision.key] = decision
            append_jsonl(self._path, asdict(decision))

    def keep(self, decisions: Iterable[Decision]) -> None:
        """Replace the whole file by these decisions, in an order that does not depend on time."""
        ordered = sorted(decisions, key=lambda one: (one.repository, one.pin, one.key))
        rewrite_jsonl(self._path, map(asdict, ordered))


# --- A build, from sources to a store.


def build_tasks(
    sources: Sequence[str],
    out: Path,
    *,
    jobs: int = 2,
    backend: str | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> BuildSummary:
    """Build a task store from repositories.

    A second call with the same arguments goes on where the first one stopped, or finds
    everything done. The tasks, their tests and the fingerprint depend on the input and the
    seed alone, not on ``jobs`` or ``ray_address``. Afterwards the folder holds exactly what was asked for.

    Args:
        sources: folders, archives or ``sdist:NAME==VERSION``.
        out: folder of the store; new, or left by an earlier build of the same repositories.
        jobs: candidates tried at the same time.
        backend: sandbox backend by name or dotted path; None for the best of this machine.
        ray_address: of a Ray cluster that runs all sandboxes, as ``ray_cluster.joined``; None: this process.
        progress: told after every step.
        settings: what is deleted, how many tasks, the seed: the fields of ``Settings``.

    Raises:
        UsageError: the folder is in use (CR0203) or of something else (CR0231), or arguments do not fit together (CR0206).
        InputError: no source is usable, a pin is not in its source (CR0402 to CR0408), or the store is damaged (CR0411).
        MissingError: the cluster cannot be joined (CR0101, CR0490), or a node cannot do such work (CR0491).
    """
    asked = Settings(**settings)
    check_arguments(sources, asked, jobs)
    opened, unusable = open_sources(sources, progress)
    with open_build(
        Path(out), asked, jobs=jobs, backend=backend, progress=progress, ray_address=ray_address
    ) as run:
        run.unusable |= unusable
        run.decide(run.candidates(run.prepare_all(opened)))
    return summary_of(run)


@contextmanager
def open_build(
    out: Path,
    settings: Settings,
    *,
    jobs: int,
    backend: str | None,
    progress: Progress | None,
    ray_address: str | None = None,
) -> Iterator[Build]:
    """Hold the folder while candidates are decided; at the end it has exactly what was asked for."""
    started = time.monotonic()
    if ray_address is None:
        require_selftest(choose_backend(backend), progress=progress)
    TaskStore.create(out)  # before the lock, which is a file: a refused folder stays as it was
    with RunFolder(out).locked():
        store = TaskStore.open(out, backend=backend)
        store.verify()  # what lies there already is taken over unread
        told = progress or (lambda _done, _total, _what: None)
        with open_workers(ray_address, store) as workers, interruptible_pool(jobs, "tasks-build") as pool:
            run = Build(store, settings, pool, workers, jobs, told, started)
            yield run
        run.finish()


def check_arguments(sources: Sequence[str], settings: Settings, jobs: int) -> None:
    """Refuse arguments of a build that do not fit together (CR0206), before anything is fetched."""
    unknown = sorted(set(settings.symbols) - set(sources))
    share, seconds, most = settings.hidden_share, settings.suite_seconds, settings.max_tasks
    problems = {
        "no source is given": not sources,
        "a source is given twice": len(set(sources)) != len(sources),
        f"symbols names {''.join(unknown[:1])}, which is not among the sources": unknown,
        f"the hidden share {share} is not in [0, 1)": not 0.0 <= share < 1.0,
        "jobs and max_tasks must be at least 1": jobs < 1 or (most is not None and most < 1),
        f"suite_seconds {seconds:g} is not above 0 and at most a day": not 0.0 < seconds <= MAX_SUITE_SECONDS,
    }
    if found := [problem for problem, is_so in problems.items() if is_so]:
        raise UsageError("CR0206", f"{found[0]}.", fix="composer-rl tasks build --help")


@dataclass
class Build:
    """The state of one build."""

    store: TaskStore
    settings: Settings
    pool: ThreadPoolExecutor
    workers: Workers
    jobs: int
    progress: Progress
    started: float
    unusable: dict[str, UnusableRepository] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    ready: dict[str, PreparedRepository] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.journal = Journal(self.store.root / "journal.jsonl")

    # --- repositories and their candidates

    def prepare_all(self, opened: Sequence[RepositorySource]) -> dict[str, PreparedRepository]:
        """Prepare every repository; one that cannot be used is noted and left out."""
        self._check_repositories(opened)
        unsettle(self.store.root)

        def prepared(source: RepositorySource) -> PreparedRepository | UnusableRepository:
            try:
                return prepare(
                    source,
                    self.store,
                    workers=self.workers,
                    with_calls=not self.settings.symbols.get(source.source),
                    sizes=self.settings.sizes(source.source),
                    jobs=max(1, self.jobs // len(opened)),
                    suite_seconds=self.settings.suite_seconds,
                )
            except UnusableRepository as error:
                return error
            except InputError as error:
                if error.code not in NOT_FETCHED or len(opened) == 1:
                    raise
                return UnusableRepository(error.code, error.message)

        found = zip(opened, self._each(prepared, opened, "repositories"), strict=True)
        ones = {source.source: one for source, one in found}
        self.unusable |= {name: one for name, one in ones.items() if isinstance(one, UnusableRepository)}
        self.ready = {name: one for name, one in ones.items() if isinstance(one, PreparedRepository)}
        return self.ready

    def _check_repositories(self, opened: Sequence[RepositorySource]) -> None:
        for one, other in combinations(opened, 2):
            if slug_of(one.repository) == slug_of(other.repository):
                problem = f"{one.source} and {other.source} are both the repository {other.repository}."
                fix = "name one of them; the other can be built into a folder of its own."
                raise UsageError("CR0206", problem, fix=fix)
        present = {self.store.record(task_id).repository_record for task_id in self.store.task_ids()}
        if other_slugs := present - {slug_of(source.repository) for source in opened}:
            missing = "".join(f"; {source} cannot be used: {why}" for source, why in self.unusable.items())
            problem = (
                f"the folder holds tasks of {min(other_slugs)}, which is not among the sources{missing}."
            )
            fix = "name that repository too, or choose another --out DIR."
            raise UsageError("CR0231", problem, where=str(self.store.root), fix=fix)

    def candidates(self, ready: Mapping[str, PreparedRepository]) -> list[Candidate]:
        """Pinned ones in the given order; drawn ones in turn from each repository.

        A repository that has none is noted as unusable.
        """
        columns: list[list[Candidate]] = []
        for source, repository in ready.items():
            pins, helps_tests = self.settings.symbols.get(source), repository.record.helps_tests
            if pins:
                found = pinned(repository, pins)
            else:
                found = [one for one in drawn(repository, self.settings.seed) if not helps_tests(one.path)]
            if not found:
                sizes = ", ".join(f"{size}/{way}" for size, way in self.settings.sizes(source))
                detail = f"no source file outside the folders of tests holds anything of the sizes {sizes}; {_CUT_ONLY}"
                self.unusable[source] = UnusableRepository("nothing-to-delete", detail)
            columns.append([Candidate(repository, one, self.settings, bool(pins)) for one in found])
        return in_turn(columns)

    # --- decisions

    def decide(self, candidates: Sequence[Candidate]) -> None:
        """Judge candidates in order until there are enough; for each that has no truth, the next one."""
        self._judge_until_enough(candidates)
        while self.settings.with_truth and self._add_truth(candidates):
            self._judge_until_enough(candidates)

    def _judge_until_enough(self, candidates: Sequence[Candidate]) -> None:
        """Decided in their order, so that the cut does not depend on timing; later ones are judged meanwhile."""
        most = math.inf if self.settings.max_tasks is None else self.settings.max_tasks
        waiting = deque(self.pool.submit(self._decide, one) for one in candidates)
        self.decisions, num_valid = [], 0
        while waiting and num_valid < most:
            self.progress(len(self.decisions), len(candidates), f"{num_valid} tasks")
            decision = waiting.popleft().result()
            self.decisions.append(decision)
            num_valid += decision.is_valid
        if begun := [future for future in waiting if not future.cancel()]:
            with runs_interrupted():  # a killed run is no decision, and the journal never hears of it
                wait(begun)
        self.progress(len(self.decisions), len(self.decisions), f"{num_valid} tasks")

    def _decide(self, candidate: Candidate) -> Decision:
        """What needs no run (no test calls that code, or most of it), what the journal says, or what all gates say."""
        share = 1.0 if candidate.is_pinned else candidate.repository.record.called_share(candidate.deletion)
        if share < MIN_CALLED_SHARE:
            reason, detail = _UNTESTED[share > 0.0], f"tests call {share:.0%} of its lines"
            return candidate.decided(reason=reason, detail=detail)
        earlier = self.journal.find(candidate.key)
        is_known = earlier and (
            not earlier.is_valid or self.store.has_record(f"tasks/{earlier.task_id}.json")
        )
        if earlier and is_known and earlier.reason not in _UNTESTED:  # nobody had pinned it then
            return earlier
        try:
            decision = candidate.decided(task_id=self._judge(candidate))
        except GateFailed as error:
            decision = candidate.decided(reason=error.reason, detail=error.detail)
        self.journal.add(decision)
        return decision

    def _judge(self, candidate: Candidate) -> str:
        """The id of the task that a candidate is, which the store holds then."""
        repository, settings = candidate.repository, self.settings
        subject = self.workers.call(
            judge_deletion,
            candidate.deletion,
            repository.record,
            repository.bench,
            hidden_share=settings.hidden_share,
            seed=settings.seed,
        )
        if candidate.instance is not None:
            candidate.instance.check(subject)
        self.store.note_proof(self.workers.call(sandbox_in_force, self.store.backend))
        record, secret = records_of(candidate, subject)
        with self.store.proposed(record, secret) as task:
            check_secrecy(self.store, task)
        self.store.put_task(record, secret)
        return record.task_id

    def _add_truth(self, candidates: Sequence[Candidate]) -> int:
        """Give each task a truth that is not in its reward; how many were refused, because there is none."""
        by_key = {candidate.key: candidate for candidate in candidates}
        valid = {decision.task_id: decision for decision in self.decisions if decision.is_valid}
        tasks = {task_id: by_key[decision.key] for task_id, decision in valid.items()}
        num_refused = 0
        refused = add_truth(self.store, tasks, self.settings.seed, each=self._each, workers=self.workers)
        for task_id, reason, detail in refused:
            self.journal.add(replace(valid[task_id], task_id="", reason=reason, detail=detail))
            self.store.drop_task(task_id)
            num_refused += 1
        return num_refused

    def _each(self, work: Callable[[Any], Any], items: Collection[Any], what: str) -> Iterator[Any]:
        self.progress(0, len(items), what)
        for done, result in enumerate(self.pool.map(work, items), start=1):
            self.progress(done, len(items), what)
            yield result

    def finish(self) -> None:
        """Leave exactly what was asked for, no task beyond the cut or of an earlier setting, and note that nothing is left."""
        keep = {f"{kind}/{one.task_id}.json" for one in self.decisions for kind in ("tasks", "secrets")}
        for one in self.ready.values():
            keep |= {f"repositories/{one.slug}.json", f"locks/{one.record.environment}.json"}
        self.store.drop_records(keep)
        self.journal.keep(self.decisions)
        self.store.settle()


# --- What a store keeps of a candidate that passed all gates.


def records_of(candidate: Candidate, subject: Subject) -> tuple[TaskRecord, SecretRecord]:
    """The public and the secret record of a new task."""
    repository, deletion, instance = candidate.repository, candidate.deletion, candidate.instance
    changes, tests = subject.changes, subject.tests
    instance_id = "" if instance is None else instance.instance_id
    task_id = make_task_id(repository.slug, deletion, repository.bench.original, instance_id)
    golden = changes.golden_code(repository.bench.original)
    record = TaskRecord(
        task_id=task_id,
        repository=repository.record.repository,
        repository_record=repository.slug,
        path=deletion.path,
        symbol=deletion.symbol,
        granularity=deletion.granularity,
        removal=deletion.removal,
        edits=changes.edits,
        stub_edits=() if deletion.removal == "body" else subject.stub_edits,
        removed_files=changes.removed_files,
        test_edits=changes.test_edits,
        visible_edits=changes.visible_edits,
        visible=tests.visible,
        environment=repository.record.environment,
        num_body_lines=sum(bool(line.strip()) for line in golden.splitlines()),
        statement="" if instance is None else instance.problem_statement,
        instance_id=instance_id,
        strength=None,
        paid_tests=tests.paid,
        shown_edits=changes.shown_edits,
    )
    return record, SecretRecord(task_id, tests.hidden, subject.withheld, None)


def make_task_id(slug: str, deletion: Deletion, original: Mapping[str, bytes], instance_id: str) -> str:
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
    content += [deletion.changes.golden_code(original), *([instance_id] if instance_id else [])]
    readable = re.sub(r"[^A-Za-z0-9._+-]", "-", "--".join(names))[:160]
    return f"{readable}--{sha256_of(json.dumps(content).encode())[:8]}"


# --- What it made, and why it made nothing.


@dataclass(frozen=True, slots=True)
class BuildSummary:
    """What a build made.

    ``candidates`` were looked at, ``valid`` became ``tasks``; ``rejected`` counts the others
    (and whole repositories) by reason, ``examples`` has one detail for each reason. ``flaky``
    are the tests by repository that were left out because they were green in some runs only.
    ``unusable`` has a sentence for each source that gave no repository.
    ``licences`` has the licence of each repository of the store, ``unused_tests`` what became of its tests.
    """

    folder: Path
    tasks: int
    candidates: int
    valid: int
    rejected: Mapping[str, int]
    seconds: float
    bytes: int
    fingerprint: str
    examples: Mapping[str, str] = field(default_factory=dict)
    flaky: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    licences: Mapping[str, Licence] = field(default_factory=dict)
    unused_tests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def require_tasks(self) -> None:
        """Raise when there is nothing to train on: no repository could be used (CR0419), no candidate passed (CR0418)."""
        if self.tasks:
            return
        counts = "; ".join(
            f"{reason} {count} ({self.examples.get(reason, '')})" for reason, count in self.rejected.items()
        )
        where = str(self.folder)
        if self.candidates == 0:
            fix = "give a repository whose own tests pass here, or add --granularity all --removal all."
            raise InputError("CR0419", f"no repository can be used: {counts}.", where=where, fix=fix)
        problem = f"none of {self.candidates} candidates is a task: {counts}."
        fix = "give more repositories, or pin other functions."
        raise NothingToDoError("CR0418", problem, where=where, fix=fix)


def restricted_licences(licences: Mapping[str, Licence]) -> dict[str, str]:
    """Repositories whose licence is not known or none of the permissive ones, with the reason: what must be looked
    at before their tasks are passed on.
    """
    return {name: licence.restriction for name, licence in sorted(licences.items()) if licence.restriction}


def summary_of(run: Build) -> BuildSummary:
    """What a build that came to its end has made."""
    store, refused = run.store, [decision for decision in run.decisions if not decision.is_valid]
    rejected = Counter([error.reason for error in run.unusable.values()] + [one.reason for one in refused])
    examples = {one.reason: f"{one.pin}: {one.detail}" for one in reversed(refused) if one.detail}
    examples |= {error.reason: f"{source}: {error.detail}" for source, error in run.unusable.items()}
    records = {record.repository: record for record in store.repositories()}
    reasons = {one.record.repository: one.first_reason for one in run.ready.values()}
    return BuildSummary(
        folder=store.root,
        tasks=len(store.task_ids()),
        candidates=len(run.decisions),
        valid=len(run.decisions) - len(refused),
        rejected=dict(sorted(rejected.items())),
        seconds=time.monotonic() - run.started,
        bytes=store.num_bytes(),
        fingerprint=store.fingerprint,
        examples=examples,
        unusable={source: str(error) for source, error in sorted(run.unusable.items())},
        licences={name: record.licence for name, record in records.items()},
        flaky={name: record.flaky for name, record in records.items()},
        unused_tests={
            name: {**unused_tests(record), "first_reason": reasons[name]} for name, record in records.items()
        },
    )
