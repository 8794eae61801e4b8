"""Rows of several conversations: every token is scored by what the model saw when it was sampled, and by nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from full_vocabulary import token_logps
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_trainer import build_trainer, tiny_model, tiny_tokenizer
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import add_fused_lm_head

from composer_replication.records import Rollout
from composer_replication.trainer.collator import rollouts_of, sibling_pairs
from composer_replication.trainer.generation import ROW_REWARD, SEGMENT_STARTS, Generation, temporarily
from composer_replication.trainer.packed_rows import shared_prefix_logps

Conversation = tuple[list[int], list[int]]  # prompt, completion
PAD = 0

words = st.lists(st.integers(2, 257), min_size=1, max_size=5)
chains = st.lists(st.tuples(words, words), min_size=1, max_size=4)


def chained(chain: list[Conversation]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Prompt, completion, mask and starts of one row."""
    (prompt, first), *later = chain
    ids, mask, starts = [*first], [1] * len(first), []
    for before, answer in later:
        starts.append(len(ids))
        ids += [*before, *answer]
        mask += [0] * len(before) + [1] * len(answer)
    return prompt, ids, mask, starts


def batch_of(rows: list[list[Conversation]]) -> dict[str, torch.Tensor]:
    """Padded as TRL pads: prompts on the left, everything else on the right."""
    parts = [chained(chain) for chain in rows]
    num_prompt, num_completion = max(len(p) for p, *_ in parts), max(len(c) for _, c, *_ in parts)

    def right(values: list[int]) -> list[int]:
        return values + [0] * (num_completion - len(values))

    prompts, ids, masks, starts = zip(*parts, strict=True)
    left = [num_prompt - len(prompt) for prompt in prompts]
    return {
        "prompt_ids": torch.tensor([[PAD] * n + prompt for n, prompt in zip(left, prompts, strict=True)]),
        "prompt_mask": torch.tensor(
            [[0] * n + [1] * len(prompt) for n, prompt in zip(left, prompts, strict=True)]
        ),
        "completion_ids": torch.tensor([right(each) for each in ids]),
        "completion_mask": torch.tensor([right([1] * len(each)) for each in ids]),
        "tool_mask": torch.tensor([right(each) for each in masks]),
        SEGMENT_STARTS: pad_sequence([torch.tensor(each, dtype=torch.long) for each in starts], True),
    }


def whole_rows(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)


def values_alone(model: Any, rows: list[list[Conversation]], num_columns: int) -> torch.Tensor:
    """Log-probabilities of what each conversation sampled, of a forward of that conversation alone; 0 elsewhere."""
    values = torch.zeros(len(rows), num_columns)
    for row, chain in enumerate(rows):
        column = 0
        for number, (prompt, answer) in enumerate(chain):
            column += len(prompt) if number else 0
            logps = token_logps(model, prompt, answer)[range(len(answer)), answer]
            values[row, column : column + len(answer)] = logps
            column += len(answer)
    return values


@pytest.fixture(scope="module")
def scorer() -> Any:
    model = tiny_model()
    add_fused_lm_head(model)
    return model.eval()


@settings(max_examples=25)
@given(st.lists(chains, min_size=1, max_size=4), st.booleans())
def test_each_token_has_the_past_of_its_own_conversation(
    scorer: Any, rows: list[list[Conversation]], packs: bool
) -> None:
    batch = batch_of(rows)
    parts = [batch[f"{part}_{kind}"] for part in ("prompt", "completion") for kind in ("ids", "mask")]
    with torch.no_grad():
        logps, _ = shared_prefix_logps(scorer, *parts, batch[SEGMENT_STARTS], packs=packs)
        expected = values_alone(scorer, rows, logps.size(1))
    torch.testing.assert_close(logps * batch["tool_mask"], expected, rtol=1e-5, atol=1e-5)
    assert (logps[batch["completion_mask"] == 0] == 0).all()


def test_a_row_whose_mask_was_emptied_has_no_value(scorer: Any) -> None:
    batch = batch_of(ROWS)
    batch["completion_mask"][2] = 0
    parts = [batch[f"{part}_{kind}"] for part in ("prompt", "completion") for kind in ("ids", "mask")]
    with torch.no_grad():
        logps, _ = shared_prefix_logps(scorer, *parts, batch[SEGMENT_STARTS])
    assert (logps[2] == 0).all() and (logps[[0, 1, 3]] != 0).any(-1).all()


ROWS: list[list[Conversation]] = [
    [([5, 6, 7], [8, 9]), ([5, 6, 40, 41], [42, 43, 44])],
    [([5, 6, 7], [20, 21, 22])],
    [([5, 6, 7], [30]), ([60], [61]), ([70, 71], [72, 73, 74, 75])],
    [([5, 6, 7], [8, 10]), ([5, 6, 50], [51])],
]


