"""What a tracker is told, by names that stay; through transformers' own integration for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_replication.safety import HeldOutGuard

NAMES = {
    "killswitch/fire",
    "killswitch/in_loop_ema",
    "killswitch/heldout_ema",
    "killswitch/proxy_real_gap",
    "heldout/score",
    "reward",
    "grad_norm",
}
DOCS = Path(__file__).parents[3] / "docs" / "engines.md"


def test_the_guards_margins_and_readings_reach_the_tracker(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer(
        max_steps=2,
        heldout_guard=HeldOutGuard(min_steps=9),
        heldout_eval_fn=lambda: 0.25,
        report_to=["tensorboard"],
    )
    trainer.train()
    [events] = tmp_path.rglob("events.out.tfevents*")
    seen = EventAccumulator(str(events.parent))
    seen.Reload()
    told = {name.removeprefix("train/"): name for name in seen.Tags()["scalars"]}
    assert told.keys() >= NAMES
    assert [each.value for each in seen.Scalars(told["heldout/score"])] == [0.25, 0.25]
    page = DOCS.read_text()
    assert all(f"`{name}`" in page for name in NAMES if name.startswith(("killswitch/", "heldout/")))
