"""One job: a recipe with its files, its command, and what it runs on. Pure: nothing is asked of a target here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from composer_replication.errors import UsageError

HALTED_EXIT_CODE = 5
INTERRUPTED_EXIT_CODE = 130
GRACE_SECONDS = 120
"""From the order to end to the kill: the step under way must be finished and saved in it."""
MASTER_PORT = 29500
MAX_FILES_BYTES = 900_000
"""Of a recipe's folder: what one ConfigMap holds, with room for its names."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Variable(str):
    """A word of a command that the target's shell or scheduler fills in, and that is not quoted against it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """What one replica runs on.

    Args:
        nodes: machines.
        gpus: of each node; with none it trains on the processor.
        processes: of each node; one for each GPU.
        cpus: cores of each node.
        memory_gib: of each node.
    """

    nodes: int = 1
    gpus: int = 0
    processes: int = 1
    cpus: int = 4
    memory_gib: int = 16


@dataclass(frozen=True, slots=True)
class Job:
    """What every target renders.

    Args:
        name: of the job; lower-case letters, digits and hyphens.
        recipe: path of the recipe on this machine.
        files: the recipe's folder, relative path to bytes.
        settings: ``KEY=VALUE`` texts of ``--set``.
        resources: of each replica.
        replicas: trainers that agree from time to time; 1 is a plain run.
        environment: variables that the processes get.
        secrets: names of variables whose values no rendered file holds.
        accelerate: a file of accelerate in the recipe's folder, for weights spread over processes; empty for none.
    """

    name: str
    recipe: Path
    files: Mapping[str, bytes]
    settings: tuple[str, ...] = ()
    resources: Resources = Resources()
    replicas: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    accelerate: str = ""

    def train_words(self, folder: str, run: str, replica: str | None = None) -> list[str]:
        """Arguments of ``composer-rl`` for one process: always ``--resume``, so that a second start goes on.

        Args:
            folder: where the recipe's files lie at the target.
            run: the run folder there; each replica has its own below it.
            replica: number of the replica, or what stands for it at the target; None for a plain run.
        """
        settings = [part for text in self.settings for part in ("--set", text)]
        words = ["train", f"{folder}/{self.recipe.name}", *settings, "--quiet", "--resume"]
        if replica is None:
            return [*words, "--out", run]
        kind = Variable if isinstance(replica, Variable) else str
        return [
            *words,
            "--out",
            kind(f"{run}/replica-{replica}"),
            "--replica",
            replica,
            "--of",
            str(self.replicas),
        ]

    def node_command(
        self,
        python: str,
        words: Sequence[str],
        place: Sequence[str],
        *,
        port: str = str(MASTER_PORT),
        folder: str = "",
    ) -> list[str]:
        """The command that each node runs.

        Args:
            python: the interpreter there.
            words: of ``train_words``.
            place: options by which the node learns its rank and the head's address; see ``trainer/node_processes.py``.
            port: of the head, free there.
            folder: as in ``train_words``, for the file of accelerate.
        """
        resources = self.resources
        if resources.nodes * resources.processes == 1:
            return [python, "-m", "composer_replication.cli.main", *words]
        several = ["--nodes", str(resources.nodes), "--processes", str(resources.processes), *place]
        sharding = ["--accelerate", f"{folder}/{self.accelerate}"] if self.accelerate else []
        grace = ["--grace-seconds", str(GRACE_SECONDS - 10)]
        starter = [python, "-m", "composer_replication.trainer.node_processes"]
        return [*starter, *several, "--port", port, *grace, *sharding, "--", *words]


class JobState(StrEnum):
    """How a job stands, in the words of no scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    HALTED = "halted"
    FAILED = "failed"
    STOPPED = "stopped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a target says of a job; ``detail`` in its own words."""

    state: JobState
    exit_code: int | None = None
    detail: str = ""


