"""The control for hints: another task's words, of the same length, with nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from chat_templates import FAMILIES, tokenizer_of

from composer_replication.channel_tables import HintWritingSection
from composer_replication.errors import UsageError
from composer_replication.records import Completion, Hint, Outcome, Rollout, Score, StopReason, Task, Turn
from composer_replication.rollouts.hints.hint_context import Fault, HintContext, observe_single_turn
from composer_replication.rollouts.hints.hinted_turns import HintedTurnMaker
from composer_replication.rollouts.hints.other_tasks import HintsOfOtherTasks
from composer_replication.rollouts.hints.task_observer import TaskObserver
from composer_replication.rollouts.single_turn import build_prompt
from composer_replication.tasks.store import TaskStore

SMOLLM2 = tokenizer_of(FAMILIES[0])
OPTIONS = HintWritingSection(from_other_tasks=True)
WRONG = {
    "clamp": "\n    return low\n\n\ndef mean",
    "sign": "\n    return 7\n\n\ndef mean",
    "initials": "\n    return (\n\n\ndef mean",
}


def names_of(task: Task) -> set[str]:
    """Visible test functions, without the values of parametrised cases."""
    return {test.rpartition("::")[2].partition("[")[0] for test in task.tests.visible}


def attempts(store: TaskStore) -> list[Rollout]:
    """An answer for each task that fails all its visible tests, and one for the first that passes them."""
    tasks = sorted(store.tasks(), key=lambda task: task.symbol)
    rows = [(task, WRONG[task.symbol], Outcome.FAILED) for task in tasks]
    rollouts = []
    for task, text, outcome in [*rows, (tasks[0], store.golden_body(tasks[0]), Outcome.PASSED)]:
        prompt = SMOLLM2.encode(build_prompt(store.broken_text(task), task.hole), add_special_tokens=False)
        ids = tuple(SMOLLM2.encode(text, add_special_tokens=False))
        turn = Turn(tuple(prompt), Completion(ids, text, StopReason.STOP_RULE))
        score = Score(dict.fromkeys(task.tests.visible, outcome))
        reward = float(outcome is Outcome.PASSED)
        rollouts.append(Rollout(task.task_id, 3, (turn,), reward, score, StopReason.STOP_RULE, 1.0))
    return rollouts


def test_each_turn_gets_the_words_of_another_task_at_the_same_place(store: TaskStore) -> None:
    rollouts, tasks = attempts(store), {task.task_id: task for task in store.tasks()}
    observe = TaskObserver(store)
    own = HintedTurnMaker(SMOLLM2, observe=observe)
    others = HintsOfOtherTasks(observe, list(tasks.values()))
    control = HintedTurnMaker(SMOLLM2, observe=observe, options=OPTIONS, other_tasks=others)
    right, wrong = own.hinted_turns(rollouts), control.hinted_turns(rollouts)
    assert [len(row) for row in right] == [len(row) for row in wrong] == [1, 1, 1, 0]
    for rollout, (hint,), (other,), (turn,), (other_turn,) in zip(
        rollouts[:3], own.last_hints[:3], control.last_hints[:3], right[:3], wrong[:3], strict=True
    ):
        task = tasks[rollout.task_id]
        assert (other.kind, other.turn_idx, other.source) == (hint.kind, hint.turn_idx, "other-task")
        foreign = set().union(*(names_of(each) for each in tasks.values() if each is not task))
        assert any(name in other.text for name in foreign)
        assert not any(f"{name} " in other.text or f"{name}[" in other.text for name in names_of(task))
        assert other.text.startswith("Hint: ")
        # of all that it may say, nothing is nearer in length
        told = {
            f"Hint: {text}" for name in tasks if name != task.task_id for text in whole_list(observe, name)
        }
        distance = min(abs(len(text) - len(hint.text)) for text in told)
        assert abs(len(other.text) - len(hint.text)) == distance
        # the same ids are scored, and the prompts differ in the hint alone
        assert other_turn.completion_ids == turn.completion_ids
        assert other_turn.prompt_ids == turn.prompt_ids
        assert other_turn.hinted_prompt_ids != turn.hinted_prompt_ids
        assert (
            other_turn.hinted_prompt_ids[: len(turn.prompt_ids)]
            == turn.hinted_prompt_ids[: len(turn.prompt_ids)]
        )
    assert control.counts["hints"] == own.counts["hints"] == 3
    again = HintedTurnMaker(
        SMOLLM2,
        observe=TaskObserver(store),
        options=OPTIONS,
        other_tasks=HintsOfOtherTasks(TaskObserver(store), list(tasks.values())[::-1]),
    )
    assert again.hinted_turns(rollouts) == wrong  # no memory, no order: what a resumed run hands out


def whole_list(observe: TaskObserver, task_id: str) -> list[str]:
    """Spelled out once more: a line a test, alone or two in a row."""
    lines = [
        f"{test.node_id.rpartition('::')[2]} fails"
        + (f": it checks `{' '.join(test.assertion.split())}`." if test.assertion else ".")
        for test in observe.known(task_id).visible_tests()
    ]
    return lines + [f"{first}\n{second}" for first, second in pairwise(lines)]


def test_other_repositories_come_before_other_tasks_of_the_same(store: TaskStore) -> None:
    near, far, third = sorted(store.tasks(), key=lambda task: task.symbol)
    far = replace(far, repository="elsewhere==1")
    others = HintsOfOtherTasks(TaskObserver(store), [near, far, third])
    for length in (10, 60, 200, 400):
        found = others(context(near), Hint(0, "x" * length, "test-failure", "template"))
        assert found is not None
        assert any(name in found.text for name in names_of(far))
        assert not any(f"{name} " in found.text for name in names_of(third))


def test_what_would_tell_a_secret_is_passed_over(store: TaskStore) -> None:
    first, second, _ = store.tasks()
    observe = TaskObserver(store)
    hint = Hint(0, "Hint: x fails.", "test-failure", "template")
    others = HintsOfOtherTasks(observe, [first, second])
    free = others(context(first), hint)
    assert free is not None
    leaky = context(first, lambda text: text == free.text)
    kept = others(leaky, hint)
    assert kept is not None
    assert kept.text != free.text
    assert others(context(first, lambda _: True), hint) is None
    assert others(context(first), free) != free  # never the turn's own words


def test_without_another_task_there_is_no_control(store: TaskStore) -> None:
    task = store.tasks()[0]
    with pytest.raises(UsageError, match=r"CR0760.*fewer than two tasks"):
        HintsOfOtherTasks(TaskObserver(store), [task, task])
    with pytest.raises(UsageError, match=r"CR0760.*other_tasks="):
        HintedTurnMaker(SMOLLM2, options=OPTIONS)
    others = HintsOfOtherTasks(TaskObserver(store), store.tasks())
    assert HintedTurnMaker(SMOLLM2, other_tasks=others).other_tasks is None  # off unless it is asked for


def context(task: Task, is_leak: Callable[[str], bool] = lambda _: False) -> HintContext:
    turn = Turn((1,), Completion((2,), "x", StopReason.STOP_RULE))
    rollout = Rollout(task.task_id, 0, (turn,), 0.0, None, StopReason.STOP_RULE, 1.0)
    return HintContext(observe_single_turn(rollout, is_leak=is_leak), Fault(0, "test-failure", ""))
