"""The trainer's side of the checks: where numbers come from, where findings go, how a bad step is skipped.

A mixin of the trainer; its own state has defaults on the class.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from composer_replication.errors import InputError
from composer_replication.records import Finding
from composer_replication.run_folder import RunFolder, append_jsonl
from composer_replication.trainer.checks.batch_figures import micro_step_figures
from composer_replication.trainer.checks.judgement import CheckThresholds, Judgement
from composer_replication.trainer.policy_terms_wiring import ImportanceFigures
from composer_replication.trainer.processes import gathered, num_processes, process_rank
from composer_replication.trainer.trl_surface import TrlSurface

logger = logging.getLogger(__name__)

MAX_BAD_BATCHES = 10


class ChecksThatSpeak(TrlSurface):
    """Measures each micro-step, judges each step, and writes what it finds.

    Attributes:
        findings: what was said in this process's life.
    """

    checks: bool | CheckThresholds = True
    findings: tuple[Finding, ...] = ()
    run_folder: RunFolder | None = None
    _in_evaluation: bool = False
    _judgement: Judgement | None = None
    _checks_callback: ChecksCallback | None = None
    _step_tensors: tuple[torch.Tensor, torch.Tensor | None] | None = None
    _takes_tensors: bool = False
    _step_figures: tuple[dict[str, float], ...] = ()
    _bad_cause: str = ""
    _first_part: str = ""
    _newest_inputs: Any = None

    # ---- one micro-step ---------------------------------------------------------------------------

    def _begin_micro_step(self) -> None:
        """The next log-probabilities with gradient are those of the policy loss."""
        self._step_tensors = None
        self._takes_tensors = bool(self.checks) and self._judgement is not None and not self._in_evaluation

    def _keep_step_tensors(self, answer: Any) -> None:
        if self._takes_tensors and torch.is_grad_enabled():
            self._step_tensors, self._takes_tensors = (answer[0].detach(), answer[1]), False

    def _check_micro_step(self, inputs: Any, loss: Any, components: Mapping[str, Any]) -> None:
        """Measure what the loss has just made; keep the batch where the loss is not finite."""
        kept, self._step_tensors, self._takes_tensors = self._step_tensors, None, False
        judgement = self._judgement
        if kept is None or judgement is None:
            return
        logps, entropies = kept
        limit = judgement.thresholds.max_token_drift
        others = {name: value for name, value in components.items() if name != "loss/grpo"}
        figures = micro_step_figures(
            inputs,
            loss=loss,
            policy_logp_BT=logps,
            entropy_BT=entropies,
            pad_token_id=self._tokenizer.pad_token_id,
            channels={name.removeprefix("loss/"): torch.as_tensor(value) for name, value in others.items()},
            parting=limit,
        )
        self._step_figures = (*self._step_figures, figures)
        self._newest_inputs = inputs
        num_drift = figures.get("num_drift_tokens", 0.0)
        if not self._first_part and num_drift and figures["drift_sum"] > limit * num_drift:
            self._first_part = self._words_on_drift(inputs, logps, int(figures["parts_at"]))
        if not figures["is_finite"]:
            self._note_bad("the loss")

    def _note_grad_norm(self, grad_norm: Any) -> None:
        """Under fp16 a gradient that overflows is the scaler's business: it skips the step and lowers its factor."""
        if self._judgement is None or grad_norm is None or self._scaler is not None:
            return
        if not math.isfinite(float(grad_norm)):
            self._note_bad("the gradient")

    @property
    def _scaler(self) -> Any:
        """Of fp16's gradients; None in any other precision."""
        return getattr(self.accelerator, "scaler", None)

    def _drop_gradients(self, optimizer: Any) -> None:
        """Without gradients an optimizer leaves weights and moments alone.

        A scaler that has not looked at them yet, which is without a limit of their norm, needs them and skips the step by itself.
        """
        if self._scaler is None or self.args.max_grad_norm > 0:
            optimizer.zero_grad(set_to_none=True)

    def _note_bad(self, cause: str) -> None:
        if not self._bad_cause:
            self._bad_cause = cause
            self._save_bad_batch(self._newest_inputs)

    def _save_bad_batch(self, inputs: Any) -> None:
        """At most ``MAX_BAD_BATCHES`` files, the newest: a run must not fill a disk with its troubles."""
        root = Path(str(self.args.output_dir)) if self.run_folder is None else self.run_folder.root
        folder = root / "bad_batches"
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: part.cpu() for name, part in (inputs or {}).items() if isinstance(part, torch.Tensor)}
        torch.save(kept, folder / f"step-{self.state.global_step + 1:06d}-process-{process_rank()}.pt")
        for path in sorted(folder.glob("step-*.pt"))[:-MAX_BAD_BATCHES]:
            path.unlink(missing_ok=True)

    def _words_on_drift(self, inputs: Any, logps: torch.Tensor, parts_at: int) -> str:
        if parts_at < 0:
            return ""
        row, position = divmod(parts_at, logps.size(1))
        mine = inputs.get("old_per_token_logps", logps)[row, position].item()
        theirs = inputs["sampling_per_token_logps"][row, position].item()
        token = int(inputs["completion_ids"][row, position])
        text = str(self._tokenizer.decode([token]))[:40]
        turn = ""
        if "tool_mask" in inputs:  # a turn begins where sampled ids follow what was not sampled
            sampled = [0, *inputs["tool_mask"][row, : position + 1].tolist()]
            turn = f" (turn {sum(b > a for a, b in pairwise(sampled)) - 1})"
        return (
            f"they part first at token {position}{turn} of row {row}, id {token} {text!r} "
            f"({theirs:.3f} sampled, {mine:.3f} in training)"
        )

    # ---- one generation ---------------------------------------------------------------------------

    def _check_generation(self, output: Mapping[str, Any], num_dull: float, num_groups: float) -> None:
        """Count groups; ``num_*`` are over all processes."""
        if self._judgement is None or self._in_evaluation:
            return
        mask_BT = output["completion_mask"].bool()
        length_B = mask_BT.sum(-1)
        last_B = output["completion_ids"].gather(1, (length_B - 1).clamp(min=0)[:, None])[:, 0]
        ends = torch.as_tensor(list(self.eos_token_ids), device=last_B.device)
        is_cut_B = (length_B >= self.max_completion_length) & ~torch.isin(last_B, ends)
        if self.mask_truncated_completions:  # TRL has emptied the masks of those rows
            is_cut_B = is_cut_B | (length_B == 0)
        num_rows = self.num_generations if is_cut_B.numel() % self.num_generations == 0 else is_cut_B.numel()
        cut_groups = float(is_cut_B.view(-1, num_rows).all(-1).float().mean()) if is_cut_B.numel() else 0.0
        share = sum(gathered(cut_groups)) / num_processes()
        self._judgement.note_generation(
            num_groups=num_groups, num_dull=num_dull, num_truncated=share * num_groups
        )

    def _check_importance(self, figures: ImportanceFigures) -> None:
        if self._judgement is not None:
            row = {
                "truncated_share": figures.truncated_share,
                "sampling_effective_share": figures.effective_sample_size,
            }
            self._step_figures = (*self._step_figures, row)

    # ---- one step ---------------------------------------------------------------------------------

    def _begin_checks(self) -> None:
        """Forget what an earlier run of this trainer left; a checkpoint is read afterwards."""
        self.findings, self._step_figures, self._bad_cause, self._first_part = (), (), "", ""
        self._newest_inputs = None
        if not self.checks:
            self._judgement = None
            return
        self._judgement = Judgement(self.checks if isinstance(self.checks, CheckThresholds) else None)
        if self._checks_callback is None:
            self._checks_callback = ChecksCallback(self)
            self.add_callback(self._checks_callback)

    def judge_step(self, optimizer: Any) -> None:
        """All micro-steps of the step are done, its update is not: judge it, and skip it where it is bad."""
        if self._judgement is None:
            return
        told = (self._step_figures, self._bad_cause, self._first_part)
        self._step_figures, self._bad_cause, self._first_part, self._newest_inputs = (), "", "", None
        processes = gathered(told)
        bad = next((cause for _, cause, _ in processes if cause), "")
        if bad:
            self._drop_gradients(optimizer)
        facts = {
            "bad": bad,
            "first_part": next((words for _, _, words in processes if words), ""),
            "masks_truncated": bool(self.mask_truncated_completions),
        }
        if facts["first_part"] and self._judgement.thresholds.stops_at_drift:
            raise TokenDriftError(str(facts["first_part"]), self.state.global_step + 1)
        rows = [row for figures, _, _ in processes for row in figures]
        self._log_figures(rows)
        self._publish(self._judgement.judge(self.state.global_step + 1, rows, facts))

    def _log_figures(self, rows: list[dict[str, float]]) -> None:
        metrics = self._metrics["train"]
        num_drift = sum(row.get("num_drift_tokens", 0.0) for row in rows)
        if num_drift:
            drift = sum(row.get("drift_sum", 0.0) for row in rows) / num_drift
            metrics["checks/token_drift"].append(drift)
            metrics["checks/token_drift_max"].append(max(row.get("drift_max", 0.0) for row in rows))
        shares = [row["policy_effective_share"] for row in rows if "policy_effective_share" in row]
        if shares:
            metrics["checks/effective_sample_size"].append(min(shares))

    def _publish(self, findings: list[Finding]) -> None:
        self.findings = (*self.findings, *findings)
        if process_rank() != 0:
            return
        for finding in findings:
            logger.warning("%s: %s Next: %s", finding.code, finding.sentence, finding.fix)
            if self.run_folder is not None:
                append_jsonl(self.run_folder.checks, finding_row(finding))

    def stop_if_broken(self) -> None:
        """Raise when too many steps in a row were not finite.

        Raises:
            NonFiniteRunError: CR0771.
        """
        if self._judgement is not None and self._judgement.must_stop:
            root = self.args.output_dir if self.run_folder is None else self.run_folder.root
            raise NonFiniteRunError(self._judgement.num_bad_in_a_row, Path(str(root)) / "bad_batches")


