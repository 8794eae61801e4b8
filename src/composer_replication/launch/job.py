"""One job: a recipe with its files, its command, and what it runs on. Pure: nothing is asked of a target here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from composer_replication.errors import UsageError

PROGRAM = "composer_replication.cli.main"
GRACE_SECONDS = 120
"""From the order to end to the kill: the step under way must be finished and saved in it."""
MAX_FILES_BYTES = 900_000
"""Of a recipe's folder: what one ConfigMap holds, with room for its names."""
_HIDDEN = re.compile(r"/(\.|__pycache__/)")
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

    def setting_words(self) -> list[str]:
        return [part for text in self.settings for part in ("--set", text)]

    def train_words(self, folder: str, run: str, replica: str | None = None) -> list[str]:
        """Arguments of ``composer-rl`` for one process: always ``--resume``, so that a second start goes on.

        ``folder`` and ``run`` are where the recipe's files and the run lie at the target; each replica has a
        folder of its own in the run, and ``replica`` is its number or what stands for it there.
        """
        recipe = f"{folder}/{self.recipe.name}"
        words = ["train", recipe, *self.setting_words(), "--quiet", "--resume", "--out"]
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
            return [python, "-m", PROGRAM, *words]
        sharding = ["--accelerate", f"{folder}/{self.accelerate}"] if self.accelerate else []
        shape = f"--nodes {nodes} --processes {processes} --grace-seconds {GRACE_SECONDS - 10}".split()
        starter = [python, "-m", "composer_replication.trainer.node_processes"]
        return [*starter, *shape, *place, "--port", port, *sharding, "--", *words]


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
    named = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    named = {name: path for name, path in named.items() if not _HIDDEN.search(f"/{name.as_posix()}")}
    if sum(path.stat().st_size for path in named.values()) > MAX_FILES_BYTES:
        problem = f"the recipe's folder holds more than {MAX_FILES_BYTES} bytes, which no job can carry."
        fix = "put the recipe into a folder of its own; large data belongs into tasks.store on the target's storage."
        raise UsageError("CR0930", problem, where=str(folder), fix=fix)
    return {name.as_posix(): path.read_bytes() for name, path in named.items()}


def checked(job: Job, sources: Sequence[str] = ()) -> Job:
    """The same job; ``UsageError`` CR0930 for names and numbers that can be used nowhere.

    ``sources`` are the recipe's tasks, where its folder alone travels and must hold them.
    """
    names = [name for name in (*job.environment, *job.secrets) if not _VARIABLE.fullmatch(name)]
    folder = job.recipe.parent.resolve()
    local = {text: path for text in sources if (path := (folder / text).resolve()).exists()}
    outside = [text for text, path in local.items() if not path.is_relative_to(folder)]
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
