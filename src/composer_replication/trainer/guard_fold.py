"""One fold of the guard: its answer to a reading, and the rows that a verdict is written as.

Shared by the hook inside ``ComposerReplicationTrainer`` and by the callback for other trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from composer_replication.errors import InputError
from composer_replication.interfaces import Guard, GuardStatus, ReadingGuard
from composer_replication.records import HeldoutReading, Verdict

HeldoutEval = Callable[[], float | HeldoutReading | None]


def updated(
    guard: Guard, reading: float | HeldoutReading, *, round_idx: int, reward: float, kl: float | None
) -> GuardStatus:
    """The guard's answer; a ``ReadingGuard`` gets the whole reading, any other the score."""
    if isinstance(reading, HeldoutReading) and isinstance(guard, ReadingGuard):
        return guard.update_from_reading(round_idx, reading, in_loop_reward=reward, kl_to_init=kl)
    return guard.update(round_idx, in_loop_reward=reward, heldout_score=score_of(reading), kl_to_init=kl)


def score_of(reading: float | HeldoutReading) -> float:
    """The score as a plain number."""
    return float(reading.score) if isinstance(reading, HeldoutReading) else float(reading)


def log_row(status: GuardStatus) -> dict[str, float]:
    """``killswitch/fire`` (1.0 or 0.0), the averages that there are, and the figures of the evidence."""
    row: dict[str, float] = {"killswitch/fire": 1.0 if status.fire else 0.0}
    for name in ("in_loop_ema", "heldout_ema", "proxy_real_gap", "kl_ema"):
        value = getattr(status, name, None)
        if value is not None:
            row[f"killswitch/{name}"] = float(value)
    for name, value in _evidence_figures(status).items():
        row[f"killswitch/evidence_{name}"] = float(value)
    return row


def reading_fields(reading: float | HeldoutReading | None, kl: float | None) -> dict[str, float]:
    """What was measured: the score (none where the evaluation gave up), the KL, and what else it knows."""
    fields: dict[str, float] = {} if reading is None else {"heldout/score": score_of(reading)}
    if kl is not None:
        fields["killswitch/kl_to_init"] = kl
    if not isinstance(reading, HeldoutReading):
        return fields
    fields["heldout/evaluation_idx"] = reading.evaluation_idx
    fields["heldout/infrastructure_failures"] = reading.infrastructure_failures
    if reading.pairs:
        fields["heldout/visible"] = sum(visible for visible, _ in reading.pairs) / len(reading.pairs)
        fields["heldout/hidden"] = sum(hidden for _, hidden in reading.pairs) / len(reading.pairs)
    return fields


def verdict_row(
    status: GuardStatus, round_idx: int, *, split_fingerprint: str, kl_path: str
) -> dict[str, Any]:
    """A line of ``verdicts.jsonl``."""
    verdict = Verdict(
        round_idx=round_idx,
        fire=bool(status.fire),
        reason=str(getattr(status, "reason", "")),
        in_loop_ema=getattr(status, "in_loop_ema", None),
        heldout_ema=getattr(status, "heldout_ema", None),
        kl_ema=getattr(status, "kl_ema", None),
        proxy_real_gap=getattr(status, "proxy_real_gap", 0.0),
        decline_streak=getattr(status, "decline_streak", 0),
        num_updates=getattr(status, "num_updates", 0),
        split_fingerprint=split_fingerprint,
    )
    evidence = {f"evidence_{name}": value for name, value in _evidence_figures(status).items()}
    return {**asdict(verdict), "kl_path": kl_path, **evidence}


def refuse_foreign_split(found: str | None, expected: str, *, where: str) -> None:
    """Refuse what was measured on another split; where either is unknown, nothing is refused.

    Raises:
        InputError: it was (CR0884).
    """
    if found and expected and found != expected:
        raise foreign_split(found, expected, where=where)


def foreign_split(found: str, expected: str, *, where: str) -> InputError:
    """The refusal of a score or a checkpoint that belongs to another split."""
    return InputError(
        "CR0884",
        f"it was measured on split {found}, but this run's split is {expected}.",
        where=where,
        fix="go on with the split that the run began with, or start a new run.",
    )


def _evidence_figures(status: GuardStatus) -> Mapping[str, float]:
    figures = getattr(status, "evidence_figures", None)
    return figures if isinstance(figures, Mapping) else {}
