"""``composer-rl eval MODEL_OR_RUN --tasks DIR``: pass rates, visible and hidden."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.cluster_parts import add_ray_flag

if TYPE_CHECKING:
    from composer_replication.rollouts.pass_rates import TaskResult
    from composer_replication.rollouts.policy_sampler import PolicySampler
    from composer_replication.tasks.difficulty import Difficulty, MeasuredPolicy


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "eval",
        parents=[common],
        help="pass rates of a model on tasks",
        description="Sample answers on every task and grade them by visible and by hidden tests, each in its own "
        "sandbox. Intervals (95%, Wilson) speak of fresh samples on these tasks, not of other tasks.",
    )
    parser.add_argument(
        "model", metavar="MODEL_OR_RUN", help="a run folder, a model folder or name, package:NAME==VERSION"
    )
    parser.add_argument("--tasks", type=Path, required=True, metavar="DIR", help="a task store")
    parser.add_argument("--samples", type=int, default=4, metavar="K", help="samples a task (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt-style", choices=["completion", "chat"], default="completion")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default 64; a run brings its own")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--update-difficulty",
        action="store_true",
        help="keep each task's pass rate in the store; the same seed replaces, another adds its samples",
    )
    add_ray_flag(parser, "grade the answers", "the model stays here, and the rates are the same")
    parser.set_defaults(run="composer_replication.cli.eval_verb:run")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Evaluate.

    Raises:
        UsageError: a number out of range (CR0206), or ``--update-difficulty`` for a store that
            cannot be written to (CR0209).
        NothingToDoError: the store is empty (CR0604), or none of its tasks is the body of one
            function (CR0457).
        MissingError: torch and its like are not installed (CR0101), or as ``check_cluster`` and ``open_cluster``.
        InputError: the run has no whole checkpoint (CR0706), or as ``load_model``; what an earlier
            evaluation measured cannot be read (CR0456).
    """
    from composer_replication.cli import run_parts
    from composer_replication.cli.cluster_parts import check_cluster, open_actors, placed_at
    from composer_replication.cli.needed_packages import needs_extra
    from composer_replication.cli.output_folder import refuse_unwritable
    from composer_replication.cli.progress_bar import progress_bar
    from composer_replication.cli.task_division import one_hole_tasks, other_sizes_note
    from composer_replication.errors import UsageError
    from composer_replication.rollouts.pass_rates import summarise
    from composer_replication.tasks.difficulty import read_difficulty, record_difficulty
    from composer_replication.tasks.store import TaskStore

    problem = _problem(args)
    if problem:
        raise UsageError("CR0206", problem, fix="composer-rl eval MODEL --tasks DIR --samples 4")
    store = TaskStore.open(args.tasks)
    tasks, num_others = one_hole_tasks(store)
    if num_others and not args.quiet:
        run_parts.note(other_sizes_note(num_others))
    if args.update_difficulty:  # what would be in the way is said now, not after the evaluation
        read_difficulty(store.root)
        refuse_unwritable(store.root)
    if args.ray is not None:
        check_cluster(args.ray, "an evaluation on a Ray cluster")
    with ExitStack() as stack:
        with needs_extra("train", "evaluating a model"):
            from composer_replication.trainer.library_notices import calm_libraries

            stack.enter_context(calm_libraries(quiet=args.quiet))
            import composer_replication.trainer.policy  # noqa: F401  # what is missing shows here
        recipe, model, tokenizer = _open_model(args)
        config = placed_at(recipe, args.ray)
        cluster = stack.enter_context(open_actors(config, store))
        grader = run_parts.open_grader(config, store, cluster=cluster)
        stack.callback(grader.close)
        sampler = run_parts.open_sampler(config, grader, model, tokenizer)
        report = stack.enter_context(progress_bar(quiet=args.quiet))
        with sampler.reporting(report, "eval"):
            results, dropped = sampler.sample(tasks, num_samples=args.samples, seed=args.seed)
        measured_policy = _measured_policy(args, sampler, model) if args.update_difficulty else None
    rates = summarise(results, infrastructure_failures=dropped)
    result: dict[str, object] = {
        "tasks": rates.num_tasks,
        "samples": rates.num_samples,
        "visible_pass": rates.visible_pass,
        "hidden_pass": rates.hidden_pass,
        "gap": rates.gap,
        "gap_upper99": _gap_bound(results),
        "ci95": {"visible": rates.visible_ci95, "hidden": rates.hidden_ci95},
        "pass_at_k": rates.pass_at_k,
        "infrastructure_failures": dropped,
        "by_task": [
            {
                "task_id": r.task_id,
                "samples": len(r.visible),
                "visible": sum(r.visible),
                "hidden": sum(r.hidden) if r.hidden else None,
            }
            for r in results
        ],
    }
    if measured_policy is not None:
        path = record_difficulty(store.root, args.seed, difficulty_of(measured_policy, results))
        result["difficulty"] = None if path is None else str(path)
    return result, 0


