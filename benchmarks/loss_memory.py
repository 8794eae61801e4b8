"""Claim: the losses need a small part of the memory that full logits need, and less than their peers.

One run gives peak memory and seconds of forward and backward from hidden states to the gradients of hidden
states and head, for two jobs: log-probability of sampled tokens, and distillation on the
student's top 100 with a tail. Peers: full logits in plain torch; TRL's fused head; TRL's SDPO losses on
full logits; TRL's tiled divergence (whole vocabulary, no top k); Liger's chunked GRPO and Jensen-Shannon losses
where liger_kernel can be imported (where not, the reason is printed). All run in this process on the same numbers,
and their losses are compared.

Memory is what torch's allocator hands out above what stood before (hidden states, head, and the head's
gradient buffer, which every method adds to): the profiler's events on CPU, max_memory_allocated on CUDA.
The figure that the goals speak of is 3 * 4 * T * V bytes: logits, softmax and gradient in float32. Each table ends
with the goals and whether "ours, in place" meets them: an eighth of that figure, a quarter of TRL's fused head, and
no more bytes than the thriftiest peer at 1.2 times that peer's seconds at most. None of them changes the exit code.

    python benchmarks/loss_memory.py [--tokens 256 1024 4096] [--hidden 576 1024 2048] [--threads 1] [--repetitions 2]

``--repetitions`` are more runs, without the profiler, of which the best time counts; full logits beyond ``--most-gib`` are left out.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

import torch
from command_line import options

from composer_replication.losses.chunked_head import logp_at, sampled_and_top_k_logp, sampled_logp
from composer_replication.losses.divergence import support_divergence

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
TOP_K, JSD_ALPHA, TRL_TILE = 100, 0.5, 32768  # the tile of TRL's own fused head
LIGER_ROW = 256  # tokens of a completion: Liger's chunk is one
TOLERANCE = 2e-3
OURS, FUSED = "ours, in place", "TRL fused head"


@dataclass
class Setting:
    """Hidden states of student and teacher, the head they share, and the sampled tokens."""

    hidden: torch.Tensor
    teacher_hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Method:
    """One way to the same gradients; ``copies`` is how many float32 logits it holds at least."""

    name: str
    loss: Callable[[Setting], torch.Tensor]
    copies: int = 0
    is_exact_peer: bool = True


def full_logits(case: Setting) -> torch.Tensor:
    """Log-softmax over all logits."""
    logp = (case.hidden @ case.weight.t()).float().log_softmax(-1)
    return logp.gather(1, case.target[:, None]).sum()


def trl_fused_head(case: Setting) -> torch.Tensor:
    """TRL's tiles; the function behind ``fused_lm_head=True``."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    result = ChunkedLogProbFunction.apply(
        case.hidden, case.weight, None, case.target, 1.0, TRL_TILE, None, 1.0, ("log_probs",)
    )
    return result[0].sum()


def our_head(case: Setting) -> torch.Tensor:
    """Our tiles, the head's gradient given to autograd."""
    return sampled_logp(case.hidden, case.weight, case.target).sum()


def our_head_in_place(case: Setting) -> torch.Tensor:
    """Our tiles, the head's gradient added in place."""
    return sampled_logp(case.hidden, case.weight, case.target, adds_to_weight_grad=True).sum()


def trl_sdpo(case: Setting, *, over_top_k: bool) -> torch.Tensor:
    """TRL's SDPO losses on the logits of student and teacher."""
    from trl.experimental.sdpo import loss_utils

    student, options = case.hidden @ case.weight.t(), {"distillation_alpha": JSD_ALPHA}
    with torch.no_grad():
        teacher = case.teacher_hidden @ case.weight.t()
    if over_top_k:
        options |= {"distillation_topk": TOP_K, "distillation_add_tail": True}
        return loss_utils.compute_topk_self_distillation_loss(student, teacher, **options).sum()
    return loss_utils.compute_full_logit_self_distillation_loss(student, teacher, **options).sum()


