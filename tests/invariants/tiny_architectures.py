"""Tiny random models of many families; what is peculiar to a family is switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING: dict[str, Any] = {"head_dim": 8, "sliding_window": 6, "layer_types": HYBRID}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

Build = Callable[[dict[str, Any]], Any]
MODELS: dict[str, Build] = {
    "llama": lambda sizes: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)),
    "llama-eager": lambda sizes: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, attn_implementation="eager")),
    "qwen2": lambda sizes: tf.Qwen2ForCausalLM(tf.Qwen2Config(**sizes)),
    "qwen3": lambda sizes: tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes, head_dim=8)),
    "gemma3-hybrid": lambda sizes: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**sizes, **SLIDING)),
    "gemma2-softcap": lambda sizes: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**sizes, **SLIDING, final_logit_softcapping=3.0)
    ),
    "mixtral": lambda sizes: tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, **EXPERTS)),
    "gpt-oss-sinks": lambda sizes: tf.GptOssForCausalLM(tf.GptOssConfig(**sizes, **SLIDING, **EXPERTS)),
    "deepseek-v3-latent": lambda sizes: tf.DeepseekV3ForCausalLM(  # Kimi-K2's
        tf.DeepseekV3Config(
            **sizes | {"num_key_value_heads": 4},
            moe_intermediate_size=16,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        )
    ),
}
HEADS: dict[str, Build] = {
    "cohere-times": lambda sizes: tf.CohereForCausalLM(tf.CohereConfig(**sizes, logit_scale=0.25)),
    "granite-divided": lambda sizes: tf.GraniteForCausalLM(tf.GraniteConfig(**sizes, logits_scaling=4.0)),
    "hyperclovax-times": lambda sizes: tf.HyperCLOVAXForCausalLM(
        tf.HyperCLOVAXConfig(**sizes, logits_scaling=0.25)
    ),
    "qwen3-tied": lambda sizes: tf.Qwen3ForCausalLM(
        tf.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True)
    ),
    "mixtral-router-loss": lambda sizes: tf.MixtralForCausalLM(
        tf.MixtralConfig(**sizes, **EXPERTS, output_router_logits=True)
    ),
}
"""Ways from the last hidden states to logits, and a model whose forward brings a loss of its router."""


def tiny_model(name: str, vocab_size: int) -> Any:
    torch.manual_seed(3)
    return (MODELS | HEADS)[name](SIZES | {"vocab_size": vocab_size})
