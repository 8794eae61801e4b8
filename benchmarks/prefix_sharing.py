"""Claim: sharing the prompt makes log-probabilities of a GRPO group several times cheaper.

Prints seconds of forward and backward for the plain forward (prompt and completion for every row, as
TRL does it), for the shared one, and their ratio, beside the ratio of token counts
G (P + C) / (P + G C), which bounds it for large models. Peer and ours run interleaved in this process
on a small random Llama; the best of the repetitions counts, since other load only adds time.

    python benchmarks/prefix_sharing.py [--threads 1] [--repetitions 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from composer_replication.trainer.prefix_sharing import shared_prefix_logps

GROUP, COMPLETION, VOCABULARY = 8, 26, 8192
PROMPT_LENGTHS = (128, 512)


def build_model() -> LlamaForCausalLM:
    """Build a Llama of 28 million parameters, wide enough that arithmetic and not overhead is timed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.train()
    return model


def plain_logps(model: LlamaForCausalLM, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
    """Forward every row whole; the head runs on the completion only, which favours the peer."""
    ids = torch.cat([prompts, completions], dim=1)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=completions.size(1) + 1).logits[:, :-1]
    logps: torch.Tensor = logits.float().log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    return logps


def shared_logps(model: LlamaForCausalLM, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
    """Forward the prompt once."""
    masks = torch.ones_like(prompts), torch.ones_like(completions)
    logps, _ = shared_prefix_logps(model, prompts, masks[0], completions, masks[1], temperature=1.0)
    return logps


def time_step(
    logps_of: Callable[[LlamaForCausalLM, torch.Tensor, torch.Tensor], torch.Tensor],
    model: LlamaForCausalLM,
    prompts: torch.Tensor,
    completions: torch.Tensor,
) -> tuple[float, torch.Tensor]:
    """Time one forward and backward."""
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    logps = logps_of(model, prompts, completions)
    torch.autograd.backward(logps.mean())
    return time.perf_counter() - started, logps.detach()


def main() -> None:
    """Print one line per prompt length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = build_model()
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"Llama {parameters:.0f}M float32, G={GROUP}, C={COMPLETION}, {arguments.threads} thread(s)")
    print(f"{'P':>5} {'plain s':>9} {'shared s':>9} {'shared/plain':>13} {'speed-up':>9} {'token bound':>12}")
    for length in PROMPT_LENGTHS:
        prompts = torch.randint(VOCABULARY, (1, length)).expand(GROUP, -1)
        completions = torch.randint(VOCABULARY, (GROUP, COMPLETION))
        plain_times, shared_times = [], []
        for _ in range(arguments.repetitions + 1):  # the first round warms up and is dropped
            plain_seconds, expected = time_step(plain_logps, model, prompts, completions)
            shared_seconds, actual = time_step(shared_logps, model, prompts, completions)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
            plain_times.append(plain_seconds)
            shared_times.append(shared_seconds)
        plain, shared = min(plain_times[1:]), min(shared_times[1:])
        bound = GROUP * (length + COMPLETION) / (length + GROUP * COMPLETION)
        cost, gain = shared / plain, plain / shared
        print(f"{length:>5} {plain:>9.2f} {shared:>9.2f} {cost:>13.2f} {gain:>9.1f} {bound:>12.1f}")


if __name__ == "__main__":
    main()
