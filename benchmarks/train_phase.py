"""Claim: the train phase of a GRPO step takes a fraction of the time that stock TRL needs, by prefix sharing.

One run gives the seconds of loss, backward and optimizer step for one group of 8 under three trainers with equal
weights, on the same rows: TRL's ``GRPOTrainer``; ours with everything off, which should cost nothing; ours with
``prefix_sharing``. The first step's gradients are compared (relative distance under 1e-4). The trainers take turns
in this process and the best repetition of each counts, in CPU time on the processor, so that other load counts
little. All rows have full length: no padding flatters either side.

Gradient checkpointing is off for all, or on for all with ``--checkpointing``. What stands against sharing is printed.
With ``--whole-step`` sampling, rewards and advantages are part of it: TRL samples with transformers' generate, ours with
one prefill a prompt. The tokens then differ between the trainers, their number hardly (a row ends early at one in 8,192).

    python benchmarks/train_phase.py [--prompts 128 512 2048] [--completions 26 256] [--repetitions 2] [--threads 1]
                                     [--hidden 512] [--layers 4]   # of the model
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from command_line import options
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.tiny_models import make_tiny_model

GROUP, VOCABULARY = 8, 8192
GOALS = {
    (128, 26): (2.5, 1.5), (512, 26): (4.5, 2.5), (2048, 26): (6.0, 4.5),
    (128, 256): (1.2, 1.05), (512, 256): (1.8, 1.2), (2048, 256): (3.2, 1.8),
}  # fmt: skip
"""By lengths of prompt and completion: how many times as fast the train phase is, and the whole step."""
TOLERANCE = 1e-4
STOCK, OFF, SHARED = "TRL", "ours, off", "ours, shared"
now = time.perf_counter if torch.cuda.is_available() else time.process_time


def build(kind: str, folder: Path, arguments: Namespace) -> Any:
    """A trainer over a random Llama; the same weights for every kind."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 11 // 4,
            num_hidden_layers=arguments.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    if arguments.checkpointing:
        model.gradient_checkpointing_enable()
    trainer_class: Any = GRPOTrainer if kind == STOCK else ComposerReplicationTrainer
    trainer = trainer_class(
        model=model,
        reward_funcs=[lambda completions, **_columns: [0.0] * len(completions)],
        args=GRPOConfig(
            output_dir=str(folder / "checkpoints"),
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
            max_completion_length=arguments.num_completion,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=arguments.checkpointing,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["x" * arguments.num_prompt] * GROUP}),  # a token a letter
        processing_class=make_tiny_model(0)[1],
        **({"prefix_sharing": True} if kind == SHARED else {}),
    )
    trainer.model.train()
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def make_rows(num_prompt: int, num_completion: int, device: torch.device) -> dict[str, torch.Tensor]:
    """One group as the trainer has it after sampling."""
    generator = torch.Generator().manual_seed(num_prompt)
    prompt = torch.randint(2, VOCABULARY, (1, num_prompt), generator=generator).repeat(GROUP, 1)
    completion = torch.randint(2, VOCABULARY, (GROUP, num_completion), generator=generator)
    rows = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": torch.linspace(-1.0, 1.0, GROUP),
        "num_items_in_batch": torch.tensor(float(completion.numel())),
    }
    return {name: tensor.to(device) for name, tensor in rows.items()}


def train_once(trainer: Any, rows: dict[str, torch.Tensor] | None = None) -> float:
    """Seconds of loss, backward and update; without rows those of a whole step. The gradients stay until the next call."""
    trainer.optimizer.zero_grad()
    prompts = [dict(trainer.train_dataset[0]) for _ in range(GROUP)]
    began = now()
    if rows is None:
        trainer.training_step(trainer.model, prompts, None)
    else:
        trainer.accelerator.backward(trainer.compute_loss(trainer.model, rows))
    trainer.optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return now() - began


def gradient(trainer: Any) -> torch.Tensor:
    """Of all weights, in one row."""
    return torch.cat(
        [weight.grad.flatten() for weight in trainer.model.parameters() if weight.grad is not None]
    )


def compare(num_prompt: int, num_completion: int, arguments: Namespace) -> str:
    """One line of the table."""
    arguments = Namespace(**vars(arguments), num_prompt=num_prompt, num_completion=num_completion)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainers = {kind: build(kind, Path(folder), arguments) for kind in (STOCK, OFF, SHARED)}
        rows = make_rows(num_prompt, num_completion, trainers[STOCK].accelerator.device)
        for trainer in trainers.values():
            train_once(trainer, rows)  # warms up, too
        expected = gradient(trainers[STOCK])
        for kind in (OFF, SHARED):
            distance = float((gradient(trainers[kind]) - expected).norm() / expected.norm())
            if not distance < TOLERANCE:
                raise SystemExit(f"{kind} has other gradients than TRL: relative distance {distance:.1e}")
        timed_rows = None if arguments.whole_step else rows
        rounds = [
            [train_once(trainer, timed_rows) for trainer in trainers.values()]
            for _ in range(arguments.repetitions)
        ]
        stock, off, shared = (min(times) for times in zip(*rounds, strict=True))
    reasons, speed_up, verdict = trainers[SHARED].shared_prompts.off_reasons, stock / shared, "-"
    if goals := GOALS.get((num_prompt, num_completion)):
        goal = goals[arguments.whole_step]
        verdict = f"{goal}x {'met' if speed_up >= goal else 'missed'}"
    return (
        f"{num_prompt:>6} {num_completion:>4} {stock:>8.2f} {off:>10.2f} {shared:>13.2f}"
        f" {off / stock - 1:>9.1%} {speed_up:>8.2f}x {verdict:>12}  {' '.join(reasons)}".rstrip()
    )


def main() -> None:
    """Print one line for each pair of lengths."""
    sizes = {"prompts": [128, 512, 2048], "completions": [26, 256], "hidden": 512, "layers": 4}
    switches = {"checkpointing": False, "whole_step": False}
    arguments = options(__doc__, **sizes, repetitions=2, threads=1, **switches)
    torch.set_num_threads(arguments.threads)
    print(f"Llama, {arguments.layers} layers of {arguments.hidden}, V = {VOCABULARY}, float32, group {GROUP}")
    print(f"{'P':>6} {'C':>4} {STOCK:>8} {OFF:>10} {SHARED:>13} {'overhead':>9} {'speed-up':>9} {'goal':>12}")
    for num_completion in arguments.completions:
        for num_prompt in arguments.prompts:
            print(compare(num_prompt, num_completion, arguments), flush=True)


if __name__ == "__main__":
    main()
