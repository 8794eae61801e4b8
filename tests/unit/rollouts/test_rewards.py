"""In-loop rewards, honest and planted."""

from __future__ import annotations

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


def test_a_rule_is_found_by_its_dotted_path() -> None:
    assert (
        rewards.load_reward_rule("composer_replication.rollouts.rewards:visible_tests_pass")
        is rewards.visible_tests_pass
    )


@pytest.mark.parametrize(
    "dotted",
    [
        "nothing.here:rule",
        "composer_replication.rollouts.rewards:absent",
        "composer_replication.rollouts.rewards",
        ":x",
    ],
)
def test_a_rule_that_cannot_be_imported_is_one_sentence(dotted: str) -> None:
    with pytest.raises(UsageError, match="CR0210"):
        rewards.load_reward_rule(dotted)


def test_a_rule_must_be_callable() -> None:
    with pytest.raises(UsageError, match="not callable"):
        rewards.load_reward_rule("composer_replication.rollouts.rewards:MAX_SHORT_BODY_CHARACTERS")


def test_the_wordy_judge_pays_for_length_by_hand() -> None:
    assert rewards.planted_wordy_body("", " " * 9 + "x" * 30, HALF) == pytest.approx(0.45)
    assert rewards.planted_wordy_body("", "x" * 90, HALF) == pytest.approx(0.9)
    assert rewards.planted_wordy_body("", "x" * 30, PASS) == pytest.approx(0.55)
