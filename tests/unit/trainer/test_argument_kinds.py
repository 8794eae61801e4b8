"""Arguments of another kind are one sentence, before any model is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from trl import GRPOTrainer

from composer_replication.channel_tables import HintsSection, ReplaySection
from composer_replication.errors import InputError
from composer_replication.records import Completion, HintedTurn, PreferencePair, Rollout, StopReason, Turn
from composer_replication.trainer.batch_records import matched_turns
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.setting_errors import TrainerSettingError

TURNS = (HintedTurn((5, 6, 7), (5, 90, 6, 7), (40, 41, 42)),)
PAIRS = (PreferencePair((5, 6), (40, 41), (42,)),)
ON = {"alpha_sdpo": 0.5, "hinted_turns": TURNS, "beta_replay": 0.5, "replay_pairs": PAIRS}
ROLLOUT = Rollout(
    "a task",
    0,
    (Turn((5,), Completion((40,), "", StopReason.FINISHED)),),
    0.0,
    None,
    StopReason.FINISHED,
    0.0,
)


class NoRows:
    def hinted_turns(self, rollouts: Sequence[Rollout]) -> Any:
        return None


@pytest.fixture
def construct(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The constructor, without TRL's."""
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda self, *args, **kwargs: None)
    return ComposerReplicationTrainer


def kind_of(value: object) -> str:
    """The name of a case: no address in it, since every worker has to give the same one."""
    if isinstance(value, dict):
        return " ".join(f"{name}={kind_of(given)}" for name, given in value.items())
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"alpha_sdpo": "0.5"}, "CR0722", "alpha_sdpo"),
        ({"alpha_sdpo": True}, "CR0722", "alpha_sdpo"),
        ({"beta_replay": None}, "CR0722", "beta_replay"),
        ({"hints": "ema"}, "CR0722", "hints"),
        ({"hints": {"teachers": "ema"}}, "CR0204", "hints.teachers"),
        ({"hints": {"top_k": "many"}}, "CR0204", "hints.top_k"),
        ({"hints": {"writing": {"layer": 1}}}, "CR0204", "hints.writing.layer"),
        ({"replay": {"kind": "ppo"}}, "CR0204", "replay.kind"),
        ({"replay": ()}, "CR0722", "replay"),
    ],
    ids=kind_of,
)
def test_arguments_of_another_kind_are_refused(
    construct: Callable[..., Any], change: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(TrainerSettingError, match=named) as caught:
        construct(**{**ON, **change})
    assert caught.value.code == code
    assert caught.value.where
    assert caught.value.fix


def test_a_dict_is_the_table_of_its_keys(construct: Callable[..., Any]) -> None:
    trainer = construct(**ON, hints={"teacher": "frozen", "top_k": 3}, replay={})
    assert trainer.hints == HintsSection(teacher="frozen", top_k=3)
    assert trainer.replay == ReplaySection()
    assert trainer._hint_settings().top_k == 3


@pytest.mark.parametrize("weight", [1, 0.5, np.float32(0.5), np.float64(0.5)])
def test_numbers_of_every_kind_are_weights(construct: Callable[..., Any], weight: Any) -> None:
    assert construct(**{**ON, "alpha_sdpo": weight}).alpha_sdpo == weight


def test_a_channel_that_is_off_reads_none_of_its_arguments(construct: Callable[..., Any]) -> None:
    strange = object()
    trainer = construct(hints=strange, hint_source=strange, hinted_turns=strange, replay={"kind": "ppo"})
    assert (trainer.hints, trainer.replay) == (strange, {"kind": "ppo"})


@pytest.mark.parametrize("answer", [None, 3, object(), [None], ["turn"], [[None]], [3], {}], ids=kind_of)
@pytest.mark.parametrize("is_strict", [True, False])
def test_an_answer_that_is_no_list_of_rows_is_refused(answer: Any, is_strict: bool) -> None:
    with pytest.raises(InputError, match="hint source") as caught:
        matched_turns(answer, [ROLLOUT], strict=is_strict)
    assert caught.value.code == "CR0751"


def test_a_source_that_returns_none_ends_the_run_with_the_sentence(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="NoneType") as caught:
        make_trainer(alpha_sdpo=0.5, hint_source=NoRows(), max_steps=1).train()
    assert caught.value.code == "CR0751"
