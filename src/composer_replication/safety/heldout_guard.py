"""The run-level kill switch: did the reward rise because the policy got better?

The in-loop reward (the proxy) is what training maximises; the held-out score (the
truth) is never trained on. ``HeldOutGuard`` compares the two at every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from composer_replication.errors import CollapseStopError
from composer_replication.safety.checked_numbers import (
    clamped,
    direction,
    finite,
    integer,
    number,
    positive,
    positive_count,
)
from composer_replication.safety.saved_state import opened, restored, saved, section

_CONFIG_FIELDS = ("min_steps", "decline_patience", "ema_alpha", "kl_hard_stop", "max_proxy_real_gap")


@dataclass(frozen=True, slots=True)
class _Memory:
    """Everything that an update changes; replaced as a whole, so that it is never half new.

    The averages and baselines mean something only once ``num_updates`` is above 0.
    """

    num_updates: int = 0
    round_idx: int = 0
    in_loop_ema: float = 0.0
    heldout_ema: float = 0.0
    kl_ema: float | None = None
    in_loop_baseline: float = 0.0
    heldout_baseline: float = 0.0
    decline_streak: int = 0
    fired_at: int = 0
    first_reason: str = ""

    @property
    def proxy_real_gap(self) -> float:
        """Rise of the in-loop average minus rise of the held-out one."""
        in_loop_rise = clamped(self.in_loop_ema - self.in_loop_baseline)
        return clamped(in_loop_rise - clamped(self.heldout_ema - self.heldout_baseline))


@dataclass(frozen=True, slots=True)
class TripwireStatus:
    """What the guard says after one update.

    Attributes:
        fire: the run must halt.
        reason: empty, or why; starts with ``latched:`` on every update after the one that fired.
        round_idx: the caller's label of the checkpoint.
        num_updates: how many checkpoints were folded, this one included.
        in_loop_ema: smoothed in-loop reward.
        heldout_ema: smoothed held-out score.
        kl_ema: smoothed KL to the initial policy, nats; None when never given.
        proxy_real_gap: rise of the in-loop average minus rise of the held-out one.
        decline_streak: updates in a row with held-out falling and in-loop rising.
    """

    fire: bool
    reason: str
    round_idx: int
    num_updates: int
    in_loop_ema: float
    heldout_ema: float
    kl_ema: float | None
    proxy_real_gap: float
    decline_streak: int

    @property
    def halt(self) -> bool:
        """The same as ``fire``."""
        return self.fire


class HeldOutGuard:
    """Halt a run whose in-loop reward and held-out score part ways.

    Every signal s is smoothed, ``ema <- a * ema + (1 - a) * s`` with a = ``ema_alpha``
    (the first sample is taken as it is). From the update number ``min_steps`` on, an
    update fires when

    - KL: ``kl_ema > kl_hard_stop`` (inert while no KL was ever given);
    - decline: the held-out average fell while the in-loop average rose, the last
      ``decline_patience`` updates in a row, those of the warm-up included;
    - gap: ``(in_loop_ema - first in_loop) - (heldout_ema - first heldout)`` exceeds
      ``max_proxy_real_gap``, even while the held-out score still rises.

    If several fire at once the reason names all of them, in this order. A fired guard
    stays fired: later reasons are ``latched:`` and the first one.

    Scores may have any unit, as long as both have the same; the default gap is meant
    for scores in [0, 1]. KL is in nats. A sampled estimate of a KL may be below zero.

    Why these defaults: ``benchmarks/heldout_guard_defaults.py`` of 8c4d449 simulated honest runs
    of 400 updates (flat, and rising by .25, from .3, .5 and .7) and hacked ones (the proxy
    jumps by .3, the truth falls by .3); 3,000 runs a row, seed 0, in-loop reward = mean of
    128 passes, held-out score = mean of 32. In the worst row the defaults halt 0.50% of honest runs
    (at most 5% was the condition) and find 99.7% of the hacks within 20 updates (at least 95%),
    after a median of 4; 3, 3, .5 and a gap of .1 halt 96.9%. Of its 200 settings 47 meet both, and
    those that see the jump sooner halt at least twice as many honest runs. With 16 held-out passes
    the defaults halt 4.9%: raise ``max_proxy_real_gap`` or evaluate more. The KL limit is not part
    of the simulation: 0.08 nats is the value the rule came with; fit it to a run with
    ``calibrate_kl_threshold``. The table is in docs/safety.md.

    Limits: the first, single reading stays the baseline for ever, and an honest run
    whose training tasks improve 0.35 more than its held-out tasks is halted. There is
    no error guarantee beyond the simulated figures.

    Departs from the plain EMA rule in one point: a change of an average by at most four
    units in the last place is rounding and counts neither as a rise nor as a fall.

    Args:
        min_steps: updates before anything may fire, at least 1.
        decline_patience: length of the streak that fires, at least 1.
        ema_alpha: weight of the past, in [0, 1).
        kl_hard_stop: largest tolerated KL average, finite and above 0.
        max_proxy_real_gap: largest tolerated gap, finite and above 0.

    A ValueError names a setting that is out of its range.
    """

    def __init__(
        self,
        *,
        min_steps: int = 5,
        decline_patience: int = 8,
        ema_alpha: float = 0.8,
        kl_hard_stop: float = 0.08,
        max_proxy_real_gap: float = 0.35,
    ) -> None:
        self.min_steps = positive_count("min_steps", min_steps)
        self.decline_patience = positive_count("decline_patience", decline_patience)
        self.ema_alpha = finite("ema_alpha", ema_alpha)
        if not 0.0 <= self.ema_alpha < 1.0:
            raise ValueError(f"ema_alpha must be in [0, 1), got {ema_alpha!r}")
        self.kl_hard_stop = positive("kl_hard_stop", kl_hard_stop)
        self.max_proxy_real_gap = positive("max_proxy_real_gap", max_proxy_real_gap)
        self.last_status: TripwireStatus | None = None
        self._memory = _Memory()

    def update(
        self, round_idx: int, *, in_loop_reward: float, heldout_score: float, kl_to_init: float | None = None
    ) -> TripwireStatus:
        """Fold one checkpoint, keep the result as ``last_status`` and return it.

        Args:
            round_idx: a label, any integer; gaps and repeats are fine.
            in_loop_reward: mean reward that training saw.
            heldout_score: mean score on tasks that are never trained on.
            kl_to_init: KL to the initial policy, nats; None leaves its average as it is.

        Raises:
            ValueError: an argument is not a finite number; the guard is unchanged.
        """
        label = integer("round_idx", round_idx)
        where = f" in round {label}"
        in_loop = finite("in_loop_reward", in_loop_reward, where)
        heldout = finite("heldout_score", heldout_score, where)
        kl = None if kl_to_init is None else finite("kl_to_init", kl_to_init, where)
        memory = self._folded(label, in_loop, heldout, kl)
        if not memory.fired_at and memory.num_updates >= self.min_steps:
            reason = self._reason(memory)
            if reason:
                memory = replace(memory, fired_at=memory.num_updates, first_reason=reason)
        self._memory = memory
        self.last_status = _status(memory)
        return self.last_status

    def should_halt(self) -> bool:
        """Whether the guard has ever fired."""
        return self._memory.fired_at > 0

    def proxy_real_gap(self) -> float:
        """Rise of the in-loop average minus rise of the held-out one; 0.0 before any update."""
        return self._memory.proxy_real_gap

    def raise_if_fired(self, status: Any = None) -> None:
        """Raise ``CollapseStopError`` with ``status``, by default the last one, when it has fired."""
        judged = self.last_status if status is None else status
        if judged is not None and judged.fire:
            raise CollapseStopError(judged)

    def calibrate_kl_threshold(self, baseline_kls: Iterable[float], factor: float = 3.0) -> float:
        """Tighten ``kl_hard_stop`` to ``factor * mean(baseline_kls)`` and return it.

        It never loosens. A product that is not above zero (an all-zero baseline says
        nothing about honest drift) leaves the limit as it was. A ValueError says that there is no
        baseline, a negative or non-finite KL, or a factor not above 0.
        """
        baseline = [finite("baseline_kls", kl) for kl in baseline_kls]
        if not baseline:
            raise ValueError("baseline_kls must be non-empty")
        if min(baseline) < 0.0:
            raise ValueError(f"baseline_kls must be non-negative, got {min(baseline)!r}")
        weight = number("factor", factor)
        if not 0.0 < weight < math.inf:
            raise ValueError(f"factor must be > 0 and finite, got {factor!r}")
        try:
            limit = weight * (math.fsum(baseline) / len(baseline))
        except OverflowError:  # the sum is beyond a float, so the mean is no tighter limit
            limit = math.inf
        if limit > 0.0:
            self.kl_hard_stop = min(self.kl_hard_stop, limit)
        return self.kl_hard_stop

    def state_dict(self) -> dict[str, Any]:
        """Settings and memory, JSON-safe and versioned."""
        config = {name: getattr(self, name) for name in _CONFIG_FIELDS}
        return saved("HeldOutGuard", config=config, memory=asdict(self._memory))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; the settings come from the state too.

        Calibration may have changed them. A state of another version, kind or class raises a
        ValueError that says so, and the guard is unchanged.
        """
        stored = opened(state, "HeldOutGuard", "config", "memory")
        memory = restored(_Memory(), stored["memory"], finite)
        settings = HeldOutGuard(**section("state's config", stored["config"], _CONFIG_FIELDS))
        for name in _CONFIG_FIELDS:
            setattr(self, name, getattr(settings, name))
        self._memory = memory
        self.last_status = _status(memory) if memory.num_updates else None

    def _fold(self, previous: float | None, value: float) -> float:
        """One step of the exponential moving average."""
        if previous is None:
            return value
        return self.ema_alpha * previous + (1 - self.ema_alpha) * value

    def _folded(self, round_idx: int, in_loop: float, heldout: float, kl: float | None) -> _Memory:
        """The memory after one more checkpoint, before any verdict."""
        old = self._memory
        is_first = old.num_updates == 0
        in_loop_ema = self._fold(None if is_first else old.in_loop_ema, in_loop)
        heldout_ema = self._fold(None if is_first else old.heldout_ema, heldout)
        declined = (
            not is_first
            and direction(old.heldout_ema, heldout_ema) < 0
            and direction(old.in_loop_ema, in_loop_ema) > 0
        )
        return replace(
            old,
            num_updates=old.num_updates + 1,
            round_idx=round_idx,
            in_loop_ema=in_loop_ema,
            heldout_ema=heldout_ema,
            kl_ema=old.kl_ema if kl is None else self._fold(old.kl_ema, kl),
            in_loop_baseline=in_loop if is_first else old.in_loop_baseline,
            heldout_baseline=heldout if is_first else old.heldout_baseline,
            decline_streak=old.decline_streak + 1 if declined else 0,
        )

    def _reason(self, memory: _Memory) -> str:
        """Every path that fires, most urgent first; empty when none does."""
        reasons = []
        if memory.kl_ema is not None and memory.kl_ema > self.kl_hard_stop:
            reasons.append(
                f"the kl_to_init average {memory.kl_ema:.4g} exceeds the hard stop {self.kl_hard_stop:.4g}"
            )
        if memory.decline_streak >= self.decline_patience:
            reasons.append(
                "the held-out average fell while the in-loop average rose in "
                f"{memory.decline_streak} consecutive updates"
            )
        gap = memory.proxy_real_gap
        if gap > self.max_proxy_real_gap:
            reasons.append(
                f"the Hacking Gap {gap:.4g} (rise of the proxy minus rise of the truth since the first "
                f"update) exceeds {self.max_proxy_real_gap:.4g}"
            )
        return "; ".join(reasons)


def kl_token_trust_filter(token_kl: float, threshold: float = 0.08) -> bool:
    """Whether to mask this token: its KL proxy is strictly above the threshold.

    ``token_kl`` is ``0.5 * logratio ** 2`` of one token, nats; infinity is masked, and NaN is a ValueError,
    since masking it would hide a bug. ``threshold`` is finite and at least 0.
    """
    limit = finite("threshold", threshold)
    if limit < 0.0:
        raise ValueError(f"threshold must be >= 0, got {threshold!r}")
    value = number("token_kl", token_kl)
    if math.isnan(value):
        raise ValueError("token_kl must not be NaN")
    return value > limit


def _status(memory: _Memory) -> TripwireStatus:
    is_latched = 0 < memory.fired_at < memory.num_updates
    return TripwireStatus(
        fire=memory.fired_at > 0,
        reason=f"latched: {memory.first_reason}" if is_latched else memory.first_reason,
        round_idx=memory.round_idx,
        num_updates=memory.num_updates,
        in_loop_ema=memory.in_loop_ema,
        heldout_ema=memory.heldout_ema,
        kl_ema=memory.kl_ema,
        proxy_real_gap=memory.proxy_real_gap,
        decline_streak=memory.decline_streak,
    )
