"""Sampling says what the model's own generation and forward say, and a policy's answers end where those of training do."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from composer_replication.config import load_config
from composer_replication.errors import InputError
from composer_replication.records import StopReason
from composer_replication.trainer import policy
from composer_replication.trainer.policy import (
    InProcessPolicy,
    ModelSampler,
    SampledRow,
    end_token_ids,
    take_end_of_template,
)
from composer_replication.trainer.preset_settings import filters_of, sampling_settings
from composer_replication.trainer.tiny_models import make_tiny_tools_model

SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.35,
}
HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, head_dim=8)),
    "gemma3-hybrid": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            **SIZES | {"initializer_range": 0.1}, head_dim=8, sliding_window=5, layer_types=HYBRID
        )
    ),
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
NO_CACHE: dict[str, Callable[[], Any]] = {
    "mamba": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=41, hidden_size=32, num_hidden_layers=2, initializer_range=0.35)
    ),
    "phi3-longrope": lambda: tf.Phi3ForCausalLM(
        tf.Phi3Config(
            **SIZES | {"num_key_value_heads": 4},
            pad_token_id=0,
            max_position_embeddings=64,
            original_max_position_embeddings=12,
            rope_parameters=LONGROPE,
        )
    ),
    "llama-dynamic": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=DYNAMIC)
    ),
}
"""Models that cannot share prompts."""
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 12, 13], [3, 4, 5, 6, 7, 8, 9, 10], [14, 15, 16, 17, 18]]
EOS, PAD = 2, 0


def build(name: str) -> Any:
    torch.manual_seed(1)
    return (MODELS | NO_CACHE)[name]().train()


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def sample(
    model: Any, prompts: list[list[int]], num_samples: int, eos_token_ids: Any = (EOS,), **changes: Any
) -> list[list[SampledRow]]:
    """The text of an answer is its ids here."""
    filters = {name: changes.pop(name, off) for name, off in filters_of(None).items()}
    tokenizer = SimpleNamespace(
        pad_token_id=PAD, decode=lambda ids, skip_special_tokens: " ".join(map(str, ids))
    )
    sampler = ModelSampler(model, SimpleNamespace(**filters), tokenizer, eos_token_ids=eos_token_ids)
    seed = changes.pop("seed", 0)
    arguments: dict[str, Any] = {
        "max_new_tokens": 9,
        "temperature": 1.0,
        "generator": torch.Generator().manual_seed(seed),
    }
    return sampler.sample(prompts, num_samples, **arguments | changes)


def ids_of(text: str) -> list[int]:
    return list(map(int, text.split()))


def greedy_by_transformers(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    was_training = model.training
    output = model.eval().generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=9,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **settings,
    )
    model.train(was_training)
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


def plain_scores(model: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """Logits before each of these ids, from one forward without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1]


