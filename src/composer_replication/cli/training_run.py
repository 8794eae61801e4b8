"""One training run from recipe to report: what ``train`` and ``quickstart`` share."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication import __version__
from composer_replication.cli import assembly
from composer_replication.cli.assembly import identity_table, open_actors, recipe_sha256
from composer_replication.cli.cluster import launched_rank
from composer_replication.cli.flags import refuse_unwritable
from composer_replication.cli.replicas_verb import Replica, open_replica
from composer_replication.cli.task_division import divide_tasks
from composer_replication.cli.terminal import note, progress_bar
from composer_replication.config import RunConfig, dump_config, load_config
from composer_replication.errors import HALTED_EXIT_CODE, CollapseStopError, UsageError, needs_extra
from composer_replication.records import HeldoutReading, StopReason
from composer_replication.report import read_run, write_model_card, write_report
from composer_replication.rollouts.heldout_evaluation import TaskResult, derive_seed, summarise
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.rollouts.single_turn import is_finished
from composer_replication.run_folder import RunFolder, read_json, read_jsonl, write_atomic, write_json
from composer_replication.sandbox.process_folder import sweep

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster
    from composer_replication.traces.pairs import PairRow

NUM_ENDS = 5  # steps averaged at either end of the run


@dataclass(slots=True)
class _Run:
    """One run: what it was told, then what was checked, then what it holds open."""

    config: RunConfig
    recipe_folder: Path
    folder: RunFolder
    quiet: bool
    guard: Any = None
    pairs: Mapping[str, PairRow] = field(default_factory=dict)
    arguments: Any = None
    method: Any = None
    replica: Replica | None = None
    store: Any = None
    tasks: Any = None
    sampler: Any = None
    evaluator: PatientEvaluation[HeldoutReading] | None = None
    trainer: Any = None

    def tell(self, text: str) -> None:
        """Progress, unless nobody wants any."""
        if not self.quiet:
            note(text)


def run_recipe(
    recipe: Path,
    overrides: dict[str, Any],
    out: Path,
    *,
    resume: bool,
    quiet: bool,
    replica: int | None = None,
) -> tuple[dict[str, object], int]:
    """Train by a recipe into a run folder; returns the summary and the exit code.

    ``replica`` says which of several replicas this is. Where several processes were launched, each calls this with the same arguments: the first locks and writes the folder, all build, measure and train.
    """
    is_first = launched_rank() == 0
    config = load_config(recipe, overrides)
    run = _Run(config, recipe.resolve().parent, RunFolder(out), quiet or not is_first)
    folder = run.folder
    if is_first:
        _refuse_occupied(folder, resume=resume)
        refuse_unwritable(out)
    with ExitStack() as stack:
        was_finished = folder.summary.is_file()
        if not was_finished:
            _prepare(run, stack)
        run.replica = stack.enter_context(open_replica(config, replica))
        if is_first:
            stack.enter_context(folder.locked())
            sweep()  # scratch folders of killed runs, which otherwise the first sandbox removes
            _keep_recipe(config, folder)
        if was_finished or folder.summary.is_file():
            run.tell("this run is finished; here is its summary.")
            return _stored_summary(folder)
        from composer_replication.trainer.checkpoints import refuse_foreign_checkpoints

        refuse_foreign_checkpoints(folder.checkpoints, recipe_sha256(config))
        return _go(run)


def _prepare(run: _Run, stack: ExitStack) -> None:
    """Refuse what can be refused at once, the cheap things first."""
    run.guard, run.pairs = assembly.check_recipe(run.config, run.recipe_folder)
    run.tell("loading torch, transformers and trl")
    with needs_extra("train", "training"):
        from composer_replication.trainer.library_notices import calm_libraries

        stack.enter_context(calm_libraries(quiet=run.quiet))
    run.arguments, run.method = assembly.check_training(run.config, run.folder)


def _go(run: _Run) -> tuple[dict[str, object], int]:
    """Tasks, parts, measure, train, measure, write."""
    from composer_replication.trainer.processes import wait_for_all

    config, started = run.config, time.monotonic()
    wait_for_all()  # until the first process holds the folder
    run.tell("tasks: building and proving them in the sandbox")
    with progress_bar(quiet=run.quiet) as report:
        run.store = assembly.open_tasks(config, run.recipe_folder, report)
    tasks = divide_tasks(config, run.store, run.recipe_folder, run.tell)
    run.tasks = tasks if run.replica is None else run.replica.share_of(tasks, config.seed)
    run.tell(f"tasks: {len(run.tasks.train)} to train on, {len(run.tasks.heldout)} held out")
    with open_actors(config, run.store) as cluster, ExitStack() as stack:
        if cluster is not None:
            run.tell(f"ray: {cluster.options.num_actors} actors attempt and grade tasks")
        _open_parts(run, cluster)
        stack.callback(run.sampler.grader.close)
        before = _measure_once(run, "before")
        halted = _train(run)
        after = _measure_once(run, "after")
    seconds = round(time.monotonic() - started, 1)
    summary = _summary(run, halted=halted, before=before, after=after, seconds=seconds)
    summary["model"] = _keep_model(run, summary) if config.trainer.save_model and not halted else None
    if launched_rank() == 0:
        write_json(run.folder.summary, summary)
        write_report(run.folder.root)
    return summary, HALTED_EXIT_CODE if halted else 0


def _keep_split(run: _Run) -> None:
    """Into the run folder; a resumed run must have the same one."""
    split, path = run.tasks.split, run.folder.root / "split.json"
    if split is not None and path.is_file():
        from composer_replication.trainer.guard import refuse_foreign_split

        refuse_foreign_split(str(read_json(path).get("fingerprint")), split.fingerprint, where=str(path))
    if split is not None:
        write_json(path, split.state_dict())


def _open_parts(run: _Run, cluster: RolloutCluster | None = None) -> None:
    """Everything that trains: grader, model, curriculum, attempts, evaluation, trainer, in this order."""
    config, folder, store, tasks = run.config, run.folder, run.store, run.tasks
    rows = assembly.training_rows(config, store, tasks.train)
    grader = assembly.open_grader(config, store, folder.root, cluster=cluster)
    if launched_rank() == 0:
        _keep_split(run)
        assembly.write_environment(folder, config, tasks, grader, run.pairs)
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from composer_replication.trainer.model_modes import parameter_sha256
    from composer_replication.trainer.model_trial import loading_note
    from composer_replication.trainer.preset_settings import overlong_punishment
    from composer_replication.trainer.run_setup import (
        limit_cpu_threads,
        lora_config,
        show_own_progress,
        training_dataset,
    )
    from composer_replication.trainer.setting_errors import refusals, refuse_few_prompts

    limit_cpu_threads(config)
    arguments, method, replica = run.arguments, run.method, run.replica
    arguments.seed += replica.number if replica else 0  # of sampling alone
    refuse_few_prompts(arguments, arguments.num_generations, len(rows))
    run.tell(loading_note(config.model))
    model, tokenizer = _load_model(config, arguments, rows)
    model_sha = parameter_sha256(model) if replica is not None else ""
    curriculum = assembly.open_curriculum(config, store, rows, model)
    reward, rollouts, hint_source, run.sampler = assembly.open_attempts(
        config, grader, model, tokenizer, folder, tasks=tasks, curriculum=curriculum, cluster=cluster
    )
    run.evaluator, evaluate = assembly.open_evaluator(config, folder, run.sampler, tasks)
    with refusals("[trl], [model.lora]"):
        trainer = run.trainer = ComposerReplicationTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[reward, *overlong_punishment(method, arguments)],
            rollout_func=rollouts,
            args=arguments,
            train_dataset=training_dataset(rows),
            peft_config=lora_config(config.model.lora),
            heldout_guard=run.guard,
            heldout_eval_fn=evaluate,
            alpha_sdpo=config.trainer.alpha_sdpo,
            hints=config.hints,
            hint_source=hint_source,
            beta_replay=config.trainer.beta_replay,
            replay=config.replay,
            replay_pairs=assembly.open_pairs(run.pairs, tokenizer, model),
            prefix_sharing=config.trainer.prefix_sharing,
            policy_options=method.options,
            prompt_source=curriculum,
            checks=assembly.checks_of(config),
            is_finished=None if _is_chat(config) else is_finished,
            run_folder=folder,
            stateful={"heldout_evaluator": run.evaluator} if run.evaluator else {},
            split_fingerprint=tasks.split_fingerprint,
            run_identity=recipe_sha256(config),
        )
    if replica is not None:
        identity = {"version": __version__, "recipe": recipe_sha256(config), "tasks": store.fingerprint}
        identity |= {"split": tasks.split_fingerprint, "model": model_sha}
        replica.attach(trainer, folder, identity)
    if trainer.channels is not None:
        trainer.channels.check_model()
    show_own_progress(trainer, quiet=run.quiet, guard=run.guard, rollouts=rollouts)
    trainer.guard_hook.choose_kl_path()
    run.sampler.follow(trainer)


def _is_chat(config: RunConfig) -> bool:
    return config.rollouts.prompt_style == "chat" or config.agent is not None


def _load_model(config: RunConfig, arguments: Any, rows: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
    """Model and tokenizer; refuses prompts that leave no room for an answer (CR0705)."""
    from composer_replication.trainer.model_loading import load_model
    from composer_replication.trainer.run_setup import refuse_long_prompts

    needs_reference = arguments.beta != 0.0
    model, tokenizer = load_model(
        config.model, seed=config.seed, needs_chat_template=_is_chat(config), needs_reference=needs_reference
    )
    if config.agent is None:
        limit = arguments.vllm_max_model_length if arguments.use_vllm else None
        num_new = arguments.max_completion_length
        refuse_long_prompts(rows, model, tokenizer, max_new_tokens=num_new, engine_limit=limit)
    return model, tokenizer


def _train(run: _Run) -> bool:
    """Train or resume; True when the guard halted the run."""
    from composer_replication.trainer.checkpoints import newest_whole_checkpoint
    from composer_replication.trainer.processes import once

    checkpoint = once(lambda: newest_whole_checkpoint(run.folder.checkpoints))
    run.tell(f"training: resuming at {checkpoint.name}" if checkpoint else "training")
    try:
        run.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except CollapseStopError as error:
        run.tell(str(error))
        return True
    guard = run.trainer.heldout_guard
    has_halted = run.trainer.halted_at is not None  # also by missed evaluations, where no guard fires
    return has_halted or bool(guard is not None and guard.should_halt())


def _measure_once(run: _Run, when: str) -> dict[str, Any] | None:
    """Fresh-sample pass rates; kept on disk, so that a resumed run measures once. The first process's count."""
    from composer_replication.trainer.model_modes import weights_are_sharded
    from composer_replication.trainer.processes import once

    section = run.config.heldout
    if section is None or section.before_and_after_samples == 0:
        return None
    path = run.folder.root / f"{when}.json"
    known = once(lambda: read_json(path) if path.is_file() else None)
    if known is not None:
        return known
    run.tell(f"measuring pass rates {when} training")
    is_shared = weights_are_sharded(run.trainer.model)
    rates = once(lambda: _measured(run, when), every_process_joins=is_shared)
    if launched_rank() == 0:
        write_json(path, rates)
    return rates


