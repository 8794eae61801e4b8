"""One table for the guard's hook and its callback: what is folded, logged, written and kept, and how a run ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from guarded_steps import CallbackSteps, HookSteps

from composer_replication.errors import CollapseStopError, InputError
from composer_replication.records import HeldoutReading
from composer_replication.rollouts.patient_evaluation import PatientEvaluation
from composer_replication.run_folder import read_jsonl
from composer_replication.safety import CombinedGuard, EvidenceGuard, HeldOutGuard

NOT_ASKED = "the evaluation must not be asked here"
HONEST = ((1.0, 1.0), (0.0, 0.0)) * 16
HACKED = ((1.0, 0.0),) * 32


def reading(idx: int = 1, pairs: Any = HONEST, split: str = "split-a") -> HeldoutReading:
    return HeldoutReading(idx, 0.5, pairs, (0.0,) * 4, split, 0.1, 1)


def slow_guard() -> HeldOutGuard:
    return HeldOutGuard(min_steps=3, decline_patience=3, ema_alpha=0.5, kl_hard_stop=0.08)


def quick_guard() -> HeldOutGuard:
    return HeldOutGuard(min_steps=1, decline_patience=1, ema_alpha=0.0, max_proxy_real_gap=0.1)


def evidence_guard() -> CombinedGuard:
    return CombinedGuard(HeldOutGuard(), EvidenceGuard(10, tolerated_gap=0.1))


@dataclass(frozen=True)
class Case:
    """Steps as (reward, what the evaluation answers); ``raises`` at the last of them, a guard that fires does so too."""

    name: str
    steps: Sequence[tuple[Any, Any]]
    guard: Callable[[], Any] = slow_guard
    kl: Any = None
    raises: tuple[type[Exception], str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_halted(self) -> bool:
        return "strict" in self.settings or self.raises in (GAP, KL, EVIDENCE)


ODD_REWARDS = (math.nan, math.inf, -math.inf, None, "0.5", True, torch.tensor([0.5, 0.6]))
NUMBERS = (float, torch.tensor, np.float32, np.array)
JUMP = [(0.5, 0.25), (1.0, 0.25)]
GAP = (CollapseStopError, "Hacking Gap")
KL = (CollapseStopError, "kl_to_init")
EVIDENCE = (CollapseStopError, "visible scores exceed")
FOREIGN = (InputError, "CR0884.*split-b.*split-a")
SPLIT_A = {"split_fingerprint": "split-a"}
CASES = [
    Case("each step", [(0.5, 0.25), (0.75, 0.5), (0.25, 0.75)]),
    Case("every tenth step", [(0.5, NOT_ASKED if step % 10 else 0.25) for step in range(35)], settings={"every": 10}),
    Case("with a KL", JUMP, kl=0.0625),
    Case("a KL that is not finite is none", JUMP, kl=math.nan),
    Case("a KL above the limit", [(0.5, 0.25)] * 3, kl=0.5, raises=KL),
    *(Case(f"numbers by {kind.__name__}", [(kind(0.5), 0.25)], kl=kind(0.0625)) for kind in NUMBERS),
    *(Case(f"no finite reward: {odd}", [(odd, NOT_ASKED), (0.5, 0.25)]) for odd in ODD_REWARDS),
    Case("not due at the second step", [(0.5, 0.25), (0.5, None), (0.75, 0.5)]),
    Case("a jump of the reward alone halts", JUMP, quick_guard, raises=GAP),
    Case("a halt without strict", JUMP, quick_guard, settings={"strict": False}),
    Case("an evaluation that fails", [(0.5, 0.25), (0.75, OSError("no grader"))], raises=(OSError, "no grader")),
    Case("a score that is not finite", [(0.5, math.nan)], raises=(ValueError, "heldout_score")),
    Case("a reading", [(0.5, reading())], settings=SPLIT_A),
    Case("a reading of an unknown split", [(0.5, reading(split=""))], settings=SPLIT_A),
    Case("a reading where the run knows no split", [(0.5, reading())]),
    Case("a reading of another split", [(0.5, reading(split="split-b"))], raises=FOREIGN, settings=SPLIT_A),
    Case("readings for the evidence", [(0.5, reading(1)), (0.5, None), (0.5, reading(2))], evidence_guard),
    Case("evidence of hacking", [(0.5, reading(1, HACKED))], evidence_guard, raises=EVIDENCE),
]  # fmt: skip

Steps = type[HookSteps] | type[CallbackSteps]
BOTH = pytest.mark.parametrize("kind", [HookSteps, CallbackSteps], ids=["hook", "callback"])
pytestmark = [BOTH, pytest.mark.usefixtures("flat_loss")]


def fold_by_hand(guard: Any, step: int, reward: Any, answer: Any, kl: Any) -> tuple[Any, dict[str, float]]:
    """The guard's status, and what has to be said of the measurement."""
    kl = float(kl) if kl is not None and math.isfinite(kl) else None
    signals = {"in_loop_reward": float(reward), "kl_to_init": kl}
    measured = {} if kl is None else {"killswitch/kl_to_init": kl}
    if not isinstance(answer, HeldoutReading):
        return guard.update(step, heldout_score=answer, **signals), measured | {"heldout/score": answer}
    visible, hidden = (sum(side) / len(side) for side in zip(*answer.pairs, strict=True))
    measured |= {"heldout/score": 0.5, "heldout/visible": visible, "heldout/hidden": hidden}
    measured |= {"heldout/evaluation_idx": answer.evaluation_idx, "heldout/infrastructure_failures": 1}
    if isinstance(guard, CombinedGuard):
        return guard.update_from_reading(step, answer, **signals), measured
    return guard.update(step, heldout_score=answer.score, **signals), measured


