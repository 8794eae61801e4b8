"""Every reason against sharing is said, and none is said without cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from composer_replication.trainer.model_modes import inner_model, packing_reason, sampling_reason

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def llama(**settings: Any) -> torch.nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **settings)).train()


def lora(dropout: float) -> torch.nn.Module:
    return get_peft_model(llama(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=dropout)).train()


def with_attention(name: str) -> torch.nn.Module:
    model = llama()
    model.config._attn_implementation = name
    return model


def with_config(**settings: Any) -> torch.nn.Module:
    model = llama()
    for key, setting in settings.items():
        setattr(model.config, key, setting)
    return model


STRUCTURE: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "not transformers": (lambda: torch.nn.Linear(2, 2), "not a transformers model"),
    "recurrent": (
        lambda: tf.MambaForCausalLM(tf.MambaConfig(vocab_size=23, hidden_size=16, num_hidden_layers=1)),
        "recurrent or convolution layers",
    ),
    "convolution": (
        lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
        "not a plain key-value cache",
    ),
    "chunked": (
        lambda: with_config(layer_types=["chunked_attention"] * 2, attention_chunk_size=8),
        "chunked",
    ),
    "bidirectional": (lambda: with_config(use_bidirectional_attention=True), "both directions"),
    "dynamic rope": (lambda: llama(rope_parameters=DYNAMIC), "type dynamic"),
    "long rope": (lambda: llama(rope_parameters=LONG), "type longrope"),
    "prompt tuning": (
        lambda: get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "virtual tokens",
    ),
    "activated adapter": (
        lambda: get_peft_model(
            llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3])
        ),
        "activated LoRA",
    ),
}
MODE: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "flash": (lambda: with_attention("flash_attention_2"), "takes no mask of ours: set it to sdpa"),
    "alibi": (
        lambda: tf.FalconForCausalLM(
            tf.FalconConfig(**SIZES, alibi=True, attention_dropout=0.0, hidden_dropout=0.0)
        ),
        "takes no positions",
    ),
    "windows": (
        lambda: with_config(layer_types=["sliding_attention", "full_attention"], sliding_window=4),
        "layers of sliding_attention",
    ),
    "attention dropout": (lambda: llama(attention_dropout=0.1), "attention_dropout 0.1"),
    "dropout module": (
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2)).train(),
        "0.1 acts in",
    ),
    "LoRA dropout": (lambda: lora(0.05), "dropout 0.05"),
    "router noise": (
        lambda: tf.MixtralForCausalLM(
            tf.MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.01)
        ).train(),
        "router_jitter_noise 0.01",
    ),
}


@pytest.mark.parametrize("name", [*STRUCTURE, *MODE])
def test_the_reason_is_one_sentence_that_names_the_cause(name: str) -> None:
    """What only training does is no reason against sampling; what cannot be sampled cannot be packed either."""
    build, cause = (STRUCTURE | MODE)[name]
    model = build()
    reason = packing_reason(model) if name in MODE else sampling_reason(model)
    assert (sampling_reason(model) is None) if name in MODE else packing_reason(model.eval())
    assert reason is not None
    assert cause in reason
    assert reason.endswith(".")
    assert "\n" not in reason


@pytest.mark.parametrize(
    "build",
    [
        llama,
        lambda: lora(0.0),
        lambda: llama(rope_parameters=YARN),
        lambda: with_config(classifier_dropout=0.3),
    ],
)
def test_a_plain_model_is_supported(build: Callable[[], torch.nn.Module]) -> None:
    assert packing_reason(build()) is None


class Engine(torch.nn.Module):
    """As DeepSpeed's engine: a wrapper with a configuration of its own, and its model's attributes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = {"zero_optimization": {"stage": 3}}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@pytest.mark.parametrize("build", [lambda: lora(0.0), with_config], ids=["adapter", "all weights"])
def test_an_engine_is_looked_through(build: Callable[[], torch.nn.Module]) -> None:
    model = build()
    assert inner_model(Engine(model)) is inner_model(model)
    assert packing_reason(Engine(model)) is None


def test_wrappers_are_looked_through() -> None:
    model = lora(0.0)
    base = inner_model(model)
    assert type(base).__name__ == "LlamaForCausalLM"
    assert inner_model(torch.nn.DataParallel(model)) is base
    assert inner_model(torch.compile(model)) is base
    assert packing_reason(torch.nn.DataParallel(lora(0.05))) is not None
    assert packing_reason(torch.nn.DataParallel(STRUCTURE["prompt tuning"][0]())) is not None
    assert packing_reason(torch.nn.DataParallel(model)) is None
