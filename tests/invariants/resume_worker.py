"""A training run in its own process, which kills itself: ``resume_worker.py SPEC.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

import torch
from tiny_trainer import KillAt, build_trainer, share_of_low_bytes

from composer_replication.config import HintsSection, ReplaySection
from composer_replication.records import HintedTurn, PreferencePair, Rollout, TaskOutcome
from composer_replication.rollouts.curriculum import Curriculum
from composer_replication.rollouts.rewards import shuffled_rewards
from composer_replication.run_folder import RunFolder
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.preset_settings import PolicyOptions


class HintEveryTurn:
    """A hint of two ids before every prompt."""

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> list[list[HintedTurn]]:
        return [
            [HintedTurn(t.prompt_ids, (90, 91, *t.prompt_ids), t.completion.token_ids) for t in rollout.turns]
            for rollout in rollouts
        ]


def loss_channels() -> dict[str, Any]:
    """Both channels on, from every origin that they have; some rollouts of each group pass."""
    return {
        "reward": lambda completions, **_: [2.5 * share for share in share_of_low_bytes(completions)],
        "alpha_sdpo": 5.0,
        "hints": HintsSection(jsd_alpha=1.0),
        "hint_source": HintEveryTurn(),
        "beta_replay": 0.5,
        "replay": ReplaySection(sibling_pairs=True, pairs_per_step=3),
        "replay_pairs": [PreferencePair((5, 6 + n), (40, 41), (42 + n,)) for n in range(5)],
    }


def curriculum_parts(*, is_shuffled: bool = False) -> dict[str, Any]:
    """The real curriculum chooses, learns from what the policy writes, and gives replacements."""
    rows = [{"prompt": f"def made_{n}(x):", "task_id": f"t{n}"} for n in range(7)]
    curriculum = type("FadesSoon", (Curriculum,), {"half_life": 3.0})(rows, seed=1, fingerprint="made")

    def reward(completions: list[str], task_id: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        values = [sum(ord(letter) < 100 for letter in text) / max(len(text), 1) for text in completions]
        values = [1.0 if name == "t3" else value for name, value in zip(task_id, values, strict=True)]
        for name, value in zip(task_id, values, strict=True):
            curriculum.note([TaskOutcome(name, value > 0.5)])
        if not is_shuffled:
            return values
        return shuffled_rewards(values, task_id, seed=1, step=trainer_state.global_step)

    return {
        "reward": reward,
        "prompt_source": curriculum,
        "policy_options": PolicyOptions(dynamic_sampling_rounds=2),
    }


def run_or_resume(folder: Path, settings: dict[str, Any], *, kill_at: int = 0) -> dict[str, Any]:
    """Train to the end from the newest whole checkpoint; final weights' hash and the guard's state."""
    run = RunFolder(folder)
    settings = dict(settings)
    channels = loss_channels() if settings.pop("loss_channels", False) else {}
    if settings.pop("curriculum", False):
        channels |= curriculum_parts(is_shuffled=settings.pop("is_shuffled", False))
    trainer = build_trainer(
        output_dir=run.checkpoints,
        run_folder=run,
        heldout_guard=HeldOutGuard(min_steps=1000),
        heldout_eval_fn=lambda: 0.5,
        save_strategy="steps",
        callbacks=[KillAt(kill_at)] if kill_at else [],
        **channels,
        **settings,
    )
    trainer.train(resume_from_checkpoint=True)
    source = trainer.prompt_source
    return {
        "sha256": parameter_sha256(trainer.model),
        "guard": trainer.heldout_guard.state_dict(),
        "prompt_source": None if source is None else source.state_dict(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    run_or_resume(Path(spec["run"]), spec["settings"], kill_at=spec["kill_at"])
