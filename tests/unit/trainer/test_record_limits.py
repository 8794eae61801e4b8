"""Pairs and hinted turns that the model cannot score are refused by name, before anything is forwarded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_trainer import HintEveryTurn, tiny_model, tiny_tokenizer

from composer_replication.cli.assembly import open_pairs, pair_rows
from composer_replication.config import parse_config
from composer_replication.errors import InputError
from composer_replication.records import HintedTurn, PreferencePair, Rollout

GOOD = PreferencePair((5, 6), (40,), (41,))
LONG = (7,) * 250  # of 256 positions


@pytest.mark.parametrize(
    ("pair", "code", "said"),
    [
        (
            PreferencePair((5, 258), (40,), (41,)),
            "CR0751",
            "the id 258 is outside the model's vocabulary of 258.",
        ),
        (PreferencePair((5,), (40,), (41, 9999)), "CR0751", "the id 9999 is outside"),
        (PreferencePair((-1,), (40,), (41,)), "CR0751", "the id -1 is outside"),
        (PreferencePair(LONG, (40,), (8,) * 7), "CR0705", "take 257 tokens; the model has 256 positions"),
    ],
)
def test_a_pair_is_named_with_what_is_wrong(
    make_trainer: Callable[..., Any], pair: PreferencePair, code: str, said: str
) -> None:
    trainer = make_trainer(beta_replay=0.5, replay_pairs=(GOOD, pair))
    for ask in (trainer.channels.check_model, trainer.train):
        with pytest.raises(InputError) as caught:
            ask()
        assert (caught.value.code, caught.value.where) == (code, "pair 1")
        assert said in caught.value.message
    make_trainer(beta_replay=0.5, replay_pairs=(GOOD, replace(GOOD, prompt_ids=LONG))).channels.check_model()


def test_a_file_of_pairs_is_named_with_its_line(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c" * length} for length in (1, 256)]
    (tmp_path / "pairs.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    table = {"model": {"name": "tiny-random"}, "tasks": {"store": "x"}, "trainer": {"beta_replay": 0.5}}
    config = parse_config({**table, "replay": {"pairs": "pairs.jsonl"}}, where="here")
    with pytest.raises(InputError) as caught:
        open_pairs(pair_rows(config, tmp_path), tiny_tokenizer(), tiny_model())
    assert (caught.value.code, caught.value.where) == ("CR0705", f"{tmp_path / 'pairs.jsonl'}:3")
    (tmp_path / "pairs.jsonl").write_text("\n\n".join([json.dumps(rows[0])] * 2))
    pairs = open_pairs(pair_rows(config, tmp_path), tiny_tokenizer(), tiny_model())
    assert pairs is not None and len(pairs) == 2


class HintsOfLength(HintEveryTurn):
    """The first row's hint is this long one."""

    def __init__(self, hint: tuple[int, ...]) -> None:
        super().__init__()
        self.hint = hint

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[list[HintedTurn]]:
        made = super().hinted_turns(rollouts)
        made[0] = [replace(turn, hinted_prompt_ids=(*self.hint, *turn.prompt_ids)) for turn in made[0]]
        return made


def test_a_hint_that_makes_a_turn_too_long_is_left_out_and_counted(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(alpha_sdpo=0.5, hint_source=HintsOfLength(LONG))
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    output = trainer._generate_and_score_completions(batch)
    assert [bool(turns) for turns in output["hinted_turns"]] == [False, True, True, True]
    assert trainer._metrics["train"]["sdpo/turns_left_out"] == [1.0]
    trainer.channels.hints.source = HintsOfLength((300,))
    with pytest.raises(InputError, match=r"CR0751.*the id 300 is outside"):
        trainer._generate_and_score_completions(batch)
