"""``composer-rl launch``: from a recipe to a scheduler; ``launch status|logs|stop JOB`` afterwards."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from composer_replication.cli.terminal import columns
from composer_replication.config import load_config, parse_override, read_table
from composer_replication.errors import HALTED_EXIT_CODE, UsageError, needs_extra
from composer_replication.launch.job import Job, Resources, checked, recipe_files
from composer_replication.launch.job_folder import read_record, write_files, write_record
from composer_replication.launch.job_status import joined
from composer_replication.launch.targets import open_target, option_error, require

_QUESTIONS = ("status", "logs", "stop")
_FAILED = 4
_EXTRAS = {"ray": "ray", "sagemaker": "aws", "eks": "aws"}

Result = dict[str, Any]


def run(args: argparse.Namespace) -> tuple[Result, int]:
    if args.recipe in _QUESTIONS:
        if args.job is None:
            fix = f"composer-rl launch {args.recipe} JOB"
            raise UsageError("CR0206", f"{args.recipe} needs a job.", where="launch", fix=fix)
        return _answer(args.recipe, args.jobs / args.job)
    if args.to is None or args.job is not None:
        problem = "--to is missing" if args.job is None else f"unknown argument {args.job!r}"
        fix = "composer-rl launch RECIPE.toml --to TARGET"
        raise UsageError("CR0206", f"{problem}.", where="launch", fix=fix)
    with needs_extra(_EXTRAS.get(args.to, args.to), f"launching to {args.to}"):
        return _launch(args)


def _launch(args: argparse.Namespace) -> tuple[Result, int]:
    name = args.name or Path(args.recipe).resolve().parent.name.lower().replace("_", "-")
    folder = args.jobs / name
    table = {} if args.options is None else read_table(args.options).get(args.to, {})
    require(isinstance(table, dict), f"{args.to} is no table", str(args.options), f"write [{args.to}]")
    target = open_target(args.to, {**table, **dict(args.option)}, folder.resolve())
    job = _job(args, name, target)
    files = target.render(job)
    result: Result = {"job": job.name, "target": args.to, "folder": str(folder.resolve()), "files": files}
    if args.dry_run:
        if args.out is not None:
            write_files(args.out, files, job.files)
        return result | {"state": "rendered", "id": None}, 0
    write_files(folder, files, job.files)
    job_id = target.submit(job)
    options = target.options.model_dump(mode="json", exclude_unset=True)
    write_record(folder, name=job.name, target=args.to, options=options, replicas=job.replicas, id=job_id)
    return result | {"state": "submitted", "id": job_id}, 0


def _job(args: argparse.Namespace, name: str, target: Any) -> Job:
    """The recipe as a job: checked whole, before anything is rendered."""
    options, recipe = target.options, Path(args.recipe).resolve()
    files = recipe_files(recipe)
    overrides = dict(parse_override(text) for text in args.overrides)
    if args.replicas > 1 and args.to != "local":  # there they may meet in a folder that is made for them
        overrides["replicas.num_replicas"] = args.replicas
    config = load_config(recipe, overrides)
    wanted = 1 if config.replicas is None else config.replicas.num_replicas
    if wanted > 1 and args.replicas == 1:
        raise option_error(f"the recipe is for {wanted} replicas", "--replicas", f"--replicas {wanted}")
    processes = options.processes or max(1, args.gpus)
    resources = Resources(args.nodes, args.gpus, processes, options.cpus, options.memory_gib)
    more = {"environment": dict(args.env), "secrets": tuple(args.secret), "accelerate": args.accelerate}
    job = Job(name, recipe, files, tuple(args.overrides), resources, args.replicas, **more)
    return checked(job, config.tasks.source if target.carries_files else ())


def _answer(question: str, folder: Path) -> tuple[Result, int]:
    record = read_record(folder)
    name, job_id = str(record["target"]), str(record["id"])
    each = job_id.split(",")  # several replicas may be a job each
    with needs_extra(_EXTRAS.get(name, name), f"asking {name}"):
        target = open_target(name, record["options"], folder.resolve())
        result: Result = {"job": record["name"], "target": name, "id": job_id}
        if question == "logs":
            return result | {"logs": "".join(map(target.logs, each))}, 0
        if question == "stop":
            for one in each:
                target.stop(one)
            return result | {"stopped": True}, 0
        status = joined([target.status(one) for one in each])
    result |= {"state": str(status.state), "exit_code": status.exit_code, "detail": status.detail}
    return result, {"halted": HALTED_EXIT_CODE, "failed": _FAILED}.get(status.state, 0)


def render(result: Result) -> str:
    if "logs" in result:
        return str(result["logs"]).rstrip("\n")
    if "stopped" in result:
        return f"{result['job']} was told to end; it saves a checkpoint in the time that its target gives it."
    if "exit_code" in result:
        return columns(result)
    if result["id"] is None:
        return "\n".join(f"# ---- {name}\n{text}" for name, text in result["files"].items())
    return f"{result['job']} is submitted to {result['target']} as {result['id']}\ncomposer-rl launch status {result['job']}"
