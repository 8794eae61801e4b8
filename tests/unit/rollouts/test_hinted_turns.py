"""From rollouts to hinted turns by row: real tasks, real grading, and rollouts with tools."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import FAMILIES, TemplateTokenizer, tokenizer_of
from hint_rollouts import cases, observe

from composer_replication.config import RolloutsSection
from composer_replication.errors import InputError
from composer_replication.records import Completion, Outcome, Rollout, Score, StopReason, Task, Turn
from composer_replication.rollouts.episodes.episode import EpisodeTurn
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.hints import hinted_turns
from composer_replication.rollouts.hints.hinted_turns import (
    MAX_TURNS,
    Fault,
    HintedTurnMaker,
    ObservedRollout,
)
from composer_replication.rollouts.hints.task_observer import KnownTask, TaskObserver
from composer_replication.rollouts.single_turn import build_prompt, extract_answer
from composer_replication.rollouts.tokens.token_ledger import Chat
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer.generation import HintGenerator

SMOLLM2 = tokenizer_of(FAMILIES[0])
WRONG = "\n    return low\n\n\ndef mean"
UNPARSED = "\n    return min(x, high\n\n\ndef mean"


def text_of(ids: tuple[int, ...], tokenizer: TemplateTokenizer = SMOLLM2) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def attempt(store: TaskStore, grader: Grader, task: Task, text: str, *, style: str = "completion") -> Rollout:
    """One answer as the quick start asks for it, graded in the sandbox."""
    broken = store.broken_text(task)
    prompt = build_prompt(broken, task.hole, RolloutsSection(prompt_style=style))
    if style == "chat":
        prompt = SMOLLM2.apply_chat_template(
            [{"role": "user", "content": prompt}], tools=None, tokenize=False, add_generation_prompt=True
        )
    score = grader.grade(task, extract_answer(text, broken, task.hole, style=style))
    assert score is not None
    ids = tuple(SMOLLM2.encode(prompt, add_special_tokens=False))
    sampled = tuple(SMOLLM2.encode(text, add_special_tokens=False))
    turn = Turn(ids, Completion(sampled, text, StopReason.STOP_RULE, (-1.0,) * len(sampled)))
    return Rollout(
        task.task_id, 3, (turn,), float(score.all_passed), score, StopReason.STOP_RULE, score.seconds
    )


def test_failing_answers_of_the_quick_start_get_a_comment_that_names_the_test(
    store: TaskStore, grader: Grader, clamp: Task
) -> None:
    golden = store.golden_body(clamp)
    texts = [WRONG, f"{golden}\n\n\ndef mean", UNPARSED]
    rollouts = [attempt(store, grader, clamp, text) for text in texts]
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 0.0]
    maker = HintedTurnMaker(SMOLLM2, observe=TaskObserver(grader))
    generator: HintGenerator = maker
    rows = generator.hinted_turns(rollouts)
    assert [len(row) for row in rows] == [1, 0, 1]
    ((wrong,), _, (unparsed,)) = rows
    assert maker.counts == {
        "rollouts": 3,
        "faults": 2,
        "hints": 2,
        "hints/test-failure": 1,
        "hints/syntax-error": 1,
    }
    for hinted, rollout in ((wrong, rollouts[0]), (unparsed, rollouts[2])):
        turn = rollout.turns[0]
        assert hinted.prompt_ids == turn.prompt_ids
        assert hinted.completion_ids == turn.completion.token_ids
        assert hinted.sampled_logp == turn.completion.token_logp
        assert hinted.hinted_prompt_ids[: len(turn.prompt_ids)] == turn.prompt_ids
    added = text_of(wrong.hinted_prompt_ids).removeprefix(text_of(wrong.prompt_ids))
    failing = {
        test.rpartition("::")[2]
        for test, what in rollouts[0].score.outcomes.items()
        if what is not Outcome.PASSED
    }  # type: ignore[union-attr]
    assert any(f"{name} fails" in added for name in failing)
    assert "clamp(" in added
    # the file with the comment in it is still a file, and it does not show the answer
    seen = text_of(wrong.hinted_prompt_ids)
    assert "\n    # Hint: " in seen
    broken = store.broken_text(clamp)
    ast.parse(fill(broken, clamp.hole, f"{seen.rpartition(chr(34) * 3)[2]}{golden}"))
    assert golden.strip() not in seen
    assert not any(name.rpartition("::")[2] in seen for name in clamp.tests.hidden)


def test_rollouts_as_a_trainer_makes_them_are_scored_by_the_rewards_own_grader(
    store: TaskStore, grader: Grader, clamp: Task
) -> None:
    rollout = attempt(store, grader, clamp, WRONG)
    turn = rollout.turns[0]
    # no score, and whatever did not end with an end-of-sequence id counts as cut off
    bare = replace(turn, completion=replace(turn.completion, stop_reason=StopReason.LENGTH))
    trained = replace(rollout, turns=(bare,), score=None, stop_reason=StopReason.LENGTH)
    nothing = replace(trained, turns=())
    maker = HintedTurnMaker(SMOLLM2, observe=TaskObserver(grader))
    with_score = maker.hinted_turns([rollout, nothing])
    assert maker.hinted_turns([trained, nothing]) == with_score
    assert [len(row) for row in with_score] == [1, 0]


def test_chat_prompts_of_tasks(store: TaskStore, grader: Grader, clamp: Task) -> None:
    rollout = attempt(store, grader, clamp, "```python\nreturn low\n```", style="chat")
    ((hinted,),) = HintedTurnMaker(
        SMOLLM2, observe=TaskObserver(grader, options=RolloutsSection(prompt_style="chat"))
    ).hinted_turns([rollout])
    added = text_of(hinted.hinted_prompt_ids).removeprefix(
        text_of(hinted.prompt_ids).removesuffix("<|im_start|>assistant\n")
    )
    assert added.startswith("<|im_start|>user\nHint: test_")
    assert added.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_text_that_tells_the_golden_code_is_never_shown(
    store: TaskStore, grader: Grader, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    solution = store.golden_body(clamp)
    monkeypatch.setattr(hinted_turns, "find_faults", lambda _: [Fault(0, "test-failure", (solution,))])
    rollouts = [attempt(store, grader, clamp, WRONG)]
    maker = HintedTurnMaker(SMOLLM2, observe=TaskObserver(grader))
    assert maker.hinted_turns(rollouts) == [()]
    assert maker.counts["without_hint"] == 1
    # the same words pass where nobody watches: the wall is what stopped them
    open_doors = TaskObserver(grader)
    unwatched = HintedTurnMaker(SMOLLM2, observe=lambda r: replace(open_doors(r), is_leak=lambda _: False))
    ((hinted,),) = unwatched.hinted_turns(rollouts)
    assert "if x < low" in text_of(hinted.hinted_prompt_ids)


def test_hidden_tests_are_no_evidence(clamp: Task) -> None:
    hidden = clamp.tests.hidden[0]
    score = Score({hidden: Outcome.FAILED, clamp.tests.visible[0]: Outcome.FAILED})
    assert list(known(clamp).failed_tests(score)) == [clamp.tests.visible[0]]


def known(task: Any, sources: Any = (), **places: Any) -> KnownTask:
    return KnownTask(task, "", sources, places, None)


def places(*node_ids: str) -> dict[str, tuple[str, int, str]]:
    """Where these stand by their names."""
    paths = (node_id.partition("::")[0] for node_id in node_ids)
    names = (node_id.partition("[")[0].rpartition("::")[2] for node_id in node_ids)
    return {node: (path, 1, name) for node, path, name in zip(node_ids, paths, names, strict=True)}


SOURCES = tuple(
    ("t.py", source)
    for source in (
        "@pytest.mark.parametrize('x', ['', 'b'])\ndef test_j(x):\n    assert f(x)\n",
        "def test_a():\n    x = f(1)\n    assert x == 2, 'no'\n    assert x\n    assert 3\n",
        "    def test_b(self):\n        self.assertEqual(f(1),\n            2)\n",
        "def test_c():\n    with pytest.raises(ValueError):\n        f(None)\n",
        "def test_d():\n    assert 1\n",
        "    def test_d(self):\n        assert 2\n",
        "def test_e(:\n",
        "@pytest.mark.parametrize(('x', 'y'), [(1, -2), ('a', None), (3, 0.5)])\ndef test_f(x, y):\n    assert f(x) == y\n",
        f"def test_i():\n    assert 1\n    assert last(1)\n    assert last({'x' * 200})\n    assert blast\n",
    )
)


@pytest.mark.parametrize(
    ("node_id", "assertion"),
    [
        ("t.py::test_a", "x == 2, 'no'; x"),
        ("t.py::TestB::test_b", "self.assertEqual(f(1),"),
        ("t.py::test_c", "with pytest.raises(ValueError):"),
        *((node_id, "") for node_id in ("t.py::test_d", "t.py::test_e", "other.py::test_a")),
        ("t.py::test_f[1--2]", "f(x) == y"),
        ("t.py::test_j[]", "f(x)"),
        ("t.py::test_i", "1; last(1)"),
    ],
)
def test_assertions_are_read_from_the_source(node_id: str, assertion: str) -> None:
    assert known(None, SOURCES, **places(node_id)).assertion_of(node_id) == assertion
    assert known(None, SOURCES).assertion_of(node_id) == ""  # nobody knows where it stands


def test_tests_with_a_known_assertion_come_first_and_each_function_once(clamp: Task) -> None:
    visible = ("t.py::test_d", "t.py::test_f[1--2]", "t.py::test_f[3-0.5]", "t.py::test_a")
    task = replace(clamp, tests=replace(clamp.tests, visible=visible))
    score = Score(dict.fromkeys(visible, Outcome.FAILED))
    names = [
        node_id.rpartition("::")[2]
        for node_id in known(task, SOURCES, **places(*visible)).failed_tests(score)
    ]
    assert names == ["test_f[1--2]", "test_a", "test_d"]


# ---- rollouts with tools -------------------------------------------------------------------------


def chatted(case: dict[str, Any]) -> ObservedRollout:
    """The recorded rollout with a conversation and the ids of a prompt at every turn."""
    observed = observe(case)
    turns = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Write last()."}]
    for idx, turn in enumerate(observed.episode.turns):
        text = SMOLLM2.apply_chat_template(messages, tools=None, tokenize=False, add_generation_prompt=True)
        ids = tuple(SMOLLM2.encode(text, add_special_tokens=False))
        turns.append(replace(turn, added_ids=ids, segment_idx=idx, chat=Chat(list(messages))))
        messages += [
            {"role": "assistant", "content": turn.completion.text},
            *({"role": "user", "content": result.text} for result in turn.results),
        ]
    return with_turns(observed, *turns)


def with_turns(observed: ObservedRollout, *turns: EpisodeTurn) -> ObservedRollout:
    return replace(observed, episode=replace(observed.episode, turns=turns))


ANY = Rollout("shelf--last", 1, (), 0.0, None, StopReason.FINISHED, 1.0)


def maker_over(observed: ObservedRollout | None = None, *, strict: bool = True) -> HintedTurnMaker:
    return HintedTurnMaker(SMOLLM2, observe=lambda _: observed, strict=strict)


def test_every_recorded_fault_becomes_a_hinted_turn_of_that_turn() -> None:
    observed = [chatted(case) for case in cases()]
    maker = maker_over()
    for case, each in zip(cases(), observed, strict=True):
        row = list(maker.hinted(each))
        assert [fault.turn_idx for fault, _ in row] == [expected[0] for expected in case["expected"]]
        assert [fault.kind for fault, _ in row] == [expected[1] for expected in case["expected"]]
        for fault, hinted in row:
            turn, hint = each.episode.turns[fault.turn_idx], hinted_turns.write_hint(fault, each.is_leak)
            assert hinted.prompt_ids == turn.added_ids
            assert hinted.completion_ids == turn.completion.token_ids
            assert hint is not None and hint in text_of(hinted.hinted_prompt_ids)
            assert hint not in text_of(hinted.prompt_ids)
    assert maker.counts["hints"] == sum(len(case["expected"]) for case in cases())


def test_at_most_so_many_turns_of_a_rollout() -> None:
    observed = chatted(next(case for case in cases() if case["name"] == "two faults in two turns"))
    first = observed.episode.turns[0]
    long = with_turns(observed, *(replace(first, segment_idx=idx) for idx in range(MAX_TURNS + 2)))
    row, nothing = [maker_over(each).hinted_turns([ANY]) for each in (long, None)]
    assert (len(row[0]), nothing) == (MAX_TURNS, [()])


def test_strict_raises_and_lenient_leaves_out_and_counts() -> None:
    observed = chatted(
        next(case for case in cases() if case["name"] == "the tool's own words for a missing file")
    )
    first, *others = observed.episode.turns
    broken = replace(first, added_ids=(1, 2, 3))
    damaged = with_turns(observed, broken, *others)
    with pytest.raises(InputError, match="CR0430"):
        maker_over(damaged).hinted_turns([ANY])
    lenient = maker_over(damaged, strict=False)
    assert lenient.hinted_turns([ANY]) == [()]
    assert lenient.counts["left_out/CR0430"] == 1
    unsampled = replace(broken, completion=replace(broken.completion, token_ids=()))
    maker = maker_over(with_turns(observed, unsampled, *others))
    assert maker.hinted_turns([ANY]) == [()]
    assert maker.counts["without_ids"] == 1