def ended(exit_code: int, detail: str = "") -> JobStatus:
    """The status of a job that ended by itself."""
    states = {
        0: JobState.SUCCEEDED,
        HALTED_EXIT_CODE: JobState.HALTED,
        INTERRUPTED_EXIT_CODE: JobState.STOPPED,
    }
    return JobStatus(states.get(exit_code, JobState.FAILED), exit_code, detail)


def joined(statuses: Sequence[JobStatus]) -> JobStatus:
    """One status of several replicas: a halt counts most, then what failed, then what still goes on."""
    order = (
        *(JobState.HALTED, JobState.FAILED, JobState.RUNNING, JobState.WAITING),
        *(JobState.UNKNOWN, JobState.STOPPED, JobState.SUCCEEDED),
    )
    if not statuses:
        return JobStatus(JobState.UNKNOWN)
    worst = min(statuses, key=lambda status: order.index(status.state))
    details = "; ".join(dict.fromkeys(status.detail for status in statuses if status.detail))
    return JobStatus(worst.state, worst.exit_code, details)


def shell_line(words: Sequence[str]) -> str:
    """The words for a shell: quoted, but for those that it is to fill in."""
    return " ".join(f'"{word}"' if isinstance(word, Variable) else shlex.quote(word) for word in words)


def recipe_files(recipe: Path) -> dict[str, bytes]:
    """The recipe and what lies beside it, hidden files and compiled code left out.

    Raises:
        UsageError: no such file (CR0201), or the folder holds more than a launch can carry (CR0930).
    """
    if not recipe.is_file():
        fix = "give the path of a run.toml; composer-rl recipe new writes one."
        raise UsageError("CR0201", "the recipe cannot be read: no such file.", where=str(recipe), fix=fix)
    folder = recipe.parent
    files: dict[str, bytes] = {}
    total = 0
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if not path.is_file() or any(
            part.startswith(".") or part == "__pycache__" for part in relative.parts
        ):
            continue
        total += path.stat().st_size
        if total > MAX_FILES_BYTES:
            raise UsageError(
                "CR0930",
                f"the recipe's folder holds more than {MAX_FILES_BYTES} bytes, which no job can carry.",
                where=str(folder),
                fix="put the recipe into a folder of its own; large data belongs into tasks.store on the target's storage.",
            )
        files[relative.as_posix()] = path.read_bytes()
    return files


def checked(job: Job, sources: Sequence[str] = ()) -> Job:
    """The same job, if it can run anywhere at all.

    Args:
        job: any.
        sources: of the recipe's tasks, where they must lie in the recipe's folder because it alone is carried.

    Raises:
        UsageError: a name, a number, the file of accelerate or a source of tasks cannot be used (CR0930).
    """
    names = [name for name in (*job.environment, *job.secrets) if not _VARIABLE.fullmatch(name)]
    outside = [text for text in sources if _is_outside(text, job.recipe.parent)]
    problem = ""
    if not _NAME.fullmatch(job.name):
        problem = (
            f"the name {job.name!r} is not of up to 40 lower-case letters, digits and hyphens, a letter first"
        )
    elif min(job.replicas, job.resources.nodes) < 1 or job.resources.gpus < 0:
        problem = "--replicas and --nodes are at least 1, --gpus at least 0"
    elif names:
        problem = f"{names[0]!r} is no name of a variable"
    elif job.accelerate and job.accelerate not in job.files:
        problem = f"there is no file {job.accelerate} beside the recipe"
    elif outside:
        problem = (
            f"tasks.source {outside[0]!r} lies outside the recipe's folder, which alone travels with the job"
        )
    if problem:
        raise UsageError("CR0930", f"{problem}.", where=str(job.recipe), fix="composer-rl launch --help")
    return job


def _is_outside(source: str, folder: Path) -> bool:
    """Whether it is a path on this machine that the recipe's folder does not hold."""
    path = (folder / source).resolve()
    return path.exists() and not path.is_relative_to(folder.resolve())
