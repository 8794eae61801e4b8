"""inspect's own ``eval`` over our task: tool calls in real sandboxes, our reward as its score."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import eval as run_eval
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    ChatMessageTool,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.tool import ToolCall
from tiny_store import (
    PLANT,
    Call,
    break_sandboxes,
    golden_file,
    graded_by_us,
    nothing_left,
    task_of,
    with_body,
    write,
)

from composer_replication.rollouts.environment.inspect_face import feature_deletion
from composer_replication.tasks.store import TaskStore

SUBMIT: Call = ("submit", {})


def answer(*calls: Call, text: str = "") -> ModelOutput:
    """One answer of a model, with these calls at once."""
    wanted = [ToolCall(f"call-{n}", name, arguments) for n, (name, arguments) in enumerate(calls)]
    message = ChatMessageAssistant(content=text, tool_calls=wanted or None)
    return output_of(message)


def output_of(message: ChatMessageAssistant) -> ModelOutput:
    """With its usage, which would be counted by a tokenizer that has to be fetched."""
    usage = ModelUsage(input_tokens=7, output_tokens=3, total_tokens=10)
    return ModelOutput(model="mockllm", choices=[ChatCompletionChoice(message=message)], usage=usage)


def evaluate(store: TaskStore, tmp_path: Path, answers: Sequence[ModelOutput], **options: Any) -> Any:
    """The log of one sample; ``options`` of the library are passed to it."""
    own = {name: options.pop(name) for name in ("time_limit", "turn_limit", "sample_id") if name in options}
    own.setdefault("sample_id", [task_of(store, "clamp").task_id])
    (log,) = run_eval(
        feature_deletion(str(store.root), **options),
        model=get_model("mockllm/model", memoize=False, custom_outputs=iter(answers)),
        log_dir=str(tmp_path / "logs"),
        display="none",
        **own,
    )
    return log


def score_of(sample: Any) -> Any:
    (score,) = sample.scores.values()
    return score


def tool_messages(sample: Any) -> list[ChatMessageTool]:
    return [message for message in sample.messages if isinstance(message, ChatMessageTool)]


def test_a_solved_sample_has_the_reward_that_our_grader_gives(store: TaskStore, tmp_path: Path) -> None:
    clamp = task_of(store, "clamp")
    with nothing_left():
        answers = [
            answer(("read_file", {"path": "tinymath/numbers.py"})),
            answer(write(golden_file(store, clamp)), ("run_tests", {})),  # two calls in one answer
            answer(SUBMIT),
        ]
        log = evaluate(store, tmp_path, answers, with_hidden=True)
    (sample,) = log.samples
    assert log.status == "success", log.error
    assert score_of(sample).value == graded_by_us(store, clamp, golden_file(store, clamp)) == 1.0
    assert log.results.scores[0].metrics["mean"].value == 1.0
    read, wrote, tests, submitted = tool_messages(sample)
    assert "def clamp" in read.text and "passed" in tests.text and "submitted" in submitted.text
    assert not wrote.error
    assert score_of(sample).metadata["num_calls"] == 4.0
    assert score_of(sample).metadata["hidden_pass_share"] == 1.0
    shown = "".join(message.text for message in sample.messages[:1])
    assert "call submit" in shown and "return max(low" not in shown


def test_an_honest_failure_is_zero_and_a_third_is_a_share(store: TaskStore, tmp_path: Path) -> None:
    sign = task_of(store, "sign")
    third = with_body(store, sign, "return 1")
    expected = graded_by_us(store, sign, third)
    assert 0.0 < expected < 1.0
    with nothing_left():
        nothing = evaluate(store, tmp_path, [answer(text="I do not know.")])
        some = evaluate(store, tmp_path, [answer(write(third)), answer(SUBMIT)], sample_id=sign.task_id)
    assert score_of(nothing.samples[0]).value == 0.0
    assert nothing.results.scores[0].metrics["mean"].value == 0.0
    assert score_of(some.samples[0]).value == expected


def test_who_cheats_is_not_paid_and_counted(store: TaskStore, tmp_path: Path) -> None:
    clamp = task_of(store, "clamp")
    honest = [answer(write(golden_file(store, clamp))), answer(SUBMIT)]
    with nothing_left():
        log = evaluate(store, tmp_path, [answer(PLANT), *honest])
    score = score_of(log.samples[0])
    assert (score.value, score.metadata["is_masked"]) == (0.0, 1.0)
    assert score.metadata["monitor"]["findings"] and score.metadata["num_findings"] >= 1.0
    log = evaluate(store, tmp_path, honest)
    score = score_of(log.samples[0])
    assert (score.value, score.metadata["is_masked"], score.metadata["num_findings"]) == (1.0, 0.0, 0.0)


def test_malformed_calls_are_answered_and_counted(store: TaskStore, tmp_path: Path) -> None:
    unreadable = ToolCall("x", "submit", {}, parse_error="no JSON")
    message = ChatMessageAssistant(content="", tool_calls=[unreadable])
    answers = [
        output_of(message),
        answer(("no_such_tool", {}), ("bash", {"cmd": "ls"}), ("bash", {"command": ["ls"]})),
        answer(("read_file", {"path": "../../etc/passwd"})),  # a call that can be made, and is refused
        answer(write(golden_file(store, task_of(store, "clamp")))),
        answer(SUBMIT),
    ]
    with nothing_left():
        log = evaluate(store, tmp_path, answers, invalid_call_cost=0.125)
    (sample,) = log.samples
    assert log.status == "success", log.error
    assert score_of(sample).metadata["num_invalid_calls"] == 4.0  # the unreadable submit did not submit
    assert score_of(sample).value == pytest.approx(1.0 - 4 * 0.125)
    assert "root:" not in "".join(message.text for message in tool_messages(sample))


def test_limits_of_the_library_end_an_attempt_and_it_is_graded(store: TaskStore, tmp_path: Path) -> None:
    golden = golden_file(store, task_of(store, "clamp"))
    endless = [answer(write(golden)), *[answer(("list_files", {})) for _ in range(20)]]
    with nothing_left():
        log = evaluate(store, tmp_path, endless, turn_limit=3)
    (sample,) = log.samples
    assert sample.limit is not None
    assert score_of(sample).value == 1.0


def test_a_time_limit_in_the_middle_of_a_command_leaves_nothing(store: TaskStore, tmp_path: Path) -> None:
    answers = [answer(("bash", {"command": "sleep 3; touch late"}))]
    with nothing_left():
        log = evaluate(store, tmp_path, answers, time_limit=2)
    assert log.samples[0].limit is not None or log.samples[0].error is not None


@pytest.mark.parametrize("place", ["open", "call", "grade"])
def test_a_sandbox_that_breaks_is_no_score(
    store: TaskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    break_sandboxes(monkeypatch, place)
    with nothing_left():
        log = evaluate(store, tmp_path, [answer(("list_files", {})), answer(SUBMIT)])
    (sample,) = log.samples
    score = score_of(sample)
    assert log.status == "success"
    assert isinstance(score.value, float) and math.isnan(score.value)
    assert score.reason == "scoring_failed" and score.explanation
    assert log.results.scores[0].unscored_samples == 1 and log.results.scores[0].scored_samples == 0


def test_a_model_that_raises_leaves_nothing(store: TaskStore, tmp_path: Path) -> None:
    with nothing_left():
        log = evaluate(store, tmp_path, [])
    assert log.status == "error" and "ran out of values" in log.error.message
    assert not log.samples[0].scores


def test_samples_run_beside_each_other_and_an_unknown_task_is_said(store: TaskStore, tmp_path: Path) -> None:
    def play(messages: list[Any], *rest: Any) -> ModelOutput:
        wrote = any(isinstance(message, ChatMessageTool) for message in messages)
        symbol = "clamp" if "clamp" in messages[0].text else "sign"
        return answer(SUBMIT) if wrote else answer(write(golden_file(store, task_of(store, symbol))))

    with nothing_left():
        (log,) = run_eval(
            feature_deletion(str(store.root)),
            model=get_model("mockllm/model", memoize=False, custom_outputs=play),
            log_dir=str(tmp_path),
            display="none",
        )
    assert [score_of(sample).value for sample in log.samples] == [1.0, 1.0]
    with pytest.raises(PrerequisiteError, match="no-such-task"):
        evaluate(store, tmp_path, [], sample_id="no-such-task")


BY_NAME = """
import sys
from inspect_ai import eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model
output = ModelOutput.from_content("mockllm", "I do not know.")
output.usage = ModelUsage()
(log,) = eval(
    "composer_replication/feature_deletion",
    task_args={"store": sys.argv[1]},
    sample_id=sys.argv[2],
    model=get_model("mockllm/model", custom_outputs=[output]),
    log_dir=sys.argv[3],
    display="none",
)
print(log.status, [score.value for score in log.samples[0].scores.values()])
"""


def test_inspect_finds_the_task_by_its_name(store: TaskStore, tmp_path: Path) -> None:
    """In a process that has imported nothing of ours: the name is an entry point of the installed package."""
    words = [str(store.root), task_of(store, "sign").task_id, str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", BY_NAME, *words], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "success [0.0]", done.stderr