class TokenDriftError(InputError):
    """Trainer and sampler give the same tokens other probabilities, and the run was to stop at that.

    Args:
        first_part: words about the first token that parts.
        step: which was not taken, from 1.
    """

    def __init__(self, first_part: str, step: int) -> None:
        super().__init__(
            "CR0870",
            f"trainer and sampler disagree about sampled tokens; {first_part}.",
            where=f"step {step}",
            fix='find out what differs (template, temperature, precision); agent.log_prob_check = "report" goes on.',
        )


class NonFiniteRunError(InputError, ArithmeticError):
    """Several steps in a row had a loss or gradient that is not a finite number.

    Args:
        num_steps: how many.
        folder: where their batches are.
    """

    def __init__(self, num_steps: int, folder: Path) -> None:
        super().__init__(
            "CR0771",
            f"{num_steps} steps in a row had a loss or gradient that is not finite; none of them was taken.",
            where=str(folder),
            fix="look at the batches there; lower trl.learning_rate, and train in float32 or bf16 instead of fp16.",
        )


class ChecksCallback(TrainerCallback):
    """Calls the trainer between a step's gradients and its update.

    Args:
        trainer: the ``ComposerReplicationTrainer`` it belongs to.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.judge_step(kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.stop_if_broken()


def finding_row(finding: Finding) -> dict[str, Any]:
    """A line of ``checks.jsonl``; a figure that is not finite is null."""
    row = asdict(finding)
    row["figures"] = {
        name: value if math.isfinite(value) else None for name, value in finding.figures.items()
    }
    return row