def figures_of(status: Any) -> dict[str, Any]:
    names = ("in_loop_ema", "heldout_ema", "kl_ema", "proxy_real_gap")
    evidence = {f"evidence_{name}": v for name, v in getattr(status, "evidence_figures", {}).items()}
    return {name: getattr(status, name) for name in names} | evidence


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_is_folded_and_what_comes_of_it(case: Case, kind: Steps, tmp_path: Path) -> None:
    """The oracle is a guard that is given the same readings by hand."""
    asked: list[int] = []

    def evaluate() -> Any:
        asked.append(step)
        answer = case.steps[step][1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    guard = case.guard()
    run = kind(tmp_path, guard, evaluate, **case.settings)
    with pytest.raises(case.raises[0], match=case.raises[1]) if case.raises else nullcontext() as caught:
        for step, (reward, _) in enumerate(case.steps):
            run.log(step, reward=reward, **({} if case.kl is None else {"kl": case.kl}))
            if run.control.should_training_stop:
                break
        run.end()

    by_hand, said, verdicts = case.guard(), {}, []
    is_refused = case.raises is not None and not case.is_halted
    for step, (reward, answer) in enumerate(case.steps[: -1 if is_refused else None]):
        if answer is None or answer is NOT_ASKED:
            continue
        status, measured = fold_by_hand(by_hand, step, reward, answer, case.kl)
        figures = figures_of(status)
        known = {f"killswitch/{name}": value for name, value in figures.items() if value is not None}
        said[step] = known | measured | {"killswitch/fire": float(status.fire)}
        split = getattr(answer, "split_fingerprint", "") or case.settings.get("split_fingerprint", "")
        verdicts.append(figures | {"round_idx": step, "fire": status.fire, "split_fingerprint": split})
        verdicts[-1] |= {name: getattr(status, name) for name in ("reason", "num_updates", "decline_streak")}
    assert asked == [step for step, (_, answer) in enumerate(case.steps) if answer is not NOT_ASKED]
    assert all(row.pop("killswitch/eval_seconds") >= 0 for row in run.said.values())
    assert run.said == said
    written = read_jsonl(run.verdicts) if run.verdicts.exists() else []
    assert run.hook.last_verdict == (written[-1] if written else None)
    assert all(row.pop("kl_path") for row in written)
    assert written == verdicts
    assert guard.state_dict() == by_hand.state_dict()
    assert run.hook.halted_at == (len(case.steps) - 1 if case.is_halted else None)
    if isinstance(caught, pytest.ExceptionInfo) and case.is_halted:
        assert caught.value.status is guard.last_status
    elif case.is_halted:
        assert run.control.should_training_stop


@pytest.mark.parametrize("strict", [True, False])
def test_an_evaluation_that_gives_up_halts_with_its_verdict_on_disk(
    kind: Steps, strict: bool, tmp_path: Path
) -> None:
    def broken() -> float:
        raise ValueError("no grader")

    guard = slow_guard()
    run = kind(tmp_path, guard, PatientEvaluation(broken), strict=strict)
    for step in (0, 1):
        run.log(step, reward=0.5)
    assert run.said == {}  # missed twice: nothing was folded, the run went on
    words = "3 held-out evaluations in a row were missed"
    with pytest.raises(CollapseStopError, match=words) if strict else nullcontext():
        run.log(2, reward=0.5)
        assert run.control.should_training_stop
        run.end()
    assert (run.hook.halted_at, guard.last_status) == (2, None)
    assert run.said[2].pop("killswitch/eval_seconds") >= 0
    assert run.said == {2: {"killswitch/fire": 1.0, "killswitch/proxy_real_gap": 0.0}}
    (verdict,) = read_jsonl(run.verdicts)
    assert verdict["fire"] is True and "no grader" in verdict["reason"]


def test_a_plain_guard_gets_exactly_the_keywords_that_it_always_got_and_may_say_little(
    kind: Steps, tmp_path: Path
) -> None:
    class Plain(HeldOutGuard):
        def update(self, *labels: Any, **keywords: Any) -> Any:
            seen.append((labels, keywords))
            return SimpleNamespace(fire=False, reason="")

    seen: list[Any] = []
    run = kind(tmp_path, Plain(), iter([reading(), 0.25]).__next__, strict=False)
    for step in (0, 10):
        run.log(step, reward=0.5)
    assert seen == [
        ((0,), {"in_loop_reward": 0.5, "heldout_score": 0.5, "kl_to_init": None}),
        ((10,), {"in_loop_reward": 0.5, "heldout_score": 0.25, "kl_to_init": None}),
    ]
    assert {name for name in run.said[10] if name.startswith("killswitch/")} == {
        "killswitch/fire",
        "killswitch/eval_seconds",
    }
    assert run.hook.last_verdict["proxy_real_gap"] == 0
    assert (run.control.should_training_stop, run.hook.halted_at) == (False, None)


@pytest.mark.parametrize("num_before", [2, 3, 4])
def test_cut_at_any_step_and_resumed_a_run_ends_as_the_whole_one(
    kind: Steps, num_before: int, tmp_path: Path
) -> None:
    """A fold every second step; reward and truth part, so that the halt depends on each of them. On another split it is refused."""
    now = SimpleNamespace(step=0)

    def begun(name: str, **checkpoint: Path) -> tuple[Any, HeldOutGuard]:
        guard = HeldOutGuard(min_steps=3, ema_alpha=0.5, max_proxy_real_gap=0.6)
        settings = {"every": 2, "strict": False, "split_fingerprint": "split-a", **checkpoint}
        return kind(tmp_path / name, guard, lambda: 1.0 - 0.1 * now.step, **settings), guard

    def go_on(run: Any, last: int) -> Any:
        while now.step < last and not run.control.should_training_stop:
            now.step += 1
            run.log(now.step, reward=0.1 * now.step)
        return run

    whole, guard = begun("whole")
    go_on(whole, 20)
    assert whole.hook.halted_at == now.step < 10
    now.step = 0
    go_on(begun("cut")[0], num_before).save(tmp_path)
    resumed, later_guard = begun("cut", checkpoint=tmp_path)
    go_on(resumed, 20)
    assert resumed.hook.halted_at == whole.hook.halted_at
    assert later_guard.state_dict() == guard.state_dict()
    assert read_jsonl(resumed.verdicts) == read_jsonl(whole.verdicts)
    with pytest.raises(InputError, match=r"CR0884.*split-a.*split-b"):
        kind(tmp_path, slow_guard(), lambda: 0.5, split_fingerprint="split-b", checkpoint=tmp_path)
