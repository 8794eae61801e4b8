"""Whole episodes with real parts: chat template, ledger, calls, tools in a jail, grading, hints, monitor, stored lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from chat_templates import FAMILIES, TemplateTokenizer, tokenizer_of
from episode_parts import attempt_folders
from scripted_policy import Scripted, hermes
from stored_episodes import stored_episodes

from composer_replication.config import AgentSection
from composer_replication.records import Score, StopReason, Task
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.episodes.agent_loop import EpisodeParts, LedgerTalk, run_episodes
from composer_replication.rollouts.episodes.episode import Episode, rollout_row
from composer_replication.rollouts.episodes.trajectories import write_trajectories
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker, ObservedRollout
from composer_replication.tasks.store import TaskStore

pytestmark = pytest.mark.timeout(600)

NUMBERS = "tinymath/numbers.py"
FAMILY = {family.name: family for family in FAMILIES}
Writer = Callable[[str, Mapping[str, object]], str]


def fenced(name: str, arguments: Mapping[str, object]) -> str:
    if name == "bash":
        return f"I try this.\n```bash\n{arguments['command']}\n```<|im_end|>"
    return "```submit\n```<|im_end|>" if name == "submit" else f"```bash\n{name} # move 1\n```<|im_end|>"


WRITERS: dict[str, Writer] = {"qwen2_5": hermes, "smollm2": fenced}


INIT = "tinymath/__init__.py"
EXIT = "def leave(): import os; os._exit(0)"


def scripts_for(write: Writer, golden: str) -> list[list[str]]:
    """One that solves the task, one that makes a mistake and gives up, one that plants an exit."""
    heredoc = f"cat > {NUMBERS} <<'EOF'\n{golden}EOF"
    return [
        [write("bash", {"command": "ls tinymath # good"}), write("bash", {"command": heredoc}), write("submit", {})],
        [write("bash", {"command": "ls tests # poor"}), write("fly_away", {"height": 3}), write("submit", {})],
        [write("bash", {"command": "ls / > /dev/null # bad"}),
         write("bash", {"command": f"echo '{EXIT}' >> {INIT}"}),
         write("submit", {})],
    ]  # fmt: skip


@pytest.fixture(scope="module", params=WRITERS)
def played(
    request: pytest.FixtureRequest, grader: Grader, store: TaskStore, clamp: Task
) -> tuple[TemplateTokenizer, list[list[str]], list[Episode]]:
    tokenizer = tokenizer_of(FAMILY[request.param])
    golden = store.files(clamp, "golden")[NUMBERS].decode()
    scripts = scripts_for(WRITERS[request.param], golden)
    talk = LedgerTalk(tokenizer)
    parts = EpisodeParts(Scripted(tokenizer, scripts), lambda: FeatureDeletionEnv(grader), talk)
    before = attempt_folders()
    run = run_episodes([clamp.task_id] * 3, parts, options=AgentSection(max_turns=5))
    episodes = asyncio.run(run)
    assert attempt_folders() == before
    assert [(episode.num_tries, episode.paid is None) for episode in episodes] == [(1, False)] * 3
    return tokenizer, scripts, sorted(episodes, key=lambda each: _script_of(each, scripts))


def _script_of(episode: Episode, scripts: Sequence[Sequence[str]]) -> int:
    first = episode.turns[0].completion.text
    return [script[0] for script in scripts].index(first)


def test_rewards_and_ends(played) -> None:
    _, _, (good, poor, bad) = played
    assert [each.stop_reason for each in (good, poor, bad)] == [StopReason.SUBMITTED] * 3
    assert [each.reward for each in (good, poor, bad)] == [1.0, 0.0, 0.0]
    assert good.score is not None and good.score.all_passed
    assert [call.name for turn in good.turns for call in turn.calls] == ["bash", "bash", "submit"]
    assert "numbers.py" in good.turns[0].results[0].text
    assert poor.turns[1].results[0].failed


def test_loss_is_on_what_was_sampled_and_on_nothing_else(played) -> None:
    tokenizer, scripts, episodes = played
    for episode in episodes:
        segment = rollout_row(episode, filler_id=0)
        sampled = [i for turn in episode.turns for i in turn.completion.token_ids]
        masked = [i for i, bit in zip(segment.completion_ids, segment.mask, strict=True) if bit]
        assert masked == sampled
        script = scripts[_script_of(episode, scripts)]
        assert sampled == [i for move in script for i in tokenizer.encode(move, add_special_tokens=False)]
        assert 0 < sum(segment.mask) < len(segment.mask)


def test_a_mistake_gets_a_hint_in_the_ids_that_the_policy_saw(played) -> None:
    tokenizer, _, episodes = played
    good, poor, *_ = map(ObservedRollout, episodes)
    maker = HintedTurnMaker(tokenizer, observe=lambda _: None)
    assert list(maker.hinted(good)) == []
    (hinted,) = [
        turn for fault, turn in maker.hinted(poor) if fault.kind in ("invalid-call", "command-not-found")
    ]
    assert hinted.prompt_ids == episodes[1].prompt_ids(1)
    assert hinted.completion_ids == episodes[1].turns[1].completion.token_ids
    assert len(hinted.hinted_prompt_ids) > len(hinted.prompt_ids)


@pytest.mark.parametrize("played", ["qwen2_5"], indirect=True)
def test_an_independent_grading_of_what_is_stored_gives_the_same_reward(
    played, known_golden, store: TaskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a grader that has seen no answer: every tree is run again, and none is looked up."""
    _, _, episodes = played
    write_trajectories(tmp_path / "episodes.jsonl", episodes)
    afresh = Grader(store)
    afresh._golden |= known_golden
    trees: list[object] = []

    def watched_once(request: GradeRequest) -> Score:
        trees.append(request.tree)
        return Grader.grade_once(afresh, request)

    monkeypatch.setattr(afresh, "grade_once", watched_once)
    try:
        for stored, episode in zip(stored_episodes(tmp_path / "episodes.jsonl"), episodes, strict=True):
            afresh.forget({episode.task_id})  # two of them leave the same tree
            with FeatureDeletionEnv(afresh) as env:
                env.reset(stored.task_id)
                for turn in stored.turns:
                    assert tuple(env.call(call) for call in turn.calls) == turn.results
                judgement = env.finish()
            assert judgement is not None and judgement.reward == episode.reward
            assert episode.score is not None and judgement.score is not episode.score
            assert judgement.score.outcomes == episode.score.outcomes
    finally:
        afresh.close()
    assert len(trees) == len(episodes)
