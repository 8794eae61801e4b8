"""The head's gradient of both channels: by hand, added in place, and given to autograd where something waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from full_vocabulary import assert_same_gradients, gradients, jensen_shannon, support
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from composer_replication.config import HintsSection
from composer_replication.losses.preferences import preference_loss
from composer_replication.records import HintedTurn, PreferencePair
from composer_replication.trainer import loss_channels, model_modes
from composer_replication.trainer.collator import collate_hinted_turns, collate_pairs
from composer_replication.trainer.loss_channels import hint_loss, pair_logps

VOCABULARY, HIDDEN = 101, 16
TURNS = (
    HintedTurn((5, 6, 7), (5, 6, 90, 91, 7), (40, 41, 42)),
    HintedTurn((8,), (88, 8), (50, 51, 52, 53), weight=0.5),
)
PAIRS = (PreferencePair((5, 6, 7), (40, 41, 42), (43,)), PreferencePair((8,), (50,), (51, 52, 53, 54)))
TOP_K = 7
BETA = 2.0


@pytest.fixture(autouse=True)
def few_words_of_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_channels, "TOP_K", TOP_K)


def tiny(*, tied: bool) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config).double()


def hints_of(model: Any, turns: tuple[HintedTurn, ...] = TURNS) -> torch.Tensor:
    return hint_loss(
        model,
        collate_hinted_turns(turns, pad_id=0),
        HintsSection(),
        num_tokens=7.0,
        teacher=nullcontext,
        autocast=nullcontext,
        sampling_temperature=1.0,
    )[0]


def replay_of(model: Any, pairs: tuple[PreferencePair, ...] = PAIRS) -> torch.Tensor:
    chosen, rejected = pair_logps(model, collate_pairs(pairs, pad_id=0))
    loss, _ = preference_loss(chosen, rejected, None, None, kind="simpo", beta=BETA)
    return loss * (len(pairs) / len(PAIRS))


CHANNELS: dict[str, Callable[..., torch.Tensor]] = {"hints": hints_of, "replay": replay_of}
PARTS: dict[str, tuple[Any, ...]] = {"hints": TURNS, "replay": PAIRS}


@contextmanager
def given_to_autograd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(model_modes, "num_processes", lambda: 2)
        yield


def states_of(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """What the head reads before each completion id: (T, H)."""
    ids = torch.tensor([[*prompt, *completion]])
    states: torch.Tensor = model.model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
    return states


@torch.no_grad()
def hints_by_hand(model: Any) -> torch.Tensor:
    """dL/dW of the head alone: sum over tokens of (dL/dz) h', dL/dz of a top-k with tail by the chain rule, class by class."""
    weight, total = model.lm_head.weight, torch.zeros_like(model.lm_head.weight)
    for turn in TURNS:
        states = states_of(model, turn.prompt_ids, turn.completion_ids)
        student = (states @ weight.t()).log_softmax(-1)
        teacher = (states_of(model, turn.hinted_prompt_ids, turn.completion_ids) @ weight.t()).log_softmax(-1)
        for state, s, t in zip(states, student, teacher, strict=True):
            p, q = support(s[None], t[None], TOP_K)
            p, q = p[0], q[0]
            m = (p + q) / 2
            # D = KL(p|m)/2 + KL(q|m)/2: its slope by p_c is log(p_c / m_c) / 2
            slope = (p / m).log() / 2
            top = s.topk(TOP_K).indices
            by_word = slope[-1].repeat(VOCABULARY)  # words outside the support act through the tail
            by_word[top] = slope[:-1]
            dz = s.exp() * (by_word - (s.exp() * by_word).sum())
            total += turn.weight * torch.outer(dz, state) / 7.0
            assert jensen_shannon(p, q, 0.5) > 0
    return total


@torch.no_grad()
def replay_by_hand(model: Any) -> torch.Tensor:
    """dL/dW of -log sigmoid(beta gap), gap the mean logp chosen - rejected: -beta sigmoid(-beta gap) (mean of (onehot - p) h', signed)."""
    weight, total = model.lm_head.weight, torch.zeros_like(model.lm_head.weight)
    for pair in PAIRS:
        gap, part = 0.0, torch.zeros_like(weight)
        for sign, ids in ((1.0, pair.chosen_ids), (-1.0, pair.rejected_ids)):
            states = states_of(model, pair.prompt_ids, ids)
            logps = (states @ weight.t()).log_softmax(-1)
            for state, logp, token in zip(states, logps, ids, strict=True):
                gap += sign * float(logp[token]) / len(ids)
                dz = -logp.exp()
                dz[token] += 1.0
                part += sign * torch.outer(dz, state) / len(ids)
        total -= BETA / (1 + math.exp(BETA * gap)) * part / len(PAIRS)
    return total


