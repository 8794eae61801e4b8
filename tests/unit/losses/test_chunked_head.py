from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.errors import InputError, UsageError
from composer_replication.losses.chunked_head import logp_at, sampled_and_top_k_logp, sampled_logp

SMALL: dict[str, Any] = {"chunk_tokens": 3, "chunk_vocab": 5}


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def plain_logp(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float = 1.0, softcap: float | None = None
) -> torch.Tensor:
    """The whole vocabulary at once."""
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(0, 7),
    v=st.integers(1, 17),
    chunks=st.tuples(st.integers(1, 9), st.integers(1, 20)),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_values_and_gradients_equal_the_plain_head(
    seed: int, n: int, v: int, chunks: tuple[int, int], temperature: float, softcap: float | None
) -> None:
    inputs = [numbers(seed, n, 4), numbers(seed + 1, v, 4)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    target = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap}
    logp = sampled_logp(ours[0], ours[1], target, chunk_tokens=chunks[0], chunk_vocab=chunks[1], **options)
    plain = plain_logp(*theirs, **options)
    want = plain.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logp, want)
    upstream = numbers(seed + 3, n)
    for mine, other in zip(
        torch.autograd.grad(logp, ours, upstream), torch.autograd.grad(want, theirs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, other)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), v=st.integers(2, 17), data=st.data())
def test_top_k_and_picks_equal_the_plain_head(seed: int, v: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, v))
    hidden, weight = numbers(seed, 6, 4), numbers(seed + 1, v, 4)
    plain = plain_logp(hidden, weight, temperature=0.7)
    target = torch.zeros(6, dtype=torch.long)
    _, logp, index = sampled_and_top_k_logp(hidden, weight, target, k=k, temperature=0.7, **SMALL)
    want = plain.topk(k, dim=-1)
    torch.testing.assert_close(logp, want.values)
    assert index.equal(want.indices)
    torch.testing.assert_close(logp_at(hidden, weight, index, temperature=0.7, **SMALL), want.values)


def test_one_pass_gives_sampled_tokens_and_support_with_gradients() -> None:
    inputs = [numbers(1, 7, 4), numbers(2, 13, 4)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    target = torch.randint(0, 13, (7,))
    logp, top_logp, top_index = sampled_and_top_k_logp(
        ours[0], ours[1], target, k=4, softcap=2.0, chunk_tokens=3, chunk_vocab=5
    )
    plain = plain_logp(theirs[0], theirs[1], softcap=2.0)
    top = plain.topk(4, dim=-1)
    picked = plain.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logp, picked)
    torch.testing.assert_close(top_logp, top.values)
    assert top_index.equal(top.indices)
    weights = numbers(3, 7), numbers(4, 7, 4)
    mine = (weights[0] * logp).sum() + (weights[1] * top_logp).sum()
    other = (weights[0] * picked).sum() + (weights[1] * top.values).sum()
    for one, two in zip(torch.autograd.grad(mine, ours), torch.autograd.grad(other, theirs), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("softcap", [None, 1.0])
def test_gradcheck(softcap: float | None) -> None:
    index = torch.tensor([[0, 6, 6], [3, 2, 1]])  # a word picked twice gets both gradients

    def picked(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"temperature": 1.3, "softcap": softcap, **SMALL}
        return logp_at(hidden, weight, index, **options)

    inputs = [numbers(seed, *shape).requires_grad_() for seed, shape in enumerate([(2, 3), (7, 3)])]
    assert torch.autograd.gradcheck(picked, tuple(inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_nearer_the_exact_gradient_than_autograd_is(dtype: torch.dtype) -> None:
    inputs = [numbers(1, 64, 16, dtype=dtype), numbers(2, 300, 16, dtype=dtype)]
    target = torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(1))

    def gradients(run: Callable[..., torch.Tensor], to: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().to(to).requires_grad_() for tensor in inputs]
        return torch.autograd.grad(run(*leaves).double().sum(), leaves)

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            (hidden @ weight.t())
            .to(torch.promote_types(hidden.dtype, torch.float32))
            .log_softmax(-1)[torch.arange(64), target]
        )

    ours = gradients(lambda h, w: sampled_logp(h, w, target, chunk_tokens=8, chunk_vocab=50), dtype)
    exact, rounded = gradients(plain, torch.float64), gradients(plain, dtype)
    for mine, truth, other in zip(ours, exact, rounded, strict=True):
        assert mine.dtype == dtype
        error, peer = (float((value.double() - truth).norm()) for value in (mine, other))
        assert error <= 1.05 * peer
    logp = sampled_logp(*inputs, target)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, plain(*inputs), rtol=1e-5, atol=1e-5)


def test_autocast_decides_the_precision_of_the_logits() -> None:
    hidden, weight = numbers(1, 6, 8, dtype=torch.float32), numbers(2, 20, 8, dtype=torch.float32)
    hidden.requires_grad_()
    target = torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp = sampled_logp(hidden, weight, target, **SMALL)
        logits = torch.nn.functional.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(
        logp, logits.float().log_softmax(-1)[torch.arange(6), target], rtol=1e-5, atol=1e-5
    )
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_is_added_in_place(dtype: torch.dtype) -> None:
    hidden, weight = (
        numbers(1, 6, 4, dtype=dtype).requires_grad_(),
        numbers(2, 11, 4, dtype=dtype).requires_grad_(),
    )
    target = torch.arange(6)
    (want,) = torch.autograd.grad(sampled_logp(hidden, weight, target).sum(), weight)
    weight.grad = torch.ones_like(weight)
    buffer, place = weight.grad, weight.grad.data_ptr()
    for _ in range(2):
        sampled_logp(hidden, weight, target, adds_to_weight_grad=True, **SMALL).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is buffer
    assert buffer.data_ptr() == place
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(buffer, 1 + 2 * want, **tolerance)