def chosen(logps: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logps.gather(-1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("penalty", [1.0, 1.4])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_token_for_token_that_of_generate(name: str, penalty: float) -> None:
    model = build(name)
    rows = sample(model, PROMPTS, 2, temperature=0, repetition_penalty=penalty)
    for prompt, group in zip(PROMPTS, rows, strict=True):
        expected = greedy_by_transformers(model, prompt, repetition_penalty=penalty)
        assert [row.ids for row in group] == [expected, expected]


@pytest.mark.parametrize("temperature", [0.8, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_logps_are_those_of_the_plain_forward(name: str, temperature: float) -> None:
    """With temperature 0 they are those of temperature 1."""
    model = build(name)
    rows = sample(model, PROMPTS, 3, temperature=temperature)
    assert temperature == 0 or len({tuple(row.ids) for group in rows for row in group}) > len(PROMPTS)
    for prompt, group in zip(PROMPTS, rows, strict=True):
        for row in group:
            expected = (plain_scores(model, prompt, row.ids) / (temperature or 1.0)).log_softmax(-1)
            actual = torch.tensor(row.logps)
            torch.testing.assert_close(actual, chosen(expected, row.ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NO_CACHE)
def test_a_model_that_cannot_share_prompts_is_forwarded_whole(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Token by token, since a longer forward may have other positions."""
    model = build(name)
    with caplog.at_level(logging.WARNING, "composer_replication"):
        answers = sample(model, PROMPTS, 3)
    assert len([each for each in caplog.messages if "whole for every token" in each]) == 1
    model.eval()
    for prompt, rows in zip(PROMPTS, answers, strict=True):
        for row in rows:
            for place, (token, logp) in enumerate(zip(row.ids, row.logps, strict=True)):
                with torch.no_grad():
                    scores = model(input_ids=torch.tensor([prompt + row.ids[:place]])).logits[0, -1]
                assert logp == pytest.approx(float(scores.log_softmax(-1)[token]), abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3},
        {"is_finished": lambda text: len(text.split()) == 5},
        {"eos_token_ids": range(12)},
    ],
)
def test_both_ways_of_sampling_draw_the_same(
    llama: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = sample(llama, PROMPTS, 3, **settings)
    monkeypatch.setattr(policy, "sampling_reason", lambda model: "it may not.")
    plain = sample(llama, PROMPTS, 3, **settings)
    for ours, theirs in zip(chain(*plain), chain(*shared), strict=True):
        assert (ours.ids, ours.stop_reason) == (theirs.ids, theirs.stop_reason)
        assert ours.logps == pytest.approx(theirs.logps, abs=1e-4)


class Forgetful(tf.LlamaForCausalLM):
    """Takes a cache and puts nothing into it."""

    def forward(self, past_key_values: Any = None, logits_to_keep: int = 0, **arguments: Any) -> Any:
        return super().forward(**arguments | {"use_cache": False})


def test_a_model_that_leaves_its_cache_empty_is_refused() -> None:
    with pytest.raises(InputError, match=r"CR0757.*Forgetful does not fill the key-value cache"):
        sample(Forgetful(tf.LlamaConfig(**SIZES)), PROMPTS, 1)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_filtered_tokens_are_never_drawn_and_logps_are_of_what_is_left(
    llama: Any, filters: dict[str, Any]
) -> None:
    rows = sample(llama, PROMPTS[:2], 8, temperature=2.0, **filters)
    for prompt, group in zip(PROMPTS[:2], rows, strict=True):
        for row in group:
            probs = (plain_scores(llama, prompt, row.ids) / 2.0).softmax(-1)
            for position, token in enumerate(row.ids):
                kept = keep_by_hand(probs[position], **filters)
                assert kept[token]
                share = probs[position, token] / probs[position, kept].sum()
                assert row.logps[position] == pytest.approx(float(share.log()), abs=1e-5)


def keep_by_hand(
    probs: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float | None = None
) -> torch.Tensor:
    order = probs.argsort(descending=True)
    kept = torch.zeros_like(probs, dtype=torch.bool)
    if top_k:
        kept[order[:top_k]] = True
    elif min_p is not None:
        kept = probs >= min_p * probs.max()
    else:
        before = probs[order].cumsum(0) - probs[order]
        kept[order[before < top_p]] = True
    return kept


def test_the_frequencies_are_the_probabilities(llama: Any) -> None:
    (rows,) = sample(llama, PROMPTS[:1], 4000, max_new_tokens=1, temperature=3.0)
    counts = torch.bincount(torch.tensor([row.ids[0] for row in rows]), minlength=41)
    probs = (plain_scores(llama, PROMPTS[0], [0])[0] / 3.0).softmax(-1)
    deviations = (counts - 4000 * probs) / (4000 * probs * (1 - probs)).sqrt()
    assert float(deviations.abs().max()) < 4
    assert int((counts > 0).sum()) > 20


def test_the_smallest_random_number_does_not_draw_a_filtered_token(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, **_settings: torch.zeros(*size, dtype=torch.float64))
    rows = sample(llama, PROMPTS, 1, top_k=1)
    greedy = sample(llama, PROMPTS, 1, temperature=0)
    assert [row.ids for (row,) in rows] == [row.ids for (row,) in greedy]
    assert all(row.ids[0] != 0 for (row,) in rows)


def test_the_generator_decides_or_else_the_global_one(llama: Any) -> None:
    assert sample(llama, PROMPTS, 2, seed=5) == sample(llama, PROMPTS, 2, seed=5)
    assert sample(llama, PROMPTS, 2, seed=5) != sample(llama, PROMPTS, 2, seed=6)
    torch.manual_seed(8)
    first = sample(llama, PROMPTS, 1, generator=None)
    torch.manual_seed(8)
    assert sample(llama, PROMPTS, 1, generator=None) == first
    assert sample(llama, PROMPTS, 1, generator=None) != first


def test_a_row_with_a_limit_of_its_own_says_the_same_and_leaves_the_batch(llama: Any) -> None:
    """Each row has a generator of its own, and says alone what it says beside others."""
    prompts, running = [[5, 6, 7], [9, 8]], list[bool]()

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(number) for number in range(2)]

    whole = [
        sample(llama, [prompt], 1, generator=[own], eos_token_ids=[])[0][0]
        for prompt, own in zip(prompts, generators(), strict=True)
    ]
    settings: dict[str, Any] = {"generator": generators(), "eos_token_ids": [], "row_limits": [2, 4]}
    limited = sample(llama, prompts, 1, goes_on=lambda runs: running.append(runs) or runs, **settings)
    for (row,), full, limit in zip(limited, whole, (2, 4), strict=True):
        assert row.ids == full.ids[:limit]
        assert row.logps == pytest.approx(full.logps[:limit], abs=1e-5)
        assert row.stop_reason is StopReason.LENGTH
    assert running == [True, True, True, False]


def test_one_prefill_for_each_distinct_prompt_and_finished_rows_leave_the_batch(llama: Any) -> None:
    shapes: list[tuple[int, ...]] = []
    handle = llama.register_forward_hook(
        lambda _module, _args, kwargs, _output: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    try:
        calls: list[int] = []

        def is_finished(text: str) -> bool:
            length = len(ids_of(text))
            calls.append(length)
            return calls.count(length) > 6 - 2 * length

        rows = sample(llama, PROMPTS[:3], 2, eos_token_ids=[], is_finished=is_finished)
    finally:
        handle.remove()
    # Three prompts, two of them equal; of the six rows two end after the first token, two after the second.
    assert shapes == [(2, 8), (4, 1), (2, 1)]
    assert sorted(len(row.ids) for group in rows for row in group) == [1, 1, 2, 2, 3, 3]


def test_end_of_sequence_is_kept_and_ends_the_row(llama: Any) -> None:
    free = sample(llama, PROMPTS, 2, eos_token_ids=[])
    end = free[1][0].ids[2]
    asked: list[list[int]] = []

    def watch(text: str) -> bool:
        asked.append(ids_of(text))
        return False

    for before, row in zip(
        [row for group in free for row in group],
        [row for group in sample(llama, PROMPTS, 2, eos_token_ids={end}, is_finished=watch) for row in group],
        strict=True,
    ):
        place = before.ids.index(end) + 1 if end in before.ids else len(before.ids)
        assert row.ids == before.ids[:place]
        assert len(row.logps) == len(row.ids)
        assert row.stop_reason is (StopReason.FINISHED if end in before.ids else StopReason.LENGTH)
    assert asked
    assert not any(end in ids for ids in asked)


def test_dropout_checkpointing_and_inference_mode_do_not_matter_to_sampling() -> None:
    quiet = build("llama").eval()
    loud = build("llama")
    loud.config.attention_dropout = 0.5
    for layer in loud.model.layers:
        layer.self_attn.attention_dropout = 0.5
    loud.gradient_checkpointing_enable()
    expected = sample(quiet, PROMPTS, 2)
    assert sample(loud, PROMPTS, 2) == expected
    with torch.inference_mode():
        assert sample(quiet, PROMPTS, 2) == expected


def test_lora_counts_until_the_caller_switches_it_off() -> None:
    base = [[row.ids for row in group] for group in sample(build("llama"), PROMPTS, 2)]
    model = get_peft_model(
        build("llama"),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.3),
    )
    assert [[row.ids for row in group] for group in sample(model, PROMPTS, 2)] != base
    with model.disable_adapter():
        assert [[row.ids for row in group] for group in sample(model, PROMPTS, 2)] == base
    ((row,),) = sample(model, PROMPTS[:1], 1, temperature=0)
    assert row.ids == greedy_by_transformers(model, PROMPTS[0])


RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"


def test_an_answer_ends_at_each_end_token_of_the_model() -> None:
    model, tokenizer = make_tiny_tools_model(0)

    def answer() -> tuple[tuple[int, ...], StopReason]:
        policy = InProcessPolicy(model.eval(), tokenizer)
        [[said]] = policy.generate(["def f"], num_samples=1, max_new_tokens=4, temperature=0, seed=0)
        return said.token_ids, said.stop_reason

    model.generation_config.eos_token_id = None
    ids, reason = answer()
    assert (len(ids), reason) == (4, StopReason.LENGTH)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, ids[0]]
    assert answer() == (ids[:1], StopReason.FINISHED)
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, ids[0]]
    model.generation_config.eos_token_id = ids[0]
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, ids[0]]


def test_the_end_of_an_answer_in_the_chat_template_ends_one() -> None:
    model, tokenizer = make_tiny_tools_model(0)
    tokenizer.add_tokens(["<|end of turn|>"], special_tokens=True)
    end = len(tokenizer) - 1
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end of turn|>\n{% endfor %}"
    )
    take_end_of_template(model, tokenizer)
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, end]
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    take_end_of_template(model, tokenizer)
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, end]


def test_samples_are_filtered_as_in_training() -> None:
    model, tokenizer = make_tiny_tools_model(0)
    sampling = sampling_settings(load_config(RECIPE, {"trl.top_k": 1, "trl.temperature": 0.9}))
    assert (sampling.top_k, sampling.temperature, sampling.top_p, sampling.min_p) == (1, 0.9, 1.0, None)

    def distinct(policy: InProcessPolicy) -> int:
        [said] = policy.generate(["def f"], num_samples=8, max_new_tokens=4, temperature=1.0, seed=0)
        return len({each.token_ids for each in said})

    assert distinct(InProcessPolicy(model.eval(), tokenizer, sampling=sampling)) == 1
    assert distinct(InProcessPolicy(model.eval(), tokenizer)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_no_wrong_answers(temperature: float) -> None:
    model, tokenizer = make_tiny_tools_model(0)
    with torch.no_grad():
        next(model.parameters()).fill_(math.inf)
    policy = InProcessPolicy(model.eval(), tokenizer)
    with pytest.raises(InputError) as caught:
        policy.generate(["def f():"], num_samples=2, max_new_tokens=3, temperature=temperature, seed=0)
    assert (caught.value.code, caught.value.where) == ("CR0770", "sampling")
