"""Rewards are pure functions of what is known of an attempt."""

from __future__ import annotations

import pytest

from composer_replication.config import AgentRewardSection as Options
from composer_replication.records import Outcome, Score
from composer_replication.rollouts.environment.feature_deletion_env import reward_of
from composer_replication.rollouts.grading import Regressions

PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
SCORE = Score({"t.py::a": PASSED, "t.py::b[1]": PASSED, "t.py::b[2]": FAILED, "t.py::c": FAILED})
WHOLE = Score(dict.fromkeys(SCORE.outcomes, PASSED))
BROKEN = Regressions(("t.py::d",), 4)


@pytest.mark.parametrize(("options", "share"), [(Options(), 0.5), (Options(rule="all_or_nothing"), 0.0)])
def test_the_share_of_the_tests(options: Options, share: float) -> None:
    assert reward_of(SCORE, options) == pytest.approx(share)
    assert reward_of(WHOLE, options) == 1.0
    for lost in (Score(WHOLE.outcomes, error="it left"), Score({})):
        assert reward_of(lost, options) == 0.0


def test_what_broke_masks_or_costs_or_is_ignored() -> None:
    rewards = [
        reward_of(WHOLE, Options(breaks=rule), regressions=BROKEN) for rule in ("mask", "cost", "ignore")
    ]
    assert rewards == [0.0, 0.75, 1.0]
    whole = Regressions((), 4)
    assert {reward_of(WHOLE, Options(breaks=rule), regressions=whole) for rule in ("mask", "cost")} == {1.0}
    assert reward_of(WHOLE, Options()) == 1.0


def test_invalid_calls_cost() -> None:
    options = Options(invalid_call_cost=0.1)
    assert reward_of(SCORE, options, num_invalid_calls=2) == pytest.approx(0.3)
    assert reward_of(SCORE, options) == 0.5
