"""Grade answers: each in its own fresh sandbox, with the tests restored from the store."""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits, Outcome, Score, Task
from composer_replication.rollouts.candidate_tree import graded_tree, rule_of, tree_sha256
from composer_replication.rollouts.forgery_checks import (
    GoldenFails,
    Survey,
    changed_files,
    forgery,
    plan_of,
    survey,
)
from composer_replication.sandbox import choose_backend, require_selftest, runs_interrupted, warm_kind
from composer_replication.sandbox.choice import SandboxBackend
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.planning.edits import write_files
from composer_replication.tasks.running.bench import noticing_seconds
from composer_replication.tasks.running.watched_run import run_watched
from composer_replication.tasks.sentinels import Canary, without_assertions
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import sandbox_in_force
from composer_replication.tasks.store_records import RUN_FACTOR
from composer_replication.tasks.test_run import TestReport, Trial
from composer_replication.tasks.twin.twin_run import Twin, judge_twin

logger = logging.getLogger(__name__)

TestsUsed = Literal["visible", "hidden", "canary", "weakened"]
Made = TypeVar("Made")
_Key = tuple[str, TestsUsed, bool, str]
"""A task, its tests, whether a single answer was asked about, and the hash of the answer or tree."""
NUM_INFRASTRUCTURE_TRIES = 2
WALL_FACTOR = 10.0
"""A test run that waits instead of computing is stopped after so many times its processor time."""


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """One answer to one task and the tests to judge it by.

    ``canary`` needs the canary itself; ``weakened`` are the visible tests without their assertions. ``tree`` is a
    candidate's whole tree in the place of ``answer``, for a task of any size; see ``candidate_tree``.
    """

    task: Task
    answer: str
    tests: TestsUsed = "visible"
    canary: Canary | None = None
    tree: Mapping[str, bytes] | None = None

    @property
    def node_ids(self) -> tuple[str, ...]:
        if self.canary is not None:
            return self.canary.node_ids
        return self.task.tests.hidden if self.tests == "hidden" else self.task.tests.visible

    @property
    def paid(self) -> tuple[str, ...]:
        """Those of ``node_ids`` that are paid but not shown."""
        return self.task.tests.paid if self.tests in ("visible", "weakened") else ()