def trl_tiled_divergence(case: Setting) -> torch.Tensor:
    """TRL's divergence over the whole vocabulary on tiles."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    result = ChunkedDivergenceFunction.apply(
        case.hidden, case.weight, None, case.teacher_hidden, case.weight.detach(), None, JSD_ALPHA, 1.0,
        1.0, None, 1.0, None,
    )  # fmt: skip
    return result[0].sum()


def our_distillation(case: Setting) -> torch.Tensor:
    """Support of the student in one pass, teacher scored on it, the head's gradient in place."""
    _, top_logp, top_index = sampled_and_top_k_logp(
        case.hidden, case.weight, case.target, k=TOP_K, adds_to_weight_grad=True
    )
    with torch.no_grad():
        teacher = logp_at(case.teacher_hidden, case.weight, top_index)
    return support_divergence(top_logp, teacher, jsd_alpha=JSD_ALPHA).sum()


def liger_sampled(case: Setting) -> torch.Tensor:
    """Liger's chunked GRPO loss, whose gradient is minus that of the log-probabilities' mean (its value is constant)."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden = case.hidden.view(-1, math.gcd(LIGER_ROW, case.hidden.size(0)), case.hidden.size(1))
    target = case.target.view(hidden.shape[:2])
    method = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo")
    return method(hidden, case.weight, target, torch.ones_like(target), hidden.new_ones(hidden.size(0)))[0]


def liger_divergence(case: Setting) -> torch.Tensor:
    """Liger's chunked Jensen-Shannon divergence of a linear head (a mean over tokens)."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    how = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "beta": JSD_ALPHA, "compiled": False}
    student, teacher = (case.hidden, case.weight), (case.teacher_hidden, case.weight.detach())
    return LigerFusedLinearJSDLoss(**how)(*student, *teacher, case.target, None, None)


SAMPLED = (
    Method("full logits", full_logits, copies=3),
    Method(FUSED, trl_fused_head),
    Method("ours", our_head),
    Method(OURS, our_head_in_place),
)
DISTILLED = (
    Method("TRL SDPO topk_logits", lambda case: trl_sdpo(case, over_top_k=True), copies=5),
    Method(
        "TRL SDPO full_logits", lambda case: trl_sdpo(case, over_top_k=False), copies=13, is_exact_peer=False
    ),
    Method("TRL tiled divergence", trl_tiled_divergence, is_exact_peer=False),
    Method(OURS, our_distillation),
)


