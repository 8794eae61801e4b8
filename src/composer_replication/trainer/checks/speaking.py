"""The trainer's side of the checks: where numbers come from, where findings go, how a bad step is skipped.

Shapes: B rows, P prompt and T completion tokens.
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
from composer_replication.losses.policy_terms import effective_share
from composer_replication.records import Finding
from composer_replication.run_folder import RunFolder, append_jsonl
from composer_replication.trainer.checks.judgement import CheckThresholds, Judgement
from composer_replication.trainer.processes import gathered, num_processes, process_rank

logger = logging.getLogger(__name__)

MAX_BAD_BATCHES = 10


class ChecksThatSpeak(TrainerCallback):
    """Measures each micro-step, judges each step between its gradients and its update, and writes what it finds.

    Args:
        trainer: whose steps are measured; where it has a run folder, ``checks.jsonl`` and bad batches go there.
        thresholds: the limits.

    Attributes:
        findings: what was said since ``begin``.
        judgement: the memory of the checks, which a checkpoint keeps.
    """

    def __init__(self, trainer: Any, thresholds: CheckThresholds) -> None:
        self._trainer, self._thresholds = trainer, thresholds
        self._run_folder: RunFolder | None = trainer.run_folder
        self._step = 1
        self._step_tensors: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._takes_tensors = False
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier run of this trainer left; a checkpoint is read afterwards."""
        self.judgement = Judgement(self._thresholds)
        self.findings: tuple[Finding, ...] = ()
        self._begin_step()

    def _begin_step(self) -> None:
        self._step_figures: tuple[dict[str, float], ...] = ()
        self._bad_cause = self._first_part = ""
        self._newest_inputs: Any = None

    # ---- one micro-step ---------------------------------------------------------------------------

    def before_loss(self) -> None:
        """The next log-probabilities with gradient are those of the policy loss."""
        self._step_tensors, self._takes_tensors = None, True

    def take_logps(self, answer: Any) -> None:
        """What TRL's ``_get_per_token_logps_and_entropies`` gave."""
        if self._takes_tensors and torch.is_grad_enabled():
            self._step_tensors, self._takes_tensors = (answer[0].detach(), answer[1]), False

    def after_loss(self, inputs: Any, loss: Any, channels: Mapping[str, Any]) -> None:
        """Measure what the loss has just made; keep the batch where the loss is not finite.

        Args:
            inputs: of the micro-step.
            loss: a scalar.
            channels: values of the further channels, by name.
        """
        kept, self._step_tensors, self._takes_tensors = self._step_tensors, None, False
        if kept is None:
            return
        logps, entropies = kept
        limit = self._thresholds.max_token_drift
        figures = micro_step_figures(
            inputs,
            loss=loss,
            policy_logp_BT=logps,
            entropy_BT=entropies,
            pad_token_id=self._trainer._tokenizer.pad_token_id,  # noqa: SLF001 - TRL's only name
            channels={name: torch.as_tensor(value) for name, value in channels.items()},
            parting=limit,
        )
        self._step_figures = (*self._step_figures, figures)
        self._newest_inputs = inputs
        num_drift = figures.get("num_drift_tokens", 0.0)
        if not self._first_part and num_drift and figures["drift_sum"] > limit * num_drift:
            self._first_part = self._words_on_drift(inputs, logps, int(figures["parts_at"]))
        if not figures["is_finite"]:
            self._note_bad("the loss")

    def note_grad_norm(self, grad_norm: Any) -> None:
        """Under fp16 a gradient that overflows is the scaler's business: it skips the step and lowers its factor."""
        if (
            grad_norm is not None
            and self._trainer.accelerator.scaler is None
            and not math.isfinite(float(grad_norm))
        ):
            self._note_bad("the gradient")

    def _note_bad(self, cause: str) -> None:
        if not self._bad_cause:
            self._bad_cause = cause
            self._save_bad_batch(self._newest_inputs)

    @property
    def _bad_batches(self) -> Path:
        root = Path(str(self._trainer.args.output_dir)) if self._run_folder is None else self._run_folder.root
        return root / "bad_batches"

    def _save_bad_batch(self, inputs: Any) -> None:
        """At most ``MAX_BAD_BATCHES`` files, the newest: a run must not fill a disk with its troubles."""
        folder = self._bad_batches
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: part.cpu() for name, part in (inputs or {}).items() if isinstance(part, torch.Tensor)}
        torch.save(kept, folder / f"step-{self._step:06d}-process-{process_rank()}.pt")
        for path in sorted(folder.glob("step-*.pt"))[:-MAX_BAD_BATCHES]:
            path.unlink(missing_ok=True)

    def _words_on_drift(self, inputs: Any, logps: torch.Tensor, parts_at: int) -> str:
        if parts_at < 0:
            return ""
        row, position = divmod(parts_at, logps.size(1))
        mine = inputs.get("old_per_token_logps", logps)[row, position].item()
        theirs = inputs["sampling_per_token_logps"][row, position].item()
        token = int(inputs["completion_ids"][row, position])
        text = str(self._trainer._tokenizer.decode([token]))[:40]  # noqa: SLF001
        turn = ""
        if "tool_mask" in inputs:  # a turn begins where sampled ids follow what was not sampled
            sampled = [0, *inputs["tool_mask"][row, : position + 1].tolist()]
            turn = f" (turn {sum(b > a for a, b in pairwise(sampled)) - 1})"
        return (
            f"they part first at token {position}{turn} of row {row}, id {token} {text!r} "
            f"({theirs:.3f} sampled, {mine:.3f} in training)"
        )

    # ---- one generation ---------------------------------------------------------------------------

    def after_generation(self, output: Mapping[str, Any], num_dull: float, num_groups: float) -> None:
        """Count groups; ``num_*`` are over all processes."""
        mask_BT = output["completion_mask"].bool()
        length_B = mask_BT.sum(-1)
        last_B = output["completion_ids"].gather(1, (length_B - 1).clamp(min=0)[:, None])[:, 0]
        ends = torch.as_tensor(list(self._trainer.eos_token_ids), device=last_B.device)
        is_cut_B = (length_B >= self._trainer.args.max_completion_length) & ~torch.isin(last_B, ends)
        if self._trainer.args.mask_truncated_completions:  # TRL has emptied the masks of those rows
            is_cut_B = is_cut_B | (length_B == 0)
        group = self._trainer.args.num_generations
        num_rows = group if is_cut_B.numel() % group == 0 else is_cut_B.numel()
        cut_groups = float(is_cut_B.view(-1, num_rows).all(-1).float().mean()) if is_cut_B.numel() else 0.0
        share = sum(gathered(cut_groups)) / num_processes()
        self.judgement.note_generation(
            num_groups=num_groups, num_dull=num_dull, num_truncated=share * num_groups
        )

    def note_importance(self, *, truncated_share: float, effective_share: float) -> None:
        """What importance weights did to the newest generation."""
        row = {"truncated_share": truncated_share, "sampling_effective_share": effective_share}
        self._step_figures = (*self._step_figures, row)

    # ---- one step ---------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step + 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All micro-steps of the step are done, its update is not: judge it, and skip it where it is bad."""
        processes = gathered((self._step_figures, self._bad_cause, self._first_part))
        self._begin_step()
        bad = next((cause for _, cause, _ in processes if cause), "")
        if bad and (self._trainer.accelerator.scaler is None or self._trainer.args.max_grad_norm > 0):
            # Without gradients an optimizer leaves weights and moments alone. A scaler that has not looked at them yet,
            # which is without a limit of their norm, needs them and skips the step by itself.
            kwargs["optimizer"].zero_grad(set_to_none=True)
        first_part = next((words for _, _, words in processes if words), "")
        if first_part and self._thresholds.stops_at_drift:
            raise TokenDriftError(first_part, self._step)
        rows = [row for figures, _, _ in processes for row in figures]
        self._log_figures(rows)
        is_masked = bool(self._trainer.args.mask_truncated_completions)
        facts = {"bad": bad, "first_part": first_part, "masks_truncated": is_masked}
        self._publish(self.judgement.judge(self._step, rows, facts))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run where too many steps in a row were not finite."""
        if self.judgement.must_stop:
            raise NonFiniteRunError(self.judgement.num_bad_in_a_row, self._bad_batches)

    def _log_figures(self, rows: list[dict[str, float]]) -> None:
        metrics = self._trainer._metrics["train"]  # noqa: SLF001
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
            if self._run_folder is not None:
                figures = {
                    key: value if math.isfinite(value) else None for key, value in finding.figures.items()
                }
                append_jsonl(self._run_folder.checks, {**asdict(finding), "figures": figures})


class TokenDriftError(InputError):
    """Trainer and sampler give the same tokens other probabilities, and the run was to stop at that.

    Args:
        first_part: words about the first token that parts.
        step: which was not taken, from 1.
    """

    def __init__(self, first_part: str, step: int) -> None:
        super().__init__(
            "CR0765",
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


# ---- the numbers of one micro-step: reduced on the device and read once -------------------------------


def micro_step_figures(
    inputs: Mapping[str, Any],
    *,
    loss: torch.Tensor,
    policy_logp_BT: torch.Tensor,
    entropy_BT: torch.Tensor | None,
    pad_token_id: int,
    channels: Mapping[str, torch.Tensor],
    parting: float,
) -> dict[str, float]:
    """Measure one micro-step.

    Args:
        inputs: what TRL hands to ``_compute_loss``.
        loss: its result, a scalar.
        policy_logp_BT: log-probabilities of the completion under the weights at hand, nats.
        entropy_BT: their entropies, if they were computed.
        pad_token_id: of the tokenizer.
        channels: scalar values of the further loss channels, by name.
        parting: distance in nats from which sampling and training log-probability part.

    Returns:
        Name to number; only what could be measured. ``num_*`` are counts, ``*_sum`` are to be added up over
        micro-steps. ``parts_at`` is row * T + position of the first token that parts, -1 where none does.
    """
    completion_mask_BT = inputs["completion_mask"].bool()
    mask_BT = completion_mask_BT & inputs["tool_mask"].bool() if "tool_mask" in inputs else completion_mask_BT
    advantages = inputs["advantages"]
    is_paid_B = (advantages != 0).reshape(advantages.size(0), -1).any(-1)
    scalars: dict[str, torch.Tensor] = {
        "is_finite": torch.isfinite(loss.detach()),
        "num_tokens": mask_BT.sum(),
        "num_rows": torch.tensor(mask_BT.size(0), device=mask_BT.device),
        "num_paid_rows": (is_paid_B & mask_BT.any(-1)).sum(),
        "num_paid_without_token": (is_paid_B & ~mask_BT.any(-1) & completion_mask_BT.any(-1)).sum(),
        "num_paid_and_empty": (is_paid_B & ~completion_mask_BT.any(-1)).sum(),
        "num_rows_over_padding": _over_padding(inputs, completion_mask_BT, pad_token_id).sum(),
    }
    if entropy_BT is not None:
        scalars["entropy_sum"] = (entropy_BT.detach() * mask_BT).sum()
    old_BT = inputs.get("old_per_token_logps")
    if old_BT is not None:
        scalars["policy_effective_share"] = effective_share((policy_logp_BT - old_BT)[mask_BT].exp())
    sampled_BT = inputs.get("sampling_per_token_logps")
    if sampled_BT is not None:
        scalars |= _drift(policy_logp_BT if old_BT is None else old_BT, sampled_BT, mask_BT, parting)
    for name, value in channels.items():
        scalars[f"channel/{name}"] = value.detach().abs()
    numbers = torch.stack(
        [value.double().reshape(()).to(mask_BT.device) for value in scalars.values()]
    ).tolist()
    return dict(zip(scalars, numbers, strict=True))


def _over_padding(
    inputs: Mapping[str, Any], completion_mask_BT: torch.Tensor, pad_token_id: int
) -> torch.Tensor:
    """Rows (B,) whose mask has a hole, whose prompt mask has one, or which carry loss on trailing padding.

    Completions are padded on the right and prompts on the left, so a completion's mask may only fall and a
    prompt's only rise. One padding token at a row's end may have been sampled (it may be the end token), two cannot.
    """
    has_hole_B: torch.Tensor = (completion_mask_BT[:, 1:] & ~completion_mask_BT[:, :-1]).any(-1)
    prompt_mask_BP: torch.Tensor = inputs["prompt_mask"].bool()
    has_hole_B = has_hole_B | (prompt_mask_BP[:, :-1] & ~prompt_mask_BP[:, 1:]).any(-1)
    if completion_mask_BT.size(1) < 2:
        return has_hole_B
    length_B = completion_mask_BT.sum(-1)
    is_pad_BT: torch.Tensor = inputs["completion_ids"] == pad_token_id
    last_B1 = (length_B - 1).clamp(min=1)[:, None]
    ends_in_pads_B = (is_pad_BT.gather(1, last_B1) & is_pad_BT.gather(1, last_B1 - 1))[:, 0]
    return has_hole_B | (ends_in_pads_B & (length_B >= 2))


def _drift(
    policy_logp_BT: torch.Tensor, sampled_logp_BT: torch.Tensor, mask_BT: torch.Tensor, parting: float
) -> dict[str, torch.Tensor]:
    """How far the sampler's log-probabilities are from the trainer's, and where they part first."""
    known_BT = mask_BT & ~torch.isnan(sampled_logp_BT)
    distance_BT = torch.where(known_BT, (policy_logp_BT.detach() - sampled_logp_BT).abs(), 0.0)
    parts_BT = distance_BT > parting
    # The earliest position counts, and among rows the first: position-major order.
    parts_TB = parts_BT.T.reshape(-1).to(torch.uint8)
    first = parts_TB.argmax()
    num_rows = distance_BT.size(0)
    parts_at = (first % num_rows) * distance_BT.size(1) + first // num_rows
    return {
        "drift_sum": distance_BT.double().sum(),
        "num_drift_tokens": known_BT.sum(),
        "drift_max": distance_BT.max() if distance_BT.numel() else distance_BT.new_zeros(()),
        "parts_at": torch.where(parts_BT.any(), parts_at, torch.full_like(parts_at, -1)),
    }
