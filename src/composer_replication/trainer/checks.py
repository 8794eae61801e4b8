"""Does the run still train what it says? Checks that speak, on by default.

None changes a gradient or draws a random number; only a loss or gradient that is not finite has a consequence.
``micro_step_figures`` measures, ``Judgement`` turns the numbers of a step into findings, ``ChecksThatSpeak`` calls both
and says where findings go and how a bad step is skipped. Shapes: B rows, P prompt and T completion tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import TrainerCallback

from composer_replication.errors import InputError
from composer_replication.losses import policy_terms as losses
from composer_replication.run_folder import RunFolder, append_jsonl
from composer_replication.trainer.generation import Generation, loss_mask
from composer_replication.trainer.metrics_log import StepLines, json_row
from composer_replication.trainer.processes import gathered, num_processes, process_rank

logger = logging.getLogger(__name__)

# Mean distance of sampling and training log-probability, nats. Engines in bf16 differ by 0.01 to 0.02; a wrong temperature,
# template or off-by-one gives tenths or more.
MAX_TOKEN_DRIFT = 0.05
WINDOW = 8  # generations
MAX_DULL_SHARE = 0.9  # of the groups of the window, which are without signal
MAX_TRUNCATED_GROUPS = 0.9  # of those whose completions all met the length limit
MIN_EFFECTIVE_SHARE = 0.5  # effective sample size of the tokens as a share of their number
MAX_TRUNCATED_SHARE = 0.1  # of tokens whose importance weight was cut
# Mean of the last steps over the first; honest quick starts came down to 0.11 (entropy), 0.56 (loss-carrying tokens a row).
TREND_STEPS, MIN_ENTROPY_SHARE, MIN_LENGTH_SHARE = 5, 0.05, 0.25
NUM_ZERO_STEPS = 5  # in a row, in which a channel is exactly 0
NUM_BAD_STEPS = 3  # in a row that are not finite, after which the run stops

Figures = Mapping[str, float]  # of one micro-step
# name of a check (and of what, where it speaks of several things), its sentence, the numbers
Said = tuple[str, str, dict[str, float]]

CODES: Final[Mapping[str, str]] = {
    "token_drift": "CR0765",
    "groups_without_signal": "CR0766",
    "effective_sample_size": "CR0767",
    "entropy_collapse": "CR0768",
    "length_collapse": "CR0769",
    "non_finite": "CR0770",
    "zero_channel": "CR0773",
    "reward_and_mask": "CR0774",
    "truncated_groups": "CR0775",
}
REMEDIES: Final[Mapping[str, str]] = {
    "token_drift": "compare temperature, chat template and weights of the sampler with the trainer's.",
    "groups_without_signal": "set trainer.dynamic_sampling_rounds, choose tasks that are neither solved nor out of reach, or stop.",
    "effective_sample_size": "lower trl.learning_rate, trl.num_iterations or trl.steps_per_generation, or sync the sampler more often.",
    "entropy_collapse": "lower trl.learning_rate, set trl.beta or trl.entropy_coef, or stop: nothing new will be sampled.",
    "length_collapse": "read the rollouts: the reward may pay for short answers; see trainer.effort_weight.",
    "non_finite": "look at the saved batch; lower trl.learning_rate, or train in float32 or bf16 instead of fp16.",
    "zero_channel": "see whether the channel gets data at all; take its weight out if it is not meant to be on.",
    "reward_and_mask": "correct the rollout function's env_mask and completion ids, or the collator.",
    "truncated_groups": "raise trl.max_completion_length, or let rows end earlier (trainer.prefix_sharing stops finished ones).",
}
"""What to do about what each check says; its sentence is made of the numbers."""
_WORST: dict[str, Any] = dict.fromkeys(("drift_max", "truncated_share"), max)
_WORST |= dict.fromkeys(("policy_effective_share", "sampling_effective_share"), min)


def of_step(rows: Sequence[Figures]) -> dict[str, float]:
    """The figures of all micro-steps as those of their step: sums, but for the worst of shares and distances."""
    names = {name for row in rows for name in row}
    return {name: _WORST.get(name, math.fsum)([r[name] for r in rows if name in r]) for name in names}


class Finding(NamedTuple):
    """What a check said, as ``checks.jsonl`` keeps it; at an ``error`` the step, counted from 1, was not taken."""

    step: int
    name: str
    sentence: str
    figures: dict[str, float]  # the numbers behind the sentence

    def row(self) -> dict[str, Any]:
        level = "error" if self.name == "non_finite" else "warning"
        own = {"code": CODES[self.name], "level": level, "fix": REMEDIES[self.name]}
        return {**self._asdict(), **own, "figures": json_row(self.figures)}


class Judgement:
    """Remembers what a check needs, and says something when it begins to hold, again when it has gone and comes back.
    A step that is not finite is said every time.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Any] = {
            "num_bad_in_a_row": 0,
            "said": [],
            "entropy": [[], []],  # the first values, and the newest
            "length": [[], []],
            "generations": [],  # of each: its groups, those with equal rewards, those with every completion cut off
            "zero_steps": {},
        }

    @property
    def num_bad_in_a_row(self) -> int:
        """Steps in a row, up to the newest one, that were not finite."""
        return int(self._memory["num_bad_in_a_row"])

    def note_generation(self, *, num_groups: float, num_dull: float, num_truncated: float) -> None:
        known = [*self._memory["generations"], [num_groups, num_dull, num_truncated]]
        self._memory["generations"] = known[-WINDOW:]

    def judge(self, step: int, figures: Figures, *, bad: str = "", first_part: str = "") -> list[Finding]:
        """Judge one optimizer step, ``step`` from 1, by its figures over all micro-steps of all processes.
        ``bad`` is what was not finite, if anything; ``first_part`` words about the first token that parts.
        """
        spoken = [*self._tokens(figures, first_part), *self._channels(figures), *self._groups()]
        if not bad:
            spoken += self._trends(figures)
        new = [said for said in spoken if said[0] not in self._memory["said"]]
        self._memory["said"] = sorted(key for key, _, _ in spoken)
        self._memory["num_bad_in_a_row"] = num_bad = self.num_bad_in_a_row + 1 if bad else 0
        if bad:
            words = f"{bad} is not finite: the step is skipped ({num_bad} in a row)."
            new.append(("non_finite", words, {"in_a_row": float(num_bad)}))
        return [Finding(step, key.split()[0], sentence, numbers) for key, sentence, numbers in new]

    def _tokens(self, figures: Figures, first_part: str) -> Iterator[Said]:
        if (drift := mean_drift(figures)) > MAX_TOKEN_DRIFT:
            words = f"sampling and training log-probabilities differ by {drift:.3g} nats a token on average"
            words += f"; {first_part}." if first_part else "."
            yield "token_drift", words, {"mean": drift, "max": figures.get("drift_max", 0.0)}
        unpaid, padded = figures.get("num_unpaid_rows", 0.0), figures.get("num_rows_over_padding", 0.0)
        if unpaid or padded:
            words = f"{unpaid:.0f} row(s) have a reward that counts and no token that carries loss, "
            words += f"and the mask of {padded:.0f} row(s) lies over padding or has a hole."
            yield "reward_and_mask", words, {"unpaid_rows": unpaid, "padded_rows": padded}
        shares = ("policy_effective_share", "sampling_effective_share")
        lowest, cut = min(figures.get(name, 1.0) for name in shares), figures.get("truncated_share", 0.0)
        if lowest < MIN_EFFECTIVE_SHARE or cut > MAX_TRUNCATED_SHARE:
            words = f"importance weights leave an effective sample size of {lowest:.0%} of the tokens, "
            words += f"and {cut:.0%} of the weights are cut."
            yield "effective_sample_size", words, {"share": lowest, "cut": cut}

    def _channels(self, figures: Figures) -> Iterator[Said]:
        """The policy gradient is zero where no advantage counts; another channel where its value is."""
        before = self._memory["zero_steps"]
        totals = {n.removeprefix("channel/"): total for n, total in figures.items() if "channel/" in n}
        totals |= {"grpo": figures["num_paid_rows"]} if "num_paid_rows" in figures else {}
        now = {name: 0 if total else before.get(name, 0) + 1 for name, total in totals.items()}
        self._memory["zero_steps"] = now
        for name, num_steps in sorted(now.items()):
            if num_steps >= NUM_ZERO_STEPS:
                words = f"the channel {name} was exactly 0 in the last {NUM_ZERO_STEPS} steps."
                yield f"zero_channel {name}", words, {"steps": float(num_steps)}

    def _groups(self) -> Iterator[Said]:
        """Shares of the groups of the last generations, once there are as many as the window."""
        generations = self._memory["generations"]
        if len(generations) < WINDOW:
            return
        num_groups, *counts = map(math.fsum, zip(*generations, strict=True))
        dull, cut = (count / num_groups if num_groups else 0.0 for count in counts)
        groups = f"of the groups of the last {len(generations)} generations"
        if dull > MAX_DULL_SHARE:
            yield "groups_without_signal", f"{dull:.0%} {groups} had equal rewards.", {"share": dull}
        if cut > MAX_TRUNCATED_GROUPS:
            words = f"in {cut:.0%} {groups} every completion met the length limit."
            yield "truncated_groups", words, {"share": cut}

    def _trends(self, figures: Figures) -> Iterator[Said]:
        """Length and entropy of the last steps beside those of the first; nothing while the two ends would overlap."""
        for name, what, part, whole, floor in (
            ("length", "tokens a row", "num_tokens", "num_rows", MIN_LENGTH_SHARE),
            ("entropy", "entropy a token", "entropy_sum", "num_tokens", MIN_ENTROPY_SHARE),
        ):
            if part not in figures or not figures["num_tokens"]:
                continue
            (first, newest), value = self._memory[name], figures[part] / figures[whole]
            if len(first) < TREND_STEPS:
                first.append(value)
                continue
            newest[:] = [*newest, value][-TREND_STEPS:]
            start = math.fsum(first)
            if len(newest) == TREND_STEPS and start > 0 and (share := math.fsum(newest) / start) < floor:
                words = f"{what} of the last {TREND_STEPS} steps is {share:.1%} of that of the first."
                yield f"{name}_collapse", words, {"share": share, "newest": value}

    def state_dict(self) -> dict[str, Any]:
        return deepcopy(self._memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memory |= deepcopy({name: state[name] for name in self._memory if name in state})


def mean_drift(figures: Figures) -> float:
    """Mean distance of sampling and training log-probability, nats; 0 where none is known."""
    return figures["drift_sum"] / figures["num_drift_tokens"] if figures.get("num_drift_tokens") else 0.0


class ChecksThatSpeak(TrainerCallback):
    """Measures each micro-step, judges each step between its gradients and its update, and writes what it finds.
    ``findings`` were said since ``begin``; ``judgement`` is the memory of the checks, which a checkpoint keeps.
    """

    def __init__(self, trainer: Any, lines: StepLines) -> None:
        self._trainer, self._lines = trainer, lines
        self._step_tensors: tuple[Tensor, Tensor | None] | None = None
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier run of this trainer left; a checkpoint is read afterwards."""
        self.judgement = Judgement()
        self.findings: tuple[Finding, ...] = ()
        self._begin_step()

    def _begin_step(self) -> None:
        self._figures: list[Figures] = []
        self._inputs: Mapping[str, Any] = {}
        self._bad_cause = self._first_part = ""

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1

    def take_logps(self, answer: Any) -> None:
        """What TRL's ``_get_per_token_logps_and_entropies`` gave; with gradient it is for the policy loss."""
        if torch.is_grad_enabled():
            self._step_tensors = answer[0].detach(), answer[1]

    def after_loss(self, inputs: Any, loss: Any, channels: Mapping[str, Any]) -> None:
        """Measure what the loss, and the further channels by name, have just made; keep the batch of one that is not finite."""
        kept, self._step_tensors = self._step_tensors, None
        if kept is None:
            return
        logps, entropies = kept
        figures = micro_step_figures(
            inputs,
            loss=loss,
            policy_logp_BT=logps,
            entropy_BT=entropies,
            pad_token_id=self._trainer._tokenizer.pad_token_id,  # noqa: SLF001 - TRL's only name
            masks_truncated=bool(self._trainer.args.mask_truncated_completions),
            channels=channels,
        )
        self._figures.append(figures)
        self._inputs = inputs
        if not self._first_part and mean_drift(figures) > MAX_TOKEN_DRIFT:
            self._first_part = self._words_on_drift(inputs, logps)
        if not figures["is_finite"]:
            self._note_bad("the loss")

    def note_grad_norm(self, grad_norm: Any) -> None:
        """Under fp16 a gradient that overflows is the scaler's business: it skips the step and lowers its factor."""
        has_scaler = self._trainer.accelerator.scaler is not None
        if grad_norm is not None and not has_scaler and not math.isfinite(float(grad_norm)):
            self._note_bad("the gradient")

    def after_generation(self, generation: Generation) -> None:
        """Count groups over all processes, and keep what is known of importance weights. A collective call."""
        self._figures += generation.importance
        arguments, output = self._trainer.args, generation.batch
        mask_BT = output["completion_mask"].bool()
        length_B = mask_BT.sum(-1)
        last_B = output["completion_ids"].gather(1, (length_B - 1).clamp(min=0)[:, None])[:, 0]
        ends = torch.as_tensor(list(self._trainer.eos_token_ids), device=last_B.device)
        is_cut_B = (length_B >= arguments.max_completion_length) & ~torch.isin(last_B, ends)
        if arguments.mask_truncated_completions:  # TRL has emptied the masks of those rows
            is_cut_B |= length_B == 0
        is_whole = is_cut_B.numel() % arguments.num_generations == 0
        groups_KG = is_cut_B.view(-1, arguments.num_generations if is_whole else is_cut_B.numel())
        share = sum(gathered(float(groups_KG.all(-1).float().mean()))) / num_processes()
        num_groups = float(len(generation.is_dull_G))
        counts = {"num_groups": num_groups, "num_truncated": share * num_groups}
        self.judgement.note_generation(num_dull=float(sum(generation.is_dull_G)), **counts)

    def extra_loss(self, model: Any, inputs: Mapping[str, Any]) -> None:
        """None: checks change no gradient."""

    def state_dict(self) -> dict[str, Any]:
        return self.judgement.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.judgement.load_state_dict(state)

    def _words_on_drift(self, inputs: Any, logps: Tensor) -> str:
        old_BT, sampled_BT = inputs.get("old_per_token_logps"), inputs["sampling_per_token_logps"]
        mine_BT = logps if old_BT is None else old_BT
        distance_BT, _ = losses.sampler_distance(mine_BT, sampled_BT, loss_mask(inputs))
        parts_BT = distance_BT.double() > MAX_TOKEN_DRIFT  # as the mean is compared
        position, row = parts_BT.T.nonzero()[0].tolist()  # of all rows the earliest position
        mine, theirs = (each[row, position].item() for each in (mine_BT, sampled_BT))
        token = int(inputs["completion_ids"][row, position])
        text = str(self._trainer._tokenizer.decode([token]))[:40]  # noqa: SLF001 - TRL's only name
        turn = ""
        if "tool_mask" in inputs:  # a turn begins where sampled ids follow what was not sampled
            sampled = [0, *inputs["tool_mask"][row, : position + 1].tolist()]
            turn = f" (turn {sum(b > a for a, b in pairwise(sampled)) - 1})"
        return (
            f"they part first at token {position}{turn} of row {row}, id {token} {text!r} "
            f"({theirs:.3f} sampled, {mine:.3f} in training)"
        )

    @property
    def _bad_batches(self) -> Path:
        own: RunFolder | None = self._trainer.run_folder
        return (own or RunFolder(Path(str(self._trainer.args.output_dir)))).bad_batches

    def _note_bad(self, cause: str) -> None:
        if self._bad_cause:
            return
        self._bad_cause, folder = cause, self._bad_batches
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: part.cpu() for name, part in self._inputs.items() if isinstance(part, Tensor)}
        torch.save(kept, folder / f"step-{self._step:06d}-process-{process_rank()}.pt")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All micro-steps of the step are done, its update is not: judge it, and skip it where it is bad."""
        rows, causes, parts = zip(*gathered((self._figures, self._bad_cause, self._first_part)), strict=True)
        self._begin_step()
        figures = of_step([row for of_process in rows for row in of_process])
        bad, first_part = (next(filter(None, words), "") for words in (causes, parts))
        if bad and (self._trainer.accelerator.scaler is None or self._trainer.args.max_grad_norm > 0):
            # Without gradients an optimizer leaves weights and moments alone. A scaler that has not looked at them yet,
            # which is without a limit of their norm, needs them and skips the step by itself.
            kwargs["optimizer"].zero_grad(set_to_none=True)
        metrics = self._trainer._metrics["train"]  # noqa: SLF001 - TRL's only name
        if figures.get("num_drift_tokens"):
            metrics["checks/token_drift"].append(mean_drift(figures))
            metrics["checks/token_drift_max"].append(figures["drift_max"])
        if "policy_effective_share" in figures:
            metrics["checks/effective_sample_size"].append(figures["policy_effective_share"])
        findings = self.judgement.judge(self._step, figures, bad=bad, first_part=first_part)
        self.findings = (*self.findings, *findings)
        for row in (finding.row() for finding in findings) if process_rank() == 0 else ():
            logger.warning("%s: %s Next: %s", row["code"], row["sentence"], row["fix"])
            if self._trainer.run_folder is not None:
                append_jsonl(self._trainer.run_folder.checks, row)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        num_bad = self.judgement.num_bad_in_a_row
        if num_bad >= NUM_BAD_STEPS:
            self._lines.finish_broken(state.global_step)
            words = f"{num_bad} steps in a row had a loss or gradient that is not finite; none was taken."
            fix = "look at the batches there; lower trl.learning_rate, and train in float32 or bf16 instead of fp16."
            raise InputError("CR0770", words, where=str(self._bad_batches), fix=fix)


def micro_step_figures(
    inputs: Mapping[str, Any],
    *,
    loss: Tensor,
    policy_logp_BT: Tensor,
    entropy_BT: Tensor | None,
    pad_token_id: int,
    masks_truncated: bool,
    channels: Mapping[str, Any],
) -> dict[str, float]:
    """What could be measured of one micro-step, by name: ``num_*`` are counts, ``*_sum`` are to be added up over micro-steps.

    ``policy_logp_BT`` is of the weights at hand; ``channels`` has the values of the further loss channels. With
    ``masks_truncated`` rows without any mask are meant, and are no fault.
    """
    completion_mask_BT, mask_BT = inputs["completion_mask"].bool(), loss_mask(inputs).bool()
    prompt_mask_BP, is_pad_BT = inputs["prompt_mask"].bool(), inputs["completion_ids"] == pad_token_id
    advantages = inputs["advantages"]
    is_paid_B = (advantages != 0).reshape(advantages.size(0), -1).any(-1)
    is_empty_B = ~mask_BT.any(-1)
    is_fault_B = is_empty_B & completion_mask_BT.any(-1) if masks_truncated else is_empty_B
    scalars: dict[str, Tensor] = {
        "is_finite": torch.isfinite(loss.detach()),
        "num_tokens": mask_BT.sum(),
        "num_rows": torch.tensor(mask_BT.size(0)),
        "num_paid_rows": (is_paid_B & ~is_empty_B).sum(),
        "num_unpaid_rows": (is_paid_B & is_fault_B).sum(),
        "num_rows_over_padding": losses.rows_over_padding(
            prompt_mask_BP, completion_mask_BT, is_pad_BT
        ).sum(),
    }
    if entropy_BT is not None:
        scalars["entropy_sum"] = (entropy_BT.detach() * mask_BT).sum()
    if (old_BT := inputs.get("old_per_token_logps")) is not None:
        scalars["policy_effective_share"] = losses.effective_share((policy_logp_BT - old_BT)[mask_BT].exp())
    if (sampled_BT := inputs.get("sampling_per_token_logps")) is not None:
        mine_BT = policy_logp_BT if old_BT is None else old_BT
        distance_BT, known_BT = losses.sampler_distance(mine_BT, sampled_BT, mask_BT)
        scalars |= {"drift_sum": distance_BT.double().sum(), "num_drift_tokens": known_BT.sum()}
        scalars["drift_max"] = functional.pad(distance_BT, (0, 1)).max()  # 0 where no row has a token
    scalars |= {f"channel/{name}": torch.as_tensor(value).detach().abs() for name, value in channels.items()}
    numbers = [value.double().reshape(()).to(mask_BT.device) for value in scalars.values()]
    return dict(zip(scalars, torch.stack(numbers).tolist(), strict=True))
