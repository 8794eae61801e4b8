"""``composer-rl eval MODEL_OR_RUN --tasks DIR``: pass rates, visible and hidden."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_replication.cli import assembly
from composer_replication.cli.flags import refuse_unwritable
from composer_replication.cli.task_division import one_hole_tasks, stored_tasks
from composer_replication.cli.terminal import columns, note, progress_bar
from composer_replication.config import ModelSection, RunConfig, load_config, parse_config
from composer_replication.errors import UsageError
from composer_replication.rollouts.episodes.episode_player import EpisodeSampler
from composer_replication.rollouts.episodes.policies import find_server, open_server
from composer_replication.rollouts.heldout_evaluation import TaskResult, TaskSampler, summarise
from composer_replication.run_folder import RunFolder
from composer_replication.safety import upper_confidence_gap
from composer_replication.tasks import difficulty
from composer_replication.tasks.difficulty import Difficulty, MeasuredPolicy
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer.preset_settings import NO_FILTERS, filters_of

_SINGLE_ANSWER = {"max_completion_length": 64, "temperature": 1.0}  # where no recipe says how


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    config = _recipe(args)
    store = TaskStore.open(args.tasks)
    served = None
    if args.endpoint is not None:
        if config.agent is None:
            fix = "name a run with one, or a recipe by --recipe."
            raise UsageError("CR0206", "--endpoint samples episodes, and there is no [agent] table.", fix=fix)
        served = find_server(open_server(args.endpoint, key_variable=args.endpoint_key_env))
    tell = (lambda _: None) if args.quiet else note
    tasks = stored_tasks(store) if config.agent else one_hole_tasks(store, tell)
    if args.update_difficulty:  # what would be in the way is said now, not after the evaluation
        difficulty.read_difficulty(store.root)
        refuse_unwritable(store.root)
    with ExitStack() as stack:
        stack.enter_context(assembly.training_packages("evaluating a model", quiet=args.quiet))
        model, tokenizer = _open_model(args, config)
        grader = stack.enter_context(closing(assembly.open_grader(config, store)))
        attempts = assembly.Attempts(config, grader, tokenizer, model, served=served)
        sampler: TaskSampler = attempts.episodes(tasks) if config.agent else attempts.answers()
        with sampler.reporting(stack.enter_context(progress_bar(quiet=args.quiet)), "eval"):
            results, dropped = sampler.sample(tasks, num_samples=args.samples, seed=args.seed)
        measured_policy = _measured_policy(args, attempts) if args.update_difficulty else None
    result = _result(results, dropped)
    if isinstance(sampler, EpisodeSampler):
        result |= {"rollouts": "episodes", "stop_reasons": dict(sampler.stop_reasons)}
    if measured_policy is not None:
        path = difficulty.record_difficulty(store.root, args.seed, difficulty_of(measured_policy, results))
        result["difficulty"] = None if path is None else str(path)
    return result, 0


def _result(results: Sequence[TaskResult], num_dropped: int) -> dict[str, object]:
    rates = summarise(results, infrastructure_failures=num_dropped)
    same = ("visible_pass", "hidden_pass", "shown_pass", "paid_pass", "gap", "pass_at_k")
    pairs = [(fmean(r.visible), fmean(r.hidden)) for r in results if r.visible and r.hidden]
    return {
        "tasks": rates["num_tasks"],
        "rollouts": "answers",
        "samples": rates["num_samples"],
        **{name: rates[name] for name in same},
        "gap_upper99": upper_confidence_gap(pairs, 0.99) if pairs else None,  # for evidence.tolerated_gap
        "ci95": {side: rates[f"{side}_ci95"] for side in ("shown", "paid", "visible", "hidden")},
        "infrastructure_failures": num_dropped,
        "by_task": [{"task_id": result.task_id, **_counts(result)} for result in results],
    }


def _counts(result: TaskResult) -> dict[str, Any]:
    visible, hidden = result.visible, result.hidden
    return {"samples": len(visible), "visible": sum(visible), "hidden": sum(hidden) if hidden else None}


def difficulty_of(policy: MeasuredPolicy, results: Sequence[TaskResult]) -> list[Difficulty]:
    """What each task's samples say of it; a task whose samples were all dropped says nothing."""
    return [Difficulty(r.task_id, policy, *_counts(r).values()) for r in results if r.visible]


def _measured_policy(args: argparse.Namespace, attempts: assembly.Attempts) -> MeasuredPolicy:
    """The model by its weights, under a name without this machine's folders; other settings of episodes are another policy."""
    from composer_replication.trainer.model_modes import parameter_sha256

    path, config, sampling = Path(args.model), attempts.config, attempts.sampling
    name = path.resolve().name if path.is_dir() else args.model
    style: str = config.rollouts.prompt_style
    context_lines, num_tokens = config.rollouts.context_lines, int(sampling.max_completion_length)
    if config.agent is not None:
        settings = hashlib.sha256(config.agent.model_dump_json().encode()).hexdigest()[:12]
        style, context_lines, num_tokens = f"episodes {settings}", 0, config.agent.max_new_tokens
    chosen = ((key, value) for key, value in filters_of(sampling).items() if value != NO_FILTERS[key])
    style += "".join(f" {key} {value}" for key, value in chosen)
    temperature, digest = float(sampling.temperature), parameter_sha256(attempts.model)
    return MeasuredPolicy(name, digest, temperature, style, context_lines, num_tokens)


def render(result: dict[str, Any]) -> str:
    sides = [side for side in ("visible", "hidden") if result[f"{side}_pass"] is None]
    return columns(result | {f"{side}_pass": f"not measured: no task has {side} tests" for side in sides})


def _recipe(args: argparse.Namespace) -> RunConfig:
    """How attempts are made: the run's own recipe, that of ``--recipe`` with this model, or one answer by the flags."""
    recipe, problem = RunFolder(Path(args.model)).recipe, ""
    if recipe.is_file() and args.recipe is not None:
        problem = "--recipe is for a model: this run has a recipe of its own."
    elif args.endpoint is not None and args.update_difficulty:
        problem = "--update-difficulty is for weights that are here: a server's are not known."
    if problem:
        raise UsageError("CR0206", problem, fix="composer-rl eval MODEL --tasks DIR --samples 4")
    if recipe.is_file():
        return load_config(recipe)
    if args.recipe is not None:
        config = load_config(args.recipe)
        if config.model.name == args.model:
            return config
        return config.model_copy(update={"model": ModelSection(name=args.model, dtype=config.model.dtype)})
    table = {"model": {"name": args.model}, "tasks": {"store": str(args.tasks)}, "trl": _SINGLE_ANSWER}
    return parse_config(table, where="composer-rl eval")


def _open_model(args: argparse.Namespace, config: RunConfig) -> tuple[Any, Any]:
    """The model of a run's newest whole checkpoint, or the model as it is; with its tokenizer."""
    from composer_replication.trainer.checkpoints import refuse_foreign_checkpoints
    from composer_replication.trainer.model_loading import load_checkpoint, load_model

    folder, has_weights = RunFolder(Path(args.model)), args.endpoint is None
    if folder.recipe.is_file() and has_weights:
        refuse_foreign_checkpoints(folder.checkpoints, assembly.recipe_sha256(config))
        return load_checkpoint(config, folder)
    as_chat = config.agent is not None or config.rollouts.prompt_style == "chat"
    how = {"needs_chat_template": as_chat, "has_weights": has_weights}
    model, tokenizer = load_model(config.model, seed=args.seed, **how)
    return model.eval(), tokenizer
