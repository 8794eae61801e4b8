"""One training run by a checked recipe, from its tasks to its report; ``train_verb`` has loaded the training packages."""

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
from composer_replication.cli.flags import launched_rank
from composer_replication.cli.replicas_verb import Replica
from composer_replication.cli.task_division import RunTasks, divide_tasks
from composer_replication.cli.terminal import note, progress_bar
from composer_replication.config import RunConfig
from composer_replication.errors import HALTED_EXIT_CODE, CollapseStopError
from composer_replication.records import HeldoutReading, StopReason
from composer_replication.report import read_run, write_model_card, write_report
from composer_replication.rollouts import heldout_evaluation as truth
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.rollouts.single_turn import is_finished
from composer_replication.run_folder import RunFolder, read_json, read_jsonl, write_json
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer import checkpoints, model_loading, model_modes, processes, run_setup
from composer_replication.trainer import preset_settings as settings
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.guard import refuse_foreign_split

if TYPE_CHECKING:
    from composer_replication.rollouts.cluster.rollout_cluster import RolloutCluster

NUM_ENDS = 5  # steps averaged at either end of the run


@dataclass(slots=True)
class TrainingRun:
    """One run: what it was told, what was made to check the recipe, then what it holds open.

    Each of several processes of a launch has one with the same arguments; the first one writes the folder.
    """

    config: RunConfig
    recipe_folder: Path
    folder: RunFolder
    quiet: bool
    checked: assembly.Checked
    replica: Replica | None
    store: TaskStore = field(init=False)
    tasks: RunTasks = field(init=False)
    sampler: truth.TaskSampler = field(init=False)
    evaluator: PatientEvaluation[HeldoutReading] | None = field(init=False)
    trainer: Any = field(init=False)

    def tell(self, text: str) -> None:
        if not self.quiet:
            note(text)

    @property
    def is_chat(self) -> bool:
        return self.config.rollouts.prompt_style == "chat" or self.config.agent is not None

    def go(self) -> tuple[dict[str, object], int]:
        """Tasks, parts, measure, train, measure, write; returns the summary and the exit code."""
        config, folder, started = self.config, self.folder, time.monotonic()
        checkpoints.refuse_foreign_checkpoints(folder.checkpoints, assembly.recipe_sha256(config))
        processes.gathered(None)  # until the first process holds the folder
        self.tell("tasks: building and proving them in the sandbox")
        with progress_bar(quiet=self.quiet) as report:
            self.store = assembly.open_tasks(config, self.recipe_folder, report)
        tasks = divide_tasks(config, self.store, self.recipe_folder, self.tell)
        self.tasks = tasks if self.replica is None else self.replica.share_of(tasks, config.seed)
        self.tell(f"tasks: {len(self.tasks.train)} to train on, {len(self.tasks.heldout)} held out")
        with assembly.open_actors(config, self.checked.cluster, self.store) as cluster, ExitStack() as stack:
            if cluster is not None:
                self.tell(f"ray: {cluster.options.num_actors} actors attempt and grade tasks")
            self._open_parts(cluster)
            stack.callback(self.sampler.grader.close)
            before = self._measure_once("before")
            halted = self._train()
            after = self._measure_once("after")
        seconds = round(time.monotonic() - started, 1)
        summary = self._summary(halted=halted, before=before, after=after, seconds=seconds)
        summary["model"] = self._keep_model(summary) if config.trainer.save_model and not halted else None
        if launched_rank() == 0:
            write_json(folder.summary, summary)
            write_report(folder.root)
        return summary, HALTED_EXIT_CODE if halted else 0

    def _open_parts(self, cluster: RolloutCluster | None = None) -> None:
        """Everything that trains: grader, model, curriculum, attempts, evaluation, trainer, in this order."""
        config, folder, store, tasks = self.config, self.folder, self.store, self.tasks
        checked, replica, arguments = self.checked, self.replica, self.checked.arguments
        rows = assembly.training_rows(config, store, tasks.train)
        grader = assembly.open_grader(config, store, folder.root, cluster=cluster)
        if launched_rank() == 0:
            self._keep_split()
            assembly.write_environment(folder, config, tasks, grader, self.checked.pairs)
        run_setup.limit_cpu_threads(config)
        arguments.seed += replica.number if replica else 0  # of sampling alone
        settings.refuse_few_prompts(arguments, arguments.num_generations, len(rows))
        self.tell(f"model: loading {config.model.name}")
        model, tokenizer = self._load_model(rows)
        model_sha = model_modes.parameter_sha256(model) if replica is not None else ""
        curriculum = assembly.open_curriculum(config, store, rows, model)
        recipe, made = assembly.recipe_sha256(config), (checked.rule, checked.served, checked.judge)
        attempts = assembly.Attempts(config, grader, tokenizer, model, cluster, *made)
        reward, rollouts, hint_source, self.sampler = attempts.for_training(folder, tasks, curriculum)
        self.evaluator, evaluate = assembly.open_evaluator(config, folder, self.sampler, tasks)
        with settings.refusals("[trl], [model.lora]"):
            trainer = self.trainer = ComposerReplicationTrainer(
                model=model,
                processing_class=tokenizer,
                reward_funcs=[reward, *settings.overlong_punishment(checked.method, arguments)],
                rollout_func=rollouts,
                args=arguments,
                train_dataset=run_setup.training_dataset(rows),
                peft_config=checked.lora,
                heldout_guard=checked.guard,
                heldout_eval_fn=evaluate,
                alpha_sdpo=config.trainer.alpha_sdpo,
                hints=config.hints,
                hint_source=hint_source,
                beta_replay=config.trainer.beta_replay,
                replay=config.replay,
                replay_pairs=assembly.open_pairs(checked.pairs, tokenizer, model),
                prefix_sharing=config.trainer.prefix_sharing,
                policy_options=checked.method.options,
                prompt_source=curriculum,
                is_finished=None if self.is_chat else is_finished,
                run_folder=folder,
                stateful={"heldout_evaluator": self.evaluator} if self.evaluator else {},
                split_fingerprint=tasks.split_fingerprint,
                run_identity=recipe,
            )
        if replica is not None:
            identity = {"version": __version__, "recipe": recipe, "tasks": store.fingerprint}
            identity |= {"split": tasks.split_fingerprint, "model": model_sha}
            replica.attach(trainer, folder, identity)
        if trainer.channels is not None:
            trainer.channels.check_model()
        run_setup.show_own_progress(trainer, quiet=self.quiet, rollouts=rollouts)
        trainer.guard_hook.choose_kl_path()
        self.sampler.follow(trainer)

    def _keep_split(self) -> None:
        """Into the run folder; a resumed run must have the same one."""
        split, path = self.tasks.split, self.folder.root / "split.json"
        if split is not None:
            kept = str(read_json(path).get("fingerprint")) if path.is_file() else None
            refuse_foreign_split(kept, split.fingerprint, where=str(path))
            write_json(path, split.state_dict())

    def _load_model(self, rows: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        """Model and tokenizer; refuses prompts that leave no room for an answer (CR0705)."""
        config, arguments = self.config, self.checked.arguments
        wanted = {"needs_chat_template": self.is_chat, "needs_reference": arguments.beta != 0.0}
        model, tokenizer = model_loading.load_model(config.model, seed=config.seed, **wanted)
        if config.agent is None:
            limit = arguments.vllm_max_model_length if arguments.use_vllm else None
            num_new = arguments.max_completion_length
            run_setup.refuse_long_prompts(rows, model, tokenizer, max_new_tokens=num_new, engine_limit=limit)
        return model, tokenizer

    def _measure_once(self, when: str) -> dict[str, Any] | None:
        """Fresh-sample pass rates; kept on disk, so that a resumed run measures once. The first process's count."""
        section = self.config.heldout
        if section is None or section.before_and_after_samples == 0:
            return None
        path = self.folder.root / f"{when}.json"
        if (known := processes.once(lambda: read_json(path) if path.is_file() else None)) is not None:
            return known
        self.tell(f"measuring pass rates {when} training")
        num_heldout = section.before_and_after_samples
        num_trained = section.before_and_after_trained_samples or num_heldout
        sides = (("train", self.tasks.train, num_trained), ("heldout", self.tasks.heldout, num_heldout))

        def measured() -> dict[str, Any]:
            rates = {}
            for number, (side, tasks, num) in enumerate(sides):
                seed, name = truth.derive_seed(self.config.seed, when, number), f"{when}-{side}"
                label = f"{when}, {side} tasks"
                with progress_bar(quiet=self.quiet) as report, self.sampler.reporting(report, label):
                    results, dropped = self.sampler.sample(tasks, num_samples=num, seed=seed, name=name)
                rates[side] = rates_of(results, dropped=dropped)
            return rates

        all_join = model_modes.weights_are_sharded(self.trainer.model)
        rates = processes.once(measured, every_process_joins=all_join)
        if launched_rank() == 0:
            write_json(path, rates)
        return rates

    def _train(self) -> bool:
        """Train or resume; True when the guard halted the run."""
        checkpoint = processes.once(lambda: checkpoints.newest_whole_checkpoint(self.folder.checkpoints))
        self.tell(f"training: resuming at {checkpoint.name}" if checkpoint else "training")
        try:
            self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except CollapseStopError as error:
            self.tell(str(error))
            return True
        guard = self.trainer.heldout_guard
        has_halted = self.trainer.halted_at is not None  # also by missed evaluations, where no guard fires
        return has_halted or bool(guard is not None and guard.should_halt())

    def _summary(self, *, halted: bool, **more: Any) -> dict[str, Any]:
        """What the verb prints; ``verdict`` is ``clean``, ``halted``, ``none`` (no guard) or ``INSUFFICIENT_DATA``."""
        metrics, verdicts = read_jsonl(self.folder.metrics), read_jsonl(self.folder.verdicts)
        keys = ("reward", "heldout/score")
        rewards, scores = ([row[key] for row in metrics if row.get(key) is not None] for key in keys)
        verdict = str(getattr(getattr(self.trainer.heldout_guard, "last_status", None), "verdict", "clean"))
        if self.config.guard is None:
            verdict = "none"
        elif halted:
            verdict = "halted"
        elif len(verdicts) < self.config.guard.min_steps:
            verdict = "INSUFFICIENT_DATA"
        step = int(self.trainer.state.global_step)
        return {
            "run": str(self.folder.root),
            "global_step": step,
            "steps": step,
            "reward_first": statistics.fmean(rewards[:NUM_ENDS]) if rewards else None,
            "reward_last": statistics.fmean(rewards[-NUM_ENDS:]) if rewards else None,
            "heldout_first": scores[0] if scores else None,
            "heldout_last": scores[-1] if scores else None,
            "verdict": verdict,
            "reason": verdicts[-1]["reason"] if halted and verdicts else "",
            "forgeries": int(sum(row.get("rollouts/forgeries") or 0 for row in metrics)),
            "missed_evaluations": self.evaluator.num_missed if self.evaluator else 0,
            "stop_reason": str(StopReason.GUARD if halted else StopReason.FINISHED),
            "parameter_sha256": model_modes.parameter_sha256(self.trainer.model),
            **more,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "report": str(self.folder.report),
        }

    def _keep_model(self, summary: Mapping[str, Any]) -> str | None:
        """Write ``model/`` with its card; all processes take part. Its path in the first one, if a process has all weights."""
        trainer, folder, weights, trained = self.trainer, self.folder.model, None, None
        if model_modes.weights_are_sharded(trainer.model):
            weights = model_loading.gathered_weights(trainer)
            if weights is None:
                why = "its weights are spread over processes"
                self.tell(f"model: {why} and {folder} is not written; take the newest checkpoint")
                return None
            trained = model_loading.probe_logps(trainer.model, trainer.processing_class)
        if launched_rank():
            return None
        self.tell(f"model: saving it to {folder}")
        data = replace(read_run(self.folder.root), summary=dict(summary))
        model_loading.save_model(
            trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),
            trainer.processing_class,
            folder,
            describe=lambda begun: write_model_card(data, begun),
            weights=weights,
            trained=trained,
        )
        return str(folder)


def rates_of(results: Sequence[truth.TaskResult], *, dropped: int) -> dict[str, Any]:
    """Pass rates as a run keeps them: pooled with intervals, and under ``by_task`` the counts of each task."""
    counts = {
        r.task_id: {"visible": sum(r.visible), "hidden": sum(r.hidden), "samples": len(r.visible)}
        for r in results
    }
    return truth.summarise(results, infrastructure_failures=dropped) | {"by_task": counts}