def test_a_gradient_that_was_dropped_after_the_forward_is_made_anew() -> None:
    hidden, weight = numbers(1, 3, 2), numbers(2, 4, 2).requires_grad_()
    weight.grad = torch.ones_like(weight)
    loss = sampled_logp(hidden, weight, torch.arange(3), adds_to_weight_grad=True).sum()
    weight.grad = None  # as zero_grad does
    loss.backward()  # type: ignore[no-untyped-call]
    (want,) = torch.autograd.grad(sampled_logp(hidden, weight, torch.arange(3)).sum(), weight)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, want)


def test_a_tied_weight_gets_the_sum_of_both_gradients_whichever_comes_first() -> None:
    """By hand: one word embeds, two are scored, so each of the two rules' gradients is a line of algebra."""
    embedding, token = torch.tensor([[0.5], [-1.0]], dtype=torch.float64, requires_grad=True), 1
    for _ in range(2):  # the second time onto what is there
        state = embedding[token].unsqueeze(0)
        sampled_logp(state, embedding, torch.tensor([0]), adds_to_weight_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    # z = e1 (e0, e1); logp = z0 - log(exp z0 + exp z1); p1 = 1 / (1 + exp(z0 - z1))
    e0, e1 = 0.5, -1.0
    p1 = 1 / (1 + math.exp(e1 * e0 - e1 * e1))
    of_head = [p1 * e1, -p1 * e1]
    of_state = p1 * (e0 - e1)
    assert embedding.grad is not None
    assert embedding.grad[:, 0].tolist() == pytest.approx([2 * of_head[0], 2 * (of_head[1] + of_state)])


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen: int) -> None:
    inputs = [numbers(1, 6, 4), numbers(2, 11, 4)]
    inputs[1 - frozen].requires_grad_()
    sampled_logp(*inputs, torch.arange(6), **SMALL).sum().backward()  # type: ignore[no-untyped-call]
    assert inputs[frozen].grad is None
    assert inputs[1 - frozen].grad is not None


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, backward included."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.largest, self.dtype = 0, dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor) and value.dtype == self.dtype:
                self.largest = max(self.largest, value.numel())
        return result


def largest_in(run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> int:
    hidden, weight = numbers(1, 64, 2).requires_grad_(), numbers(2, 500, 2).requires_grad_()
    with LargestTensor() as seen:
        run(hidden, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    return seen.largest


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_tensor_of_tokens_times_vocabulary_is_ever_made(softcap: float | None) -> None:
    target, index = torch.arange(64), torch.arange(64 * 3).view(64, 3)
    options: dict[str, Any] = {"chunk_tokens": 16, "chunk_vocab": 100, "softcap": softcap}
    runs: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda h, w: sampled_logp(h, w, target, **options),
        lambda h, w: logp_at(h, w, index, **options),
        lambda h, w: sampled_and_top_k_logp(h, w, target, k=5, **options)[1],
    ]
    for run in runs:
        assert largest_in(run) == 16 * 100, "a tile is the largest; the weight's gradient has 500 * 2"
    assert largest_in(lambda h, w: plain_logp(h, w)[torch.arange(64), target]) == 64 * 500, (
        "the measure sees it"
    )


def test_what_is_not_a_number_stays_in_its_row() -> None:
    hidden = numbers(1, 4, 3)
    hidden[1, 0] = math.nan
    hidden[2, 0] = math.inf
    logp = sampled_logp(hidden, numbers(2, 9, 3), torch.arange(4), **SMALL)
    assert torch.isfinite(logp).tolist() == [True, False, False, True]


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4]]), torch.tensor([[1.0], [0.0], [-1.0]])
    logp = sampled_logp(hidden, weight, torch.tensor([0, 0]), chunk_vocab=1)
    assert logp.tolist() == [0.0, -2e4]


def test_wrong_arguments_are_said() -> None:
    hidden, weight, target = numbers(1, 2, 3), numbers(2, 4, 3), torch.tensor([0, 1])
    for wrong in (torch.tensor([0, -100]), torch.tensor([0, 4])):
        with pytest.raises(InputError, match=r"CR0722.*position 1"):
            sampled_logp(hidden, weight, wrong)
    with pytest.raises(UsageError, match="1 rows of token ids do not fit 2"):
        sampled_logp(hidden, weight, target[:1])
    for no_leaf in (weight, 2 * weight.clone().requires_grad_()):
        with pytest.raises(UsageError, match=r"CR0722.*takes no gradient, or is no leaf"):
            logp_at(hidden, no_leaf, target[:, None], adds_to_weight_grad=True)


def test_a_sharded_head_is_gathered_and_its_gradient_is_sharded_again(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        hidden, weight, target = numbers(1, 4, 3), numbers(2, 6, 3), torch.arange(4)
        sharded = torch.nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (1,)), [Shard(0)]))
        plain = weight.clone().requires_grad_()
        for one in (sharded, plain):
            sampled_logp(hidden, one, target, **SMALL).sum().backward()  # type: ignore[no-untyped-call]
        assert isinstance(sharded.grad, DTensor)
        assert plain.grad is not None
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad)
    finally:
        distributed.destroy_process_group()
