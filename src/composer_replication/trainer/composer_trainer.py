"""TRL's GRPO trainer with a kill switch, exact resume, one log line a step, prefix sharing and two further loss channels.

Without a guard, a run folder, sharing and channels training is TRL's, bit for bit.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput, rotate_checkpoints
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_replication.config import HintsSection, ReplaySection
from composer_replication.errors import CollapseStopError
from composer_replication.interfaces import Guard, Stateful
from composer_replication.records import PreferencePair
from composer_replication.run_folder import RunFolder
from composer_replication.trainer import checkpoints, preset_settings, processes
from composer_replication.trainer.checks import ChecksThatSpeak
from composer_replication.trainer.collator import refuse_odd_weight
from composer_replication.trainer.generation import Generation, HintGenerator, Part, PromptSource, temporarily
from composer_replication.trainer.guard import GuardHook, HeldoutEval, raise_halt
from composer_replication.trainer.loss_channels import HintChannel, LossChannels, ReplayChannel
from composer_replication.trainer.metrics_log import StepLines, cut_back
from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.packed_rows import SharedPrompts
from composer_replication.trainer.policy import load_weights, sampling_for_step
from composer_replication.trainer.policy_terms import PolicyTerms, learn_outcomes, without_lone_punishments
from composer_replication.trainer.rollout_columns import CheckedRollouts, counting_load, replaying

logger = logging.getLogger(__name__)


class ComposerReplicationTrainer(GRPOTrainer):
    """GRPO under a guard; takes every argument of ``GRPOTrainer``, and further ones by keyword.

    total loss = TRL's loss + alpha_sdpo * L_sdpo + beta_replay * L_replay, where a channel of
    weight 0 is not computed at all (both are 0 unless asked for).

    Args:
        heldout_guard: asked once every ``args.logging_steps`` global steps, on the first micro-step, before its update.
        heldout_eval_fn: the truth for the guard; None from it means not due.
        strict_killswitch: a guard that fires raises ``CollapseStopError``, else ``train`` returns; verdict and checkpoint are saved.
        alpha_sdpo: weight of hint distillation, by the ``[hints]`` table of a recipe (``hints``; None for the defaults).
        hint_source: asked about each generation for the turns that went wrong; ``alpha_sdpo`` above 0 needs it.
        beta_replay: weight of replayed preferences, by the ``[replay]`` table (``replay``; None for the defaults).
        replay_pairs: from which every step draws; ``beta_replay`` above 0 needs some, or ``replay.sibling_pairs``.
        prefix_sharing: forward each distinct prompt once (exact; see ``packed_rows``).
        is_finished: the text so far of one row is complete, so the row stops. Only with prefix sharing.
        policy_options: what the policy-gradient channel does beyond TRL (``preset_settings`` makes it of a recipe).
        prompt_source: gives fresh prompts to dynamic sampling; by default the training data in random order.
            One with ``chosen_rows`` also chooses the prompts of every generation, in the place of the data order.
        checks: whether checks speak.
        run_folder: where ``metrics.jsonl`` and ``verdicts.jsonl`` go (a run that begins anew empties them); None: nowhere.
        stateful: extra states saved in and restored from each checkpoint, by name.
        split_fingerprint: of the held-out split; readings and checkpoints of another are refused.
        run_identity: a digest of what makes this run; checkpoints of another are refused.

    Raises:
        TrainerSettingError: a guard without ``heldout_eval_fn`` (CR0710; a ``ValueError`` too), a channel's weight that is no
            number of at least 0 (CR0722) or that has nothing to learn from (CR0755), a term in scaled rewards (CR0760).
        InputError: a pair cannot be learned from (CR0722, CR0751).
    """

    # TRL and transformers type these more loosely than they are while a run trains; nothing is set here.
    args: Any
    model: Any
    beta: Any
    num_generations: Any
    rollout_func: Any
    train_dataset: Any
    callback_handler: Any
    _metrics: Any
    _buffered_inputs: Any

    channels: LossChannels | None = None
    checks: ChecksThatSpeak | None = None
    generation: Generation = Generation()
    """Of the rows that are sampled or scored right now."""
    has_sharded_weights: bool = False
    has_trackers: bool = False
    _in_evaluation: bool = False
    _halt_is_saved: bool = False

    def __init__(
        self,
        *args: Any,
        heldout_guard: Guard | None = None,
        heldout_eval_fn: HeldoutEval | None = None,
        strict_killswitch: bool = True,
        alpha_sdpo: float = 0.0,
        hints: HintsSection | None = None,
        hint_source: HintGenerator | None = None,
        beta_replay: float = 0.0,
        replay: ReplaySection | None = None,
        replay_pairs: Sequence[PreferencePair] | None = None,
        prefix_sharing: bool = False,
        is_finished: Callable[[str], bool] | None = None,
        policy_options: preset_settings.PolicyOptions = preset_settings.PolicyOptions(),  # noqa: B008 - frozen
        prompt_source: PromptSource | None = None,
        checks: bool = True,
        run_folder: RunFolder | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        split_fingerprint: str = "",
        run_identity: str = "",
        **kwargs: Any,
    ) -> None:
        self.heldout_guard, self.heldout_eval_fn = heldout_guard, heldout_eval_fn
        self.strict_killswitch, self.split_fingerprint = strict_killswitch, split_fingerprint
        self.alpha_sdpo, self.hints, self.hint_source = alpha_sdpo, hints, hint_source
        self.beta_replay, self.replay, self.replay_pairs = beta_replay, replay, replay_pairs
        self.prefix_sharing, self.is_finished = prefix_sharing, is_finished
        self.policy_options, self.prompt_source = policy_options, prompt_source
        self.run_folder, self.stateful, self.run_identity = run_folder, stateful, run_identity
        if heldout_guard is not None and heldout_eval_fn is None:
            words = "heldout_guard needs heldout_eval_fn: without the held-out score there is no truth."
            fix = "pass a function that returns the held-out score."
            raise preset_settings.TrainerSettingError("CR0710", words, where="heldout_eval_fn", fix=fix)
        arguments = kwargs.get("args", args[2] if len(args) > 2 else None)
        preset_settings.check_policy_options(policy_options, arguments)
        if checks:
            self.checks = ChecksThatSpeak(self, self.step_lines)
        for name, weight in {"alpha_sdpo": alpha_sdpo, "beta_replay": beta_replay}.items():
            refuse_odd_weight(weight, f"trainer.{name}", error=preset_settings.TrainerSettingError)
        distils = HintChannel(self, hints or HintsSection(), hint_source) if alpha_sdpo else None
        replays = ReplayChannel(self, replay or ReplaySection(), replay_pairs) if beta_replay else None
        if distils or replays:
            self.channels = LossChannels(self, distils, replays)
        self.generation = Generation()
        super().__init__(*args, **kwargs)
        processes.wait_for_gloo_at_exit()
        self.policy_terms.take_kl_out_of_the_loss()

    # ---- parts: made when first asked for, as an instance without its constructor asks too -----------------

    interrupt = cached_property(lambda _: processes.InterruptOnce())
    step_lines = cached_property(
        lambda self: StepLines(self, self.interrupt, is_halted=lambda: self.halted_at is not None)
    )
    policy_terms = cached_property(PolicyTerms)
    guard_hook = cached_property(lambda self: GuardHook(self, self.step_lines, self.channels))
    shared_prompts = cached_property(SharedPrompts)
    own_state = cached_property(lambda self: checkpoints.OwnState(self, self.guard_hook, self.checks))

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they see a generation; the policy's own terms come before all of them."""
        found: tuple[Part | None, ...] = (self.checks, *(self.channels.all if self.channels else ()))
        return tuple(part for part in found if part is not None)

    @property
    def halted_at(self) -> int | None:
        """``global_step`` of the fold that fired, or None."""
        return self.guard_hook.halted_at

    def _maybe_update_killswitch(self) -> None:
        self.guard_hook.update()

    # ---- loss -----------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """On the cadence the guard is asked; then TRL's loss plus the weighted channels."""
        is_open = not self._in_evaluation and self.guard_hook.opens_gate()
        if is_open:  # before the forward: an evaluation beside its activations would need the memory of both
            with temporarily(self.guard_hook, batch=inputs):
                self._maybe_update_killswitch()
        load = nullcontext() if self._in_evaluation else counting_load(self, model)
        with temporarily(self, generation=Generation.of_batch(inputs)), load:
            loss = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        if self._in_evaluation:
            return loss
        of_trl, others = loss, dict[str, Any]()
        if self.alpha_sdpo != 0.0:
            others["sdpo"] = self._compute_sdpo_loss(model, inputs)
            loss = loss + self.alpha_sdpo * others["sdpo"]
        if self.beta_replay != 0.0:
            others["trace_replay"] = self._compute_trace_replay_loss(model, inputs)
            loss = loss + self.beta_replay * others["trace_replay"]
        if self.checks is not None:
            self.checks.after_loss(inputs, loss, others)
        for name, value in {"grpo": of_trl, **others}.items() if is_open and others else ():
            number = value.item() if isinstance(value, Tensor) else float(value)
            self._metrics.setdefault("train", {}).setdefault(f"loss/{name}", []).append(number)
        return loss

    def _compute_sdpo_loss(self, model: Any, inputs: Any) -> Any:
        if self.channels is None or self.channels.hints is None:
            raise preset_settings.nothing_to_learn("alpha_sdpo")
        return self.channels.hints.extra_loss(model, inputs)

    def _compute_trace_replay_loss(self, model: Any, inputs: Any) -> Any:
        if self.channels is None or self.channels.replay is None:
            raise preset_settings.nothing_to_learn("beta_replay")
        return self.channels.replay.extra_loss(model, inputs)

    # ---- log-probabilities and sampling -----------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> Any:
        """As TRL's; with prefix sharing each distinct prompt is forwarded once, and chained rows come apart."""
        routing_BWLK, starts_BS = self.generation.routing_BWLK, self.generation.starts_BS
        given = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
        has_chains = starts_BS is not None and bool((starts_BS > 0).any())
        if has_chains and compute_aux_loss:
            words = "rows of several conversations are scored without the auxiliary loss of routers."
            fix = "set agent.summary_tokens = 0, or the model's output_router_logits to false."
            raise preset_settings.TrainerSettingError("CR0757", words, where="agent.summary_tokens", fix=fix)
        with replaying(self, model, attention_mask, routing_BWLK) as is_replayed:
            against = {
                "the routing of the rollouts is replayed.": is_replayed,
                "the auxiliary router loss is on.": compute_aux_loss,
                "the rows carry images.": any(value is not None for value in multimodal.values()),
            }
            packs = self.prefix_sharing and self.shared_prompts.may_score(model, against)
            if packs or has_chains:
                answer: Any = self.shared_prompts.logps(*given, starts_BS, packs=packs)
            else:
                answer = super()._get_per_token_logps_and_entropies(*given, compute_aux_loss, **multimodal)
        if self.checks is not None:
            self.checks.take_logps(answer)
        return answer

    def logps_of(self, batch: Mapping[str, Any], generation: Generation, **options: Any) -> Tensor:
        """Log-probabilities (B, T) of a batch's rows under the weights at hand, without gradient."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        num_columns, score = batch["completion_ids"].size(1), self._get_per_token_logps_and_entropies
        with torch.no_grad(), temporarily(self, generation=generation):
            logps: Tensor = score(self.model, ids, mask, num_columns, **options)[0]
        return logps

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """As TRL's, in training with the policy's own terms and what the parts put beside them."""
        if not self.model.training:
            return self._one_generation(inputs).batch
        with self.step_lines.timing("generation"):
            generation = self.policy_terms.apply(self._one_generation, inputs)
        for part in self.parts:
            part.after_generation(generation)
        return generation.batch

    def _one_generation(self, rows: Any) -> Generation:
        """TRL's batch of one generation, and what is known of it."""
        generation = Generation(rows)
        with temporarily(self, generation=generation), sampling_for_step(self.state.global_step + 1):
            generation.take(super()._generate_and_score_completions(rows), self.reward_weights)
        learn_outcomes(self.prompt_source, is_training=self.model.training)
        return generation

    def _generate(self, prompts: Any) -> Any:
        """As TRL's; which ids were sampled is remembered before TRL empties any mask."""
        if self.use_vllm:
            load_weights(self)
        with self.step_lines.timing("sampling"):
            answer: Any = super()._generate(prompts)
        _, self.generation.sampled_ids, self.generation.sampled_masks, *_ = answer
        return answer

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """As TRL's, but a row that nobody scored is not punished for its length; remembered for this generation."""
        with self.step_lines.timing("grading"):
            rewards_NF = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.generation.rewards_NF = without_lone_punishments(rewards_NF, self.reward_func_names)
        return self.generation.rewards_NF

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        """As TRL's; with prefix sharing one prefill a distinct prompt, and rows stop by ``is_finished``."""
        if self.prefix_sharing and self.shared_prompts.may_sample(images, multimodal_fields):
            with self.model_for_generation() as model:
                return self.shared_prompts.completions(model, prompt_ids)
        given = (prompt_ids, images, multimodal_fields, num_generations, has_tool_images)
        return super()._generate_single_turn(*given)  # type: ignore[no-untyped-call]

    @contextmanager
    def model_for_generation(self) -> Iterator[Any]:
        """Inside, the bare model with all its weights, as TRL has it for sampling."""
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            yield model

    # ---- evaluation and logging -----------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; the guard is never folded meanwhile."""
        with temporarily(self, _in_evaluation=True):
            return super().evaluate(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with temporarily(self, _in_evaluation=True):
            return super().prediction_step(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, but a row of the guard's keys alone passes by TRL's merge and clear."""
        if logs and all(name.startswith(("killswitch/", "heldout/")) for name in logs):
            super(GRPOTrainer, self).log(logs, start_time)
            return
        signals, metrics = self.step_lines.signals, self._metrics.get("train", {})
        signals.read(metrics)
        super().log(logs, start_time)
        signals.read(metrics)  # empty now, as a rule

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As transformers'; a norm that is not finite makes the step a bad one."""
        norm: Any = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        if self.checks is not None:
            self.checks.note_grad_norm(norm)
        return norm

    # ---- training -------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train, or go on from a checkpoint, exactly; the other arguments are transformers'.

        ``resume_from_checkpoint`` is one checkpoint's folder, or True for the newest whole one of ``args.output_dir`` (none
        there: from the start; half-written ones are deleted). A checkpoint under a fired guard is not trained on.

        Raises:
            CollapseStopError: the guard fired, after verdict and checkpoint were written: that of ``state.global_step``, as
                the step under way left no trace in weights and optimizer.
            KeyboardInterrupt: after a first Ctrl-C or an order to end, when the step was finished and saved.
            InputError: the checkpoint is damaged, half-written or without its optimizer (CR0706) or another run's (CR0884);
                three steps in a row, or sampling, gave numbers that are not finite (CR0770).
            TrainerSettingError: settings that cannot work (CR0760, CR0884, CR0710).
        """
        self._check_before_training()
        wanted, folder = resume_from_checkpoint, Path(str(self.args.output_dir))
        checkpoint = processes.once(lambda: checkpoints.choose_checkpoint(wanted, folder))
        self._begin_run(checkpoint)
        if self.heldout_guard is not None and self.heldout_guard.should_halt():
            self.guard_hook.halted_at = self.guard_hook.last_round_idx  # one that has fired stays fired
            return self._without_training(checkpoint, "the guard had halted this run before")
        num_done = 0 if checkpoint is None else checkpoints.checkpoint_step(checkpoint)
        is_finished = 0 < self.args.max_steps <= num_done
        if checkpoint is not None and not is_finished:
            processes.together(lambda: checkpoints.check_is_resumable(checkpoint))
        if self.run_folder is not None and processes.process_rank() == 0:
            cut_back(self.run_folder, num_done, self.guard_hook.last_round_idx)
            self.step_lines.folder = self.run_folder
        if is_finished:  # transformers would take one more step amid an epoch
            return self._without_training(checkpoint, f"all {num_done} steps were taken before")
        if self.channels is not None:
            self.channels.begin()
        try:
            with self.interrupt:
                path = None if checkpoint is None else str(checkpoint)
                output = super().train(path, trial, ignore_keys_for_eval)
        except CollapseStopError as halt:
            try:
                self._finish_halted_run(trial)
            except (OSError, RuntimeError) as error:  # a full disk must not hide why the run ends
                halt.add_note(f"its last checkpoint could not be saved: {error}")
                logger.exception("the last checkpoint of the halted run could not be saved.")
            raise
        if self.halted_at is not None and not self._halt_is_saved:
            self._finish_halted_run(trial)
        if self.interrupt.is_requested:
            raise KeyboardInterrupt
        return output

    def create_optimizer(self, model: Any = None) -> Any:
        """As transformers'; what it refuses is a setting of the recipe (CR0211)."""
        with preset_settings.refusals():
            return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        with preset_settings.refusals():
            return super().create_scheduler(num_training_steps, optimizer)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Transformers' files, ours, then the manifest; older checkpoints go only after that."""
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        with self.step_lines.timing("checkpoint"):  # in the line of the next step
            # until the new one is there the checkpoint is half-written
            processes.once(lambda: (checkpoint / checkpoints.MANIFEST_NAME).unlink(missing_ok=True))
            limits = {"save_total_limit": self.args.save_total_limit, "use_mtime": True}
            with temporarily(self.args, save_total_limit=None):  # it would delete too early
                super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]
            processes.together(lambda: self.own_state.write(checkpoint))
            processes.once(lambda: checkpoints.write_manifest(checkpoint))
            best = self.state.best_model_checkpoint
            processes.once(lambda: rotate_checkpoints(str(folder), best_model_checkpoint=best, **limits))
        self._halt_is_saved = self.halted_at is not None

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """As TRL's, which starts from its seed in every process: on a resume the finished epochs' permutations are drawn first."""
        sampler: Any = super()._get_train_sampler(dataset)
        if getattr(sampler, "shuffle", False):
            for _ in range(self.own_state.num_permutations_to_skip):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        self.own_state.num_permutations_to_skip = 0
        return sampler

    # ---- before the first step of a run and after its last ----------------------------------------

    def _check_before_training(self) -> None:
        if self.prefix_sharing:
            preset_settings.refuse_masked_stops(self.args, stops_rows=self.is_finished is not None)
        if self.rollout_func is not None and not isinstance(self.rollout_func, CheckedRollouts):
            self.rollout_func = CheckedRollouts(self.rollout_func)
        self.policy_terms.check_settings()
        if len(set(processes.gathered(self.heldout_guard is None))) > 1:  # they would wait for ever
            words = "some processes have a guard and some have none."
            fix = "construct the trainer alike on every process."
            raise preset_settings.TrainerSettingError("CR0710", words, where="heldout_guard", fix=fix)
        if self.heldout_guard is not None and not self.args.logging_steps > 0:
            words = "logging_steps is the guard's cadence and must be above 0."
            fix = "set trl.logging_steps = 1."
            raise preset_settings.TrainerSettingError("CR0710", words, where="trl.logging_steps", fix=fix)
        if isinstance(self.train_dataset, Sized):
            preset_settings.refuse_few_prompts(self.args, self.num_generations, len(self.train_dataset))

    def _begin_run(self, checkpoint: Path | None) -> None:
        self.guard_hook.begin()
        self._halt_is_saved, self.own_state.num_permutations_to_skip = False, 0
        self.step_lines.begin(has_run_folder=any(processes.gathered(self.run_folder is not None)))
        for part in (self.step_lines, self.checks, self.channels):
            if part is not None and part not in self.callback_handler.callbacks:
                self.add_callback(part)
        self.has_trackers = bool(self.args.report_to)
        if self.checks is not None:
            self.checks.begin()
        if checkpoint is not None:
            processes.together(lambda: self.own_state.read(checkpoint))
        self.guard_hook.choose_kl_path()
        self.has_sharded_weights = weights_are_sharded(self.model)

    def _without_training(self, checkpoint: Path | None, reason: str) -> TrainOutput:
        """Weights and step of the checkpoint are loaded; nothing is trained or written."""
        if checkpoint is not None:
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            if self.has_sharded_weights:  # spread first; each process loads its parts
                loader = self.get_train_dataloader()  # type: ignore[no-untyped-call]
                self._prepare_for_training(self.state.max_steps, loader, str(checkpoint))  # type: ignore[no-untyped-call]
            else:
                self._load_from_checkpoint(str(checkpoint))
        guard = self.heldout_guard
        if guard is not None and guard.should_halt() and self.strict_killswitch:
            raise_halt(guard)
        logger.warning("%s; nothing was trained.", reason)
        return TrainOutput(self.state.global_step, 0.0, {})

    def _finish_halted_run(self, trial: Any) -> None:
        """Line, checkpoint and the callbacks' end of a run that the guard stopped inside a step."""
        if self.step_lines.noted:
            self.step_lines.finish_broken(self.state.global_step + 1)
        self.model.zero_grad()  # what the broken-off step had accumulated
        self._save_checkpoint(self.model, trial)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        if self.is_in_train:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            self.is_in_train = False


for _name, _parameter in inspect.signature(ComposerReplicationTrainer.__init__).parameters.items():
    if _parameter.kind is _parameter.KEYWORD_ONLY and _name != "checks":  # a part, made of the argument
        # An instance that was made without its constructor has the defaults of our own arguments, too.
        setattr(ComposerReplicationTrainer, _name, _parameter.default)
