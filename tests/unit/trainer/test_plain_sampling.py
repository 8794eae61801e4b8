"""Models that cannot share prompts are sampled all the same, by whole forwards, and say what their plain forward says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import transformers as tf

from composer_replication.records import StopReason
from composer_replication.trainer import policy
from composer_replication.trainer.policy import InProcessPolicy, ModelSampler, SampledRow, filters_of
from composer_replication.trainer.tiny_models import make_tiny_model

T = TypeVar("T")
SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.35,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 12,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "mamba": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=41, hidden_size=32, num_hidden_layers=2, initializer_range=0.35)
    ),
    "phi3-longrope": lambda: tf.Phi3ForCausalLM(
        tf.Phi3Config(
            **SIZES, max_position_embeddings=64, original_max_position_embeddings=12, rope_parameters=LONGROPE
        )
    ),
    "llama-dynamic": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(
            **SIZES,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        )
    ),
}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13], [3, 4, 5, 6, 7, 8, 9, 10], [14, 15, 16, 17, 18]]


def build(name: str) -> Any:
    torch.manual_seed(1)
    return MODELS[name]().train()


def sample(
    model: Any, num_samples: int = 3, prompts: Any = PROMPTS, eos_token_ids: Any = (2,), **changes: Any
) -> list[list[SampledRow]]:
    """The text of an answer is its ids here."""
    filters = {name: changes.pop(name, off) for name, off in filters_of(None).items()}
    tokenizer = SimpleNamespace(
        pad_token_id=0, decode=lambda ids, skip_special_tokens: " ".join(map(str, ids))
    )
    sampler = ModelSampler(model, SimpleNamespace(**filters), tokenizer, eos_token_ids=eos_token_ids)
    arguments: dict[str, Any] = {
        "max_new_tokens": 9,
        "temperature": 1.0,
        "generator": torch.Generator().manual_seed(4),
    }
    return sampler.sample(prompts, num_samples, **arguments | changes)


def flat(groups: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(groups))


def refuse_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "sampling_reason", lambda model: "it may not.")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3},
        {"is_finished": lambda text: len(text.split()) == 5},
        {"eos_token_ids": range(12)},
    ],
)
def test_both_ways_of_sampling_draw_the_same(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    shared = sample(model, **settings)
    refuse_sharing(monkeypatch)
    plain = sample(model, **settings)
    for ours, theirs in zip(flat(plain), flat(shared), strict=True):
        assert (ours.ids, ours.stop_reason) == (theirs.ids, theirs.stop_reason)
        assert ours.logps == pytest.approx(theirs.logps, abs=1e-4)
    assert all(module.training for module in model.modules())


def test_a_row_of_its_own_generator_says_the_same_beside_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    refuse_sharing(monkeypatch)
    together = sample(model, 1, generator=[torch.Generator().manual_seed(seed) for seed in range(4)])
    for place, prompt in enumerate(PROMPTS):
        own = [torch.Generator().manual_seed(place)]
        [[alone]] = sample(model, 1, [prompt], generator=own)
        assert alone.ids == together[place][0].ids


@pytest.mark.parametrize("name", ["mamba", "phi3-longrope", "llama-dynamic"])
def test_sampled_tokens_have_the_log_probabilities_of_plain_forwards(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(name)
    with caplog.at_level(logging.WARNING, "composer_replication"):
        answers = sample(model)
        assert [row.ids for row in flat(sample(model))] == [row.ids for row in flat(answers)]
    assert len([each for each in caplog.messages if "whole for every token" in each]) == 1
    model.eval()
    for prompt, rows in zip(PROMPTS, answers, strict=True):
        for row in rows:
            for place, (token, logp) in enumerate(zip(row.ids, row.logps, strict=True)):
                with torch.no_grad():
                    scores = model(input_ids=torch.tensor([prompt + row.ids[:place]])).logits[0, -1]
                assert logp == pytest.approx(float(scores.log_softmax(-1)[token]), abs=1e-4)


def test_a_policy_of_a_recurrent_model_answers_until_its_rule_stops_it() -> None:
    _, tokenizer = make_tiny_model(0)
    torch.manual_seed(0)
    model = tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, eos_token_id=1)
    )
    policy = InProcessPolicy(model, tokenizer)
    answers = policy.generate(
        ["def f", "x"],
        num_samples=2,
        max_new_tokens=6,
        temperature=1.0,
        seed=3,
        is_finished=lambda text: len(text) >= 3,
    )
    assert {each.stop_reason for each in flat(answers)} <= {StopReason.STOP_RULE, StopReason.LENGTH}
    assert all(1 <= len(each.token_ids) <= 6 for each in flat(answers))


def test_a_forward_that_takes_ids_alone_is_enough() -> None:
    llama = build("llama")

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama

        def forward(self, input_ids: torch.Tensor) -> Any:
            return SimpleNamespace(logits=self.inner(input_ids=input_ids).logits)

    for ours, theirs in zip(flat(sample(Bare())), flat(sample(llama)), strict=True):
        assert ours.ids == theirs.ids
