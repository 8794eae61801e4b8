"""Judge a candidate by the twin of the function that it writes anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composer_replication.records import Limits
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.twin.twin_records import Twin, TwinScore, damaged, score_digests
from composer_replication.tasks.twin.twin_run import (
    WALL_FACTOR,
    Job,
    Subject,
    pickler_fingerprint,
    play,
    play_apart,
)


def subject_of(twin: Twin) -> Subject:
    """A twin's function and inputs, as the player takes them; no digest is among them."""
    return Subject(twin.path, twin.symbol, tuple(vector.blob for vector in twin.vectors))


def _check_pickler(twin: Twin) -> None:
    if twin.pickler != pickler_fingerprint():
        raise damaged("the recorded behaviour needs another version of cloudpickle", twin.pin)


def judge_twin(
    tree_files: Mapping[str, bytes],
    environment: Environment,
    twin: Twin,
    *,
    backend: str | None = None,
    limits: Limits | None = None,
    timeout_seconds: float,
) -> TwinScore:
    """Does a candidate do what the golden code did?

    The candidate runs in a fresh sandbox of its own. It gets the inputs; its canonical
    digests come out and are compared here. A call that is missing, hangs (1 s of processor time)
    or takes down its process disagrees.

    Args:
        tree_files: the candidate's tree; tests are not needed in it.
        environment: as when the twin was built.
        twin: of the deleted function.
        backend: sandbox backend; None for the best of this machine.
        limits: of the sandbox.
        timeout_seconds: of processor time, above 0; past it the whole run is a failure of the
            candidate. By the clock it may take ``WALL_FACTOR`` times as long, so that a busy
            machine fails nobody.

    Raises:
        InputError: the twin needs another cloudpickle than this installation has (CR0411).
        SandboxFailure: the sandbox itself broke; never because of what the candidate did.
    """
    _check_pickler(twin)
    reports, problem = play(
        tree_files,
        environment,
        [subject_of(twin)],
        [Job(0)],
        backend=backend,
        limits=limits,
        timeout_seconds=WALL_FACTOR * timeout_seconds,
        job_seconds=timeout_seconds,
    )
    report = reports[0]
    return score_digests(twin, report.digests, problem or report.error)


def judge_twins(
    files: Mapping[str, bytes],
    environment: Environment,
    twins: Sequence[Twin],
    *,
    backend: str | None = None,
    timeout_seconds: float,
) -> list[TwinScore]:
    """Judge a tree of our own making by several twins: one sandbox, a process for each.

    A policy's code gets ``judge_twin``, for it could harm its neighbours here.

    Args:
        files: the tree, for example with the golden code, or without it.
        environment: as when the twins were built.
        twins: of functions of it.
        backend: sandbox backend; None for the best of this machine.
        timeout_seconds: of processor time, for each twin.

    Raises:
        InputError: a twin needs another cloudpickle than this installation has (CR0411).
        SandboxFailure: the sandbox itself broke.
    """
    for twin in twins:
        _check_pickler(twin)
    reports = play_apart(
        files,
        environment,
        [subject_of(twin) for twin in twins],
        [Job(number) for number in range(len(twins))],
        backend=backend,
        job_seconds=timeout_seconds,
    )
    return [
        score_digests(twin, report.digests, report.error) for twin, report in zip(twins, reports, strict=True)
    ]
