"""The head's gradient of both channels: added in place, and given to autograd where something waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from full_vocabulary import assert_same_gradients, gradients
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
