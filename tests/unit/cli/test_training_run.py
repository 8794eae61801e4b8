"""How a run of ``train`` ends."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_replication.cli import train_verb
from composer_replication.cli.main import build_parser
from composer_replication.cli.train_verb import _SHOWN, _keep_recipe, render
from composer_replication.cli.training_run import TrainingRun
from composer_replication.config import HeldoutSection, parse_config
from composer_replication.errors import UsageError
from composer_replication.rollouts.heldout_evaluation import TaskResult
from composer_replication.run_folder import RunFolder
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.run_setup import fast_dtype


@pytest.mark.parametrize(("halted_at", "halted"), [(None, False), (6, True)])
def test_a_halt_by_missed_evaluations_counts_though_no_guard_fired(
    tmp_path: Path, halted_at: int | None, halted: bool
) -> None:
    """With ``strict_killswitch = false`` the trainer stops without an error."""
    trainer = SimpleNamespace(heldout_guard=HeldOutGuard(), halted_at=halted_at, train=lambda **_: None)
    run: Any = SimpleNamespace(folder=RunFolder(tmp_path), trainer=trainer, tell=print)
    assert TrainingRun._train(run) is halted


def test_pass_rates_are_shown_by_side_and_what_was_not_measured_is_named() -> None:
    measured = {
        "train": {"visible_pass": 0.5, "visible_ci95": (0.25, 0.75)},
        "heldout": {"hidden_pass": None, "hidden_ci95": None},
    }
    result = {
        **dict.fromkeys(_SHOWN),
        "steps": 2,
        "peak_memory_bytes": 3 * 10**9,
        "before": measured,
        "after": None,
    }
    assert render(result).splitlines() == [
        "steps             2",
        "peak memory bytes 3000000000",
        "train before      0.50 [0.25, 0.75] visible tests",
        "heldout before    not measured hidden tests",
    ]


def test_a_run_goes_on_at_another_cluster_and_not_with_another_seed(tmp_path: Path) -> None:
    def recipe(**tables: Any) -> Any:
        table = {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}, **tables}
        return parse_config(table, where="here")

    folder = RunFolder(tmp_path)
    first = recipe(ray={"address": "auto"})
    _keep_recipe(first, folder)
    folder.metrics.write_text("{}\n")  # it has begun
    for same in (first, recipe(), recipe(ray={"address": "h:6379", "resources": {"jail": 1.0}})):
        _keep_recipe(same, folder)
    with pytest.raises(UsageError, match=r"CR0208.*seed is 1 now and was not set"):
        _keep_recipe(recipe(seed=1, ray={"address": "h:6379"}), folder)


# ---- trained tasks may be measured by fewer samples than held-out ones, which are what a run is judged by


class CountedSamples:
    """Every sample passes; only their number is asked about."""

    def reporting(self, report: Any, label: str) -> nullcontext[None]:
        del report, label
        return nullcontext()

    def sample(
        self, tasks: tuple[str, ...], *, num_samples: int, seed: int, name: str
    ) -> tuple[list[TaskResult], int]:
        del seed, name
        return [TaskResult(task, (True,) * num_samples, (True,) * num_samples) for task in tasks], 0


@pytest.mark.parametrize(("of_trained", "counts"), [(None, (6, 3)), (1, (2, 3))])
def test_trained_tasks_have_a_number_of_samples_of_their_own(
    tmp_path: Path, of_trained: int | None, counts: tuple[int, int]
) -> None:
    section = HeldoutSection(before_and_after_samples=3, before_and_after_trained_samples=of_trained)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(heldout=section, seed=0),
        folder=SimpleNamespace(root=tmp_path),
        tasks=SimpleNamespace(train=("a", "b"), heldout=("c",)),
        sampler=CountedSamples(),
        trainer=SimpleNamespace(model=None),
        quiet=True,
        tell=print,
    )
    rates = TrainingRun._measure_once(run, "before")
    assert rates is not None
    assert (rates["train"]["num_samples"], rates["heldout"]["num_samples"]) == counts
    assert rates["heldout"]["by_task"] == {"c": {"visible": 3, "hidden": 3, "samples": 3}}


# ---- ``quickstart``: the shipped recipe, in the type that the machine multiplies fast


@pytest.mark.parametrize(("has_gpu", "gpu", "processor"), [(False, False, True), (True, True, False)])
def test_sixteen_bits_only_where_they_are_fast(
    has_gpu: bool, gpu: bool, processor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(of_gpu: bool, of_processor: bool) -> str:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: of_gpu)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: of_processor)
        return fast_dtype()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert say(gpu, processor) == "bfloat16"
    assert say(not gpu, not processor) == "float32"


def test_what_is_given_and_the_type_go_to_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def run_recipe(
        recipe: Path, overrides: dict[str, Any], out: Path, **_: Any
    ) -> tuple[dict[str, Any], int]:
        seen.append(overrides)
        return {}, 0

    monkeypatch.setattr(train_verb, "run_recipe", run_recipe)
    for words in ([], ["--seed", "0", "--steps", "3"]):
        train_verb.run_quickstart(build_parser(only="quickstart").parse_args(["quickstart", *words]))
    assert seen == [
        {"model.dtype": fast_dtype()},
        {"trl.max_steps": 3, "seed": 0, "model.dtype": fast_dtype()},
    ]
