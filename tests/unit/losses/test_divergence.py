from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.losses.divergence import divergence, support_divergence

ALPHAS = st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.9, 1.0])


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def by_hand(p: list[float], q: list[float], jsd_alpha: float) -> float:
    """The formula of the recipe over plain floats."""

    def kl(a: list[float], b: list[float]) -> float:
        return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    if jsd_alpha in (0, 1):
        return kl(p, q) if jsd_alpha else kl(q, p)
    middle = [(1 - jsd_alpha) * x + jsd_alpha * y for x, y in zip(p, q, strict=True)]
    return (1 - jsd_alpha) * kl(p, middle) + jsd_alpha * kl(q, middle)


def some_logits(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def on_support(
    student_NV: torch.Tensor, teacher_NV: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    index_NK = student_NV.detach().topk(k, dim=-1).indices
    return (student_NV.log_softmax(-1).gather(-1, index_NK), teacher_NV.log_softmax(-1).gather(-1, index_NK))


# p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL either way is ln 2 / 4; the middle at 1/2 is (3/8, 1/4, 3/8),
# so JSD = (1/2 ln 4/3 + 1/4 ln 2/3).
@pytest.mark.parametrize(
    ("jsd_alpha", "expected"),
    [(0.0, math.log(2) / 4), (1.0, math.log(2) / 4), (0.5, 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3))],
)
def test_three_classes_by_hand(jsd_alpha: float, expected: float) -> None:
    whole = divergence(logs(0.5, 0.25, 0.25), logs(0.25, 0.25, 0.5), jsd_alpha=jsd_alpha)
    assert whole.item() == pytest.approx(expected, abs=1e-15)
    # two classes and the tail are the same three classes
    tail = support_divergence(logs(0.5, 0.25), logs(0.25, 0.25), jsd_alpha=jsd_alpha)
    assert tail.item() == pytest.approx(expected, abs=1e-12)


def test_the_ends_are_told_apart() -> None:
    student, teacher = logs(0.9, 0.1), logs(0.5, 0.5)
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    reverse = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert divergence(student, teacher, jsd_alpha=0).item() == pytest.approx(forward)
    assert divergence(student, teacher, jsd_alpha=1).item() == pytest.approx(reverse)
    assert forward != pytest.approx(reverse, rel=0.1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 5), v=st.integers(2, 12), jsd_alpha=ALPHAS, data=st.data()
)
def test_against_plain_sums_over_the_whole_vocabulary(
    seed: int, n: int, v: int, jsd_alpha: float, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, v - 1))
    student, teacher = some_logits(seed, n, v), some_logits(seed + 1, n, v)
    got = support_divergence(*on_support(student, teacher, k), jsd_alpha=jsd_alpha)
    index = student.topk(k, dim=-1).indices
    for row in range(n):
        pair = []
        for logits in (student, teacher):
            probabilities = logits[row].softmax(-1).tolist()
            kept = [probabilities[i] for i in index[row].tolist()]
            rest = math.fsum(x for i, x in enumerate(probabilities) if i not in index[row].tolist())
            pair.append([*kept, rest])
        assert got[row].item() == pytest.approx(by_hand(pair[0], pair[1], jsd_alpha), rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def trl_losses() -> Any:
    import trl.experimental.sdpo.loss_utils as losses

    return losses


@pytest.mark.parametrize("jsd_alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_equal_trl(trl_losses: Any, *, jsd_alpha: float, dtype: torch.dtype) -> None:
    for seed in range(5):
        teacher = some_logits(seed + 50, 6, 40, dtype=dtype)
        ours = some_logits(seed, 6, 40, dtype=dtype).requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
        got = support_divergence(*on_support(ours, teacher, 7), jsd_alpha=jsd_alpha)
        want = trl_losses.compute_topk_self_distillation_loss(
            theirs, teacher, distillation_topk=7, distillation_alpha=jsd_alpha, distillation_add_tail=True
        )
        # float32: the tail is 1 minus a sum near 1, here down to 1e-3, so 1e-7 becomes 1e-4 of it
        rtol = 1e-9 if dtype is torch.float64 else 1e-4
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-6)
        weights = some_logits(seed + 99, 6, dtype=dtype)
        got.backward(weights)  # type: ignore[no-untyped-call]
        want.backward(weights)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=10 * rtol, atol=1e-6)


@pytest.mark.parametrize("jsd_alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mass", [1.0, 1.0 + 3e-7])
def test_an_empty_tail_gives_finite_values_and_gradients(
    jsd_alpha: float, dtype: torch.dtype, mass: float
) -> None:
    logits = torch.tensor([[30.0, 0.0, -20.0], [1.0, 1.0, 1.0]], dtype=dtype, requires_grad=True)
    student = logits.float().log_softmax(-1).to(dtype) + math.log(mass)
    teacher = torch.tensor([[0.0, -30.0, -40.0], [-1.0, -2.0, -3.0]], dtype=dtype)
    got = support_divergence(student, teacher, jsd_alpha=jsd_alpha)
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    got.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_half_precision_inputs_are_summed_in_float32() -> None:
    student, teacher = on_support(some_logits(1, 50, 400), some_logits(2, 50, 400), 100)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = [logp.to(dtype) for logp in (student, teacher)]
        got = support_divergence(rounded[0], rounded[1], jsd_alpha=0.5)
        exact = support_divergence(rounded[0].double(), rounded[1].double(), jsd_alpha=0.5)
        torch.testing.assert_close(got, exact.float(), rtol=1e-4, atol=1e-5)


def test_classes_of_probability_zero() -> None:
    student = torch.tensor([[0.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[math.log(0.5), -math.inf]], dtype=torch.float64)
    both_empty = divergence(student, teacher, jsd_alpha=0.5)
    both_empty.sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    one = torch.tensor([[0.0, -math.inf]]), torch.tensor([[math.log(0.5), math.log(0.5)]])
    assert divergence(*one, jsd_alpha=1).item() == pytest.approx(math.log(2))
    assert divergence(*one, jsd_alpha=0).item() == math.inf
    assert divergence(*one, jsd_alpha=0.5).item() == pytest.approx(by_hand([1, 0], [0.5, 0.5], 0.5))


def test_the_teacher_carries_no_gradient() -> None:
    student, teacher = logs(0.5, 0.2).requires_grad_(), logs(0.1, 0.6).requires_grad_()
    loss = support_divergence(student, teacher, jsd_alpha=0.5).sum()
    assert torch.autograd.grad(loss, [student, teacher], allow_unused=True)[1] is None


def test_other_shapes_are_said() -> None:
    student, teacher = logs(0.5, 0.2), logs(0.1, 0.6)
    with pytest.raises(InputError, match="CR0722"):
        support_divergence(student, teacher[:, :1], jsd_alpha=0.5)
