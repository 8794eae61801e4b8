"""Settings of a whole run of several turns, and what of two such runs has to be equal."""

from __future__ import annotations

from typing import Any

from stored_episodes import stored_episodes

from composer_replication.run_folder import RunFolder

SETTINGS = {
    "trl.max_steps": 3,
    "trl.save_total_limit": 9,
    "trl.learning_rate": 1e-2,
    "agent.max_new_tokens": 2048,
    "agent.max_concurrent": 3,
    "curriculum": {},
    "trainer.alpha_sdpo": 0.5,
    "guard.max_proxy_real_gap": 9.0,
}


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            name: round(value, 6) if name == "loss" else value  # a running sum rounds by where it began
            for name, value in row.items()
            if name not in ("step_time", "seconds") and not name.endswith("_seconds")
        }
        for row in rows
    ]


def what_was_played(folder: RunFolder) -> list[list[Any]]:
    return list(played_by_file(folder).values())


def played_by_file(folder: RunFolder) -> dict[str, list[Any]]:
    return {
        path.name: [
            (
                episode.task_id,
                episode.seed,
                episode.reward,
                episode.stop_reason,
                *(turn.completion for turn in episode.turns),
            )
            for episode in stored_episodes(path)
        ]
        for path in sorted([*folder.rollouts.glob("episodes-*"), *folder.rollouts.glob("heldout-*")])
    }
