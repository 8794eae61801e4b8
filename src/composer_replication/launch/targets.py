"""The targets by name, the options that all have, and what each of them can do."""

from __future__ import annotations

import difflib
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_replication.errors import HALTED_EXIT_CODE, INTERRUPTED_EXIT_CODE, ComposerError, UsageError
from composer_replication.launch.clients import refusal
from composer_replication.launch.job import GRACE_SECONDS, Job
from composer_replication.launch.job_status import JobStatus

TARGETS = {
    "local": "local:LocalTarget",
    "slurm": "slurm:SlurmTarget",
    "ray": "ray_jobs:RayTarget",
    "kuberay": "kuberay:KubeRayTarget",
    "kubernetes": "kubernetes:KubernetesTarget",
    "eks": "eks:EksTarget",
    "sagemaker": "sagemaker:SageMakerTarget",
    "skypilot": "skypilot:SkyPilotTarget",
}


class TargetOptions(BaseModel):
    """Options of every target; each adds its own. Given as ``--option KEY=VALUE``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: int = Field(4, ge=1, description="cores of each node")
    memory_gib: int = Field(16, ge=1, description="memory of each node")
    processes: int = Field(0, ge=0, description="of each node; 0: one for each GPU")
    port: int = Field(29500, ge=1024, le=65535, description="of the head, where processes meet")


class Target(ABC):
    """Renders a job, and speaks with one scheduler about it; the rendered files are kept in ``folder``."""

    Options = TargetOptions
    carries_files = True  # the recipe's folder travels with the job; else it is on storage that the job sees

    def __init__(self, options: Any, folder: Path) -> None:
        self.options = options
        self.folder = folder

    @abstractmethod
    def render(self, job: Job) -> dict[str, str]:
        """The files, name to text; pure and offline. ``UsageError`` CR0930 for what cannot run there."""

    @abstractmethod
    def submit(self, job: Job) -> str:
        """Submit what was rendered, whole or not at all; the id by which the target knows it."""

    @abstractmethod
    def status(self, job_id: str) -> JobStatus:
        """How it stands."""

    @abstractmethod
    def logs(self, job_id: str) -> str:
        """What it printed until now."""

    @abstractmethod
    def stop(self, job_id: str) -> None:
        """End it; it saves a checkpoint where it can."""

    def submit_each(self, names: Iterable[str], submit: Callable[[str], str]) -> str:
        """Each replica's job; their ids with commas between. Where one is refused, those before it are stopped.

        Raises:
            UsageError: what was refused, and what still runs because it could not be stopped (CR0932).
        """
        submitted: list[str] = []
        try:
            for name in names:
                submitted.append(submit(name))  # noqa: PERF401 - kept when a later one is refused
        except ComposerError as error:
            left = []
            for one in submitted:
                try:
                    self.stop(one)
                except ComposerError:
                    left.append(one)
            if left:
                raise refusal(error.where, f"{error.message} and {', '.join(left)} still runs") from error
            raise
        return ",".join(submitted)


def open_target(name: str, values: Mapping[str, Any], folder: Path) -> Target:
    """A target with its options; ``UsageError`` CR0930 for no such target, or an option that is unknown, missing or wrong."""
    if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, n=1, cutoff=0.0)[0]
        raise option_error(f"{name} is none of {', '.join(TARGETS)}", "--to", f"did you mean {near}?")
    module, _, class_name = TARGETS[name].partition(":")
    kind = getattr(import_module(f"{__package__}.{module}"), class_name)
    try:
        target: Target = kind(kind.Options.model_validate(dict(values)), folder)
    except ValidationError as error:
        problem, fields = error.errors(include_url=False)[0], kind.Options.model_fields
        key = ".".join(map(str, problem["loc"]))
        sentence = f"{key}: {problem['msg'].removeprefix('Value error, ')}"
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.0)[0]
            sentence = f"{name} has no option {key}; the nearest is {near}"
        elif problem["type"] == "missing":
            sentence = f"{name} needs the option {key}: {fields[key].description}"
        raise option_error(sentence, f"--option {key}", f"options of {name}: {', '.join(fields)}") from error
    return target


def option_error(sentence: str, where: str, fix: str) -> UsageError:
    """CR0930: what was asked for does not fit the target."""
    return UsageError("CR0930", f"{sentence}.", where=where, fix=f"{fix}.")


def require(fits: object, sentence: str, where: str, fix: str) -> None:
    """What a target cannot do is refused before anything is rendered (CR0930)."""
    if not fits:
        raise option_error(sentence, where, fix)


def secrets_are_set(job: Job) -> None:
    """For targets that hand our own environment on."""
    for name in job.secrets:
        require(name in os.environ, f"{name} is not set here", "--secret", f"export {name} first")


def filled(template: str, **values: Any) -> str:
    """A file of ``templates/`` with these values; a value that is missing is an error."""
    environment = jinja2.Environment(  # noqa: S701 - no page
        loader=jinja2.PackageLoader(__package__ or ""),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = shlex.quote
    codes = {"halted": HALTED_EXIT_CODE, "interrupted": INTERRUPTED_EXIT_CODE}
    environment.globals |= {**codes, "grace_seconds": GRACE_SECONDS}
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment.get_template(template).render(**values)
