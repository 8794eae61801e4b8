"""Prompts of a generation that somebody chooses: what is trained on, what is learnt, and when nothing is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum import Curriculum
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.trainer import policy_terms
from composer_replication.trainer.preset_settings import PolicyOptions

MakeTrainer = Callable[..., Any]


class Chooser:
    """Gives its prompts in turn and writes down what it is asked and told."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.rows = [{"prompt": prompt, "task_id": f"id of {prompt}"} for prompt in prompts]
        self.num_given = 0
        self.noted: list[TaskOutcome] = []
        self.asked: list[int] = []
        self.learnt: list[list[TaskOutcome]] = []

    def _next(self, num: int) -> list[Mapping[str, Any]]:
        given: list[Mapping[str, Any]] = [
            self.rows[(self.num_given + n) % len(self.rows)] for n in range(num)
        ]
        self.num_given += num
        return given

    def chosen_rows(self, num_rows: int) -> list[Mapping[str, Any]]:
        self.asked.append(num_rows)
        return self._next(num_rows)

    def fresh_rows(self, num_rows: int, *, without_signal: Any) -> list[Mapping[str, Any]]:
        return self._next(num_rows)

    def take_outcomes(self) -> list[TaskOutcome]:
        noted, self.noted = self.noted, []
        return noted

    def learn(self, outcomes: Sequence[TaskOutcome]) -> None:
        self.learnt.append(list(outcomes))

    def figures(self) -> dict[str, float]:
        return {"curriculum/num_asked": float(len(self.asked))}

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_given = int(state["num_given"])


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


def test_outcomes_of_one_generation_are_known_when_the_next_is_chosen(make_trainer: MakeTrainer) -> None:
    """The sampler runs ahead; the choice does not."""
    order: list[str] = []

    class Listening(Chooser):
        def chosen_rows(self, num_rows: int) -> list[Mapping[str, Any]]:
            order.append("chosen")
            return super().chosen_rows(num_rows)

        def learn(self, outcomes: Sequence[TaskOutcome]) -> None:
            order.append("learnt")
            super().learn(outcomes)

    chooser = Listening(["def one():", "def two():"])
    make_trainer(max_steps=3, reward=noting(chooser, []), prompt_source=chooser).train()
    assert order == ["chosen", "learnt"] * 3


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


def test_a_source_that_only_replaces_leaves_the_data_order(make_trainer: MakeTrainer) -> None:
    """Without ``chosen_rows`` and its like it is no chooser, and the prompts are TRL's."""

    class Replacing:
        fresh_rows, state_dict, load_state_dict = (
            Chooser.fresh_rows,
            Chooser.state_dict,
            Chooser.load_state_dict,
        )

    def prompts_of(**settings: Any) -> list[list[str]]:
        seen: list[list[str]] = []
        make_trainer(max_steps=2, reward=noting(Chooser([]), seen), **settings).train()
        return seen

    assert prompts_of(prompt_source=Replacing()) == prompts_of()


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
