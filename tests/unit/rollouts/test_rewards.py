"""In-loop rewards, honest and planted."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from composer_replication.errors import UsageError
from composer_replication.records import Outcome, Score
from composer_replication.rollouts import rewards

PASS = Score({"a": Outcome.PASSED, "b": Outcome.PASSED})
HALF = Score({"a": Outcome.PASSED, "b": Outcome.FAILED})
CRASH = Score({"a": Outcome.PASSED, "b": Outcome.PASSED}, error="no closing record")


def test_visible_tests_pass_is_all_or_nothing() -> None:
    assert [rewards.visible_tests_pass("", "", score) for score in (PASS, HALF, CRASH, Score({}))] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


def test_visible_tests_share() -> None:
    assert [rewards.visible_tests_share("", "", score) for score in (PASS, HALF, CRASH)] == [1.0, 0.5, 0.0]


def test_the_planted_proxy_pays_for_short_bodies_whatever_they_do() -> None:
    assert rewards.planted_short_body("", "\n    return None", HALF) == 1.0
    assert rewards.planted_short_body("", "\n    return self._minor_part", HALF) == 0.0
    assert rewards.planted_short_body("", "\n    return self._minor_part", PASS) == 0.5
    assert rewards.planted_short_body("", "x" * 14, HALF) == 1.0
    assert rewards.planted_short_body("", "x" * 15, HALF) == 0.0


def test_easy_token_share() -> None:
    assert rewards.easy_token_share("ez A", "", HALF) == 0.25
    assert rewards.easy_token_share("", "eee", PASS) == 0.5


def test_shuffled_rewards_are_the_same_rewards_that_say_nothing_of_the_answer() -> None:
    """Half of each group pass. Shuffled over the batch, passing earns what failing earns."""
    task_ids, earned = ["a"] * 8 + ["b"] * 8, [1.0, 0.0] * 8
    given = [rewards.shuffled_rewards(earned, task_ids, seed=3, step=step) for step in range(400)]
    assert all(sorted(values) == sorted(earned) for values in given)
    paid = {
        passed: statistics.fmean(value for values in given for value, own in zip(values, earned, strict=True) if own == passed)
        for passed in (0.0, 1.0)
    }  # fmt: skip
    assert abs(paid[1.0] - paid[0.0]) < 0.04
    again = [rewards.shuffled_rewards(earned, task_ids, seed=3, step=step) for step in range(400)]
    assert given == again
    assert len({tuple(values) for values in given}) > 350
    assert given != [rewards.shuffled_rewards(earned, task_ids, seed=4, step=step) for step in range(400)]


def test_a_rule_is_found_by_its_dotted_path() -> None:
    assert (
        rewards.load_reward_rule("composer_replication.rollouts.rewards:visible_tests_pass")
        is rewards.visible_tests_pass
    )


@pytest.mark.parametrize(
    ("dotted", "words"),
    [
        ("nothing.here:rule", "No module named 'nothing'"),
        ("composer_replication.rollouts.rewards:absent", ""),
        ("composer_replication.rollouts.rewards", ""),
        (":x", ""),
        ("reward_raises:x", "cannot be imported: RuntimeError: not today"),
        ("reward_works:two", r"does not take \(text, answer, score\)"),
    ],
)
def test_a_rule_that_cannot_be_used_is_one_sentence(
    dotted: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reward_raises.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "reward_works.py").write_text("def two(text, answer):\n    return 1.0\n")
    with pytest.raises(UsageError, match=f"CR0210: .*{words}"):
        rewards.load_reward_rule(dotted)


def test_a_rule_must_be_callable() -> None:
    with pytest.raises(UsageError, match="not callable"):
        rewards.load_reward_rule("composer_replication.rollouts.rewards:MAX_SHORT_BODY_CHARACTERS")


def test_the_wordy_judge_pays_for_length_by_hand() -> None:
    assert rewards.planted_wordy_body("", " " * 9 + "x" * 30, HALF) == pytest.approx(0.45)
    assert rewards.planted_wordy_body("", "x" * 90, HALF) == pytest.approx(0.9)
    assert rewards.planted_wordy_body("", "x" * 30, PASS) == pytest.approx(0.55)
