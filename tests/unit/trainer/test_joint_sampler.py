"""Sampling weights in parts, in a group of one process; more of them are in tests/invariants/test_sharded_agents.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer_replication.errors import InputError, UsageError
from composer_replication.rollouts.episodes.batching_policy import SampleOptions
from composer_replication.trainer import joint_sampler
from composer_replication.trainer.distinct_prompts import Prompt
from composer_replication.trainer.episode_rollouts import batching_policy
from composer_replication.trainer.joint_sampler import JointSampler, forwards_need_others
from composer_replication.trainer.model_sampler import ModelSampler
from composer_replication.trainer.sampling_batches import start_batch

SIZES = {"vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 2}
NO_FILTERS: Any = SimpleNamespace(top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0)
WORDS: Any = SimpleNamespace(pad_token_id=0, decode=lambda ids, **options: " ".join(map(str, ids)))
PROMPTS = [(5, 6, 7), (9, 8)]
OPTIONS = [SampleOptions(3, 1.0, 0), SampleOptions(6, 1.0, 3)]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def llama() -> Any:
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, intermediate_size=16, num_attention_heads=2))


def in_parts(model: Any) -> Any:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def sampler_over(model: Any, kind: type[ModelSampler] = JointSampler) -> Any:
    return kind(model, NO_FILTERS, WORDS, eos_token_ids=[2])


def test_the_words_are_those_of_whole_weights(group_of_one: None) -> None:
    joint = sampler_over(in_parts(llama()))
    with batching_policy(joint, lambda: 1, max_batch=2, in_rounds=False):
        joint.meet(OPTIONS)
        drawn = joint(PROMPTS, OPTIONS)
    whole = sampler_over(llama(), ModelSampler)(PROMPTS, OPTIONS)
    for ours, theirs in zip(drawn, whole, strict=True):
        assert (ours.token_ids, ours.stop_reason) == (theirs.token_ids, theirs.stop_reason)
        assert ours.token_logp == pytest.approx(theirs.token_logp, abs=1e-5)
    assert len(drawn[0].token_ids) <= 3 < len(drawn[1].token_ids) <= 6


def test_after_a_failure_nothing_is_asked_of_the_others_any_more(
    group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(joint_sampler, "gathered", lambda word: told.append(word) or [word])
    joint = sampler_over(in_parts(llama()))
    error = ValueError("no more")
    with (
        pytest.raises(ValueError, match="no more"),
        batching_policy(joint, lambda: 1, max_batch=2, in_rounds=False),
    ):
        raise error
    assert [str(word.error) for word in told] == ["no more"]
    for call in (lambda: joint.meet(OPTIONS), joint.leave):
        with pytest.raises(ValueError, match="no more") as raised:
            call()
        assert raised.value is error
    joint.fail(error)
    assert len(told) == 1


def test_after_all_have_left_nobody_is_told(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(joint_sampler, "gathered", lambda word: told.append(word) or [word])
    joint = sampler_over(in_parts(llama()))
    joint.leave()
    joint.fail(ValueError("too late"))
    assert len(told) == 1


def test_only_an_error_of_ours_is_told_amid_a_batch(
    group_of_one: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another may come from within a forward, where the others wait for weights."""
    told: list[Any] = []
    monkeypatch.setattr(joint_sampler, "gathered", lambda word: told.append(word) or [word])

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise errors.pop()

    errors: list[Exception] = [InputError("CR0999", "of ours."), RuntimeError("out of memory")]
    for error, num_told in ((RuntimeError, 0), (InputError, 1)):
        joint = sampler_over(in_parts(llama()))
        monkeypatch.setattr(joint, "sampled", broken)
        with pytest.raises(error):
            joint(PROMPTS, OPTIONS)
        joint.fail(ValueError("again"))
        assert len(told) == num_told
    assert "out of memory" in caplog.text


def test_weights_that_are_whole_after_a_forward_are_still_in_parts(group_of_one: None) -> None:
    model = llama()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
    for _ in range(2):
        joint = sampler_over(model)
        joint.meet(OPTIONS)
        assert len(joint(PROMPTS, OPTIONS)) == 2
    assert forwards_need_others(model)
    assert not forwards_need_others(llama())


def test_a_lone_sampler_over_weights_in_parts_is_refused(group_of_one: None) -> None:
    lone = sampler_over(in_parts(llama()), ModelSampler)
    with (
        pytest.raises(UsageError, match=r"CR0873.*forwards alone"),
        batching_policy(lone, lambda: 1, max_batch=2, in_rounds=False),
    ):
        pass


def test_what_went_another_way_is_a_sentence(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_sampler, "gathered", lambda word: [word, None])
    with pytest.raises(RuntimeError, match="process 1 does not sample here"):
        sampler_over(in_parts(llama())).meet(OPTIONS)


def test_whole_weights_and_models_without_a_cache_are_refused(group_of_one: None) -> None:
    with pytest.raises(UsageError, match=r"CR0873.*not spread by FSDP2") as raised:
        sampler_over(llama())
    assert "fsdp_version: 2" in raised.value.fix
    mamba = in_parts(tf.MambaForCausalLM(tf.MambaConfig(**SIZES, state_size=4)))
    with pytest.raises(UsageError, match=r"CR0873.*cannot sample weights") as raised:
        sampler_over(mamba)
    assert "take another model" in raised.value.fix
    with pytest.raises(InputError, match="CR0757"):
        start_batch(mamba, [Prompt(ids=(5,), mask=(1,))], [0], 0, needs_cache=True)
