"""What shared_prefix_logps computes, refuses and spends."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from composer_replication.errors import InputError
from composer_replication.trainer import packed_rows
from composer_replication.trainer.packed_rows import MAX_COLUMNS, rows_of_a_pack, shared_prefix_logps

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


def test_equal_to_trls_own_forward_of_whole_rows(model: LlamaForCausalLM) -> None:
    ids, mask, completions, kept = tensors([PROMPT, [9, 10], PROMPT], [[1, 2, 3], [4, 5], [6]])
    labels = torch.cat([ids, completions], 1).masked_fill(torch.cat([mask, kept], 1) == 0, -100)
    labels[:, : ids.size(1)] = -100
    output: Any = model(
        input_ids=torch.cat([ids, completions], 1),
        attention_mask=torch.cat([mask, kept], 1),
        labels=labels,
        fused_lm_head=True,
    )
    logps, entropies = shared_prefix_logps(model, ids, mask, completions, kept)
    torch.testing.assert_close(logps, output.log_probs[:, -3:], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, output.entropy[:, -3:], rtol=0, atol=1e-5)
    assert logps.dtype == output.log_probs.dtype


def test_an_empty_prompt_is_refused_by_row(model: LlamaForCausalLM) -> None:
    ids, mask, completions, kept = tensors([PROMPT, PROMPT], [[1], [2]])
    mask[1] = 0
    with pytest.raises(InputError, match=r"CR0722.*row 1"):
        shared_prefix_logps(model, ids, mask, completions, kept)


def test_one_row_behind_each_prompt_needs_no_mask(model: LlamaForCausalLM) -> None:
    masks: list[object] = []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, given: masks.append(given.get("attention_mask")), with_kwargs=True
    )
    for prompts in ([PROMPT, [9, 10]], [PROMPT, PROMPT]):
        shared_prefix_logps(model, *tensors(prompts, [[1, 2], [3, 4]]))
    hook.remove()
    assert [mask is None for mask in masks] == [True, True, False]


def test_masks_that_would_be_too_large_together_are_made_one_by_one(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = tensors([PROMPT, PROMPT, [9, 10], [9, 10]], [[1, 2], [3], [4, 5], [6]])
    monkeypatch.setattr(packed_rows, "num_processes", lambda: 2)
    shapes = []
    for columns in (MAX_COLUMNS, 7):
        monkeypatch.setattr(packed_rows, "MAX_COLUMNS", columns)
        monkeypatch.setattr(packed_rows, "rows_of_a_pack", lambda rows, *_: rows)
        with Spy(model) as spy:
            shared_prefix_logps(model, *batch)
        shapes.append([len(ids) for ids in spy.inputs])
    assert shapes == [[2], [1, 1]]


@pytest.mark.parametrize(
    ("rows", "prompt", "completion", "hidden", "packed"),
    [
        (8, 2048, 26, 576, 8),
        (8, 128, 26, 576, 8),
        (8, 16, 4096, 576, 1),  # attention between completions would be most of the work
        (8, 512, 512, 4096, 8),
        (1, 5, 5, 16, 1),
        (8, 15_500, 1_000, 16_384, 1),  # no two fit
        (8, 20_000, 1_000, 576, 1),
    ],
)
def test_how_many_rows_a_pack_has(rows: int, prompt: int, completion: int, hidden: int, packed: int) -> None:
    found = rows_of_a_pack(rows, prompt, completion, hidden)
    assert found == packed
    assert found == 1 or prompt + found * completion <= MAX_COLUMNS