def _measured(run: _Run, when: str) -> dict[str, Any]:
    section, rates = run.config.heldout, {}
    assert section is not None
    num_samples = section.before_and_after_samples
    sides = {
        "train": (run.tasks.train, section.before_and_after_trained_samples or num_samples),
        "heldout": (run.tasks.heldout, num_samples),
    }
    for n, (side, (tasks, num)) in enumerate(sides.items()):
        seed, label = derive_seed(run.config.seed, when, n), f"{when}, {side} tasks"
        with progress_bar(quiet=run.quiet) as report, run.sampler.reporting(report, label):
            results, dropped = run.sampler.sample(tasks, num_samples=num, seed=seed, name=f"{when}-{side}")
        rates[side] = rates_of(results, dropped=dropped)
    return rates


def rates_of(results: Sequence[TaskResult], *, dropped: int) -> dict[str, Any]:
    """Pass rates as a run keeps them: pooled with intervals, and under ``by_task`` the counts of each task."""
    counts = {
        r.task_id: {"visible": sum(r.visible), "hidden": sum(r.hidden), "samples": len(r.visible)}
        for r in results
    }
    return summarise(results, infrastructure_failures=dropped) | {"by_task": counts}


def _summary(run: _Run, *, halted: bool, **more: Any) -> dict[str, Any]:
    """What the verb prints; ``verdict`` is ``clean``, ``halted``, ``none`` (no guard) or ``INSUFFICIENT_DATA``."""
    from composer_replication.trainer.model_modes import parameter_sha256

    metrics, verdicts = read_jsonl(run.folder.metrics), read_jsonl(run.folder.verdicts)
    rewards, scores = (
        [row[key] for row in metrics if row.get(key) is not None] for key in ("reward", "heldout/score")
    )
    verdict = str(getattr(getattr(run.trainer.heldout_guard, "last_status", None), "verdict", "clean"))
    if run.config.guard is None:
        verdict = "none"
    elif halted:
        verdict = "halted"
    elif len(verdicts) < run.config.guard.min_steps:
        verdict = "INSUFFICIENT_DATA"
    step = int(run.trainer.state.global_step)
    return {
        "run": str(run.folder.root),
        "global_step": step,
        "steps": step,
        "reward_first": statistics.fmean(rewards[:NUM_ENDS]) if rewards else None,
        "reward_last": statistics.fmean(rewards[-NUM_ENDS:]) if rewards else None,
        "heldout_first": scores[0] if scores else None,
        "heldout_last": scores[-1] if scores else None,
        "verdict": verdict,
        "reason": verdicts[-1]["reason"] if halted and verdicts else "",
        "forgeries": int(sum(row.get("rollouts/forgeries") or 0 for row in metrics)),
        "missed_evaluations": run.evaluator.num_missed if run.evaluator else 0,
        "stop_reason": str(StopReason.GUARD if halted else StopReason.FINISHED),
        "parameter_sha256": parameter_sha256(run.trainer.model),
        **more,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "report": str(run.folder.report),
    }


