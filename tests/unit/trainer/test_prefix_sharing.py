"""What shared_prefix_logps computes, refuses and spends, and how the trainer wires it: when it steps back, and how rows stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from composer_replication.errors import InputError
from composer_replication.trainer import packed_rows
from composer_replication.trainer.packed_rows import MAX_COLUMNS, shared_prefix_logps
from composer_replication.trainer.policy import ModelSampler
from composer_replication.trainer.preset_settings import TrainerSettingError

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    made = LlamaForCausalLM(config).train()
    add_fused_lm_head(made, outputs=("log_probs", "entropy"))
    return made


def tensors(prompts: list[list[int]], completions: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Pad as TRL does: prompts on the left, completions on the right."""
    width, columns = max(map(len, prompts)), max(1, *map(len, completions))
    return (
        torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
        torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
        torch.tensor([ids + [0] * (columns - len(ids)) for ids in completions]),
        torch.tensor([[1] * len(ids) + [0] * (columns - len(ids)) for ids in completions]),
    )


class Spy:
    """Records the token ids of every forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inputs: list[list[list[int]]] = []
        self._handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self.inputs.append(kwargs["input_ids"].tolist())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._handle.remove()


def test_completions_follow_their_prompt_in_one_row(model: LlamaForCausalLM) -> None:
    batch = tensors([PROMPT, [9, 10], PROMPT, PROMPT], [[1, 2, 3], [4, 5], [6], [7, 8, 9]])
    with Spy(model) as spy:
        shared_prefix_logps(model, *batch)
    last = PROMPT[-1]  # once for each completion; what is only predicted is not read
    assert spy.inputs == [[[*PROMPT[:-1], last, 1, 2, last, last, 7, 8]], [[9, 10, 4]]]


def test_masked_positions_are_zero_and_carry_no_gradient(model: LlamaForCausalLM) -> None:
    batch = tensors([PROMPT, PROMPT, PROMPT], [[1, 2, 3], [4], []])
    logps, entropies = shared_prefix_logps(model, *batch)
    assert entropies is not None
    hidden = batch[3] == 0
    for values in (logps, entropies):
        assert values[hidden].eq(0).all()
        assert values[~hidden].ne(0).all()
    parts = torch.autograd.grad(logps[hidden].sum() + entropies[hidden].sum(), list(model.parameters()))
    assert all(part.eq(0).all() for part in parts)


def test_a_batch_without_any_token_gives_a_differentiable_zero(model: LlamaForCausalLM) -> None:
    ids, mask, completions, kept = tensors([PROMPT, [9]], [[1, 2], [3, 4]])
    logps, _ = shared_prefix_logps(model, ids, mask, completions, torch.zeros_like(kept))
    assert logps.shape == (2, 2)
    assert logps.eq(0).all()
    assert logps.requires_grad


def test_learned_positions_count_from_the_first_token_not_from_the_padding() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = GPT2LMHeadModel(config).eval()
    batch = tensors([PROMPT, [9, 10]], [[1, 2, 3], [4, 5, 6]])
    add_fused_lm_head(model)
    logps, _ = shared_prefix_logps(model, *batch)
    for row, sequence in enumerate(([*PROMPT, 1, 2, 3], [9, 10, 4, 5, 6])):
        alone = model(torch.tensor([sequence])).logits[0, -4:-1].log_softmax(-1)
        expected = alone.gather(-1, batch[2][row, :, None])[:, 0]
        torch.testing.assert_close(logps[row], expected, rtol=0, atol=1e-5)


def test_an_empty_prompt_is_refused_by_row(model: LlamaForCausalLM) -> None:
    ids, mask, completions, kept = tensors([PROMPT, PROMPT], [[1], [2]])
    mask[1] = 0
    with pytest.raises(InputError, match=r"CR0722.*row 1"):
        shared_prefix_logps(model, ids, mask, completions, kept)


def test_masks_that_would_be_too_large_together_are_made_one_by_one(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = tensors([PROMPT, PROMPT, [9, 10], [9, 10]], [[1, 2], [3], [4, 5], [6]])
    monkeypatch.setattr(packed_rows, "num_processes", lambda: 2)
    shapes = []
    for columns in (MAX_COLUMNS, 7):
        monkeypatch.setattr(packed_rows, "MAX_COLUMNS", columns)
        monkeypatch.setattr(packed_rows, "rows_of_a_pack", lambda *_: 99)
        with Spy(model) as spy:
            shared_prefix_logps(model, *batch)
        shapes.append([len(ids) for ids in spy.inputs])
    assert shapes == [[2], [1, 1]]


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
    make_trainer(prefix_sharing=False, **settings)._check_before_training()  # the rule is not used


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({"gradient_checkpointing": True, "cast_lm_head_to_fp32": True, "entropy_coef": 0.01}, ()),
        ({"generation_kwargs": {"num_beams": 1}}, ("sampling: generation_kwargs",)),
    ],
    ids=["nothing", "generation-kwargs"],
)
def test_what_stands_against_sharing_is_said_once_and_training_goes_on(
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    reasons: tuple[str, ...],
) -> None:
    trainer = make_trainer(max_steps=2, prefix_sharing=True, **settings)
    trainer.train()
    assert trainer.state.global_step == 2
    found = trainer.shared_prompts.off_reasons
    assert len(found) == len(reasons)
    for sentence, beginning in zip(found, reasons, strict=True):
        assert sentence.startswith(beginning)
        assert caplog.text.count(sentence) == 1


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
