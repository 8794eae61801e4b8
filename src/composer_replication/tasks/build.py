"""Cut tasks out of repositories: every candidate through every gate, in parallel, resumable."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from composer_replication.errors import InputError, UsageError
from composer_replication.run_folder import RunFolder
from composer_replication.sandbox import runs_interrupted
from composer_replication.tasks.build_summary import BuildSummary
from composer_replication.tasks.cache import sha256_of
from composer_replication.tasks.deletion import Deletion
from composer_replication.tasks.edits import edited_files
from composer_replication.tasks.gates import GateFailed, judge_deletion
from composer_replication.tasks.journal import Decision, Journal, decision_key
from composer_replication.tasks.lock import UnusableRepository
from composer_replication.tasks.parquet import has_pyarrow, write_parquet
from composer_replication.tasks.repository import PreparedRepository, prepare, slug_of
from composer_replication.tasks.sources import RepositorySource, open_source
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import SecretRecord, TaskRecord
from composer_replication.tasks.subject import Subject

__all__ = ["BuildSummary", "Progress", "build_tasks", "keep_task", "make_task_id"]

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is done now) from the calling thread."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    repository: PreparedRepository
    deletion: Deletion
    is_pinned: bool
    key: str


@dataclass(frozen=True, slots=True)
class _Settings:
    seed: int
    hidden_share: float


def build_tasks(
    sources: Sequence[str],
    out: Path,
    *,
    symbols: Mapping[str, Sequence[str]] | None = None,
    max_tasks: int | None = None,
    seed: int = 0,
    jobs: int = 2,
    hidden_share: float = 0.5,
    backend: str | None = None,
    progress: Progress | None = None,
) -> BuildSummary:
    """Build a task store from repositories.

    A second call with the same arguments goes on where the first one stopped, or finds
    everything done. The tasks, their tests and the fingerprint depend on the input and the
    seed alone, not on ``jobs``. Afterwards the folder holds exactly what was asked for.

    Args:
        sources: folders, archives or ``sdist:NAME==VERSION``.
        out: folder of the store; new, or left by an earlier build of the same repositories.
        symbols: for a source, the functions to delete (``path/inside/tree.py::Qualified.name``);
            a source without an entry gives all its functions, in an order drawn by ``seed``.
        max_tasks: stop after so many tasks.
        seed: draws candidates and hidden tests.
        jobs: candidates tried at the same time.
        hidden_share: share of a task's test functions that are held back, in [0, 1).
        backend: sandbox backend by name or dotted path; None for the best of this machine.
        progress: told after every step.

    Raises:
        UsageError: the folder is in use (CR0203), is something else (CR0415), holds other
            repositories (CR0425), or the arguments do not fit together (CR0421).
        InputError: a source is not usable (CR0402 to CR0408), a pin is not in it (CR0409), or the
            store of an earlier build is damaged (CR0411).
        SandboxFailure: the sandbox broke; what is built so far stays and is resumed.
    """
    started = time.monotonic()
    _check_arguments(sources, symbols or {}, hidden_share, jobs, max_tasks)
    out = Path(out)
    with ThreadPoolExecutor(jobs, thread_name_prefix="tasks-fetch") as fetchers:
        opened = list(fetchers.map(open_source, sources))
    with RunFolder(out).locked():
        store = TaskStore.create(out, backend=backend)
        store.verify()  # what lies there already is taken over unread
        pool = ThreadPoolExecutor(jobs, thread_name_prefix="tasks-build")
        try:
            run = _Build(store, pool, _Settings(seed, hidden_share), jobs, progress or _no_progress)
            prepared = run.prepare_all(opened, symbols or {})
            run.decide(run.candidates(prepared, symbols or {}), max_tasks)
        except KeyboardInterrupt:
            with runs_interrupted():  # a killed run is no decision: the journal never hears of it
                pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        run.finish()
        if has_pyarrow():
            write_parquet(store)
        return run.summary(time.monotonic() - started)


def _check_arguments(
    sources: Sequence[str],
    symbols: Mapping[str, Sequence[str]],
    hidden_share: float,
    jobs: int,
    max_tasks: int | None,
) -> None:
    problem = ""
    unknown = sorted(set(symbols) - set(sources))
    if not sources:
        problem = "no source is given"
    elif len(set(sources)) != len(sources):
        problem = "a source is given twice"
    elif unknown:
        problem = f"symbols names {unknown[0]}, which is not among the sources"
    elif not 0.0 <= hidden_share < 1.0:
        problem = f"the hidden share {hidden_share} is not in [0, 1)"
    elif jobs < 1 or (max_tasks is not None and max_tasks < 1):
        problem = "jobs and max_tasks must be at least 1"
    if problem:
        raise UsageError("CR0421", f"{problem}.", fix="composer-rl tasks build --help")


class _Build:
    """The state of one build."""

    def __init__(
        self, store: TaskStore, pool: ThreadPoolExecutor, settings: _Settings, jobs: int, progress: Progress
    ) -> None:
        self.store = store
        self.pool = pool
        self.settings = settings
        self.jobs = jobs
        self.progress = progress
        self.journal = Journal(store.root / "journal.jsonl")
        self.unusable: dict[str, UnusableRepository] = {}
        self.decisions: list[Decision] = []
        self.slugs: set[str] = set()

    def prepare_all(
        self, opened: Sequence[RepositorySource], symbols: Mapping[str, Sequence[str]]
    ) -> dict[str, PreparedRepository]:
        """Prepare every repository; one that cannot be used is noted and left out."""
        self._check_repositories(opened)
        futures: dict[Future[PreparedRepository], str] = {
            self.pool.submit(
                prepare,
                source,
                self.store,
                self.store.backend,
                map_calls=not symbols.get(source.source),
                jobs=max(1, self.jobs // len(opened)),
            ): source.source
            for source in opened
        }
        ready: dict[str, PreparedRepository] = {}
        self.progress(0, len(futures), "repositories")
        for done, future in enumerate(_as_completed(futures), start=1):
            try:
                ready[futures[future]] = future.result()
            except UnusableRepository as error:
                self.unusable[futures[future]] = error
            self.progress(done, len(futures), "repositories")
        return {source.source: ready[source.source] for source in opened if source.source in ready}

    def _check_repositories(self, opened: Sequence[RepositorySource]) -> None:
        self.slugs = {slug_of(source.repository) for source in opened}
        if len(self.slugs) != len(opened):
            names = Counter(source.repository for source in opened).most_common(1)
            raise UsageError(
                "CR0421",
                f"two sources are the same repository {names[0][0]}.",
                fix="name each repository once.",
            )
        present = {self.store.record(task_id).repository_record for task_id in self.store.task_ids()}
        if present - self.slugs:
            raise UsageError(
                "CR0425",
                f"the folder holds tasks of {min(present - self.slugs)}, which is not among the sources.",
                where=str(self.store.root),
                fix="name that repository too, or choose another --out DIR.",
            )

    def candidates(
        self, ready: Mapping[str, PreparedRepository], symbols: Mapping[str, Sequence[str]]
    ) -> list[_Candidate]:
        """Pinned ones in the given order; drawn ones in turn from each repository."""
        columns = []
        for source, repository in ready.items():
            pins = symbols.get(source)
            chosen = _pinned(repository, pins) if pins else self._drawn(repository)
            columns.append(
                [self._candidate(repository, deletion, is_pinned=bool(pins)) for deletion in chosen]
            )
        return [candidate for row in zip_longest(*columns) for candidate in row if candidate is not None]

    def _candidate(
        self, repository: PreparedRepository, deletion: Deletion, *, is_pinned: bool
    ) -> _Candidate:
        key = decision_key(
            repository.record, deletion.pin, hidden_share=self.settings.hidden_share, seed=self.settings.seed
        )
        return _Candidate(repository, deletion, is_pinned, key)

    def _drawn(self, repository: PreparedRepository) -> list[Deletion]:
        def rank(deletion: Deletion) -> str:
            return hashlib.sha256(
                f"{self.settings.seed}/{repository.slug}/{deletion.pin}".encode()
            ).hexdigest()

        return sorted(repository.deletions, key=rank)

    def decide(self, candidates: Sequence[_Candidate], max_tasks: int | None) -> None:
        """Judge candidates in order until there are enough; the cut does not depend on timing."""
        decided: dict[int, Decision] = {}
        running: dict[Future[Decision], int] = {}
        upcoming = 0

        def num_valid() -> int:
            return sum(decision.is_valid for decision in decided.values())

        while running or (upcoming < len(candidates) and not _is_enough(num_valid(), max_tasks)):
            while (
                len(running) < self.jobs
                and upcoming < len(candidates)
                and not _is_enough(num_valid(), max_tasks)
            ):
                known = self._known(candidates[upcoming])
                if known is not None:
                    decided[upcoming] = known
                else:
                    running[self.pool.submit(self._judge, candidates[upcoming])] = upcoming
                upcoming += 1
            self.progress(len(decided), len(candidates), f"{num_valid()} tasks")
            if running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    decided[running.pop(future)] = future.result()
        self.decisions = list(_until_enough([decided[index] for index in sorted(decided)], max_tasks))
        self.progress(len(decided), len(decided), f"{num_valid()} tasks")

    def _known(self, candidate: _Candidate) -> Decision | None:
        """What the journal says, or what needs no run: no test calls that function."""
        earlier = self.journal.find(candidate.key)
        if earlier is not None and (
            not earlier.is_valid or self.store.has_record(f"tasks/{earlier.task_id}.json")
        ):
            return earlier
        called = candidate.repository.record.called
        functions = candidate.deletion.functions
        if candidate.is_pinned or called is None or not functions or not functions.isdisjoint(called):
            return None
        return Decision(
            candidate.key, candidate.repository.record.repository, candidate.deletion.pin, reason="untested"
        )

    def _judge(self, candidate: _Candidate) -> Decision:
        repository = candidate.repository
        name = repository.record.repository
        try:
            subject = judge_deletion(
                candidate.deletion,
                repository.record,
                repository.bench,
                hidden_share=self.settings.hidden_share,
                seed=self.settings.seed,
            )
        except GateFailed as error:
            decision = Decision(
                candidate.key, name, candidate.deletion.pin, reason=error.gate, detail=error.detail
            )
        else:
            task_id = keep_task(self.store, repository, candidate.deletion, subject)
            decision = Decision(candidate.key, name, candidate.deletion.pin, task_id=task_id)
        self.journal.add(decision)
        return decision

    def finish(self) -> None:
        """Leave exactly what was asked for: no task beyond the cut or of an earlier setting."""
        keep: set[str] = set()
        for slug in self.slugs:
            if self.store.has_record(f"repositories/{slug}.json"):
                keep |= {f"repositories/{slug}.json", f"locks/{self.store.repository(slug).environment}.json"}
        for decision in self.decisions:
            keep |= {f"tasks/{decision.task_id}.json", f"secrets/{decision.task_id}.json"}
        self.store.drop_records(keep)
        self.journal.keep(self.decisions)

    def summary(self, seconds: float) -> BuildSummary:
        rejected = Counter(error.reason for error in self.unusable.values())
        rejected.update(decision.reason for decision in self.decisions if not decision.is_valid)
        examples = {d.reason: f"{d.pin}: {d.detail}" for d in reversed(self.decisions) if d.detail}
        examples |= {error.reason: f"{source}: {error.detail}" for source, error in self.unusable.items()}
        return BuildSummary(
            folder=self.store.root,
            tasks=len(self.store.task_ids()),
            candidates=len(self.decisions),
            valid=sum(decision.is_valid for decision in self.decisions),
            rejected=dict(sorted(rejected.items())),
            seconds=seconds,
            bytes=self.store.num_bytes(),
            fingerprint=self.store.fingerprint,
            examples=examples,
            flaky={record.repository: record.flaky or () for record in self.store.repositories()},
            has_parquet=bool(self.store.derived),
        )


def _no_progress(_done: int, _total: int, _what: str) -> None:
    """Tell nobody."""


def _is_enough(num_valid: int, max_tasks: int | None) -> bool:
    return max_tasks is not None and num_valid >= max_tasks


def _until_enough(decisions: Sequence[Decision], max_tasks: int | None) -> Iterator[Decision]:
    num_valid = 0
    for decision in decisions:
        if _is_enough(num_valid, max_tasks):
            return
        num_valid += decision.is_valid
        yield decision


def _as_completed(futures: Mapping[Future[PreparedRepository], str]) -> Iterator[Future[PreparedRepository]]:
    pending = set(futures)
    while pending:
        finished, pending = wait(pending, return_when=FIRST_COMPLETED)
        yield from finished


def _pinned(repository: PreparedRepository, pins: Sequence[str]) -> list[Deletion]:
    chosen = []
    for pin in pins:
        deletion = repository.by_pin(pin)
        if deletion is None:
            near = difflib.get_close_matches(pin, [d.pin for d in repository.deletions], n=1, cutoff=0.0)
            raise InputError(
                "CR0409",
                f"{repository.record.repository} has no function {pin!r} whose body can be deleted.",
                where=pin,
                fix=f"the nearest is {near[0]}." if near else "",
            )
        chosen.append(deletion)
    return chosen


def keep_task(store: TaskStore, repository: PreparedRepository, deletion: Deletion, subject: Subject) -> str:
    """Write a candidate that passed all gates into the store; its task id."""
    task_id = make_task_id(repository.slug, deletion, repository.bench.original)
    golden = deletion.golden_code(repository.bench.original)
    is_edited_by_stubs = deletion.removal == "body"
    record = TaskRecord(
        task_id=task_id,
        repository=repository.record.repository,
        repository_record=repository.slug,
        path=deletion.path,
        symbol=deletion.symbol,
        granularity=deletion.granularity,
        removal=deletion.removal,
        edits=subject.changes.edits,
        stub_edits=() if is_edited_by_stubs else subject.stub_edits,
        removed_files=subject.changes.removed_files,
        test_edits=subject.changes.test_edits,
        visible_edits=subject.changes.visible_edits,
        visible=subject.visible,
        environment=repository.record.environment,
        num_body_lines=sum(bool(line.strip()) for line in golden.splitlines()),
    )
    store.put_task(record, SecretRecord(task_id, subject.golden_patch, subject.hidden, subject.withheld))
    return task_id


def make_task_id(slug: str, deletion: Deletion, original: Mapping[str, bytes]) -> str:
    """``toolz-1.2.0--toolz.itertoolz--concatv--1a2b3c4d``: safe in a file name, derived from the content."""
    path = PurePosixPath(deletion.path)
    parts = [part for part in (*path.parts[:-1], path.stem) if part not in ("src", "lib", "__init__")]
    size = f"{deletion.granularity}-{deletion.removal}"
    if size == "function-body":
        broken = edited_files(original, deletion.edits)[deletion.path]
        content: list[object] = [
            deletion.path,
            deletion.symbol,
            sha256_of(broken),
            deletion.golden_code(original),
        ]
        names = [slug, ".".join(parts), deletion.symbol]
    else:
        edits = [astuple(edit) for edit in deletion.edits]
        content = [deletion.pin, edits, deletion.removed_files, deletion.golden_code(original)]
        names = [slug, ".".join(parts), deletion.symbol, size]
    readable = re.sub(r"[^A-Za-z0-9._+-]", "-", "--".join(names))[:160]
    return f"{readable}--{sha256_of(json.dumps(content).encode())[:8]}"