def _keep_model(run: _Run, summary: Mapping[str, Any]) -> str | None:
    """Write ``model/`` with its card, from the first process; every process has to come here.

    Returns:
        The folder; None in the other processes, and where no process can have all weights.
    """
    from composer_replication.trainer.model_modes import weights_are_sharded
    from composer_replication.trainer.saved_model import gathered_weights, probe_logps, save_model

    trainer, folder, weights, trained = run.trainer, run.folder.model, None, None
    if weights_are_sharded(trainer.model):
        weights = gathered_weights(trainer)
        if weights is None:
            why = "its weights are spread over processes"
            run.tell(f"model: {why} and {folder} is not written; take the newest checkpoint")
            return None
        trained = probe_logps(trainer.model, trainer.processing_class)
    if launched_rank():
        return None
    run.tell(f"model: saving it to {folder}")
    data = replace(read_run(run.folder.root), summary=dict(summary))
    save_model(
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),
        trainer.processing_class,
        folder,
        describe=lambda begun: write_model_card(data, begun),
        weights=weights,
        trained=trained,
    )
    return str(folder)


def _refuse_occupied(folder: RunFolder, *, resume: bool) -> None:
    """A folder with anything in it is only gone on with where a run is in it, and only when asked."""
    if not folder.is_occupied or (resume and folder.recipe.is_file()):
        return
    problem, fix = "no run is in it, and the folder is not empty.", "choose another --out."
    if folder.recipe.is_file():
        problem, fix = "the run folder is not empty.", f"the same command with --resume goes on; or {fix}"
    raise UsageError("CR0231", problem, where=str(folder.root), fix=fix)


