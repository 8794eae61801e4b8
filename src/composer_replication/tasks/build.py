"""Cut tasks out of repositories: every candidate through every gate, in parallel, resumable."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, NothingToDoError, UsageError
from composer_replication.run_folder import RunFolder
from composer_replication.sandbox import choose_backend, require_selftest
from composer_replication.sandbox.supervised_run import interruptible_pool
from composer_replication.tasks.build_state import Build, Progress, Settings
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.intake.sources import open_sources
from composer_replication.tasks.repository import MAX_SUITE_SECONDS, UnusedTests, read_unused, slug_of
from composer_replication.tasks.store import TaskStore, refuse_other_content
from composer_replication.tasks.workers import open_workers


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
        UsageError: the folder is in use (CR0203), is something else (CR0231), holds other
            repositories (CR0231), or the arguments do not fit together (CR0206).
        InputError: no source is usable (CR0402 to CR0408), a pin is not in its source (CR0402), or the
            store of an earlier build is damaged (CR0411).
        MissingError: the cluster cannot be joined (CR0101, CR0490), or a node cannot
            do such work (CR0491).
    """
    asked = Settings(**settings)
    check_arguments(sources, asked, jobs)
    opened, unusable = open_sources(sources, jobs, progress)
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
    refuse_other_content(out)  # before the lock, which is a file: a refused folder stays as it was
    if ray_address is None:
        require_selftest(choose_backend(backend), progress=progress)
    with RunFolder(out).locked():
        store = TaskStore.create(out, backend=backend)
        store.verify()  # what lies there already is taken over unread
        with open_workers(ray_address, store) as workers, interruptible_pool(jobs, "tasks-build") as pool:
            run = Build(
                store=store,
                settings=settings,
                pool=pool,
                workers=workers,
                jobs=jobs,
                progress=progress or (lambda _done, _total, _what: None),
                started=started,
            )
            yield run
        run.finish()


def check_arguments(sources: Sequence[str], settings: Settings, jobs: int) -> None:
    """Refuse arguments of a build that do not fit together (CR0206), before anything is fetched."""
    unknown = sorted(set(settings.symbols) - set(sources))
    share, seconds, most = settings.hidden_share, settings.suite_seconds, settings.max_tasks
    problems = (
        (not sources, "no source is given"),
        (len(set(sources)) != len(sources), "a source is given twice"),
        (unknown, f"symbols names {''.join(unknown[:1])}, which is not among the sources"),
        (not 0.0 <= share < 1.0, f"the hidden share {share} is not in [0, 1)"),
        (jobs < 1 or (most is not None and most < 1), "jobs and max_tasks must be at least 1"),
        (
            not 0.0 < seconds <= MAX_SUITE_SECONDS,
            f"suite_seconds {seconds:g} is not above 0 and at most {MAX_SUITE_SECONDS:g}",
        ),
    )
    for is_so, problem in problems:
        if is_so:
            fix = "composer-rl tasks build --help, or tasks import --help"
            raise UsageError("CR0206", f"{problem}.", fix=fix)


# --- What it made, and why it made nothing.


@dataclass(frozen=True, slots=True)
class BuildSummary:
    """What a build made.

    ``candidates`` were looked at, ``valid`` became ``tasks``; ``rejected`` counts the others
    (and whole repositories) by reason, ``examples`` has one detail for each reason. ``flaky``
    are the tests by repository that were left out because they were green in some runs only.
    ``unusable`` has a sentence for each source that gave no repository.
    ``unrecorded`` has, by repository and function, why a run that records behaviour failed: nothing
    is known of these, and the same build looks again.
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
    unrecorded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    licences: Mapping[str, Licence] = field(default_factory=dict)
    unused_tests: Mapping[str, UnusedTests] = field(default_factory=dict)

    def require_tasks(self) -> None:
        """Raise when there is nothing to train on.

        Raises:
            InputError: no repository could be used (CR0419).
            NothingToDoError: no candidate passed the gates (CR0418).
        """
        if self.tasks:
            return
        counts = "; ".join(
            f"{reason} {count}" + (f" ({self.examples[reason]})" if reason in self.examples else "")
            for reason, count in self.rejected.items()
        )
        if self.candidates == 0:
            raise InputError(
                "CR0419",
                f"no repository can be used: {counts}.",
                where=str(self.folder),
                fix="add --granularity all --removal all, or give another repository."
                if set(self.rejected) == {"nothing-to-delete"}
                else "give a repository whose own tests pass here: a folder, an archive or sdist:NAME==VERSION.",
            )
        raise NothingToDoError(
            "CR0418",
            f"none of {self.candidates} candidates is a task: {counts}.",
            where=str(self.folder),
            fix="give more repositories, or pin other functions.",
        )


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
        flaky={name: record.flaky or () for name, record in records.items()},
        unused_tests={name: read_unused(store.root, slug_of(name), one) for name, one in records.items()},
        unrecorded={name: dict(sorted(own.items())) for name, own in sorted(run.unrecorded.items())},
    )