@pytest.mark.parametrize("prefix_sharing", [False, True])
def test_values_and_gradients_are_those_of_the_conversations_alone(
    tmp_path: Path, prefix_sharing: bool
) -> None:
    trainer = build_trainer(output_dir=tmp_path, prefix_sharing=prefix_sharing)
    batch = batch_of(ROWS)
    ids, mask, num_columns = whole_rows(batch)
    weights = torch.linspace(-1, 1, batch["tool_mask"].numel()).reshape(batch["tool_mask"].shape)
    weights = weights * batch["tool_mask"]
    oracle = tiny_model()
    expected = (values_alone(oracle, ROWS, num_columns) * weights).sum()
    expected.backward()
    with temporarily(trainer, generation=Generation.of_batch(batch)):
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, num_columns, batch_size=3, compute_entropy=True
        )
    loss = (logps * weights).sum()
    loss.backward()
    assert not trainer.shared_prompts.off_reasons
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(trainer.model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert (entropies[batch["tool_mask"] == 1] > 0).all() and (
        entropies[batch["completion_mask"] == 0] == 0
    ).all()
    as_one, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, num_columns)
    sampled = batch["tool_mask"].bool()
    sampled[:, :1] = False
    far = (as_one - logps).abs()
    assert far[1][sampled[1]].max() < 1e-5  # one conversation is as it was
    assert far[2][sampled[2]].max() > 1e-3  # scored as if it were one conversation it would be another number


def rollout_function(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Every second row goes on from a summary; the log-probabilities are those of each conversation alone."""
    tokenizer = trainer.processing_class
    output: dict[str, Any] = {
        key: [] for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs", SEGMENT_STARTS)
    }
    for number, prompt in enumerate(prompts):
        first = (tokenizer.encode(prompt), [50 + number, 60, 61])
        chain = [first, ([70, 71, 72], [80, 81 + number, 1])] if number % 2 else [(first[0], [*first[1], 1])]
        ids, completion, mask, starts = chained(chain)
        logps = [0.0] * len(completion)
        places = [place for place, kept in enumerate(mask) if kept]
        with torch.no_grad():
            known = [
                token_logps(trainer.model, before, answer)[range(len(answer)), answer]
                for before, answer in chain
            ]
        for place, value in zip(places, torch.cat(known).tolist(), strict=True):
            logps[place] = value
        for key, value in zip(output, (ids, completion, mask, logps, starts), strict=True):
            output[key].append(value)
    return output


@pytest.mark.parametrize(
    "settings", [{"beta": 0.1, "lora_adapter": True}, {"steps_per_generation": 2, "num_iterations": 2}]
)
def test_a_run_on_chains_drifts_from_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Shuffled, split and used again: each row stays with its own conversations."""
    trainer = build_trainer(
        output_dir=tmp_path, max_steps=2, learning_rate=0.0, rollout_func=rollout_function, **settings
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "checks/token_drift_max" in row]
    drifts = [row["checks/token_drift_max"] for row in rows]
    assert len(drifts) == 2 and max(drifts) < 1e-5
    if "beta" in settings:  # the reference is the policy here
        assert max(abs(row["kl"]) for row in rows) < 1e-6


def test_a_run_that_hides_its_chains_is_told_so(tmp_path: Path) -> None:
    """The same ids without their starts: the check of token drift sees the difference."""

    def hiding(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            key: value for key, value in rollout_function(prompts, trainer).items() if key != SEGMENT_STARTS
        }

    trainer = build_trainer(output_dir=tmp_path, max_steps=1, learning_rate=0.0, rollout_func=hiding)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "checks/token_drift_max" in row]
    assert row["checks/token_drift_max"] > 1e-2


def test_turns_of_a_row_begin_with_their_own_conversation() -> None:
    batch = {**batch_of(ROWS), ROW_REWARD: torch.ones(4)}
    generation = Generation([{"prompt": "p"}] * 4, batch=batch)
    found = rollouts_of(generation, tiny_tokenizer(), step=1, eos_token_ids=())
    assert [turns_of(rollout) for rollout in found] == [
        [(tuple(prompt), tuple(answer)) for prompt, answer in chain] for chain in ROWS
    ]


def turns_of(rollout: Rollout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(turn.prompt_ids, turn.completion.token_ids) for turn in rollout.turns]


def test_chains_are_in_no_pair_of_siblings() -> None:
    rows: list[list[Conversation]] = [[([5], [6, 7])], [([5], [8, 9])], ROWS[0], ROWS[2]]
    pairs = sibling_pairs(dict(batch_of(rows)), [1.0, 0.0, 1.0, 0.0])
    assert list(map(len, pairs)) == [1, 0, 0, 0]
