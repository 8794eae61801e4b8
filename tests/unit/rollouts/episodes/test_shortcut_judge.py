"""A model on a server that is asked about what was paid: what it is shown, what its words become, and that it ends nothing."""

from __future__ import annotations

from typing import Any

from policy_server import PolicyServer, says

from composer_replication.records import Score
from composer_replication.rollouts.environment.feature_deletion_env import Judgement
from composer_replication.rollouts.episodes import shortcut_judge
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.shortcut_judge import KEY_VARIABLE, open_judge
from composer_replication.rollouts.monitor.hack_monitor import HackFinding


def played(index: int, patch: str | None = "+ return {1: 2}[x]", reward: float | None = 1.0) -> Episode:
    judgement = Judgement(Score({}, "", 0.0), reward or 0.0, reward or 0.0, patch=patch)
    return Episode("t", index, 3, 5, first_messages=("Write double.",), reward=reward, judgement=judgement)


def test_a_yes_is_a_finding_that_flags_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(shortcut_judge, "SHARE", 1.0)
    monkeypatch.setenv(KEY_VARIABLE, "secret-key")
    words = {
        "+ table": "<think>yes?</think>**YES**: it is a\ntable.",
        "+ code": "No: honest.",
        "+ odd": "Maybe.",
    }
    episodes = [played(n, patch) for n, patch in enumerate(words)]
    unpaid = [played(7, reward=0.0), played(8, reward=None), played(9, patch=None)]

    def reply(request: dict) -> dict:
        text = request["messages"][0]["content"]
        assert "Task:\nWrite double." in text
        return says(words[text.rpartition("Change:\n")[2]])

    with PolicyServer.running(reply) as server:
        judge = open_judge(f"{server.url}/v1#tiny")
        found, figures = judge([*episodes, *unpaid])
        assert server.authorizations == ["Bearer secret-key"] * 3 and "secret-key" not in repr(judge)
    assert figures == {"rollouts/judged": 2, "rollouts/judged_shortcuts": 1, "rollouts/judge_failures": 1}
    assert found[1:] == [*episodes, *unpaid][1:]
    report = found[0].judgement.report
    assert report.findings == (
        HackFinding("judged-shortcut", "report", "it is a table.", "judge", None, None),
    )
    assert not report.masks_reward and found[0].reward == 1.0
    assert judge(episodes) == (episodes, dict(zip(figures, (0, 0, 3), strict=True)))  # nobody is there


def test_a_tenth_is_drawn_and_the_same_again() -> None:
    drawn, again = ([shortcut_judge._is_drawn(played(n)) for n in range(2000)] for _ in range(2))
    assert 150 < sum(drawn) < 250 and drawn == again