def _keep_recipe(config: RunConfig, folder: RunFolder) -> None:
    """Write the recipe; one that trains differently from what was begun is refused. Where attempts run changes none of them."""
    resolved = dump_config(config)
    begun = (folder.metrics, folder.root / "before.json", *folder.checkpoints.glob("checkpoint-*"))
    if not folder.recipe.is_file() or not any(path.exists() for path in begun):
        write_atomic(folder.recipe, resolved)
        (folder.root / "split.json").unlink(missing_ok=True)  # of a recipe by which nothing was trained
        return
    was, now = (_flat(identity_table(each)) for each in (load_config(folder.recipe), config))
    key = next((key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)), None)
    if key is not None:
        before, after = (repr(table[key]) if key in table else "not set" for table in (was, now))
        problem = f"this folder was begun with another recipe: {key} is {after} now and was {before}."
        fix = "resume with the same recipe and --set values, or choose another --out."
        raise UsageError("CR0208", problem, where=str(folder.recipe), fix=fix)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _stored_summary(folder: RunFolder) -> tuple[dict[str, object], int]:
    summary: dict[str, object] = read_json(folder.summary)
    del summary["schema_version"]
    if not folder.report.is_file():
        write_report(folder.root)
    return summary, HALTED_EXIT_CODE if summary.get("verdict") == "halted" else 0
