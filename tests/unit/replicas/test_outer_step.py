"""The outer step against numbers worked out by hand, and the bytes that it sends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replica_threads import section

from composer_replication.errors import InputError
from composer_replication.replicas.outer_precision import BLOCK, decode, encode, num_bytes
from composer_replication.replicas.outer_step import Fragment, OuterState, check_cover, divided
from composer_replication.replicas.rounds import Contribution


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


def fragment(weight: torch.nn.Parameter, precision: str = "fp32") -> Fragment:
    part = Fragment([("w", weight)], section(precision=precision))
    part.outer_lr = part.outer_momentum = 0.5
    return part


def test_two_outer_steps_by_hand() -> None:
    """Outer weight 1; the replicas reach 0 (3 tokens) and -2 (1 token): Delta 1 and 3, mean 1.5."""
    weight = parameter(1.0)
    part = fragment(weight)
    with torch.no_grad():
        weight.fill_(0.0)
    own = Contribution(0, 3, part.offer())
    divergence, norm = part.merge(
        [own, Contribution(1, 1, encode(torch.tensor([3.0]), "fp32"))], is_included=True
    )
    # b = 1.5, g + 0.5 b = 2.25, 1 - 0.5 * 2.25 = -0.125
    assert part.outer.tolist() == [-0.125]
    assert weight.tolist() == [-0.125]
    assert norm == pytest.approx(1.5)
    assert divergence == pytest.approx((0.75 * 0.25 + 0.25 * 2.25) ** 0.5 / 1.5)
    with torch.no_grad():
        weight.fill_(-1.125)  # Delta 1; b = 0.5 * 1.5 + 1 = 1.75; 1 + 0.875; -0.125 - 0.9375
    part.merge([Contribution(0, 5, part.offer())], is_included=True)
    assert part.outer.tolist() == [-1.0625]


def test_the_momentum_is_that_of_torch() -> None:
    torch.manual_seed(0)
    weight, other = parameter(*[0.0] * 8), parameter(*[0.0] * 8)
    part = Fragment([("w", weight)], section())
    sgd = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        update = torch.randn(8)
        part.merge([Contribution(0, 1, encode(update, "fp32"))], is_included=False)
        other.grad = update
        sgd.step()
    torch.testing.assert_close(part.outer, other.detach(), rtol=1e-6, atol=1e-6)


def test_the_last_outer_step_is_the_plain_mean() -> None:
    """-0.125 less the mean of 0.25 and 0.5; with momentum it would be -0.125 - 0.5 (0.375 + 0.5 * 1.125)."""
    weight = parameter(1.0)
    part = fragment(weight)
    part.merge([Contribution(0, 1, encode(torch.tensor([1.5]), "fp32"))], is_included=False)
    assert part.outer.tolist() == [-0.125]
    two = [Contribution(n, 1, encode(torch.tensor([value]), "fp32")) for n, value in enumerate((0.25, 0.5))]
    part.merge(two, is_included=False, is_last=True)
    assert weight.tolist() == [-0.5]


def test_what_was_trained_while_the_sum_was_under_way_stays() -> None:
    weight = parameter(1.0)
    part = fragment(weight)
    with torch.no_grad():
        weight.fill_(0.0)
    payload = part.offer()
    with torch.no_grad():
        weight.sub_(0.25)
    part.merge([Contribution(0, 1, payload)], is_included=True)  # 1 - 0.5 * (1 + 0.5) = 0.25
    assert part.outer.tolist() == [0.25]
    assert weight.tolist() == [0.0]


def test_an_offer_that_came_too_late_is_dropped() -> None:
    weight = parameter(1.0)
    part = fragment(weight)
    with torch.no_grad():
        weight.fill_(9.0)
    part.offer()
    part.merge([Contribution(1, 1, encode(torch.tensor([1.0]), "fp32"))], is_included=False)
    assert weight.tolist() == part.outer.tolist() == [0.25]


def test_nobody_learned_anything_and_nothing_moves() -> None:
    part = fragment(parameter(1.0))
    part.momentum.fill_(4.0)
    part.merge([Contribution(0, 0, encode(torch.tensor([1.0]), "fp32"))], is_included=False)
    assert part.outer.tolist() == [1.0]


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_rounding_is_made_up_for(precision: str) -> None:
    """Over many rounds the sum of what was sent stays within one round's error of the sum of what was learned."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(600))
    part = Fragment([("w", weight)], section(precision=precision))
    part.outer_lr, part.outer_momentum = 1.0, 0.0
    wanted, sent, largest = torch.zeros(600), torch.zeros(600), 0.0
    for _ in range(50):
        update = torch.randn(600, generator=generator)
        with torch.no_grad():
            weight.copy_(part.outer - update)
        payload = part.offer()
        received = decode(payload, 600, precision)  # type: ignore[arg-type]
        largest = max(largest, float(received.abs().max()))
        part.merge([Contribution(0, 1, payload)], is_included=True)
        wanted, sent = wanted + update, sent + received
    bound = {"int8": largest / 127, "int4": largest / 7, "bf16": largest / 128}[precision]
    assert float((wanted - sent).abs().max()) <= bound
    assert float((wanted - sent).abs().max()) > 0.0


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=3 * BLOCK),
    st.sampled_from(["fp32", "bf16", "int8", "int4"]),
)
def test_bytes_there_and_back(values: list[float], precision: str) -> None:
    tensor = torch.tensor(values)
    payload = encode(tensor, precision)  # type: ignore[arg-type]
    assert len(payload) == num_bytes(len(values), precision)  # type: ignore[arg-type]
    back = decode(payload, len(values), precision)  # type: ignore[arg-type]
    steps = {"fp32": 0.0, "bf16": 1 / 128, "int8": 0.5 / 127, "int4": 0.5 / 7}[precision]
    assert float((back - tensor).abs().max()) <= steps * float(tensor.abs().max()) * 1.001 + 1e-38
    again = encode(decode(payload, len(values), precision), precision)  # type: ignore[arg-type]
    assert precision in {"int8", "int4"} or again == payload


