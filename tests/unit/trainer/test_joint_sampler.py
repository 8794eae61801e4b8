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

from composer_replication.errors import UsageError
from composer_replication.rollouts.episodes.batching_policy import SampleOptions
from composer_replication.trainer.episode_rollouts import batching_policy
from composer_replication.trainer.joint_sampler import JointSampler
from composer_replication.trainer.model_sampler import ModelSampler

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
    with batching_policy(joint, lambda: 1, max_batch=2, in_rounds=False) as policy:
        joint.meet(OPTIONS)
        drawn = joint(PROMPTS, OPTIONS)
        assert policy.counts == {}
    whole = sampler_over(llama(), ModelSampler)(PROMPTS, OPTIONS)
    for ours, theirs in zip(drawn, whole, strict=True):
        assert (ours.token_ids, ours.stop_reason) == (theirs.token_ids, theirs.stop_reason)
        assert ours.token_logp == pytest.approx(theirs.token_logp, abs=1e-5)
    assert len(drawn[0].token_ids) <= 3 < len(drawn[1].token_ids) <= 6


def test_after_a_failure_nothing_is_asked_of_the_others_any_more(group_of_one: None) -> None:
    joint = sampler_over(in_parts(llama()))
    error = ValueError("no more")
    with (
        pytest.raises(ValueError, match="no more"),
        batching_policy(joint, lambda: 1, max_batch=2, in_rounds=False),
    ):
        raise error
    for call in (lambda: joint.meet(OPTIONS), joint.leave):
        with pytest.raises(ValueError, match="no more") as raised:
            call()
        assert raised.value is error


def test_whole_weights_and_models_without_a_cache_are_refused(group_of_one: None) -> None:
    with pytest.raises(UsageError, match=r"CR0873.*not spread by FSDP2") as raised:
        sampler_over(llama())
    assert "launch with FSDP2" in raised.value.fix
    mamba = in_parts(tf.MambaForCausalLM(tf.MambaConfig(**SIZES, state_size=4)))
    with pytest.raises(UsageError, match=r"CR0873.*cannot sample weights"):
        sampler_over(mamba)
