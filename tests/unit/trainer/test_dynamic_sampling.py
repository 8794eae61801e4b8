"""Who gives prompts: groups that taught nothing are replaced, and a whole generation is chosen; a resume does the same."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum import Curriculum
from composer_replication.run_folder import RunFolder, read_json, read_jsonl
from composer_replication.trainer import policy_terms
from composer_replication.trainer.checkpoints import STATE_NAME
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.policy_terms import merge_rows, other_rows
from composer_replication.trainer.preset_settings import PolicyOptions, TrainerSettingError

MakeTrainer = Callable[..., Any]
SAMPLING = PolicyOptions(dynamic_sampling_rounds=2)


def rows(*prompts: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt in prompts]


# ---- who gives fresh prompts ------------------------------------------------------------------------


@given(st.integers(0, 7), st.integers(1, 8), st.sets(st.integers(0, 6)), st.text(max_size=4))
def test_other_rows_are_each_drawn_once_and_pass_over_the_dull(
    num_data: int, num_rows: int, dull: set[int], place: str
) -> None:
    data = rows(*(f"p{n}" for n in range(num_data)))
    without = rows(*(f"p{n}" for n in dull))
    found = other_rows(data, num_rows, without_signal=without, place=place)
    others = [row for row in data if row not in without]
    assert len(found) == min(num_rows, len(others))
    assert all(found.count(row) == 1 and row in others for row in found)
    assert found == other_rows(data, num_rows, without_signal=without, place=place)


# ---- merging ------------------------------------------------------------------------------------------


def test_rows_of_other_widths_are_merged_by_hand() -> None:
    old = {
        "prompt_ids": torch.tensor([[9, 1], [2, 3]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[4, 5, 6], [7, 9, 9]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "advantages": torch.tensor([0.5, -0.5]),
        "num_items_in_batch": torch.tensor(4),
    }
    new = {
        "prompt_ids": torch.tensor([[1, 2, 3]]),
        "prompt_mask": torch.tensor([[1, 1, 1]]),
        "completion_ids": torch.tensor([[8, 8]]),
        "completion_mask": torch.tensor([[1, 1]]),
        "advantages": torch.tensor([2.0]),
        "num_items_in_batch": torch.tensor(2),
    }
    merged = merge_rows(old, new, [(1, 0)], pad_token_id=9)
    assert list(merged) == list(old)
    assert merged["prompt_ids"].tolist() == [[9, 9, 1], [1, 2, 3]]
    assert merged["prompt_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert merged["completion_ids"].tolist() == [[4, 5, 6], [8, 8, 9]]
    assert merged["completion_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert merged["advantages"].tolist() == [0.5, 2.0]
    assert old["completion_ids"].tolist() == [[4, 5, 6], [7, 9, 9]]


def test_a_part_that_is_not_by_row_is_refused() -> None:
    rows_alone = {"prompt_ids": torch.zeros(2, 1), "pixel_values": torch.zeros(7, 3)}
    with pytest.raises(TrainerSettingError, match=r"CR0760.*pixel_values"):
        merge_rows(rows_alone, rows_alone, [(0, 0)], pad_token_id=0)


# ---- in training --------------------------------------------------------------------------------------


def dull_for(*letters: str) -> Callable[..., list[float]]:
    """Equal rewards for prompts with one of these letters, different ones for the others."""

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [
            1.0 if any(letter in prompt for letter in letters) else float(number % 4)
            for number, prompt in enumerate(prompts)
        ]

    return reward


class Source:
    """A stub with a state of its own: gives its prompts in turn and remembers what was dull."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.rows = [{"prompt": prompt, "task_id": f"id of {prompt}"} for prompt in prompts]
        self.num_given = 0
        self.dull: list[str] = []

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        self.dull += [row["prompt"] for row in without_signal]
        first, self.num_given = self.num_given, self.num_given + num_rows
        return [self.rows[number % len(self.rows)] for number in range(first, self.num_given)]

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given, "dull": self.dull}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_given, self.dull = int(state["num_given"]), list(state["dull"])


