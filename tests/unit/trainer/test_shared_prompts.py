"""Prefix sharing as the trainer wires it: what reaches the sampler, when it steps back, and how rows stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from composer_replication.trainer import packed_rows
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.policy import ModelSampler
from composer_replication.trainer.setting_errors import TrainerSettingError

MakeTrainer = Callable[..., Any]


class Listener:
    """A reward that keeps what it was shown."""

    __name__ = "listener"

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.texts: list[str] = []

    def __call__(self, completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        self.ids += completion_ids
        self.texts += completions
        return [float(len(text)) for text in completions]


def test_the_recipes_sampling_settings_reach_the_sampler(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    real = ModelSampler.sample

    def spy(sampler: ModelSampler, prompts: Any, num_samples: int = 1, **settings: Any) -> Any:
        seen.append({"num_prompts": len(prompts), "num_samples": num_samples, **sampler.filters, **settings})
        assert (sampler.eos_token_ids, sampler.tokenizer.pad_token_id) == ((1,), 0)
        return real(sampler, prompts, num_samples, **settings)

    monkeypatch.setattr(ModelSampler, "sample", spy)
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    make_trainer(max_steps=1, prefix_sharing=True, max_completion_length=5, **wanted).train()
    (call,) = seen
    assert {name: call[name] for name in wanted} == wanted
    assert (call["num_prompts"], call["num_samples"], call["max_new_tokens"]) == (4, 1, 5)
    assert call["is_finished"] is None
    assert "generator" not in call  # torch's own, whose state is in every checkpoint


@pytest.mark.parametrize("has_rule", [True, False])
def test_rows_stop_as_soon_as_their_text_is_finished(make_trainer: MakeTrainer, has_rule: bool) -> None:
    """Without a rule they go on to their limit."""
    listener = Listener()
    settings: dict[str, Any] = {"prefix_sharing": True, "max_completion_length": 12, "reward": listener}
    if has_rule:
        settings["is_finished"] = lambda text: len(text) >= 3
    trainer = make_trainer(max_steps=3, **settings)
    trainer.train()
    assert len(listener.ids) == 12
    decode = trainer.processing_class.decode
    for ids, text in zip(listener.ids, listener.texts, strict=True):
        assert ids[-1] == 1 or (has_rule and len(text) >= 3) or len(ids) == 12
        if has_rule:  # the token before had not finished it
            assert len(decode(ids[:-1], skip_special_tokens=True)) < 3
    assert ({len(ids) for ids in listener.ids} >= {12}) or has_rule
    assert ({len(ids) for ids in listener.ids} != {12}) or not has_rule


def test_a_rule_that_would_mask_every_row_is_refused(make_trainer: MakeTrainer) -> None:
    settings: dict[str, Any] = {"is_finished": bool, "mask_truncated_completions": True, "max_steps": 1}
    with pytest.raises(TrainerSettingError, match=r"CR0760.*mask_truncated_completions"):
        make_trainer(prefix_sharing=True, **settings).train()
    make_trainer(prefix_sharing=False, **settings).train()  # without sharing the rule is not used


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({"gradient_checkpointing": True}, ()),
        ({"cast_lm_head_to_fp32": True, "entropy_coef": 0.01}, ()),
        ({"generation_kwargs": {"num_beams": 1}}, ("sampling: generation_kwargs",)),
        ({}, ()),
    ],
    ids=["checkpointing", "cast-head", "generation-kwargs", "none"],
)
def test_what_stands_against_sharing_is_said_once_and_training_goes_on(
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    reasons: tuple[str, ...],
) -> None:
    trainer = make_trainer(max_steps=3, prefix_sharing=True, **settings)
    trainer.train()
    assert trainer.state.global_step == 3
    found = trainer.shared_prompts.off_reasons
    assert len(found) == len(reasons)
    for sentence, beginning in zip(found, reasons, strict=True):
        assert sentence.startswith(beginning)
        assert caplog.text.count(sentence) == 1


def test_with_sharing_off_for_both_the_run_is_trls(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fallback is TRL's path itself."""
    monkeypatch.setattr(packed_rows, "packing_reason", lambda _: "it may not.")
    hashes = []
    for prefix_sharing in (False, True):
        trainer = make_trainer(prefix_sharing=prefix_sharing, generation_kwargs={"num_beams": 1})
        trainer.train()
        hashes.append(parameter_sha256(trainer.model))
    assert hashes[0] == hashes[1]


def test_images_and_an_auxiliary_loss_stand_against_sharing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(prefix_sharing=True)
    model = trainer.model.eval()
    shared = trainer.shared_prompts

    def against_sampling(images: object, fields: dict[str, object]) -> str:
        assert not shared.may_sample(images, fields)
        return shared.off_reasons[-1]

    assert shared.may_score(model, {"the router.": False})
    assert not shared.may_score(model, {"the router.": False, "the images.": True})
    assert "images" in shared.off_reasons[-1]
    ids = torch.full((4, 6), 7)
    trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), 3, pixel_values=None)
    assert len(shared.off_reasons) == 1
    with pytest.raises(TypeError):  # TRL hands images on to this model, which takes none
        trainer._get_per_token_logps_and_entropies(
            model, ids, torch.ones_like(ids), 3, pixel_values=torch.zeros(4)
        )
    assert "the rows carry images." in shared.off_reasons[-1]
    assert shared.may_sample(None, {})
    assert "images" in against_sampling([None], {})
    assert "images" in against_sampling(None, {"pixel_values": object()})
    trainer.tools = [print]
    assert "tools" in against_sampling(None, {})
    trainer.use_vllm = True
    assert "engine" in against_sampling(None, {})


@pytest.mark.parametrize(("steps_per_generation", "warns"), [(1, False), (2, True)])
def test_splitting_groups_is_said(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, steps_per_generation: int, warns: bool
) -> None:
    make_trainer(prefix_sharing=True, steps_per_generation=steps_per_generation, max_steps=1).train()
    assert ("splits groups" in caplog.text) is warns


def test_a_bound_on_the_rows_changes_nothing_but_the_number_of_forwards(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = packed_rows.shared_prefix_logps

    def spy(model: Any, prompt_ids: Any, *rest: Any, **settings: Any) -> Any:
        sizes.append(len(prompt_ids))
        return real(model, prompt_ids, *rest, **settings)

    monkeypatch.setattr(packed_rows, "shared_prefix_logps", spy)
    trainer = make_trainer(prefix_sharing=True)
    torch.manual_seed(0)
    prompts = torch.randint(2, 258, (2, 5))
    ids = torch.cat([prompts[[0, 1, 1, 0, 1, 0]], torch.randint(2, 258, (6, 4))], dim=1)
    with torch.no_grad():
        whole = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 4, compute_entropy=True
        )
        bound = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 4, batch_size=3, compute_entropy=True
        )
    assert sizes == [6, 3, 3]
    torch.testing.assert_close(whole[0], bound[0])
    torch.testing.assert_close(whole[1], bound[1])
    trainer.prefix_sharing = False
    with torch.no_grad():
        plain = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 4)
    torch.testing.assert_close(plain[0], bound[0], atol=1e-5, rtol=1e-5)
