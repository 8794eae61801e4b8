"""Thinking is counted from sampled ids, wherever a thought begins and whether it ends or not."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import FAMILIES, tokenizer_of
from episode_parts import Lives

from composer_replication.config import AgentSection
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.agent_loop import LedgerTalk
from composer_replication.rollouts.episodes.episode import rollout_row
from composer_replication.rollouts.episodes.episode_player import EpisodePlayer
from composer_replication.rollouts.tokens.call_dialects import num_thinking_ids

TOKENIZER = tokenizer_of(next(family for family in FAMILIES if family.name == "qwen3"))
THOUGHT = "<think>\nIs it größer? I look.\n</think>"
CALL = '\n\n<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call><|im_end|>'


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("prompt", "pieces", "thoughts"),
    [
        ("Hello.", ["No thought at all."], []),
        ("Hello.", [THOUGHT, CALL], [0]),
        ("Hello.", ["First. ", THOUGHT, " Then. ", THOUGHT, CALL], [1, 3]),
        ("Hello. <think>\n", ["I look.\n</think>", CALL], [0]),
        ("Hello. <think>\n", ["I look, and was cut off"], [0]),
        ("Hello.", ["Well. ", "<think>\nI was cut off"], [1]),
        ("Hello. <think>\n", [], []),
    ],
)
def test_ids_of_thoughts_are_counted_and_no_others(
    prompt: str, pieces: list[str], thoughts: list[int]
) -> None:
    sampled = [ids(piece) for piece in pieces]
    joined = [number for piece in sampled for number in piece]
    assert num_thinking_ids(TOKENIZER, ids(prompt), joined) == sum(len(sampled[place]) for place in thoughts)


@pytest.mark.parametrize(
    ("kind", "other", "text"), [("tool_call", "final", CALL), ("final", "tool_call", "Done.<|im_end|>")]
)
def test_the_effort_of_an_episode_in_training_has_its_thinking(kind: str, other: str, text: str) -> None:
    class Thinker:
        async def sample(self, prompt_ids: Any, **_: Any) -> Completion:
            sampled = (*ids(THOUGHT), *ids(text))
            return Completion(sampled, THOUGHT + text, StopReason.FINISHED, tuple(-0.5 for _ in sampled))

    lives = Lives()
    grader: Any = None
    talk = LedgerTalk(TOKENIZER)
    player = EpisodePlayer(grader, lives.open, talk, AgentSection(), seed=0)
    [episode] = player.generation(["task"], Thinker(), step=1, place="0", is_training=False)
    counts = rollout_row(episode, filler_id=0).effort_counts
    assert counts["thinking_token"] == len(ids(THOUGHT))
    assert (counts[f"{kind}_token"], counts[f"{other}_token"]) == (len(ids(text)), 0)
