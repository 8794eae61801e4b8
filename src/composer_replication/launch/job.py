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
MAX_FILES_BYTES = 900_000
"""Of a recipe's folder: what one ConfigMap holds, with room for its names."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Variable(str):
    """A word of a command that the target's shell or scheduler fills in, and that is not quoted against it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """Machines of one replica; GPUs, processes (one for each GPU), cores and memory of each of them."""

    nodes: int = 1
    gpus: int = 0
    processes: int = 1
    cpus: int = 4
    memory_gib: int = 16


@dataclass(frozen=True, slots=True)
class Job:
    """What every target renders."""

    name: str
    recipe: Path  # on this machine
    files: Mapping[str, bytes]  # of the recipe's folder, by relative path
    settings: tuple[str, ...] = ()  # texts of --set
    resources: Resources = Resources()  # of each replica
    replicas: int = 1  # trainers that agree from time to time
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()  # names of variables whose values no rendered file holds
    accelerate: str = ""  # a file of accelerate beside the recipe, for weights spread over processes

    def each_replica(self) -> list[tuple[str, str | None]]:
        """A name and a number for each; the job's own name and no number where it is a plain run."""
        if self.replicas == 1:
            return [(self.name, None)]
        return [(f"{self.name}-{i}", str(i)) for i in range(self.replicas)]

    def train_words(self, folder: str, run: str, replica: str | None = None) -> list[str]:
        """Arguments of ``composer-rl`` for one process: always ``--resume``, so that a second start goes on.

        ``folder`` and ``run`` are where the recipe's files and the run lie at the target; each replica has a
        folder of its own in the run, and ``replica`` is its number or what stands for it there.
        """
        settings = [part for text in self.settings for part in ("--set", text)]
        words = ["train", f"{folder}/{self.recipe.name}", *settings, "--quiet", "--resume", "--out"]
        if replica is None:
            return [*words, run]
        own = type(replica)(f"{run}/replica-{replica}")  # a Variable stays one
        return [*words, own, "--replica", replica, "--of", str(self.replicas)]

    def node_command(
        self, python: str, words: Sequence[str], place: Sequence[str], *, port: str, folder: str = ""
    ) -> list[str]:
        """The command that each node runs.

        ``place`` are options of ``trainer/node_processes.py`` by which it learns its rank and the head's address;
        ``port`` is free on the head; the rest as for ``train_words``.
        """
        nodes, processes = self.resources.nodes, self.resources.processes
        if nodes * processes == 1:
            return [python, "-m", "composer_replication.cli.main", *words]
        sharding = ["--accelerate", f"{folder}/{self.accelerate}"] if self.accelerate else []
        shape = f"--nodes {nodes} --processes {processes} --grace-seconds {GRACE_SECONDS - 10}".split()
        starter = [python, "-m", "composer_replication.trainer.node_processes"]
        return [*starter, *shape, *place, "--port", port, *sharding, "--", *words]


class JobState(StrEnum):
    """How a job stands, in the words of no scheduler; what counts most of several replicas first."""

    HALTED = "halted"
    FAILED = "failed"
    RUNNING = "running"
    WAITING = "waiting"
    UNKNOWN = "unknown"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"


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
    if not statuses:
        return JobStatus(JobState.UNKNOWN)
    order = list(JobState)
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
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    named = {path.relative_to(folder): path for path in paths}
    named = {name: path for name, path in named.items() if not any(_is_hidden(part) for part in name.parts)}
    if sum(path.stat().st_size for path in named.values()) > MAX_FILES_BYTES:
        problem = f"the recipe's folder holds more than {MAX_FILES_BYTES} bytes, which no job can carry."
        fix = "put the recipe into a folder of its own; large data belongs into tasks.store on the target's storage."
        raise UsageError("CR0930", problem, where=str(folder), fix=fix)
    return {name.as_posix(): path.read_bytes() for name, path in named.items()}


def _is_hidden(part: str) -> bool:
    return part.startswith(".") or part == "__pycache__"


def checked(job: Job, sources: Sequence[str] = ()) -> Job:
    """The same job; ``UsageError`` CR0930 for names and numbers that can be used nowhere.

    ``sources`` are the recipe's tasks, where its folder alone travels and must hold them.
    """
    names = [name for name in (*job.environment, *job.secrets) if not _VARIABLE.fullmatch(name)]
    outside = [text for text in sources if _is_outside(text, job.recipe.parent)]
    problem = ""
    if not _NAME.fullmatch(job.name):
        problem = f"the name {job.name!r} is not of up to 40 of a-z, 0-9 and hyphens, a letter first"
    elif min(job.replicas, job.resources.nodes) < 1 or job.resources.gpus < 0:
        problem = "--replicas and --nodes are at least 1, --gpus at least 0"
    elif names:
        problem = f"{names[0]!r} is no name of a variable"
    elif job.accelerate and job.accelerate not in job.files:
        problem = f"there is no file {job.accelerate} beside the recipe"
    elif outside:
        problem = f"tasks.source {outside[0]!r} lies outside the recipe's folder, which alone travels"
    if problem:
        raise UsageError("CR0930", f"{problem}.", where=str(job.recipe), fix="composer-rl launch --help")
    return job


def _is_outside(source: str, folder: Path) -> bool:
    """Whether it is a path on this machine that the recipe's folder does not hold."""
    path = (folder / source).resolve()
    return path.exists() and not path.is_relative_to(folder.resolve())
