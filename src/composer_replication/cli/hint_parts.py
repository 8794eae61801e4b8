"""Joins the hint channel to a recipe's tasks: who looks at its rollouts and writes the hints."""

from __future__ import annotations

from collections.abc import Sequence

from composer_replication.channel_tables import HintsSection
from composer_replication.config import RunConfig
from composer_replication.interfaces import HintGenerator, Tokenizer
from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker
from composer_replication.rollouts.hints.other_tasks import HintsOfOtherTasks
from composer_replication.rollouts.hints.task_observer import TaskObserver
from composer_replication.tasks.store import TaskStore


def open_hint_source(
    config: RunConfig, store: TaskStore, grader: Grader, tokenizer: Tokenizer, *, tasks: Sequence[Task]
) -> HintGenerator | None:
    """Hints for the rollouts of training; None where ``trainer.alpha_sdpo`` is 0.

    ``grader`` is the reward's own, which keeps its scores: no answer is run twice. ``tasks`` are those that are trained
    on: with ``from_other_tasks`` hints tell of them.

    Raises:
        UsageError: a layer or the judge cannot be used (CR0221, CR0223), no other task to tell of (CR0877).
    """
    if config.trainer.alpha_sdpo == 0.0:
        return None
    observe = TaskObserver(
        store,
        grader=grader,
        tests=config.reward.tests,
        prompt_style=config.rollouts.prompt_style,
        context_lines=config.rollouts.context_lines,
    )
    section = config.hints or HintsSection()
    others = HintsOfOtherTasks(observe, tasks) if section.writing.from_other_tasks else None
    return HintedTurnMaker(
        tokenizer, observe=observe, options=section.writing, strict=section.strict, other_tasks=others
    )