def test_int4_by_hand() -> None:
    """Largest 7: the scale is 1; -7 and 7 are the nibbles 1 and 15."""
    payload = encode(torch.tensor([-7.0, 7.0, 0.4]), "int4")
    assert payload[:4] == torch.tensor([1.0]).numpy().tobytes()
    assert payload[4:6] == bytes([0xF1, 0x88])
    assert len(payload) == 4 + BLOCK // 2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_bytes_of_another_length_are_refused(precision: str) -> None:
    with pytest.raises(InputError) as caught:
        decode(encode(torch.zeros(10), precision) + b"x", 10, precision)  # type: ignore[arg-type]
    assert caught.value.code == "CR1107"


def test_weights_that_are_not_finite_are_not_sent() -> None:
    weight = parameter(1.0, 2.0)
    part = fragment(weight)
    with torch.no_grad():
        weight[1] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        part.offer()


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 7, 50])
def test_fragments_cover_each_trained_parameter_once(num_fragments: int) -> None:
    model = Tied()
    state = OuterState(model, section(sync_every=num_fragments, fragments=num_fragments))
    names = [name for part in state.fragments for name, _ in part.parameters]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert len(state.fragments) == min(num_fragments, 7)
    assert sum(part.outer.numel() for part in state.fragments) == 40 + 3 * 20


def test_a_parameter_in_no_fragment_or_in_two_is_found() -> None:
    model = Tied()
    parts = divided([(n, p) for n, p in model.named_parameters() if p.requires_grad], 2)
    with pytest.raises(ValueError, match=r"embed.weight is in none"):
        check_cover([parts[0][1:], parts[1]], model)
    with pytest.raises(ValueError, match="one is in two"):
        check_cover([parts[0], [*parts[1], parts[0][0]]], model)
    with pytest.raises(ValueError, match="not trained"):
        check_cover([*parts, [("frozen", model.frozen)]], model)


def test_a_state_moves_to_another_replica_bit_for_bit() -> None:
    torch.manual_seed(3)
    one, other = (OuterState(Tied(), section(fragments=2)) for _ in range(2))
    one.fragments[0].merge(
        [Contribution(0, 1, encode(torch.randn(one.fragments[0].outer.numel()), "fp32"))], is_included=False
    )
    assert one.fingerprint() != other.fingerprint()
    other.load(one.dump())
    assert one.fingerprint() == other.fingerprint()
    for part in other.fragments:
        live = torch.cat([p.detach().flatten() for _, p in part.parameters])
        assert torch.equal(live, part.outer)


def test_a_state_of_another_model_or_broken_bytes_are_refused() -> None:
    state = OuterState(Tied(), section(fragments=2))
    before = state.fingerprint()
    for data in (OuterState(Tied(), section(sync_every=3, fragments=3)).dump(), state.dump()[:-1], b""):
        with pytest.raises(InputError) as caught:
            state.load(data)
        assert caught.value.code == "CR1107"
    assert state.fingerprint() == before
