"""Cut tasks out of repositories: every candidate through every gate, in parallel, resumable."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from composer_replication.errors import UsageError
from composer_replication.run_folder import RunFolder
from composer_replication.sandbox import choose_backend, require_selftest, runs_interrupted
from composer_replication.tasks.build_state import Build, Candidate, Progress, Settings
from composer_replication.tasks.build_summary import BuildSummary
from composer_replication.tasks.intake.sources import open_sources
from composer_replication.tasks.planning.deletion import Granularity, Removal
from composer_replication.tasks.running.whole_suite import MAX_SUITE_SECONDS
from composer_replication.tasks.store import TaskStore, refuse_other_content
from composer_replication.tasks.store_records import SUITE_SECONDS
from composer_replication.tasks.workers.workers import open_workers

__all__ = ["Build", "BuildSummary", "Candidate", "Progress", "Settings", "build_tasks", "run_build"]


def build_tasks(
    sources: Sequence[str],
    out: Path,
    *,
    symbols: Mapping[str, Sequence[str]] | None = None,
    granularities: Sequence[Granularity] = ("function",),
    removals: Sequence[Removal] = ("body",),
    with_truth: bool = False,
    max_tasks: int | None = None,
    seed: int = 0,
    jobs: int = 2,
    hidden_share: float = 0.5,
    suite_seconds: float = SUITE_SECONDS,
    backend: str | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
) -> BuildSummary:
    """Build a task store from repositories.

    A second call with the same arguments goes on where the first one stopped, or finds
    everything done. The tasks, their tests and the fingerprint depend on the input and the
    seed alone, not on ``jobs`` or ``ray_address``. Afterwards the folder holds exactly what was asked for.

    Args:
        sources: folders, archives or ``sdist:NAME==VERSION``.
        out: folder of the store; new, or left by an earlier build of the same repositories.
        symbols: for a source, the functions to delete (``path/inside/tree.py::Qualified.name``);
            a source without an entry gives all its candidates, in an order drawn by ``seed``.
        granularities: what is deleted; the sizes take turns.
        removals: how much of it; see ``deletion``.
        with_truth: record what the deleted functions do, as further hidden tests (``twin``), refuse
            tasks that have neither these nor hidden tests, and measure how strong both are.
        max_tasks: stop after so many tasks.
        seed: draws candidates and hidden tests.
        jobs: candidates tried at the same time.
        hidden_share: share of a task's test functions that are held back, in [0, 1).
        suite_seconds: how long by the clock one run of a repository's whole suite may take; above 0, at most a day.
        backend: sandbox backend by name or dotted path; None for the best of this machine.
        ray_address: of a Ray cluster that runs all sandboxes, as ``RayConnection``; None: this process.
        progress: told after every step.

    Raises:
        UsageError: the folder is in use (CR0203), is something else (CR0231), holds other
            repositories (CR0231), or the arguments do not fit together (CR0206).
        InputError: no source is usable (CR0402 to CR0408), a pin is not in its source (CR0402), or the
            store of an earlier build is damaged (CR0411).
        MissingError: the cluster cannot be joined (CR0101, CR0490), or a node cannot
            do such work (CR0491).
    """
    settings = Settings(
        symbols=symbols or {},
        granularities=granularities,
        removals=removals,
        with_truth=with_truth,
        max_tasks=max_tasks,
        seed=seed,
        hidden_share=hidden_share,
        suite_seconds=suite_seconds,
    )
    check_arguments(sources, settings, jobs)
    opened, unusable = open_sources(sources, jobs, progress)

    def choose(run: Build) -> None:
        run.unusable |= unusable
        run.decide(run.candidates(run.prepare_all(opened)))

    return run_build(
        Path(out),
        settings,
        choose,
        command=build_command(sources, out, settings),
        jobs=jobs,
        backend=backend,
        progress=progress,
        ray_address=ray_address,
    )


def run_build(
    out: Path,
    settings: Settings,
    choose: Callable[[Build], None],
    *,
    command: str,
    jobs: int,
    backend: str | None,
    progress: Progress | None,
    ray_address: str | None = None,
) -> BuildSummary:
    """Hold the folder, let ``choose`` decide about candidates, leave exactly what was asked for.

    ``command`` is what is typed to finish the build when it was cut off.
    """
    started = time.monotonic()
    refuse_other_content(out)  # before the lock, which is a file: a refused folder stays as it was
    if ray_address is None:
        require_selftest(choose_backend(backend), progress=progress)
    with RunFolder(out).locked():
        store = TaskStore.create(out, backend=backend)
        store.verify()  # what lies there already is taken over unread
        with open_workers(ray_address, store) as workers:
            pool = ThreadPoolExecutor(jobs, thread_name_prefix="tasks-build")
            try:
                run = Build(
                    store=store,
                    settings=settings,
                    command=command,
                    pool=pool,
                    workers=workers,
                    jobs=jobs,
                    progress=progress or (lambda _done, _total, _what: None),
                )
                choose(run)
            except KeyboardInterrupt:
                with runs_interrupted():  # a killed run is no decision: the journal never hears of it
                    workers.interrupt()
                    pool.shutdown(wait=True, cancel_futures=True)
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        run.finish()
        return run.summary(time.monotonic() - started)


def check_arguments(sources: Sequence[str], settings: Settings, jobs: int) -> None:
    """Refuse arguments of a build that do not fit together (CR0206), before anything is fetched."""
    problem = ""
    unknown = sorted(set(settings.symbols) - set(sources))
    if not sources:
        problem = "no source is given"
    elif len(set(sources)) != len(sources):
        problem = "a source is given twice"
    elif unknown:
        problem = f"symbols names {unknown[0]}, which is not among the sources"
    elif not 0.0 <= settings.hidden_share < 1.0:
        problem = f"the hidden share {settings.hidden_share} is not in [0, 1)"
    elif jobs < 1 or (settings.max_tasks is not None and settings.max_tasks < 1):
        problem = "jobs and max_tasks must be at least 1"
    elif not 0.0 < settings.suite_seconds <= MAX_SUITE_SECONDS:
        problem = f"suite_seconds {settings.suite_seconds:g} is not above 0 and at most {MAX_SUITE_SECONDS:g}"
    if problem:
        raise UsageError(
            "CR0206", f"{problem}.", fix="composer-rl tasks build --help, or tasks import --help"
        )


def build_command(sources: Sequence[str], out: Path, settings: Settings) -> str:
    """``composer-rl tasks build`` with these arguments; empty where the command line cannot say them.

    Paths are absolute, so that it works from every folder. What changes no task (``--jobs``,
    ``--backend``, ``--ray``) is left out. Pins of several sources come from recipes only.
    """
    asked, usual = settings, Settings()
    if asked.symbols and len(sources) > 1:
        return ""
    words = [*map(_from_everywhere, sources), "--out", str(Path(out).resolve())]
    words += [] if asked.max_tasks is None else ["--max-tasks", str(asked.max_tasks)]
    if list(asked.granularities) != ["function"]:
        words += [word for size in asked.granularities for word in ("--granularity", size)]
    if list(asked.removals) != ["body"]:
        words += [word for way in asked.removals for word in ("--removal", way)]
    words += [word for pins in asked.symbols.values() for pin in pins for word in ("--symbol", pin)]
    words += ["--seed", str(asked.seed)] if asked.seed else []
    if asked.hidden_share != usual.hidden_share:
        words += ["--hidden-share", str(asked.hidden_share)]
    if asked.suite_seconds != usual.suite_seconds:
        words += ["--suite-seconds", f"{asked.suite_seconds:g}"]
    words += [] if asked.with_truth else ["--visible-only"]
    return shlex.join(["composer-rl", "tasks", "build", *words])


def _from_everywhere(source: str) -> str:
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source
