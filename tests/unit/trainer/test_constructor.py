"""What the constructor keeps, refuses and does not read."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from trl import GRPOTrainer

from composer_replication.errors import UsageError
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.preset_settings import TrainerSettingError

OWN_ARGUMENTS = {
    "heldout_guard": object(),
    "heldout_eval_fn": lambda: 0.5,
    "strict_killswitch": False,
    "hints": object(),
    "hint_source": object(),
    "replay": object(),
    "replay_pairs": (),
    "prefix_sharing": True,
    "is_finished": lambda text: bool(text),
    "run_folder": object(),
    "stateful": {},
    "split_fingerprint": "abc",
}


@pytest.fixture
def parent_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """TRL's constructor does nothing but note how it was called."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda self, *args, **kwargs: calls.append((args, kwargs)))
    return calls


def test_trl_is_the_one_base_class() -> None:
    assert ComposerReplicationTrainer.__bases__ == (GRPOTrainer,)


def test_constructs_without_arguments_where_the_parent_does_nothing(parent_calls: list[Any]) -> None:
    trainer = ComposerReplicationTrainer()
    assert parent_calls == [((), {})]
    assert trainer.heldout_guard is None
    assert trainer.strict_killswitch is True
    assert (trainer.alpha_sdpo, trainer.beta_replay) == (0.0, 0.0)


def test_keeps_its_own_arguments_and_passes_the_rest_on(parent_calls: list[Any]) -> None:
    trainer = ComposerReplicationTrainer("a model", args="settings", **OWN_ARGUMENTS)  # type: ignore[arg-type]
    assert parent_calls == [(("a model",), {"args": "settings"})]
    assert {name: getattr(trainer, name) for name in OWN_ARGUMENTS} == OWN_ARGUMENTS


def test_own_arguments_are_keyword_only_with_defaults_on_the_class() -> None:
    parameters = inspect.signature(ComposerReplicationTrainer.__init__).parameters
    for name in (*OWN_ARGUMENTS, "alpha_sdpo", "beta_replay"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert getattr(ComposerReplicationTrainer, name) == parameters[name].default


def test_a_guard_without_its_truth_is_refused_before_any_model(parent_calls: list[Any]) -> None:
    with pytest.raises(ValueError, match="heldout_eval_fn") as caught:
        ComposerReplicationTrainer(heldout_guard=object())  # type: ignore[arg-type]
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2
    assert parent_calls == []


def test_the_channels_raise_the_constructors_error() -> None:
    trainer = ComposerReplicationTrainer.__new__(ComposerReplicationTrainer)
    with pytest.raises(TrainerSettingError, match="alpha_sdpo"):
        trainer._compute_sdpo_loss(object(), {})
    with pytest.raises(TrainerSettingError, match="beta_replay"):
        trainer._compute_trace_replay_loss(object(), {})
