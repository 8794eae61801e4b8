"""The checks that need a GPU, one table: ``make gpu``. Without a GPU it says so and ends with 3.

Each check runs in a process of its own, so that one that runs out of memory says nothing of the next, and the peak is its own.
A check that takes longer than its share of 20 minutes is ended and named.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS = 180
DEVICE = "cuda"
NUM_TOKENS = 1024
NUM_HEAD_TOKENS = 16_384
MODEL = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 150_000}


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = MODEL | {"intermediate_size": 4096, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    with torch.device(DEVICE):
        return LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)


def training_step() -> dict[str, float]:
    """One step of forward, backward and update in bf16: 8 rows of 1,024 tokens."""
    import torch

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, MODEL["vocab_size"], (8, NUM_TOKENS), device=DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return {"loss": float(loss)}


def packed_prompts() -> dict[str, float]:
    """Log-probabilities of 16 rows of 2 prompts: each prompt once, against each row whole."""
    import torch
    from trl.trainer.utils import add_fused_lm_head

    from composer_replication.trainer.packed_rows import shared_prefix_logps

    model = _model().eval()
    add_fused_lm_head(model)
    prompts = torch.randint(1, 1000, (2, NUM_TOKENS), device=DEVICE).repeat_interleave(8, 0)
    answers = torch.randint(1, 1000, (16, 256), device=DEVICE)
    ones = torch.ones_like
    with torch.no_grad():
        shared, _ = shared_prefix_logps(model, prompts, ones(prompts), answers, ones(answers))
        whole = model(input_ids=torch.cat([prompts, answers], 1), logits_to_keep=257).logits[:, :-1]
        plain = whole.float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    return {"mean_difference": float((shared.float() - plain).abs().mean())}


def head_memory() -> dict[str, float]:
    """Log-probabilities of 16,384 tokens over 150,000 ids, tile by tile: a whole tensor of them takes 9.8 GB."""
    import torch

    from composer_replication.losses.chunked_head import sampled_logp

    hidden = torch.randn(
        NUM_HEAD_TOKENS, MODEL["hidden_size"], device=DEVICE, dtype=torch.bfloat16, requires_grad=True
    )
    weight = torch.randn(
        MODEL["vocab_size"], MODEL["hidden_size"], device=DEVICE, dtype=torch.bfloat16, requires_grad=True
    )
    ids = torch.randint(0, MODEL["vocab_size"], (NUM_HEAD_TOKENS,), device=DEVICE)
    sampled_logp(hidden, weight, ids).sum().backward()
    return {}


def heldout_reading() -> dict[str, float]:
    """Sampling 64 answers of 128 tokens behind shared prompts, as a held-out reading does."""
    import torch

    from composer_replication.trainer.policy import ModelSampler

    model = _model().eval()
    prompts = [tuple(range(first, first + NUM_TOKENS)) for first in (1, 2)]
    with torch.no_grad():
        rows = ModelSampler(model, None, SimpleNamespace(pad_token_id=0), eos_token_ids=(0,)).sample(
            prompts,
            32,
            max_new_tokens=128,
            temperature=1.0,
            generator=torch.Generator(DEVICE).manual_seed(0),
        )
    return {"tokens": float(sum(len(row.ids) for group in rows for row in group))}


def episodes(*settings: str) -> dict[str, float]:
    """Two steps of ``recipes/tiny-tools``: attempts of several turns in sandboxes, their tokens scored again by the trainer."""
    from composer_replication.cli.main import main as composer_rl

    out = ROOT / "build" / f"gpu-day-{int(time.time())}"
    words = [word for setting in settings for word in ("--set", setting)]
    recipe = str(ROOT / "recipes" / "tiny-tools" / "run.toml")
    if exit_code := composer_rl(["train", recipe, "--out", str(out), "--quiet", *words]):
        sys.exit(exit_code)  # its last line says why
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {"token_drift": max(row["checks/token_drift"] for row in rows)}


def colocated_vllm() -> dict[str, float]:
    """The same with vLLM in the trainer's process."""
    return episodes(
        "trl.use_vllm=true", "trl.vllm_gpu_memory_utilization=0.3", "agent.max_context_tokens=4096"
    )


CHECKS: dict[str, Callable[[], dict[str, float]]] = {
    "training step, bf16": training_step,
    "packed prompts": packed_prompts,
    "memory of the head": head_memory,
    "held-out reading": heldout_reading,
    "episodes of several turns": episodes,
    "vLLM beside the trainer": colocated_vllm,
}


def run_one(name: str) -> None:
    """One check, its figures as one line of JSON at the end of standard output."""
    import torch

    started = time.monotonic()
    figures = CHECKS[name]()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(json.dumps({"seconds": round(time.monotonic() - started, 1), "peak_gb": round(peak, 2), **figures}))


def main() -> int:
    """Every check, or the one that is named."""
    if len(sys.argv) == 2:
        run_one(sys.argv[1])
        return 0
    import torch

    if not torch.cuda.is_available():
        print("make gpu: there is no GPU here; nothing was measured.", file=sys.stderr)
        return 3
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n| check | outcome |\n|---|---|",
        flush=True,
    )
    num_failed = 0
    for name in CHECKS:
        if "vLLM" in name and find_spec("vllm") is None:
            print(f"| {name} | skipped: vllm is not installed |", flush=True)
            continue
        try:
            done = subprocess.run(
                [sys.executable, __file__, name],
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
                check=False,
            )
            lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["?"]
            outcome, is_good = lines[-1][:200], done.returncode == 0
        except subprocess.TimeoutExpired:
            outcome, is_good = f"not through after {MOST_SECONDS} s", False
        num_failed += not is_good
        print(f"| {name} | {'' if is_good else 'FAILED: '}{outcome} |", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
