"""TRL's GRPO trainer with a kill switch, exact resume, one log line a step and prefix sharing.

Everything here is off unless it is asked for: without a guard, a run folder and prefix sharing,
training is TRL's, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import rotate_checkpoints
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_replication.channel_tables import HintsSection, ReplaySection
from composer_replication.errors import CollapseStopError
from composer_replication.interfaces import Guard, HintGenerator, PromptSource, Stateful
from composer_replication.records import HintedTurn, PreferencePair
from composer_replication.run_folder import RunFolder
from composer_replication.trainer.chained_rows import SEGMENT_STARTS, ChainedRows
from composer_replication.trainer.checkpoints import (
    MANIFEST_NAME,
    choose_checkpoint,
    write_manifest,
)
from composer_replication.trainer.checks.judgement import CheckThresholds
from composer_replication.trainer.checks.speaking import ChecksThatSpeak
from composer_replication.trainer.fresh_groups import without_lone_punishments
from composer_replication.trainer.guard import HeldoutEval
from composer_replication.trainer.loss_channels import LossChannels
from composer_replication.trainer.policy_options import PolicyOptions, check_policy_options
from composer_replication.trainer.policy_terms_wiring import PolicyTerms
from composer_replication.trainer.prefix_generation import sampling_for_step
from composer_replication.trainer.prefix_wiring import PrefixWiring
from composer_replication.trainer.processes import once, process_rank, wait_for_all, wait_for_gloo_at_exit
from composer_replication.trainer.router_replay import RouterLoad, RouterReplay
from composer_replication.trainer.run_borders import RunBorders
from composer_replication.trainer.run_callback import InterruptOnce
from composer_replication.trainer.served_rollouts import load_weights
from composer_replication.trainer.setting_errors import TrainerSettingError, refusals

logger = logging.getLogger(__name__)


class ComposerReplicationTrainer(
    GRPOTrainer,
    RunBorders,
    LossChannels,
    PrefixWiring,
    PolicyTerms,
    ChecksThatSpeak,
):
    """GRPO under a guard.

    total loss = TRL's loss + alpha_sdpo * L_sdpo + beta_replay * L_replay, where a channel of
    weight 0 is not computed at all (both are 0 unless asked for).

    Takes every argument of ``GRPOTrainer``, and by keyword:

    Args:
        heldout_guard: asked once every ``args.logging_steps`` global steps, on the first
            micro-step, before that step's update.
        heldout_eval_fn: the truth for the guard; None from it means not due.
        strict_killswitch: a verdict that fires raises ``CollapseStopError``; otherwise training
            stops and ``train`` returns. Either way checkpoint and verdict are on disk first.
        alpha_sdpo: weight of hint distillation; above 0 it needs ``hint_source`` or ``hinted_turns``.
        hints: its settings, the ``[hints]`` table of a recipe; None for the defaults.
        hint_source: asked about each generation for the turns that went wrong.
        hinted_turns: recorded ones, from which every step draws.
        beta_replay: weight of replayed preferences; above 0 it needs ``replay_pairs`` or ``replay.sibling_pairs``.
        replay: its settings, the ``[replay]`` table; None for the defaults.
        replay_pairs: from which every step draws.
        prefix_sharing: forward each distinct prompt once (exact; see ``prefix_wiring``).
        is_finished: the text so far of one row is complete, so the row stops. Only with
            prefix sharing, whose sampling can stop single rows.
        policy_options: what the policy-gradient channel does beyond TRL (``preset_settings`` makes it of a recipe).
        prompt_source: gives fresh prompts to dynamic sampling; by default the training data in shuffled order.
            A ``PromptChooser`` also chooses the prompts of every generation, in the place of the data order.
        checks: the checks that speak, with their thresholds; False is none.
        run_folder: where ``metrics.jsonl`` and ``verdicts.jsonl`` go (a run that begins anew empties them);
            None writes neither.
        stateful: extra states saved in and restored from each checkpoint, by name.
        split_fingerprint: of the held-out split; readings and checkpoints of another are refused.
        run_identity: a digest of what makes this run; checkpoints of another are refused.

    Raises:
        TrainerSettingError: a guard without ``heldout_eval_fn`` (CR0710; a ``ValueError`` too).
            A channel's weight is no number of at least 0 (CR0722), or it has nothing to learn from (CR0755).
            A term in the reward while rewards are scaled (CR0760).
        InputError: a hinted turn or a pair cannot be learned from (CR0722, CR0751).
    """

    alpha_sdpo: float = 0.0
    beta_replay: float = 0.0
    generation_rows: Sequence[Mapping[str, Any]] = ()
    """Rows of the generation under way, for a ``rollout_func`` that needs more of them than their prompts."""
    _interrupt: InterruptOnce | None = None

    def __init__(
        self,
        *args: Any,
        heldout_guard: Guard | None = None,
        heldout_eval_fn: HeldoutEval | None = None,
        strict_killswitch: bool = True,
        alpha_sdpo: float = 0.0,
        hints: HintsSection | None = None,
        hint_source: HintGenerator | None = None,
        hinted_turns: Sequence[HintedTurn] | None = None,
        beta_replay: float = 0.0,
        replay: ReplaySection | None = None,
        replay_pairs: Sequence[PreferencePair] | None = None,
        prefix_sharing: bool = False,
        is_finished: Callable[[str], bool] | None = None,
        policy_options: PolicyOptions = PolicyOptions(),  # noqa: B008 - frozen
        prompt_source: PromptSource | None = None,
        checks: bool | CheckThresholds = True,
        run_folder: RunFolder | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        split_fingerprint: str = "",
        run_identity: str = "",
        **kwargs: Any,
    ) -> None:
        if heldout_guard is not None and heldout_eval_fn is None:
            raise TrainerSettingError(
                "CR0710",
                "heldout_guard needs heldout_eval_fn: without the held-out score it has no truth to compare.",
                where="ComposerReplicationTrainer(heldout_eval_fn=)",
                fix="pass a function that returns the held-out score.",
            )
        check_policy_options(policy_options, kwargs.get("args", args[2] if len(args) > 2 else None))
        self.policy_options = policy_options
        self.prompt_source = prompt_source
        self.checks = checks
        self.heldout_guard = heldout_guard
        self.heldout_eval_fn = heldout_eval_fn
        self.strict_killswitch = strict_killswitch
        self.alpha_sdpo = alpha_sdpo
        self.hints = hints
        self.hint_source, self.hinted_turns = hint_source, hinted_turns
        self.beta_replay, self.replay_pairs = beta_replay, replay_pairs
        self.replay = replay
        self.prefix_sharing = prefix_sharing
        self.is_finished = is_finished
        self.run_folder = run_folder
        self.stateful = stateful
        self.split_fingerprint = split_fingerprint
        self.run_identity = run_identity
        self._check_channel_settings()
        super().__init__(*args, **kwargs)
        wait_for_gloo_at_exit()
        self._take_kl_out_of_the_loss()

    # ---- parts: made when first asked for, as an instance without its constructor asks too -----------------

    @cached_property
    def chained_rows(self) -> ChainedRows:
        """Which rows at hand are chains of conversations."""
        return ChainedRows()

    @cached_property
    def router_load(self) -> RouterLoad:
        """How evenly routers choose their experts."""
        return RouterLoad()

    @cached_property
    def router_replay(self) -> RouterReplay:
        """Which experts the rows at hand went to."""
        return RouterReplay()

    # ---- loss -----------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """On the cadence the guard is asked; then TRL's loss plus the weighted channels."""
        is_open = self._gate_is_open()
        if is_open:  # before the forward: an evaluation beside its activations would need the memory of both
            self._gate_step = self.state.global_step
            self._fold_rows = inputs
            self._maybe_update_killswitch()
            self._fold_rows = None
        self._begin_micro_step()
        inputs = self._without_distilled_rows(inputs)
        with (
            self.chained_rows.scored_as(inputs.get(SEGMENT_STARTS)),
            self.router_replay.scored_as(inputs),
            self.router_load.counting(model),
        ):
            loss = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        components = {"loss/grpo": loss}
        if self.alpha_sdpo != 0.0:
            components["loss/sdpo"] = self._compute_sdpo_loss(model, inputs)
            loss = loss + self.alpha_sdpo * components["loss/sdpo"]
        if self.beta_replay != 0.0:
            components["loss/trace_replay"] = self._compute_trace_replay_loss(model, inputs)
            loss = loss + self.beta_replay * components["loss/trace_replay"]
        ended = {"loss/sdpo"} if self._hints_have_ended else set()  # its zero is what was asked for
        judged = {name: value for name, value in components.items() if name not in ended}
        self._check_micro_step(inputs, loss, judged)
        for part in (self.router_load, self.router_replay):
            if part.has_news:
                part.log(self.accelerator, self._metrics["train"])
        if is_open and len(components) > 1:
            metrics: Any = self._metrics
            for name, value in components.items():
                number = value.item() if isinstance(value, torch.Tensor) else value
                metrics.setdefault("train", {}).setdefault(name, []).append(float(number))
        return loss

    # ---- log-probabilities and sampling -----------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> Any:
        """As TRL's; with prefix sharing each distinct prompt is forwarded once, and chained rows come apart."""

        def score(ids: torch.Tensor, mask: torch.Tensor, num_columns: int) -> Any:
            if self.prefix_sharing and self._may_share(
                "log-probabilities",
                "the routing of the rollouts is replayed."
                if self.router_replay.is_followed_by(model, self.ref_model)
                else self._logps_sharing_reason(model, compute_aux_loss, multimodal),
            ):
                return self._shared_logps(model, ids, mask, num_columns, batch_size, compute_entropy)
            return super(ComposerReplicationTrainer, self)._get_per_token_logps_and_entropies(
                model,
                ids,
                mask,
                num_columns,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **multimodal,
            )

        with self.router_replay.replaying(model, self.ref_model, attention_mask):
            answer: Any = self.chained_rows.score(score, input_ids, attention_mask, logits_to_keep)
        self._keep_step_tensors(answer)
        return answer

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """As TRL's, in training with the policy's own terms and what the channels that are on need of each row."""
        of_trl = super()._generate_and_score_completions

        def generate(rows: Any) -> dict[str, Any]:
            self.generation_rows = rows
            step = self.state.global_step + 1
            parts = (self.chained_rows, self.router_replay)
            with parts[0].scored_as(None), parts[1].scored_as(None), sampling_for_step(step):
                batch: dict[str, Any] = of_trl(rows)
                for part in parts:
                    part.after_generation(batch)
            return self._with_sampled_ids(self._with_row_rewards(self._learn_outcomes(batch)))

        inputs = self._chosen_inputs(inputs)
        return self._with_channel_tensors(inputs, self._with_policy_terms(generate, inputs))

    def _generate(self, prompts: Any) -> Any:
        """As TRL's; which ids were sampled is remembered before any mask is emptied."""
        if self.use_vllm:
            load_weights(self)
        answer: Any = super()._generate(prompts)
        _, completion_ids, tool_masks, *_ = answer
        self._newest_sampled = (completion_ids, tool_masks)
        return answer

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """As TRL's, but a row that nobody scored is not punished for its length; remembered for this generation."""
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rewards = without_lone_punishments(rewards, self.reward_func_names)
        self._remember_rewards(rewards)
        return rewards

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        """As TRL's; with prefix sharing one prefill a distinct prompt, and rows stop by ``is_finished``."""
        if self.prefix_sharing and self._may_share(
            "sampling", self._generation_sharing_reason(images, multimodal_fields)
        ):
            return self._shared_completions(prompt_ids)
        return super()._generate_single_turn(  # type: ignore[no-untyped-call]
            prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        )

    # ---- evaluation and logging -----------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Any:
        """As TRL's; the guard is never folded meanwhile."""
        was_in_evaluation = self._in_evaluation
        self._in_evaluation = True
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._in_evaluation = was_in_evaluation

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: Any, ignore_keys: list[str] | None = None
    ) -> Any:
        """As TRL's; the guard is never folded meanwhile."""
        was_in_evaluation = self._in_evaluation
        self._in_evaluation = True
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._in_evaluation = was_in_evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, but a row of the guard's keys alone passes by TRL's merge and clear."""
        if logs and all(name.startswith(("killswitch/", "heldout/")) for name in logs):
            super(GRPOTrainer, self).log(logs, start_time)
            return
        metrics = self._metrics["train"]
        self._signals().read(metrics)
        self._window().before_clearing(metrics)
        super().log(logs, start_time)
        self._signals().after_clearing(metrics)
        self._window().after_clearing(metrics)
        if "loss" in logs:
            self._loss_seen = 0.0

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As transformers'; a norm that is not finite makes the step a bad one."""
        norm: Any = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        self._note_grad_norm(norm)
        return norm

    @property
    def is_interrupted(self) -> bool:
        return self._interrupt is not None and self._interrupt.is_requested

    def is_asked_to_end(self) -> bool:
        """Whether any process was asked to end after this step. A collective call."""
        return self._interrupt is not None and self._interrupt.is_agreed()

    # ---- training -------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, or go on from a checkpoint, exactly.

        Args:
            resume_from_checkpoint: True for the newest whole checkpoint of ``args.output_dir`` (none
                there: from the start; half-written ones are deleted), or one checkpoint's folder.
            trial: as in transformers.
            ignore_keys_for_eval: as in transformers.

        Raises:
            CollapseStopError: the guard fired, after the last checkpoint and verdict were written. The
                checkpoint is of ``state.global_step``: the step under way left no trace in weights and
                optimizer. A checkpoint under a fired guard is not trained on.
            KeyboardInterrupt: after a first Ctrl-C or an order to end, when the step was finished and saved.
            InputError: the checkpoint is damaged (CR0706), half-written or without its optimizer (CR0706) or another run's
                (CR0884, CR0706); three steps in a row (CR0771) or sampling (CR0771) gave numbers that are not
                finite.
            TrainerSettingError: settings that cannot work (CR0760, CR0884, CR0710).
        """
        self._check_before_training()
        checkpoint = once(lambda: choose_checkpoint(resume_from_checkpoint, Path(str(self.args.output_dir))))
        self._begin_run(checkpoint)
        if self.heldout_guard is not None and self.heldout_guard.should_halt():
            return self._refuse_halted_run(self.heldout_guard, checkpoint)
        self._refuse_inexact_resume(checkpoint)
        self._open_run_log(checkpoint)
        if checkpoint is not None and self._has_all_steps(checkpoint):
            return self._keep_finished_run(checkpoint)
        self._begin_channels()
        self._interrupt = InterruptOnce()
        try:
            with self._interrupt:
                output = super().train(
                    None if checkpoint is None else str(checkpoint), trial, ignore_keys_for_eval
                )
        except CollapseStopError as halt:
            try:
                self._finish_halted_run(trial)
            except (OSError, RuntimeError) as error:  # a full disk must not hide why the run ends
                halt.add_note(f"its last checkpoint could not be saved: {error}")
                logger.exception("the last checkpoint of the halted run could not be saved.")
            raise
        finally:
            self.flush_run_log()
        if self.halted_at is not None and not self._halt_is_saved:
            self._finish_halted_run(trial)
        if self.is_interrupted:
            raise KeyboardInterrupt
        return output

    def create_optimizer(self, model: Any = None) -> Any:
        """As transformers'; what it refuses is a setting of the recipe (CR0211)."""
        with refusals():
            return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As transformers'; what it refuses is a setting of the recipe (CR0211)."""
        with refusals():
            return super().create_scheduler(num_training_steps, optimizer)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Transformers' files, ours, then the manifest; older checkpoints go only after that."""
        self.flush_run_log()
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        if process_rank() == 0:
            (checkpoint / MANIFEST_NAME).unlink(missing_ok=True)  # until the new one it is half-written
        wait_for_all()
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # it would delete too early
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit
        self._write_own_state(checkpoint)
        wait_for_all()
        if process_rank() == 0:
            write_manifest(checkpoint)
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        wait_for_all()
        self._halt_is_saved = self.halted_at is not None

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """As TRL's; on a resume the permutations of the finished epochs are drawn first.

        TRL's sampler starts from its seed in every process, so without this a resumed second epoch
        would repeat the order of the first.
        """
        sampler: Any = super()._get_train_sampler(dataset)
        if getattr(sampler, "shuffle", False):
            for _ in range(self._num_permutations_to_skip):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        self._num_permutations_to_skip = 0
        return sampler
