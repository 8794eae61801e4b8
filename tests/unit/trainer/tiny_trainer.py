"""Build a ``ComposerReplicationTrainer`` on a tiny random model; usable from a plain subprocess too."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from composer_replication.records import HintedTurn, Rollout
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer

PROMPTS = ("def add(a, b):", "def twice(x):", "def first(s):", "def size(c):")
_OURS = (
    *"heldout_guard heldout_eval_fn strict_killswitch alpha_sdpo hints hint_source".split(),
    *"beta_replay replay replay_pairs prefix_sharing is_finished policy_options prompt_source".split(),
    *"checks rollout_func run_folder stateful split_fingerprint run_identity callbacks eval_dataset".split(),
)


class KillAt(TrainerCallback):
    """SIGKILL in the middle of a step: nothing can be flushed, closed or finished."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class HintEveryTurn:
    """Hints of three ids after the first prompt id, for every turn of a row whose reward is below ``until``."""

    def __init__(self, until: float = math.inf) -> None:
        self.until = until
        self.seen: list[Rollout] = []

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[list[HintedTurn]]:
        self.seen = list(rollouts)
        return [
            [
                HintedTurn(
                    t.prompt_ids, (*t.prompt_ids[:1], 90, 91, 92, *t.prompt_ids[1:]), t.completion.token_ids
                )
                for t in rollout.turns
                if rollout.reward is not None and rollout.reward < self.until
            ]
            for rollout in rollouts
        ]


def shifted_rollouts(shift: float, token: int = 0) -> Callable[[Any, Any], dict[str, Any]]:
    """Rollouts whose engine thinks each token from that one on ``shift`` nats likelier than the trainer does."""

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [list(trainer.processing_class(text=prompt)["input_ids"]) for prompt in prompts]
        answers = [[70 + 3 * n, 80, 90 + n, 100] for n in range(len(prompts))]
        logprobs = []
        with torch.no_grad():
            for prompt, answer in zip(ids, answers, strict=True):
                table = trainer.model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(-1)
                own = [table[len(prompt) - 1 + t, token_id].item() for t, token_id in enumerate(answer)]
                logprobs.append([value + shift * (t >= token) for t, value in enumerate(own)])
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": logprobs}

    return roll_out


def tiny_tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<eos>", *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_model(seed: int = 0, vocab_size: int = 258) -> Any:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
            tie_word_embeddings=True,
        )
    )


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def share_of_low_bytes(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that varies between samples and needs nothing."""
    return [sum(ord(letter) < 100 for letter in text) / max(len(text), 1) for text in completions]


def build_trainer(
    *,
    output_dir: Path,
    lora_adapter: bool = False,
    seed: int = 0,
    trainer_class: type[GRPOTrainer] = ComposerReplicationTrainer,
    reward: Callable[..., list[float]] = share_of_low_bytes,
    num_prompts: int = 4,
    model: Any = None,
    processing_class: Any = None,
    **settings: Any,
) -> Any:
    """Keyword arguments of the trainer go to the trainer, all others to ``GRPOConfig``."""
    ours = {name: settings.pop(name) for name in _OURS if name in settings}
    config: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": False,
        "seed": seed,
        **settings,
    }
    prompts = [PROMPTS[index % len(PROMPTS)] + " " * (index // len(PROMPTS)) for index in range(num_prompts)]
    return trainer_class(
        model=tiny_model(seed) if model is None else model,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=processing_class or tiny_tokenizer(),
        peft_config=lora() if lora_adapter else None,
        **ours,
    )
