"""What the checks measure and when they speak, from numbers written by hand and from recorded runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.cli.doctor_verb import load_explanations
from composer_replication.trainer.checks import CODES, REMEDIES, Judgement, micro_step_figures

RECORDED = Path(__file__).parents[2] / "golden" / "recorded_runs"
PAD = 0
HONEST = {"num_tokens": 20.0, "num_rows": 4.0, "num_paid_rows": 4.0, "entropy_sum": 30.0}


def batch(**changes: Any) -> dict[str, Any]:
    """Two rows of three and two tokens."""
    return {
        "prompt_ids": torch.tensor([[PAD, 5], [5, 6]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[7, 8, 9], [7, 8, PAD]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "advantages": torch.tensor([0.5, -0.5]),
        **changes,
    }


def figures(inputs: dict[str, Any], **changes: Any) -> dict[str, float]:
    arguments: dict[str, Any] = {
        "loss": torch.tensor(0.5),
        "policy_logp_BT": torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, -9.0]]),
        "entropy_BT": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 100.0]]),
        "pad_token_id": PAD,
        "masks_truncated": False,
        "channels": {},
        **changes,
    }
    return micro_step_figures(inputs, **arguments)


def test_an_honest_batch_by_hand() -> None:
    found = figures(batch())
    assert found == {
        "is_finite": 1.0,
        "num_tokens": 5.0,
        "num_rows": 2.0,
        "num_paid_rows": 2.0,
        "num_unpaid_rows": 0.0,
        "num_rows_over_padding": 0.0,
        "entropy_sum": 15.0,
    }


def test_tokens_of_which_nothing_is_known_do_not_drift() -> None:
    sampled = torch.tensor([[-1.0, -2.0, -2.0], [-1.0, -2.25, 50.0]])
    found = figures(batch(sampling_per_token_logps=sampled))
    assert found["drift_sum"] == 1.25  # the token outside the mask does not count
    assert (found["num_drift_tokens"], found["drift_max"]) == (5.0, 1.0)
    same = figures(batch(sampling_per_token_logps=torch.tensor([[-1.0, -2.0, -3.0], [-1.0, math.nan, 0.0]])))
    assert (same["drift_sum"], same["num_drift_tokens"]) == (0.0, 4.0)


def test_rows_without_any_token_do_not_drift() -> None:
    none = torch.zeros(2, 0)
    empty = batch(completion_ids=none, completion_mask=none, sampling_per_token_logps=none)
    found = figures(empty, policy_logp_BT=none, entropy_BT=None)
    assert (found["num_tokens"], found["num_drift_tokens"], found["drift_max"]) == (0.0, 0.0, 0.0)


def test_ratio_to_the_old_policy_by_hand() -> None:
    """Ratios 1, 1, 1, 1 and 3: (7^2) / (5 * 13)."""
    old = torch.tensor([[-1.0, -2.0, -3.0 - math.log(3)], [-1.0, -2.0, 70.0]])
    found = figures(batch(old_per_token_logps=old))
    assert found["policy_effective_share"] == pytest.approx(49 / 65)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tool_mask": torch.tensor([[1, 1, 1], [0, 0, 1]])}, "num_unpaid_rows"),
        ({"completion_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "num_unpaid_rows"),
        ({"completion_mask": torch.tensor([[1, 0, 1], [1, 1, 0]])}, "num_rows_over_padding"),
        ({"completion_ids": torch.tensor([[7, PAD, PAD], [7, 8, PAD]])}, "num_rows_over_padding"),
        ({"prompt_mask": torch.tensor([[1, 0], [1, 1]])}, "num_rows_over_padding"),
    ],
)
def test_reward_and_mask_that_do_not_fit(changes: dict[str, Any], name: str) -> None:
    assert figures(batch())[name] == 0
    found = figures(batch(**changes))
    assert found[name] == 1
    said = Judgement().judge(1, found)
    assert [finding.name for finding in said] == ["reward_and_mask"]


def test_one_padding_token_at_the_end_may_be_the_end_token() -> None:
    changes = {"completion_ids": torch.tensor([[7, 8, PAD], [7, PAD, PAD]])}
    assert figures(batch(**changes))["num_rows_over_padding"] == 0


def test_rows_that_truncation_masked_are_meant() -> None:
    emptied = batch(completion_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    assert figures(emptied)["num_unpaid_rows"] == 1
    assert figures(emptied, masks_truncated=True)["num_unpaid_rows"] == 0


def test_loss_and_channels_are_measured() -> None:
    found = figures(batch(), loss=torch.tensor(math.nan), channels={"sdpo": torch.tensor(-0.25)})
    assert (found["is_finite"], found["channel/sdpo"]) == (0.0, 0.25)


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_masks_of_right_padded_rows_are_never_complained_of(
    num_rows: int, num_tokens: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, num_tokens), min_size=num_rows, max_size=num_rows))
    mask = torch.tensor([[int(t < length) for t in range(num_tokens)] for length in lengths])
    ids = torch.where(mask.bool(), 7, PAD)
    inputs = {
        "prompt_ids": torch.full((num_rows, 2), 5),
        "prompt_mask": torch.ones(num_rows, 2),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([float(length > 0) for length in lengths]),
    }
    zeros = torch.zeros(num_rows, num_tokens)
    found = figures(inputs, policy_logp_BT=zeros, entropy_BT=zeros)
    assert found["num_rows_over_padding"] == found["num_unpaid_rows"] == 0
    assert found["num_tokens"] == sum(lengths)


# ---- when they speak --------------------------------------------------------------------------------


def names(judgement: Judgement, steps: list[dict[str, float]]) -> list[list[str]]:
    return [
        [finding.name for finding in judgement.judge(number, row)]
        for number, row in enumerate(steps, start=1)
    ]


def test_a_finding_is_said_when_it_begins_and_again_when_it_comes_back() -> None:
    drifting = HONEST | {"num_drift_tokens": 10.0, "drift_sum": 1.0, "drift_max": 0.4}
    calm = HONEST | {"num_drift_tokens": 10.0, "drift_sum": 0.4, "drift_max": 0.3}
    said = names(Judgement(), [calm, drifting, drifting, calm, drifting])
    assert said == [[], ["token_drift"], [], [], ["token_drift"]]


def test_importance_weights() -> None:
    fine = HONEST | {"policy_effective_share": 0.5, "truncated_share": 0.1}
    assert names(Judgement(), [fine]) == [[]]
    for bad in (
        {"policy_effective_share": 0.49},
        {"sampling_effective_share": 0.4},
        {"truncated_share": 0.11},
    ):
        assert names(Judgement(), [HONEST | bad]) == [["effective_sample_size"]]


def test_a_channel_that_is_zero_for_five_steps() -> None:
    unpaid = HONEST | {"num_paid_rows": 0.0, "channel/sdpo": 0.0, "channel/replay": 0.1}
    judgement = Judgement()
    assert names(judgement, [unpaid] * 4) == [[]] * 4
    said = judgement.judge(5, unpaid)
    assert [finding.name for finding in said] == ["zero_channel", "zero_channel"]
    assert {"grpo", "sdpo"} == {finding.sentence.split()[2] for finding in said}
    assert names(Judgement(), [unpaid] * 4 + [HONEST | {"channel/sdpo": 1e-9}] + [unpaid] * 4) == [[]] * 9


def test_groups_over_a_window_of_eight_generations() -> None:
    for part, name in (("num_dull", "groups_without_signal"), ("num_truncated", "truncated_groups")):
        judgement = Judgement()
        counts = {"num_dull": 0.0, "num_truncated": 0.0}
        for _ in range(7):
            judgement.note_generation(num_groups=2, **(counts | {part: 2.0}))
        assert judgement.judge(7, HONEST) == []  # seven generations are too few to say
        judgement.note_generation(num_groups=2, **(counts | {part: 1.0}))
        (said,) = judgement.judge(8, HONEST)
        assert (said.name, said.figures["share"]) == (name, 15 / 16)
    judgement = Judgement()
    for _ in range(20):
        judgement.note_generation(num_groups=2, num_dull=1.0, num_truncated=1.0)
    assert judgement.judge(20, HONEST) == []


def test_entropy_and_length_trends_by_hand() -> None:
    """From 1.5 nats and 5 tokens a row to 4.9% and 24% of them."""
    low_entropy = HONEST | {"entropy_sum": 30.0 * 0.049}
    assert names(Judgement(), [HONEST] * 5 + [low_entropy] * 5)[-1] == ["entropy_collapse"]
    assert names(Judgement(), [HONEST] * 5 + [HONEST | {"entropy_sum": 30.0 * 0.051}] * 5) == [[]] * 10
    short = HONEST | {"num_tokens": 4.8, "entropy_sum": 7.2}
    assert names(Judgement(), [HONEST] * 5 + [short] * 5)[-1] == ["length_collapse"]
    assert names(Judgement(), [HONEST] * 5 + [low_entropy] * 4) == [[]] * 9


@pytest.mark.parametrize("run", ["quickstart-0", "planted-hack-0", "weakened-tests-0", "wordy-judge-0"])
def test_recorded_runs_do_not_collapse(run: str) -> None:
    rows = [json.loads(line) for line in (RECORDED / run / "metrics.jsonl").read_text().splitlines()]
    steps = []
    judgement = Judgement()
    for row in rows:
        length = row["completions/mean_length"]
        steps.append(HONEST | {"num_tokens": 16 * length, "num_rows": 16.0})
        steps[-1]["entropy_sum"] = row["entropy"] * 16 * length
        judgement.note_generation(num_groups=2, num_dull=2 * row["frac_reward_zero_std"], num_truncated=0)
    assert [said for said in names(judgement, steps) if said] == []


def test_bad_steps_are_said_each_time_and_three_in_a_row_stop() -> None:
    judgement = Judgement()
    for cause, stops in (("the loss", False), ("", False), ("the loss", False), ("the gradient", False)):
        judgement.judge(1, HONEST, bad=cause)
        assert (judgement.num_bad_in_a_row >= 3) is stops
    (said,) = judgement.judge(5, HONEST, bad="the gradient")
    assert said.sentence == "the gradient is not finite: the step is skipped (3 in a row)."
    assert judgement.num_bad_in_a_row == 3


@given(st.integers(0, 24), st.integers(0, 3))
def test_memory_survives_json(split: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [
        HONEST
        | {"entropy_sum": value * 30, "drift_sum": value, "num_drift_tokens": 10.0, "num_paid_rows": 0.0}
        for value in torch.rand(24, generator=generator).tolist()
    ]

    def run(judgement: Judgement, part: list[dict[str, float]]) -> list[list[str]]:
        said = []
        for row in part:
            judgement.note_generation(num_groups=1, num_dull=1, num_truncated=row["drift_sum"])
            said += names(judgement, [row])
        return said

    whole, first, second = (Judgement() for _ in range(3))
    expected = run(whole, rows)
    said = run(first, rows[:split])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert said + run(second, rows[split:]) == expected
    assert second.state_dict() == whole.state_dict()


def test_each_check_has_a_code_that_is_explained() -> None:
    assert len(set(CODES.values())) == len(CODES) == len(REMEDIES)
    explanations = load_explanations()
    for name, code in CODES.items():
        assert name in explanations[code]["meaning"]
        assert REMEDIES[name].endswith(".")
