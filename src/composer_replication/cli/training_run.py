"""One training run from recipe to report: what ``train`` and ``quickstart`` share."""

from __future__ import annotations

import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli import assembly
from composer_replication.cli.agent_assembly import checks_of, open_actors
from composer_replication.cli.assembly import identity_table, recipe_sha256
from composer_replication.cli.cluster import launched_rank
from composer_replication.cli.flags import refuse_unwritable
from composer_replication.cli.replicas_verb import Replica, identity_of, open_replica
from composer_replication.cli.task_division import RunTasks, divide_tasks
from composer_replication.cli.terminal import note, progress_bar
from composer_replication.config import RunConfig, dump_config, load_config
from composer_replication.errors import HALTED_EXIT_CODE, CollapseStopError, UsageError, needs_extra
from composer_replication.records import HeldoutReading, StopReason
from composer_replication.report import write_report
from composer_replication.rollouts.heldout_evaluation import derive_seed
from composer_replication.rollouts.pass_rates import TaskResult, summarise
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.rollouts.single_turn import is_finished
from composer_replication.rollouts.task_sampler import TaskSampler
from composer_replication.run_folder import RunFolder, read_json, read_jsonl, write_atomic, write_json
from composer_replication.sandbox.process_folder import sweep
from composer_replication.tasks.store import TaskStore

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster
    from composer_replication.traces.pair_files import PairRow

NUM_ENDS = 5  # steps averaged at either end of the run