class Grader:
    """Turns answers into scores; safe to use from several threads.

    The same answer to the same task is run once per process: the tests were green
    twice before the task was accepted, so a repeat would tell nothing new. A sandbox
    that fails is tried again, then the grade is None: dropped and counted by the
    caller, never a zero.

    The tests of each grading run in a random order with sentinels among them; see
    ``forgery_checks``. The first grading of a task runs its golden code as well, in
    sandboxes of its own, to learn which sentinels fit it. Where that code does not pass here, no answer is graded
    (``of_golden_code``). An answer that forged outcomes fails all tests, and its score says so (``is_forged``).

    Args:
        store: where trees, tests and environments come from.
        backend: sandbox backend; empty for the best of this machine.
        num_jobs: test runs at the same time, those of ``find_regressions`` among them.
        unseen: folders that no sandbox may show, besides the store's own; the self-test tries them.

    ``places`` are the threads of its test runs; whoever runs tests by ``watched`` takes one, unless it has one already.
    ``missing_guards`` are those that do not hold and that this process has accepted (``sandbox.accept``);
    ``num_infrastructure_failures`` counts the runs that gave no score.

    Raises:
        SandboxFailure: the backend's self-test does not pass, so no reward is given.
    """

    limits = Limits()  # those under which tasks are built
    timeout_seconds = 20.0
    """Processor time of one test run; past it the answer fails. So does one whose tests need ten times what they need with
    golden code, and more than 2 s (``noticing_seconds``): loops without an end are the commonest waste. By the clock a run
    may take ``WALL_FACTOR`` times as long: how busy the machine is decides nothing."""

    def __init__(
        self,
        store: TaskStore,
        *,
        backend: str = "",
        num_jobs: int = 2,
        unseen: Sequence[Path] = (),
    ) -> None:
        self.store = store
        self._unseen = (store.root, *unseen)
        self.backend = backend or None
        self._num_jobs = num_jobs
        self.places = self._new_places()
        self._seen: dict[_Key, Score] = {}
        self._turns: dict[str, Lock] = {}
        self._golden: dict[str, Any] = {}
        self._golden_failed: dict[str, tuple[int, str]] = {}
        self._draw = random.SystemRandom()
        self._lock = Lock()
        self._attempt_backend: SandboxBackend | None = None
        self._choosing = Lock()
        self.num_infrastructure_failures = 0
        self.missing_guards = self.require_guards()

    @property
    def backend_name(self) -> str:
        """The jail of its test runs, for records."""
        return choose_backend(self.backend).name

    def require_guards(self) -> tuple[str, ...]:
        """Prove that the sandbox holds; the guards that do not and are accepted."""
        return require_selftest(choose_backend(self.backend), unseen=self._unseen)

    def attempt_backend(self) -> SandboxBackend:
        """The jails of attempts: the warm kind of its backend where it holds whatever the cold one holds, else the cold one.

        The self-test of the one that is given has passed, over the same folders as for gradings, which stay cold.
        Asked again, the same answer.
        """
        with self._choosing:
            if self._attempt_backend is None:
                cold = choose_backend(self.backend)
                missing, why = require_selftest(cold, unseen=self._unseen), ""
                warm = warm_kind(cold)
                if warm is None or not warm.is_available().ok:
                    warm = cold
                try:
                    if lacking := {*require_selftest(warm, unseen=self._unseen)} - {*missing}:
                        why = f"it lacks {', '.join(sorted(lacking))}"
                except SandboxFailure as error:
                    why = str(error)
                if why:
                    logger.warning("attempts run in %s, not in %s: %s", cold.name, warm.name, why)
                self._attempt_backend = cold if why else warm
            return self._attempt_backend

    def grade_many(
        self,
        requests: Sequence[GradeRequest],
        *,
        on_done: Callable[[int, int], None] | None = None,
        afresh: bool = False,
    ) -> list[Score | None]:
        """Scores in the order of the requests; None where the sandbox failed.

        ``on_done`` is told (graded, to be graded) after each answer that had to be run. An
        interruption kills the test runs that are under way; none of them becomes a score.
        ``afresh`` runs every request, whatever was seen before.
        """
        keys = [_key(request) for request in requests]
        asked = zip(keys, requests, strict=True)
        missing = {key: request for key, request in asked if afresh or key not in self._seen}
        # The first of each kind before the others, which would wait for the run of its golden code.
        first = {key[:2]: key for key in reversed(missing)}
        waiting = sorted(missing, key=lambda key: key != first[key[:2]])
        fresh: dict[_Key, Score | None] = {}
        try:
            runs = (partial(self.grade_once, missing[key]) for key in waiting)
            for key, score in zip(waiting, self.places.map(self.tried, runs), strict=True):
                fresh[key] = score
                if on_done is not None:
                    on_done(len(fresh), len(missing))
        except (KeyboardInterrupt, TimeoutError):
            self.stop_runs()
            self.places = self._new_places()
            raise
        with self._lock:
            self._seen.update({key: score for key, score in fresh.items() if score is not None})
        return [fresh.get(key, self._seen.get(key)) for key in keys]

    def grade(self, task: Task, answer: str, tests: TestsUsed = "visible") -> Score | None:
        """One answer; None where the sandbox failed."""
        return self.grade_many([GradeRequest(task, answer, tests)])[0]

    def grade_tree(self, task: Task, tree: Mapping[str, bytes], tests: TestsUsed = "visible") -> Score | None:
        """A candidate's tree, files by path; None where the sandbox failed.

        Tests, their data and their configuration come from the store (``candidate_tree``). With ``hidden`` the
        recorded behaviour of the deleted functions is judged too.
        """
        return self.grade_many([GradeRequest(task, "", tests, tree=tree)])[0]

    def forget(self, task_ids: Collection[str]) -> None:
        """Run the answers to these tasks again when they come again, whatever was seen."""
        with self._lock:
            self._seen = {key: score for key, score in self._seen.items() if key[0] not in task_ids}

    def close(self) -> None:
        """Wait for what runs; what waits is not begun any more."""
        self.places.shutdown(wait=True, cancel_futures=True)

    def stop_runs(self) -> None:
        """Kill what is under way; ``close`` waits for it instead."""
        with runs_interrupted():
            self.close()

    def _new_places(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_jobs, "grader")

    def tried(self, run: Callable[[], Made]) -> Made | None:
        """What a run gives, tried again where the sandbox fails; None where it fails again."""
        for _ in range(NUM_INFRASTRUCTURE_TRIES):
            with suppress(SandboxFailure):
                return run()
        with self._lock:
            self.num_infrastructure_failures += 1
        return None

    def grade_once(self, request: GradeRequest) -> Score:
        """Run one request in this thread, whatever was seen before."""
        files = self._answered(request)
        score = self._run_tests(request, files) if request.node_ids else Score({})
        if request.tests == "hidden" and not score.error:
            return self._with_twins(request.task, files, score)
        return score

    def _run_tests(self, request: GradeRequest, files: dict[str, bytes]) -> Score:
        known = self._survey(request)
        plan = plan_of(files, request.node_ids, known, self._draw)
        report = self.watched(
            request.task,
            {**files, **plan.files},
            (*request.node_ids, *plan.node_ids),
            self._draw.getrandbits(32) if known.is_shuffled else None,
            timeout_seconds=noticing_seconds(known.cpu_seconds, self.timeout_seconds),
        )
        if forged := forgery(plan, request.node_ids, report, known):
            failed, error = dict.fromkeys(request.node_ids, Outcome.FAILED), f"outcomes were forged: {forged}"
            return Score(failed, error, report.seconds, request.paid, is_forged=True)
        outcomes = {test: report.outcomes[test] for test in request.node_ids}
        return Score(outcomes, report.error, report.seconds, request.paid)

    def _survey(self, request: GradeRequest) -> Survey:
        """What golden code does in this kind of grading; looked up once, also when many ask at a time."""
        task = request.task
        return self.of_golden_code(
            task.task_id,
            f"{request.tests}/{request.canary is not None}",
            lambda: survey(
                {**self._files(request), **self.golden_files(task)},
                request.node_ids,
                partial(self.watched, task),
                has_copies=request.tests != "weakened",
                all_pass=request.canary is None,
            ),
        )

    def of_golden_code(self, task_id: str, kind: str, look: Callable[[], Made]) -> Made:
        """What ``look`` gives, once for each kind; it raises ``GoldenFails`` where the original code does not pass.

        What fails is not kept: the machine may have been busy. It is tried again at the second, fourth, eighth, … asking, so
        that a task that cannot pass here costs little.
        """
        key = f"{task_id}/{kind}"
        with self._lock:
            turn = self._turns.setdefault(key, Lock())
        with turn:
            num_asked, problem = self._golden_failed.get(key, (0, ""))
            if key not in self._golden and not num_asked & (num_asked - 1):
                try:
                    self._golden[key] = look()
                except GoldenFails as failed:
                    problem = str(failed)
            if key in self._golden:
                found: Made = self._golden[key]
                return found
            self._golden_failed[key] = (num_asked + 1, problem)
        proved = " or ".join(self.store.proved_by) or "a sandbox that it does not name"
        error = SandboxFailure(
            "CR0494",
            f"the original code of {task_id} does not pass here, in {sandbox_in_force(self.backend)}: {problem}; "
            f"it was proven in {proved}. Attempts at it are dropped.",
            where=str(self.store.root),
            fix="use the sandbox that proved it, or build the tasks again here; composer-rl tasks validate names all such tasks.",
        )
        if num_asked == 0:
            logger.warning("%s", error)
        raise error

    def golden_files(self, task: Task) -> dict[str, bytes]:
        """The files that the task took code out of, as they were. For trees that are graded, never for a policy."""
        record = self.store.record(task.task_id)
        touched = record.changes.source_files
        return {path: self.store.original(record, path) for path in touched}

    def watched(
        self,
        task: Task,
        files: Mapping[str, bytes],
        node_ids: Sequence[str],
        seed: int | None = None,
        *,
        backwards: bool = False,
        timeout_seconds: float | None = None,
    ) -> TestReport:
        """One watched run of tests over these files in a sandbox of its own; ``seed`` draws their order, ``backwards`` turns it round."""
        with tempfile.TemporaryDirectory(prefix="grade-", dir=process_folder()) as folder:
            tree = Path(folder) / "tree"
            write_files(tree, files)
            trial = Trial(
                {}, node_ids, timeout_seconds or self.timeout_seconds,
                wall_factor=WALL_FACTOR, shuffle_seed=seed, backwards=backwards,
            )  # fmt: skip
            report = run_watched(
                tree, self.store.environment(task), trial, backend=self.backend, limits=self.limits
            )
            return replace(report, flags=report.flags | changed_files(tree, files))

    def _with_twins(self, task: Task, files: dict[str, bytes], score: Score) -> Score:
        """The hidden score with one more outcome for each function whose behaviour was recorded."""
        outcomes, started, environment = dict(score.outcomes), time.monotonic(), self.store.environment(task)
        seconds = self.timeout_seconds  # a twin's calls need at most a quarter of it with the golden code
        judge = partial(judge_twin, backend=self.backend, limits=self.limits, timeout_seconds=seconds)

        def require_golden(twin: Twin) -> None:
            golden = {**self.store.files(task, "hidden"), **self.golden_files(task)}
            if not judge(golden, environment, twin).passed:
                raise GoldenFails("a function does other than was recorded of it")

        for pin, twin in self.store.twins(task).items():
            passed = judge(files, environment, twin).passed
            if not passed:
                self.of_golden_code(task.task_id, f"twin/{pin}", partial(require_golden, twin))
            outcomes[f"twin::{pin}"] = Outcome.PASSED if passed else Outcome.FAILED
        return Score(outcomes, score.error, score.seconds + time.monotonic() - started)

    def _answered(self, request: GradeRequest) -> dict[str, bytes]:
        """The tree in which an answer is judged."""
        task, files = request.task, self._files(request)
        if request.tree is not None:
            return graded_tree(files, request.tree, rule_of(self.store, task))
        answered = fill(self.store.broken_text(task), task.hole, request.answer)
        files[task.hole.path] = answered.encode("utf-8", "replace")
        return files

    def _files(self, request: GradeRequest) -> dict[str, bytes]:
        if request.canary is not None:
            return {**self.store.files(request.task, "visible"), **request.canary.test_files}
        files = self.store.files(request.task, "hidden" if request.tests == "hidden" else "visible")
        if request.tests == "weakened":
            for path in {node_id.partition("::")[0] for node_id in request.node_ids}:
                files[path] = without_assertions(files[path].decode("utf-8", "replace")).encode()
        return files


