"""Claim: the checks that speak take under 1% of a training step.

Trains a small random Llama with everything on, with two clocks: one around each hook of the checks (their
reading of the device included), one around the whole step; on the processor they count the time of this
process. Prints both and the share; exit code 1 where it is above the claim. A larger model only lowers the share:
the hooks read (rows, tokens) tensors.

    python benchmarks/check_cost.py [--threads 1] [--steps 20] [--tokens 64]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig

from composer_replication.run_folder import RunFolder
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.tiny_models import make_tiny_model

CLAIM = 0.01
HOOKS = (
    "_begin_micro_step",
    "_keep_step_tensors",
    "_check_micro_step",
    "_check_generation",
    "_check_importance",
    "_note_grad_norm",
    "judge_step",
    "stop_if_broken",
)
WARM_UP = 3
now = time.perf_counter if torch.cuda.is_available() else time.process_time  # other load does not count


class Clock(TrainerCallback):
    """Seconds of steps and of hooks, the first few steps left out."""

    def __init__(self) -> None:
        self.steps = self.hooks = 0.0
        self.is_on = False
        self._began = 0.0

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = now()
            try:
                return hook(*args, **kwargs)
            finally:
                if self.is_on:
                    self.hooks += now() - began

        return run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - as called
        self.is_on = state.global_step >= WARM_UP
        self._began = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - as called
        if self.is_on:
            self.steps += now() - self._began


def build(folder: Path, num_steps: int, num_tokens: int) -> Any:
    """A Llama of 5 million parameters on 8 rows; with 64 tokens the smallest step that anybody would take."""
    torch.manual_seed(0)
    _, tokenizer = make_tiny_model(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )

    def reward(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    return ComposerReplicationTrainer(
        model=model,
        reward_funcs=[reward],
        args=GRPOConfig(
            output_dir=str(folder / "checkpoints"),
            per_device_train_batch_size=8,
            num_generations=8,
            num_iterations=2,
            max_completion_length=num_tokens,
            max_steps=num_steps + WARM_UP,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [f"def f{n}(x): " + "y = x + 1; " * 10 for n in range(8)]}
        ),
        processing_class=tokenizer,
        prefix_sharing=True,
        run_folder=RunFolder(folder / "run"),
    )


def main() -> int:
    """Measure, print, compare with the claim."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = build(Path(folder), options.steps, options.tokens)
        for name in HOOKS:
            setattr(trainer, name, clock.timed(getattr(trainer, name)))
        trainer.add_callback(clock)
        trainer.train()
    share = clock.hooks / clock.steps
    print(f"steps: {1e3 * clock.steps / options.steps:.1f} ms each, {options.steps} of them")
    print(f"checks: {1e3 * clock.hooks / options.steps:.2f} ms each")
    print(f"share: {share:.2%} (claim: under {CLAIM:.0%})")
    return int(share >= CLAIM)


if __name__ == "__main__":
    sys.exit(main())