@dataclass(slots=True)
class _Parts:
    """Everything that a run holds open."""

    config: RunConfig
    folder: RunFolder
    store: TaskStore
    tasks: RunTasks
    sampler: TaskSampler
    evaluator: PatientEvaluation[HeldoutReading] | None
    trainer: Any
    quiet: bool


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What was checked before any task was built: the recipe's parts, TRL's arguments and the method."""

    recipe_folder: Path
    guard: Any
    pairs: Mapping[str, PairRow]
    arguments: Any
    method: Any


def run_recipe(
    recipe: Path,
    overrides: dict[str, Any],
    out: Path,
    *,
    resume: bool,
    quiet: bool,
    again: str = "",
    replica: int | None = None,
) -> tuple[dict[str, object], int]:
    """Train by a recipe into a run folder; returns the summary and the exit code.

    ``again`` is the command that would resume this run, for the message; ``replica`` says which of several replicas this is. Where several processes were launched, each calls
    this with the same arguments: the first locks and writes the folder, all build, measure and train.

    Raises:
        UsageError: recipe wrong, folder not to be written (CR0209), occupied by something else or
            without ``resume`` (CR0207), resumed with another recipe (CR0208), or locked by another
            run (CR0203).
        MissingError: torch and its like are not installed (CR0101).
        InputError: a checkpoint in the folder is of another run (CR0884).
        ComposerError: whatever the parts raise; the folder stays resumable.
    """
    config = load_config(recipe, overrides)
    folder, is_first = RunFolder(out), launched_rank() == 0
    quiet = quiet or not is_first
    progress: Callable[[str], None] = (lambda _: None) if quiet else note
    if is_first:
        _refuse_occupied(folder, resume=resume, again=again)
        refuse_unwritable(out)
    with ExitStack() as stack:
        prepared = None
        if not folder.summary.is_file():
            prepared = _prepare(config, recipe.resolve().parent, folder, stack, quiet=quiet)
        joined = stack.enter_context(open_replica(config, replica))
        if is_first:
            stack.enter_context(folder.locked())
            sweep()  # scratch folders of killed runs, which otherwise the first sandbox removes
            _keep_recipe(config, folder)
        if prepared is None or folder.summary.is_file():
            progress("this run is finished; here is its summary.")
            return _stored_summary(folder)
        from composer_replication.trainer.checkpoints import refuse_foreign_checkpoints

        refuse_foreign_checkpoints(folder.checkpoints, recipe_sha256(config))
        return _run(config, prepared, folder, joined, quiet=quiet, progress=progress)


def _prepare(
    config: RunConfig, recipe_folder: Path, folder: RunFolder, stack: ExitStack, *, quiet: bool
) -> _Prepared:
    """Refuse what can be refused at once, the cheap things first."""
    guard, pairs = assembly.check_recipe(config, recipe_folder)
    if not quiet:
        note("loading torch, transformers and trl")
    with needs_extra("train", "training"):
        from composer_replication.trainer.library_notices import calm_libraries

        stack.enter_context(calm_libraries(quiet=quiet))
    return _Prepared(recipe_folder, guard, pairs, *assembly.check_training(config, folder))


def _run(
    config: RunConfig,
    prepared: _Prepared,
    folder: RunFolder,
    replica: Replica | None,
    *,
    quiet: bool,
    progress: Callable[[str], None],
) -> tuple[dict[str, object], int]:
    from composer_replication.trainer.processes import wait_for_all

    started = time.monotonic()
    wait_for_all()  # until the first process holds the folder
    progress("tasks: building and proving them in the sandbox")
    with progress_bar(quiet=quiet) as report:
        store = assembly.open_tasks(config, prepared.recipe_folder, report)
    tasks = divide_tasks(config, store, prepared.recipe_folder, progress)
    if replica is not None:
        tasks = replica.share_of(tasks, config.seed)
    if launched_rank() == 0:
        _keep_split(tasks, folder)
        assembly.write_environment(folder, config, store, tasks)
    progress(f"tasks: {len(tasks.train)} to train on, {len(tasks.heldout)} held out")
    with ExitStack() as stack:
        cluster = stack.enter_context(open_actors(config, store))
        if cluster is not None:
            progress(f"ray: {cluster.options.num_actors} actors attempt and grade tasks")
        parts = _open_parts(
            config,
            prepared,
            folder,
            store,
            tasks,
            replica=replica,
            cluster=cluster,
            quiet=quiet,
            progress=progress,
        )
        stack.callback(parts.sampler.grader.close)
        before = _measure_once(parts, "before", progress)
        halted = _train(parts, progress)
        after = _measure_once(parts, "after", progress)
    summary = _summary(parts, before, after, halted=halted, seconds=time.monotonic() - started)
    saves = config.trainer.save_model and not halted
    summary["model"] = assembly.keep_model(parts.trainer, folder, summary, progress) if saves else None
    if launched_rank() == 0:
        write_json(folder.summary, summary)
        write_report(folder.root)
    return summary, HALTED_EXIT_CODE if halted else 0


def _keep_split(tasks: RunTasks, folder: RunFolder) -> None:
    """Into the run folder; a resumed run must have the same one."""
    if tasks.split is None:
        return
    path = folder.root / "split.json"
    if path.is_file():
        from composer_replication.trainer.guard import refuse_foreign_split

        found = str(read_json(path).get("fingerprint"))
        refuse_foreign_split(found, tasks.split.fingerprint, where=str(path))
    write_json(path, tasks.split.state_dict())


def _open_parts(
    config: RunConfig,
    prepared: _Prepared,
    folder: RunFolder,
    store: TaskStore,
    tasks: RunTasks,
    *,
    replica: Replica | None = None,
    cluster: RolloutCluster | None,
    quiet: bool,
    progress: Callable[[str], None],
) -> _Parts:
    rows = assembly.training_rows(config, store, tasks.train)
    grader = assembly.open_grader(config, store, folder.root, cluster=cluster)
    if launched_rank() == 0:
        assembly.record_sandbox(config, folder, grader)
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from composer_replication.trainer.model_modes import parameter_sha256
    from composer_replication.trainer.model_trial import loading_note
    from composer_replication.trainer.preset_settings import check_num_prompts, overlong_punishment
    from composer_replication.trainer.run_setup import (
        limit_cpu_threads,
        lora_config,
        show_own_progress,
        training_dataset,
    )
    from composer_replication.trainer.setting_errors import refusals

    limit_cpu_threads(config)
    arguments, method = prepared.arguments, prepared.method
    arguments.seed += replica.number if replica else 0  # of sampling alone
    check_num_prompts(config, arguments, len(rows))
    progress(loading_note(config.model))
    model, tokenizer = _load_model(config, arguments, rows)
    model_sha = parameter_sha256(model) if replica is not None else ""
    curriculum = assembly.open_curriculum(config, store, rows, model)
    reward, rollouts, hint_source, sampler = assembly.open_attempts(
        config, grader, model, tokenizer, folder, tasks=tasks, curriculum=curriculum, cluster=cluster
    )
    evaluator = assembly.open_evaluator(config, sampler, tasks)
    with refusals("[trl], [model.lora]"):
        trainer = ComposerReplicationTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[reward, *overlong_punishment(method, arguments)],
            rollout_func=rollouts,
            args=arguments,
            train_dataset=training_dataset(rows),
            peft_config=lora_config(config.model.lora),
            heldout_guard=prepared.guard,
            heldout_eval_fn=assembly.journalled(config, folder, tasks, evaluator),
            alpha_sdpo=config.trainer.alpha_sdpo,
            hints=config.hints,
            hint_source=hint_source,
            beta_replay=config.trainer.beta_replay,
            replay=config.replay,
            replay_pairs=assembly.open_pairs(prepared.pairs, tokenizer, model),
            prefix_sharing=config.trainer.prefix_sharing,
            policy_options=method.options,
            prompt_source=curriculum,
            checks=checks_of(config),
            is_finished=None if _is_chat(config) else is_finished,
            run_folder=folder,
            stateful={"heldout_evaluator": evaluator} if evaluator else {},
            split_fingerprint=tasks.split.fingerprint if tasks.split else "",
            run_identity=recipe_sha256(config),
        )
    if replica is not None:
        replica.attach(trainer, folder, identity_of(config, store.fingerprint, tasks, model_sha))
    trainer.check_channel_model()
    show_own_progress(trainer, quiet=quiet, rollouts=rollouts)
    reason = trainer.choose_kl_path()
    if reason:
        progress(f"guard: KL path off: {reason}")
    sampler.follow(trainer)
    return _Parts(config, folder, store, tasks, sampler, evaluator, trainer, quiet)


def _is_chat(config: RunConfig) -> bool:
    return config.rollouts.prompt_style == "chat" or config.agent is not None


def _load_model(config: RunConfig, arguments: Any, rows: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
    """Model and tokenizer; refuses prompts that leave no room for an answer (CR0705)."""
    from composer_replication.trainer.model_loading import load_model
    from composer_replication.trainer.run_setup import refuse_long_prompts

    model, tokenizer = load_model(
        config.model,
        seed=config.seed,
        needs_chat_template=_is_chat(config),
        needs_reference=arguments.beta != 0.0,
    )
    if config.agent is None:
        limit = arguments.vllm_max_model_length if arguments.use_vllm else None
        num_new = arguments.max_completion_length
        refuse_long_prompts(rows, model, tokenizer, max_new_tokens=num_new, engine_limit=limit)
    return model, tokenizer


def _train(parts: _Parts, progress: Callable[[str], None]) -> bool:
    """Train or resume; True when the guard halted the run."""
    from composer_replication.trainer.checkpoints import newest_whole_checkpoint
    from composer_replication.trainer.processes import once

    checkpoint = once(lambda: newest_whole_checkpoint(parts.folder.checkpoints))
    progress(f"training: resuming at {checkpoint.name}" if checkpoint else "training")
    try:
        parts.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except CollapseStopError as error:
        progress(str(error))
        return True
    guard = parts.trainer.heldout_guard
    has_halted = parts.trainer.halted_at is not None  # also by missed evaluations, where no guard fires
    return has_halted or bool(guard is not None and guard.should_halt())


def _measure_once(parts: _Parts, when: str, progress: Callable[[str], None]) -> dict[str, Any] | None:
    """Fresh-sample pass rates; kept on disk, so that a resumed run measures once. The first process's count."""
    from composer_replication.trainer.model_modes import weights_are_sharded
    from composer_replication.trainer.processes import once

    section = parts.config.heldout
    if section is None or section.before_and_after_samples == 0:
        return None
    path = parts.folder.root / f"{when}.json"
    known = once(lambda: read_json(path) if path.is_file() else None)
    if known is not None:
        return known
    progress(f"measuring pass rates {when} training")
    is_shared = weights_are_sharded(parts.trainer.model)
    rates = once(lambda: _measured(parts, when), every_process_joins=is_shared)
    if launched_rank() == 0:
        write_json(path, rates)
    return rates