def difficulty_of(policy: MeasuredPolicy, results: Sequence[TaskResult]) -> list[Difficulty]:
    """What each task's samples say of it; a task whose samples were all dropped says nothing."""
    from composer_replication.tasks.difficulty import Difficulty

    return [
        Difficulty(r.task_id, policy, len(r.visible), sum(r.visible), sum(r.hidden) if r.hidden else None)
        for r in results
        if r.visible
    ]


def _measured_policy(args: argparse.Namespace, sampler: PolicySampler, model: Any) -> MeasuredPolicy:
    """The model by its weights, under a name without this machine's folders."""
    from composer_replication.tasks.difficulty import MeasuredPolicy
    from composer_replication.trainer.parameter_hash import parameter_sha256

    path = Path(args.model)
    return MeasuredPolicy(
        name=path.resolve().name if path.is_dir() else args.model,
        parameter_sha256=parameter_sha256(model),
        temperature=float(sampler.temperature),
        prompt_style=sampler.prompt_style,
        context_lines=sampler.context_lines,
        max_new_tokens=sampler.max_new_tokens,
    )


def _gap_bound(results: Sequence[TaskResult]) -> float | None:
    """99% upper bound on visible minus hidden, for ``evidence.tolerated_gap``; None without hidden tests."""
    from statistics import fmean

    from composer_replication.safety import upper_confidence_gap

    pairs = [(fmean(r.visible), fmean(r.hidden)) for r in results if r.visible and r.hidden]
    return upper_confidence_gap(pairs, 0.99) if pairs else None


def _problem(args: argparse.Namespace) -> str:
    """What is wrong with the numbers of the command line; empty when nothing is."""
    if args.samples < 1:
        return f"--samples {args.samples} is below 1."
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        return f"--max-new-tokens {args.max_new_tokens} is below 1."
    if not 0 <= args.seed < 2**32:
        return f"--seed {args.seed} is not in [0, 2**32)."
    if not 0 <= args.temperature < float("inf"):
        return f"--temperature {args.temperature} is not a number of at least 0."
    return ""


def render(result: dict[str, Any]) -> str:
    rows = [
        f"{row['task_id']:<72} {row['visible']}/{row['samples']}"
        + ("   no hidden tests" if row["hidden"] is None else f"   hidden {row['hidden']}/{row['samples']}")
        for row in result["by_task"]
    ]
    bound = result["gap_upper99"]
    gap = (
        []
        if bound is None
        else [f"gap      {result['gap']:.3f}  99% upper bound {bound:.3f}, over tasks drawn alike"]
    )
    kept = [f"kept in  {result['difficulty']}"] if result.get("difficulty") else []
    return "\n".join([*rows, "", *(_line(side, result) for side in ("visible", "hidden")), *gap, *kept])


def _line(side: str, result: dict[str, Any]) -> str:
    value, interval = result[f"{side}_pass"], result["ci95"][side]
    if value is None:
        return f"{side:<8} not measured: no task has {side} tests"
    return f"{side:<8} {value:.3f}  [{interval[0]:.3f}, {interval[1]:.3f}]"


def _open_model(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Recipe and model of a run's newest whole checkpoint, or a model with the flags' settings."""
    from composer_replication.config import load_config, parse_config
    from composer_replication.run_folder import RunFolder
    from composer_replication.trainer.model_loading import load_checkpoint, load_model

    folder = RunFolder(Path(args.model))
    if folder.recipe.is_file():
        config = load_config(folder.recipe)
        return config, *load_checkpoint(config, folder)
    table = {
        "model": {"name": args.model},
        "tasks": {"store": str(args.tasks)},
        "rollouts": {"prompt_style": args.prompt_style},
        "trl": {"max_completion_length": args.max_new_tokens or 64, "temperature": args.temperature},
    }
    config = parse_config(table, where="composer-rl eval")
    model, tokenizer = load_model(
        config.model, seed=args.seed, needs_chat_template=args.prompt_style == "chat"
    )
    return config, model.eval(), tokenizer