def prompts_trained_on(trainer: Any) -> list[list[str]]:
    """Decoded prompts of every step, noted as the loss sees them."""
    seen: list[list[str]] = []
    compute = trainer._compute_loss

    def noting(model: Any, inputs: Any) -> Any:
        ids = [
            row[mask.bool()] for row, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        ]
        seen.append([trainer.processing_class.decode(row) for row in ids])
        trained = inputs["completion_mask"].sum()
        assert inputs["num_items_in_batch"] == trained
        return compute(model, inputs)

    trainer._compute_loss = noting
    return seen


def test_dull_groups_are_replaced_counted_and_logged(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Prompts with "twice" or "first" are dull; the source gives a dull one, then two good ones."""
    source = Source(["def twice(x, y):", "def longer(a, b):", "def even_longer(a, b):"])
    trainer = make_trainer(
        max_steps=2,
        per_device_train_batch_size=16,
        reward=dull_for("twice", "first"),
        prompt_source=source,
        policy_options=SAMPLING,
        run_folder=RunFolder(tmp_path / "run"),
    )
    seen = prompts_trained_on(trainer)
    trainer.train()
    for prompts in seen:
        # Two of the four groups were dull. Round one gives a dull and a good prompt, round two a good one.
        assert sum("longer" in prompt for prompt in prompts) == 8
        assert not any("twice" in prompt or "first" in prompt for prompt in prompts)
    lines = read_jsonl(trainer.run_folder.metrics)
    assert [line["dynamic_sampling/replaced_groups"] for line in lines] == [2, 2]
    assert [line["dynamic_sampling/rounds"] for line in lines] == [2, 2]
    assert [line["dynamic_sampling/groups_without_signal"] for line in lines] == [0, 0]
    # The logged reward and share are those of the prompts that nobody chose: (1 + 1 + 1.5 + 1.5) / 4 and 2 of 4.
    assert [line["reward"] for line in lines] == [1.25, 1.25]
    assert [line["frac_reward_zero_std"] for line in lines] == [0.5, 0.5]
    assert all("twice" in prompt or "first" in prompt for prompt in source.dull)
    assert source.num_given == 6


@pytest.mark.parametrize("num_rounds", [0, 1])
def test_the_budget_is_kept(make_trainer: MakeTrainer, tmp_path: Path, num_rounds: int) -> None:
    source = Source(["def twice(y):"])
    trainer = make_trainer(
        max_steps=1,
        per_device_train_batch_size=16,
        reward=dull_for("twice"),
        prompt_source=source,
        policy_options=PolicyOptions(dynamic_sampling_rounds=num_rounds),
        run_folder=RunFolder(tmp_path / "run"),
    )
    trainer.train()
    (line,) = read_jsonl(trainer.run_folder.metrics)
    assert source.num_given == num_rounds
    figures = {"groups_without_signal": 1, "replaced_groups": 0, "rounds": 1} if num_rounds else {}
    found = {name: value for name, value in line.items() if name.startswith("dynamic_sampling/")}
    assert found == {f"dynamic_sampling/{name}": value for name, value in figures.items()}


def test_a_source_that_has_no_more_ends_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    settings: dict[str, Any] = {"policy_options": SAMPLING, "num_prompts": 1, "run_folder": folder}
    make_trainer(max_steps=1, reward=dull_for("def"), **settings).train()
    (line,) = read_jsonl(folder.metrics)
    assert line["dynamic_sampling/rounds"] == 0


@pytest.mark.parametrize("own_source", [True, False])
def test_a_resumed_run_draws_the_same_prompts(
    make_trainer: MakeTrainer, tmp_path: Path, own_source: bool
) -> None:
    """The state of whoever gives prompts is in the checkpoint; without it the end is another one."""

    def run(name: str, **more: Any) -> Any:
        source = Source([f"def made_{n}(x):" for n in range(7)]) if own_source else None
        trainer = make_trainer(
            output_dir=tmp_path / name,
            max_steps=4,
            per_device_train_batch_size=8,
            num_prompts=6,
            learning_rate=1e-2,
            reward=dull_for("twice", "first", "made_1", "made_4"),
            prompt_source=source,
            policy_options=SAMPLING,
            save_strategy="steps",
            save_steps=2,
        )
        trainer.train(**more)
        return trainer

    whole = run("whole")
    replaced = [row.get("dynamic_sampling/replaced_groups", 0) for row in whole.state.log_history]
    assert sum(replaced) > 2
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert (read_json(checkpoint / STATE_NAME)["prompt_source"] is not None) is own_source
    resumed_folder = tmp_path / "resumed" / "checkpoint-2"
    shutil.copytree(checkpoint, resumed_folder)
    resumed = run("resumed", resume_from_checkpoint=str(resumed_folder))
    assert parameter_sha256(resumed.model) == parameter_sha256(whole.model)
    if own_source:
        assert resumed.prompt_source.state_dict() == whole.prompt_source.state_dict()
    again = [row.get("dynamic_sampling/replaced_groups", 0) for row in resumed.state.log_history]
    assert sum(again) == sum(replaced)


def test_a_stream_needs_a_source(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(policy_options=SAMPLING)
    trainer.train_dataset = iter(())
    with pytest.raises(TrainerSettingError, match="CR0760"):
        trainer.policy_terms.check_settings()


class Chooser(Source):
    """Also chooses the prompts of each generation, and writes down what it is asked and told."""

    def __init__(self, prompts: Sequence[str]) -> None:
        super().__init__(prompts)
        self.noted: list[TaskOutcome] = []
        self.asked: list[int] = []
        self.learnt: list[list[TaskOutcome]] = []
        self.order: list[str] = []

    def chosen_rows(self, num_rows: int) -> list[Mapping[str, Any]]:
        self.asked.append(num_rows)
        self.order.append("chosen")
        return self.fresh_rows(num_rows, without_signal=())

    def take_outcomes(self) -> list[TaskOutcome]:
        noted, self.noted = self.noted, []
        return noted

    def learn(self, outcomes: Sequence[TaskOutcome]) -> None:
        self.learnt.append(list(outcomes))
        self.order.append("learnt")

    def figures(self) -> dict[str, float]:
        return {"curriculum/num_asked": float(len(self.asked))}


def noting(chooser: Any, seen: list[list[str]]) -> Callable[..., list[float]]:
    """A reward with a signal in every group, whose every second attempt is a full pass; tells ``chooser``."""

    def reward(prompts: list[str], task_id: list[str] | None = None, **kwargs: Any) -> list[float]:
        seen.append(list(prompts))
        values = [float(number % 2 == 0) for number in range(len(prompts))]
        if task_id is not None:
            outcomes = [TaskOutcome(*row) for row in zip(task_id, map(bool, values), strict=True)]
            (chooser.note if isinstance(chooser, Curriculum) else chooser.noted.extend)(outcomes)
        return values

    return reward


def test_what_was_chosen_is_what_is_trained_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Two groups of four a generation; none of the prompts is in the training data."""
    chooser, seen = Chooser([f"def chosen_{n}():" for n in range(5)]), list[list[str]]()
    trainer = make_trainer(
        max_steps=3,
        per_device_train_batch_size=8,
        reward=noting(chooser, seen),
        prompt_source=chooser,
        run_folder=RunFolder(tmp_path / "run"),
    )
    trainer.train()
    chosen = [[row["prompt"] for row in chooser.rows][n % 5] for n in range(6)]
    assert seen == [[chosen[2 * step]] * 4 + [chosen[2 * step + 1]] * 4 for step in range(3)]
    assert chooser.asked == [2, 2, 2]
    assert chooser.order == ["chosen", "learnt"] * 3  # the sampler runs ahead; the choice does not
    assert [[outcome.task_id for outcome in part] for part in chooser.learnt] == [
        [f"id of {prompt}" for prompt in prompts] for prompts in seen
    ]
    lines = read_jsonl(trainer.run_folder.metrics)
    assert [line["curriculum/num_asked"] for line in lines] == [1.0, 2.0, 3.0]


def test_a_generation_that_serves_many_steps_is_chosen_once(make_trainer: MakeTrainer) -> None:
    chooser, seen = Chooser(["def one():", "def two():", "def three():"]), list[list[str]]()
    trainer = make_trainer(
        max_steps=5,
        num_iterations=2,
        steps_per_generation=2,
        reward=noting(chooser, seen),
        prompt_source=chooser,
    )
    trainer.train()
    assert chooser.asked == [2, 2]  # each for two slices, used twice
    assert len(chooser.learnt) == len(seen) == 2


def test_an_evaluation_neither_chooses_nor_teaches(make_trainer: MakeTrainer) -> None:
    chooser, seen = Chooser(["def chosen():"]), list[list[str]]()
    trainer = make_trainer(
        reward=noting(chooser, seen),
        prompt_source=chooser,
        eval_dataset=Dataset.from_dict({"prompt": ["def held():"], "task_id": ["held"]}),
        per_device_eval_batch_size=4,
    )
    trainer.evaluate()
    assert {prompt for prompts in seen for prompt in prompts} == {"def held():"}
    assert (chooser.asked, chooser.learnt, chooser.noted) == ([], [], [])


def test_the_real_one_counts_every_attempt(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Replacements included: what it knows is what the reward saw, counted again by hand."""
    rows = [{"prompt": f"def task_{n}():", "task_id": f"t{n}"} for n in range(6)]
    never_fades = type("NeverFades", (Curriculum,), {"half_life": 1e9})
    curriculum, seen, graded = never_fades(rows, seed=3), list[list[str]](), Counter[str]()

    def reward(prompts: list[str], task_id: list[str], **kwargs: Any) -> list[float]:
        values = noting(curriculum, seen)(prompts, task_id)
        graded.update(task_id)
        return [1.0 if name in ("t0", "t1") else value for name, value in zip(task_id, values, strict=True)]

    trainer = make_trainer(
        max_steps=6,
        per_device_train_batch_size=8,
        reward=reward,
        prompt_source=curriculum,
        policy_options=PolicyOptions(dynamic_sampling_rounds=2),
        run_folder=RunFolder(tmp_path / "run"),
    )
    trainer.train()
    curriculum.chosen_rows(1)  # the last generation is counted now
    for task_id, standing in curriculum.standings.items():
        assert standing.passed + standing.failed == pytest.approx(graded[task_id], rel=1e-6)
        assert standing.passed == pytest.approx(graded[task_id] / 2, rel=1e-6)
    lines = read_jsonl(trainer.run_folder.metrics)
    assert sum(line["dynamic_sampling/replaced_groups"] for line in lines) > 0
    assert all(line["curriculum/num_active"] == 6.0 for line in lines)
    assert lines[-1]["curriculum/mean_pass_rate"] == pytest.approx(0.5)


def test_the_first_process_chooses_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser, firsts = Chooser(["def one():"]), [{"prompt": "def first():", "task_id": "of the first"}]
    monkeypatch.setattr(policy_terms, "from_first", lambda value: firsts)
    metrics: dict[str, list[float]] = {"curriculum/num_asked": []}
    rows = policy_terms.chosen_inputs(chooser, [{"prompt": "of the data"}] * 4, 4, metrics)
    assert rows == firsts * 4
    assert chooser.asked == [1]  # its state stays that of the others


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_group_that_lies_across_processes_has_one_prompt(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Three processes of four rows are two groups of six: rows 0-5 and 6-11."""
    monkeypatch.setattr(policy_terms, "num_processes", lambda: 3)
    monkeypatch.setattr(policy_terms, "process_rank", lambda: rank)
    metrics: dict[str, list[float]] = {"curriculum/num_asked": []}
    rows = policy_terms.chosen_inputs(Chooser(["a", "b"]), [{"prompt": "of the data"}] * 4, 6, metrics)
    assert [row["prompt"] for row in rows] == [*"aaaa", *"aabb", *"bbbb"][4 * rank : 4 * rank + 4]