def _measured(parts: _Parts, when: str) -> dict[str, Any]:
    section, rates = parts.config.heldout, {}
    assert section is not None
    for n, (side, tasks) in enumerate([("train", parts.tasks.train), ("heldout", parts.tasks.heldout)]):
        seed = derive_seed(parts.config.seed, when, n)
        of_trained = section.before_and_after_trained_samples if side == "train" else None
        num_samples = of_trained or section.before_and_after_samples
        with (
            progress_bar(quiet=parts.quiet) as report,
            parts.sampler.reporting(report, f"{when}, {side} tasks"),
        ):
            results, dropped = parts.sampler.sample(
                tasks, num_samples=num_samples, seed=seed, name=f"{when}-{side}"
            )
        rates[side] = rates_of(results, dropped=dropped)
    return rates


def rates_of(results: Sequence[TaskResult], *, dropped: int) -> dict[str, Any]:
    """Pass rates as a run keeps them: pooled with intervals, and under ``by_task`` the counts of each task."""
    rates = asdict(summarise(results, infrastructure_failures=dropped))
    rates["by_task"] = {
        r.task_id: {"visible": sum(r.visible), "hidden": sum(r.hidden), "samples": len(r.visible)}
        for r in results
    }
    return rates


def _summary(
    parts: _Parts,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    *,
    halted: bool,
    seconds: float,
) -> dict[str, Any]:
    from composer_replication.trainer.model_modes import parameter_sha256

    metrics = read_jsonl(parts.folder.metrics)
    rewards = [row["reward"] for row in metrics if row.get("reward") is not None]
    verdicts = read_jsonl(parts.folder.verdicts)
    scores = [row["heldout/score"] for row in metrics if row.get("heldout/score") is not None]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "run": str(parts.folder.root),
        "global_step": int(parts.trainer.state.global_step),
        "steps": int(parts.trainer.state.global_step),
        "reward_first": _mean(rewards[:NUM_ENDS]),
        "reward_last": _mean(rewards[-NUM_ENDS:]),
        "heldout_first": scores[0] if scores else None,
        "heldout_last": scores[-1] if scores else None,
        "verdict": _verdict(parts, verdicts, halted=halted),
        "reason": verdicts[-1]["reason"] if halted and verdicts else "",
        "forgeries": int(sum(row.get("rollouts/forgeries") or 0 for row in metrics)),
        "hints": _hint_counts(metrics),
        "missed_evaluations": parts.evaluator.num_missed if parts.evaluator else 0,
        "stop_reason": str(StopReason.GUARD if halted else StopReason.FINISHED),
        "parameter_sha256": parameter_sha256(parts.trainer.model),
        "before": before,
        "after": after,
        "seconds": round(seconds, 1),
        "peak_memory_bytes": peak,
        "report": str(parts.folder.report),
    }