def make_setting(num_tokens: int, hidden_size: int, vocabulary: int, device: str) -> Setting:
    """Random numbers of the size that a trained model has: logits with a spread of about 3."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(device)

    weight = draw(vocabulary, hidden_size, scale=3 / hidden_size**0.5).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    hidden = draw(num_tokens, hidden_size, scale=1.0)
    return Setting(
        hidden=hidden.requires_grad_(),
        teacher_hidden=(hidden.detach() + draw(num_tokens, hidden_size, scale=0.3)),
        weight=weight,
        target=torch.randint(0, vocabulary, (num_tokens,), generator=generator).to(device),
    )


def run_once(method: Method, case: Setting) -> tuple[float, float]:
    """Forward and backward; the loss and the seconds (of CPU time on CPU, so that other load does not count)."""
    clock = time.perf_counter if case.hidden.is_cuda else time.process_time
    case.hidden.grad = None
    start = clock()
    loss = method.loss(case)
    loss.backward()
    value = float(loss.detach())
    if case.hidden.is_cuda:
        torch.cuda.synchronize()
    return value, clock() - start


def run_watched(method: Method, case: Setting) -> tuple[int, float, float]:
    """As ``run_once``; first the most bytes that were allocated at once above what stood before."""
    case.hidden.grad = None
    if case.hidden.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, seconds = run_once(method, case)
        return torch.cuda.max_memory_allocated() - before, loss, seconds
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        loss, seconds = run_once(method, case)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = sorted(json.loads(path.read_text())["traceEvents"], key=itemgetter("ts"))
    changes = (int(event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate(changes, initial=0)), loss, seconds


def compare(job: str, methods: tuple[Method, ...], case: Setting, arguments: Namespace) -> None:
    """One table: memory, its share of full logits, seconds. Each row is printed when it is known."""
    num_tokens, hidden_size = case.hidden.shape
    full = 3 * 4 * num_tokens * case.weight.size(0)
    print(
        f"\n{job}: V = {case.weight.size(0)}, T = {num_tokens}, H = {hidden_size}; 3*4*T*V = {full / 2**20:.0f} MiB"
    )
    losses: list[float] = []
    found: dict[str, tuple[int, float]] = {}
    for method in methods:
        if method.copies * full / 3 > arguments.most_gib * 2**30:
            print(f"  {method.name:24} left out: needs more than {arguments.most_gib} GiB")
            continue
        memory, loss, first = run_watched(method, case)
        seconds = min([first, *(run_once(method, case)[1] for _ in range(arguments.repetitions))])
        found[method.name] = memory, seconds
        ratio = f"1/{full / memory:.1f} of full logits"
        print(f"  {method.name:24} {memory / 2**20:9.1f} MiB  {ratio:24} {seconds:8.2f} s", flush=True)
        losses += [loss] if method.is_exact_peer else []
    if losses and max(losses) - min(losses) > TOLERANCE * abs(losses[0]):
        raise SystemExit(f"the methods disagree about the loss: {losses}")
    print("  goals: " + "; ".join(judge_goals(found, full)), flush=True)


def judge_goals(found: dict[str, tuple[int, float]], full_bytes: int) -> list[str]:
    """Which goals ours meets. ``found`` has bytes and seconds of each method that was run."""
    memory, seconds = found[OURS]
    goals = {"1/8 of full logits": memory <= full_bytes / 8}
    if FUSED in found:
        goals["1/4 of the fused head"] = memory <= found[FUSED][0] / 4
    peers = {name: figures for name, figures in found.items() if not name.startswith("ours")}
    if peers:
        name, (bytes_of_peer, seconds_of_peer) = min(peers.items(), key=lambda item: item[1])
        goals[f"no more bytes than {name}"] = memory <= bytes_of_peer
        goals[f"at most 1.2 of its seconds ({seconds / seconds_of_peer:.2f})"] = (
            seconds <= 1.2 * seconds_of_peer
        )
    return [f"{goal}: {'met' if is_met else 'MISSED'}" for goal, is_met in goals.items()]


def liger_methods() -> tuple[tuple[Method, ...], tuple[Method, ...]]:
    """Liger's for either job; none, and the reason printed, where they cannot be imported."""
    try:
        importlib.import_module("liger_kernel.chunked_loss")
    except ImportError as error:
        print(f"Liger's chunked losses are not measured: {error}")
        return (), ()
    return (
        (Method("Liger GRPO", liger_sampled, is_exact_peer=False),),
        (Method("Liger JSD", liger_divergence, copies=17, is_exact_peer=False),),
    )


def main() -> None:
    """Measure what the arguments say and print it."""
    sizes = {"vocabulary": 151_665, "tokens": [256, 1024, 4096], "hidden": [576, 1024, 2048]}
    how = {"threads": 1, "repetitions": 2, "most_gib": 8.0, "device": "cpu"}
    arguments = options(__doc__, **sizes, **how)
    torch.set_num_threads(arguments.threads)
    more_sampled, more_distilled = liger_methods()
    for hidden_size in arguments.hidden:
        for num_tokens in arguments.tokens:
            case = make_setting(num_tokens, hidden_size, arguments.vocabulary, arguments.device)
            compare("sampled log-probabilities", SAMPLED + more_sampled, case, arguments)
            compare(f"distillation, top {TOP_K} and tail", DISTILLED + more_distilled, case, arguments)


if __name__ == "__main__":
    main()