BY_HAND = {"hints": hints_by_hand, "replay": replay_by_hand}


@pytest.mark.parametrize("channel", CHANNELS)
def test_an_untied_heads_gradient_is_the_one_by_hand(channel: str) -> None:
    model = tiny(tied=False)
    for part in PARTS[channel]:  # micro-batches add up
        CHANNELS[channel](model, (part,)).backward()
    want = BY_HAND[channel](model)
    assert float(want.norm()) > 1e-3
    torch.testing.assert_close(model.lm_head.weight.grad, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_tied_heads_gradient_is_the_embeddings_plus_its_own(channel: str) -> None:
    tied, apart = tiny(tied=True), tiny(tied=False)
    weights = {name: weight for name, weight in tied.state_dict().items() if name != "lm_head.weight"}
    apart.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    for model in (tied, apart):
        for part in PARTS[channel]:
            CHANNELS[channel](model, (part,)).backward()
    of_head = BY_HAND[channel](apart)
    of_embedding = apart.model.embed_tokens.weight.grad
    assert min(float(of_head.norm()), float(of_embedding.norm())) > 1e-3
    torch.testing.assert_close(
        tied.model.embed_tokens.weight.grad, of_head + of_embedding, rtol=1e-5, atol=1e-7
    )


class Copies(TorchDispatchMode):
    """Tensors of the head's size that operations have made, other than weights and gradients that were there before."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.size = model.lm_head.weight.numel()
        kept = [tensor for weight in model.parameters() for tensor in (weight, weight.grad)]
        self.known = {tensor.data_ptr() for tensor in kept if tensor is not None}
        self.places: set[int] = set()
        self.held: list[torch.UntypedStorage] = []
        """So that no place is used twice; the tensors themselves, if held, would be copied by autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.size:
            self.places |= {result.data_ptr()} - self.known
            self.held.append(result.untyped_storage())
        return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("channel", CHANNELS)
def test_in_place_and_through_autograd_are_the_same(
    monkeypatch: pytest.MonkeyPatch, channel: str, *, tied: bool
) -> None:
    ours, theirs = tiny(tied=tied), tiny(tied=tied)
    for part in PARTS[channel]:
        CHANNELS[channel](ours, (part,)).backward()
        with given_to_autograd(monkeypatch):
            CHANNELS[channel](theirs, (part,)).backward()
    assert_same_gradients(gradients(ours), gradients(theirs), tolerance=1e-12)


@pytest.mark.parametrize("channel", CHANNELS)
def test_no_second_tensor_of_the_heads_size_is_made(monkeypatch: pytest.MonkeyPatch, channel: str) -> None:
    model = tiny(tied=False)
    model.lm_head.weight.grad = kept = torch.zeros_like(model.lm_head.weight)
    for _ in range(2):
        loss = CHANNELS[channel](model)
        with Copies(model) as seen:
            loss.backward()
        # the embedding has the same size; its gradient is made once a backward pass
        assert len(seen.places) == 1
    assert model.lm_head.weight.grad is kept
    with given_to_autograd(monkeypatch):
        loss = CHANNELS[channel](model)
    with Copies(model) as seen:
        loss.backward()
    assert len(seen.places) == 2, "the measure sees it"


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_frozen_head_gets_none_and_the_rest_is_unchanged(channel: str) -> None:
    whole, frozen = tiny(tied=False), tiny(tied=False)
    frozen.lm_head.weight.requires_grad_(False)
    adapted = get_peft_model(
        tiny(tied=False), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    for model in (whole, frozen, adapted):
        CHANNELS[channel](model).backward()
    expected = gradients(whole)
    del expected["lm_head.weight"]
    assert_same_gradients(gradients(frozen), expected, tolerance=1e-12)
    found = gradients(adapted)
    assert found
    assert all("lora_" in name for name in found)
    assert all(float(gradient.norm()) > 0 for gradient in found.values())


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_hook_on_the_head_sees_the_whole_gradient(channel: str) -> None:
    """An optimizer that steps inside backward, one weight at a time, waits for it."""
    plain, hooked = tiny(tied=True), tiny(tied=True)
    CHANNELS[channel](plain).backward()
    seen: list[torch.Tensor] = []
    weight = hooked.model.embed_tokens.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    CHANNELS[channel](hooked).backward()
    (gradient,) = seen
    torch.testing.assert_close(gradient, plain.model.embed_tokens.weight.grad)
