"""verifiers' own evaluation over our environment: a scripted server, real sandboxes, our reward in its traces."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from faulty_http import Fault, status
from policy_server import hold
from scripted_server import Script, in_turn, scripted
from tiny_store import (
    PLANT,
    Call,
    attempt_folders,
    break_sandboxes,
    golden_file,
    graded_by_us,
    nothing_left,
    task_of,
    wire_calls,
    with_body,
    write,
)
from verifiers.v1.cli.eval.main import main as vf_eval
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.cli.validate import run_validate
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.configs.cli.validate import ValidateConfig

from composer_replication.errors import InputError
from composer_replication.rollouts.environment.verifiers_face import NAME, load_environment
from composer_replication.tasks.store import TaskStore

SUBMIT = wire_calls(("submit", {}))


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_KEY", "none")
    monkeypatch.chdir(tmp_path)


def configured(store: TaskStore, url: str, *, symbol: str = "clamp", **changes: Any) -> EvalConfig:
    """An evaluation of one task as ``vf-eval`` reads it; ``changes`` are of the task, ``agent`` of the agent."""
    agent = changes.pop("agent", {})
    env = {"taskset": {"id": NAME, "task": {"store": str(store.root), **changes}}, "agent": agent}
    return EvalConfig.model_validate(
        {
            "env": env,
            "model": "scripted",
            "client": {"base_url": f"{url}/v1", "api_key_var": "NO_KEY"},
            "select": {"include": {"ids": [task_of(store, symbol).task_id]}},
            "push": False,
            "rich": None,
        }
    )


def trace_of(store: TaskStore, script: Script, **changes: Any) -> Any:
    with scripted(script) as server, nothing_left():
        (episode,) = asyncio.run(run_eval(configured(store, server.url, **changes)))
    (trace,) = episode.traces
    return trace


def reward_of(trace: Any) -> float:
    (reward,) = trace.rewards.values()
    assert trace.ok, trace.errors
    return float(reward.value)


def test_a_solved_task_has_the_reward_that_our_grader_gives(store: TaskStore) -> None:
    clamp = task_of(store, "clamp")
    golden = golden_file(store, clamp)
    look = ("read_file", {"path": "tinymath/numbers.py"})
    script = in_turn(wire_calls(look), wire_calls(write(golden), ("run_tests", {})), SUBMIT)
    trace = trace_of(store, script, with_hidden=True)
    assert reward_of(trace) == trace.reward == graded_by_us(store, clamp, golden) == 1.0
    read, _, tests = (message.content for message in trace.tool_messages)
    assert "def clamp" in read and "passed" in tests
    assert trace.num_turns == 3 and trace.task.data.id == trace.task.key == clamp.task_id
    assert trace.metrics["num_calls"] == 4.0 and trace.metrics["hidden_pass_share"] == 1.0
    assert "call submit" in trace.task.data.prompt and "return max(low" not in trace.task.data.prompt


def test_an_honest_failure_is_zero_and_a_third_is_a_share(store: TaskStore) -> None:
    sign = task_of(store, "sign")
    some = with_body(store, sign, "return 1")
    expected = graded_by_us(store, sign, some)
    assert 0.0 < expected < 1.0
    assert reward_of(trace_of(store, in_turn("I do not know."))) == 0.0
    assert reward_of(trace_of(store, in_turn(wire_calls(write(some)), SUBMIT), symbol="sign")) == expected


def test_who_cheats_is_not_paid_and_counted(store: TaskStore) -> None:
    clamp = task_of(store, "clamp")
    honest = [wire_calls(write(golden_file(store, clamp))), SUBMIT]
    trace = trace_of(store, in_turn(wire_calls(PLANT), *honest))
    assert (reward_of(trace), trace.metrics["is_masked"]) == (0.0, 1.0)
    assert trace.info["monitor"]["findings"] and trace.metrics["num_findings"] >= 1.0
    trace = trace_of(store, in_turn(*honest))
    assert (reward_of(trace), trace.metrics["is_masked"], trace.metrics["num_findings"]) == (1.0, 0.0, 0.0)


def test_malformed_calls_are_answered_and_counted(store: TaskStore) -> None:
    wrong: list[Call | tuple[str, str]] = [
        ("submit", "{no JSON"),
        ("no_such_tool", {}),
        ("bash", {"cmd": "ls"}),
        ("bash", "[1, 2]"),
        ("read_file", {"path": "../../etc/passwd"}),  # a call that can be made, and is refused
    ]
    golden = golden_file(store, task_of(store, "clamp"))
    script = in_turn(wire_calls(*wrong), wire_calls(write(golden)), SUBMIT)
    trace = trace_of(store, script, invalid_call_cost=0.125)
    assert reward_of(trace) == pytest.approx(1.0 - 4 * 0.125)
    answers = [message.content for message in trace.tool_messages]
    assert "unknown tool" in answers[1] and "Example:" in answers[2]
    assert "root:" not in "".join(answers)


def test_a_tool_that_is_switched_off_is_not_offered_and_not_made(store: TaskStore) -> None:
    golden = golden_file(store, task_of(store, "clamp"))
    agent = {"harness": {"id": NAME, "disabled_tools": ["write_file"]}}
    script = in_turn(wire_calls(write(golden)), SUBMIT)
    with scripted(script) as server, nothing_left():
        (episode,) = asyncio.run(run_eval(configured(store, server.url, agent=agent)))
    offered = {tool["function"]["name"] for tool in server.bodies[0][1]["tools"]}
    assert "write_file" not in offered and "bash" in offered
    assert server.bodies[1][1]["messages"][-1]["content"] == "the tool write_file is switched off."
    assert reward_of(episode.traces[0]) == 0.0


def test_limits_of_the_library_end_an_attempt_and_it_is_graded(store: TaskStore) -> None:
    golden = golden_file(store, task_of(store, "clamp"))
    script = in_turn(wire_calls(write(golden)), wire_calls(("list_files", {})))
    trace = trace_of(store, script, agent={"max_turns": 3})
    assert trace.stop_condition == "max_turns" and trace.num_turns == 3
    assert reward_of(trace) == 1.0


def test_a_time_limit_in_the_middle_of_a_command_is_graded_when_it_has_ended(store: TaskStore) -> None:
    script = in_turn(wire_calls(("bash", {"command": "sleep 3; touch late"})))
    trace = trace_of(store, script, agent={"timeout": {"rollout": 2.0}})
    assert trace.is_timeout and reward_of(trace) == 0.0


@pytest.mark.parametrize("place", ["open", "call", "grade"])
def test_a_sandbox_that_breaks_is_no_score(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    break_sandboxes(monkeypatch, place)
    unseen = with_body(store, task_of(store, "clamp"), "return 4321")  # no other test had it graded
    trace = trace_of(store, in_turn(wire_calls(write(unseen)), SUBMIT))
    assert not trace.ok and trace.last_error.type == "SandboxError"
    assert not trace.rewards


def test_a_server_that_gives_nothing_leaves_nothing_and_no_score(store: TaskStore) -> None:
    with scripted(in_turn(SUBMIT)) as server, nothing_left():
        server.faults.append(Fault("completions", status(401, "no")))
        (episode,) = asyncio.run(run_eval(configured(store, server.url)))
    (trace,) = episode.traces
    assert not trace.ok and trace.last_error.type == "ProviderError" and not trace.rewards


def test_an_evaluation_that_is_cancelled_leaves_nothing(store: TaskStore) -> None:
    async def cancelled(config: EvalConfig, before: set[Path]) -> None:
        running = asyncio.ensure_future(run_eval(config))
        while attempt_folders() == before or not server.seen:  # noqa: ASYNC110  two processes to wait for
            await asyncio.sleep(0.02)  # until a sandbox is open and the server was asked
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with scripted(in_turn(SUBMIT)) as server, nothing_left():
        server.faults.append(Fault("completions", hold))
        asyncio.run(cancelled(configured(store, server.url), attempt_folders()))


def test_another_harness_is_refused_before_anything_is_opened(store: TaskStore) -> None:
    trace = trace_of(store, in_turn(SUBMIT), agent={"harness": {"id": "null"}})
    assert not trace.ok and "CR0722" in trace.last_error.message and not trace.rewards


def test_an_unknown_task_is_data_of_its_rollout(store: TaskStore) -> None:
    async def play(env: Any, url: str) -> Any:
        task = next(iter(env.taskset)).with_data(id="no-such-task")
        client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
        async with env.serving():
            return await env.run_episode(
                task, vf.ModelContext(client=client, model="m", sampling=vf.SamplingConfig())
            )

    with scripted(in_turn(SUBMIT)) as server, nothing_left():
        episode = asyncio.run(play(load_environment(store.root), server.url))
    assert "CR0412" in episode.traces[0].last_error.message and not episode.traces[0].rewards
    with pytest.raises(InputError):
        load_environment(store.root / "nowhere")


def test_a_validation_which_has_no_harness_leaves_nothing(store: TaskStore) -> None:
    taskset = {"id": NAME, "task": {"store": str(store.root)}}
    asked = {"taskset": taskset, "runtime": {"type": "subprocess"}, "only_setup": True, "rich": False}
    with nothing_left():
        rows = asyncio.run(run_validate(ValidateConfig.model_validate(asked)))
        gc.collect()
    assert [row["valid"] for row in rows] == [True, True]


def test_the_command_evaluates_every_task_beside_each_other(store: TaskStore, tmp_path: Path) -> None:
    def play(messages: list[dict[str, Any]]) -> Any:
        symbol = "clamp" if "clamp" in messages[0]["content"] else "sign"
        if any(message["role"] == "tool" for message in messages):
            return SUBMIT
        return wire_calls(write(golden_file(store, task_of(store, symbol))))

    with scripted(play) as server, nothing_left():
        words = [NAME, "--env.taskset.task.store", str(store.root), "-m", "scripted", "-r", "2", "--no-push"]
        client = ["--client.base-url", f"{server.url}/v1", "--client.api-key-var", "NO_KEY"]
        vf_eval([*words, *client, "--no-rich", "-o", str(tmp_path / "out"), "--run.name", "both"])
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "both" / "traces.jsonl").read_text().splitlines()
    ]
    rewards = [trace["rewards"]["tests"]["score"] for line in lines for trace in line["traces"]]
    assert rewards == [1.0] * 4