def _hint_counts(metrics: Sequence[dict[str, Any]]) -> dict[str, int] | None:
    """What the source of hints counted, added up over the steps; None where no hint was asked for."""
    total: Counter[str] = Counter()
    for row in metrics:
        for name, number in row.items():
            if name.startswith("hint_source/"):
                total[name.removeprefix("hint_source/")] += int(number or 0)
    return dict(sorted(total.items())) or None


def _verdict(parts: _Parts, verdicts: list[dict[str, Any]], *, halted: bool) -> str:
    """``clean``, ``halted``, ``none`` (no guard) or ``INSUFFICIENT_DATA`` (too little was seen for a verdict)."""
    if parts.config.guard is None:
        return "none"
    if halted:
        return "halted"
    if len(verdicts) < parts.config.guard.min_steps:
        return "INSUFFICIENT_DATA"
    status = getattr(parts.trainer.heldout_guard, "last_status", None)
    return str(getattr(status, "verdict", "clean"))


def _refuse_occupied(folder: RunFolder, *, resume: bool, again: str) -> None:
    """A folder with anything in it is only gone on with where a run is in it, and only when asked."""
    if not folder.is_occupied or (resume and folder.recipe.is_file()):
        return
    holds_run = folder.recipe.is_file()
    raise UsageError(
        "CR0207",
        "the run folder is not empty." if holds_run else "the folder is not empty, and no run is in it.",
        where=str(folder.root),
        fix=f"{again}, or choose another --out." if holds_run and again else "choose another --out.",
    )


def _keep_recipe(config: RunConfig, folder: RunFolder) -> None:
    """Write the recipe; one that trains differently from what was begun is refused. Where attempts run changes none of them."""
    resolved = dump_config(config)
    begun = (folder.metrics, folder.root / "before.json", *folder.checkpoints.glob("checkpoint-*"))
    if not folder.recipe.is_file() or not any(path.exists() for path in begun):
        write_atomic(folder.recipe, resolved)
        (folder.root / "split.json").unlink(missing_ok=True)  # of a recipe by which nothing was trained
        return
    try:
        begun_with = load_config(folder.recipe)
    except UsageError as error:
        if error.code != "CR0204":
            raise
        raise UsageError(
            "CR0208",
            f"this folder was begun by another version: {error.message}",
            where=str(folder.recipe),
            fix="resume with the version that environment.json names, or choose another --out.",
        ) from error
    was, now = (_flat(identity_table(each)) for each in (begun_with, config))
    key = next((key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)), None)
    if key is not None:
        before, after = (repr(table[key]) if key in table else "not set" for table in (was, now))
        raise UsageError(
            "CR0208",
            f"this folder was begun with another recipe: {key} is {after} now and was {before}.",
            where=str(folder.recipe),
            fix="resume with the same recipe and --set values, or choose another --out.",
        )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _stored_summary(folder: RunFolder) -> tuple[dict[str, object], int]:
    summary: dict[str, object] = read_json(folder.summary)
    summary.pop("schema_version")
    if not folder.report.is_file():
        write_report(folder.root)
    return summary, HALTED_EXIT_CODE if summary.get("verdict") == "halted" else 0


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