def _key(request: GradeRequest) -> _Key:
    tree, answer = request.tree, request.answer.encode("utf-8", "replace")
    what = sha256_of(answer) if tree is None else tree_sha256(tree)
    return request.task.task_id, request.tests, tree is None, what


@dataclass(frozen=True, slots=True)
class Regressions:
    """PASS_TO_PASS tests that a candidate broke, of ``num_run`` that were run; they passed before it and with the original code.

    Where the run as a whole failed all of them count as broken: a tree in which a test file cannot be collected any more is
    not looked at test by test.
    """

    broken: tuple[str, ...]
    num_run: int

    @property
    def share(self) -> float:
        """Broken tests, of those that were run; 0 where none was."""
        return len(self.broken) / self.num_run if self.num_run else 0.0


def find_regressions(
    grader: Grader, task: Task, tree: Mapping[str, bytes], *, sample: int = 0, seed: int | None = None
) -> Regressions | None:
    """What else a candidate's tree broke; None where the sandbox failed.

    No sentinels stand among these tests: to forge a pass here would hide a break, and win nothing. The first candidate of a
    task has its tests run once over the original code as well, in the tree that a policy sees: only what passes there can be
    broken. Each run is in a fresh sandbox, and waits for one of the grader's places.

    ``sample`` of the tests are run, 0 runs all; ``seed`` says which ones, together with the task and the tree, and None draws
    anew each time.
    """
    store = grader.store
    seconds = RUN_FACTOR * store.repository(store.record(task.task_id).repository_record).suite_seconds

    def run(files: Mapping[str, bytes], node_ids: Sequence[str]) -> TestReport:
        """In one of the grader's places, and as long as a whole suite of the repository may take."""
        watched = partial(grader.watched, task, files, node_ids, timeout_seconds=seconds)
        return grader.places.submit(watched).result()

    def passing_with_golden_code() -> tuple[str, ...]:
        wanted = task.tests.pass_to_pass
        report = run({**store.files(task, "visible"), **grader.golden_files(task)}, wanted)
        if report.error:
            raise GoldenFails(f"its other tests end with: {report.error}")
        return tuple(test for test in wanted if report.outcomes[test] is Outcome.PASSED)

    def found() -> Regressions:
        node_ids = grader.of_golden_code(task.task_id, "pass-to-pass", passing_with_golden_code)
        if 0 < sample < len(node_ids):
            draw: random.Random = random.SystemRandom()
            if seed is not None:
                # The same attempt of the same run has the same tests run, whoever ended first. The code in the sandbox
                # knows its tree, but not the seed, without which nothing of the draw can be told.
                draw = random.Random(f"break sample/{seed}/{task.task_id}/{tree_sha256(tree)}")  # noqa: S311
            node_ids = tuple(sorted(draw.sample(node_ids, sample)))
        if not node_ids:
            return Regressions((), 0)
        report = run(graded_tree(store.files(task, "visible"), tree, rule_of(store, task)), node_ids)
        broken = tuple(test for test in node_ids if report.outcomes[test] is not Outcome.PASSED)
        return Regressions(broken, len(node_ids))

    return grader.tried(found)
