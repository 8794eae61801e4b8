"""A real server process, the library's own client over WebSocket, real sandboxes."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openenv.core.generic_client import GenericEnvClient
from served_process import HANGING_SECONDS, PATIENCE_SECONDS, Server
from tiny_store import PLANT, golden_file, write
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from composer_replication.records import Score, Task
from composer_replication.rollouts.environment.openenv_client import ToolAction
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore

NUMBERS = "tinymath/numbers.py"
CLIENT_THAT_HANGS = """
import sys
from composer_replication.rollouts.environment.openenv_client import FeatureDeletionClient
from composer_replication.rollouts.environment.openenv_client import ToolAction
client = FeatureDeletionClient(sys.argv[1]).sync()
client.reset(seed=0)
print("begun", flush=True)
client.step(ToolAction(name="bash", arguments={"command": "sleep 300", "timeout_seconds": 5}))
"""


@pytest.fixture(scope="module")
def shared(serve: Callable[..., Server]) -> Server:
    return serve("--max-sessions", "3")


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The server that most tests share; each leaves it empty."""
    yield shared
    wait_until(lambda: (shared.sandboxes(), shared.descendants()) == ([], []))


@pytest.fixture
def grader(store: TaskStore) -> Iterator[Grader]:
    grader = Grader(store)
    yield grader
    grader.close()


def act(name: str, **arguments: Any) -> ToolAction:
    return ToolAction(name=name, arguments=arguments)


def wait_until(holds: Callable[[], bool]) -> None:
    last = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < last, "it never came to be"
        time.sleep(0.05)


def ask(socket: ClientConnection, frame: str | bytes | dict[str, Any]) -> dict[str, Any]:
    socket.send(json.dumps(frame) if isinstance(frame, dict) else frame)
    answer: dict[str, Any] = json.loads(socket.recv(timeout=PATIENCE_SECONDS))
    return answer


def socket_url(server: Server) -> str:
    return server.url.replace("http", "ws") + "/ws"


def fetch(server: Server, method: str, path: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(
        urllib.parse.urlsplit(server.url).netloc, timeout=PATIENCE_SECONDS
    )
    connection.request(method, path, body="{}" if method == "POST" else None, headers=headers)
    answer = connection.getresponse()
    status, body = answer.status, answer.read()
    connection.close()
    return status, json.loads(body or "null")


def solutions(store: TaskStore, task: Task) -> dict[str, str]:
    """The file as it was, one in which the function is right for some calls only, and the broken one."""
    golden = store.files(task, "golden")[NUMBERS].decode()
    broken = store.files(task, "rollout")[NUMBERS].decode()
    some = broken[: task.hole.start] + "\n    return 1" + broken[task.hole.end :]
    return {"whole": golden, "some": some, "none": broken}


def graded(grader: Grader, task: Task, text: str) -> Score:
    files = grader.store.files(task, "rollout")
    score = grader.grade_tree(task, {**files, NUMBERS: text.encode()})
    assert score is not None
    return score


def test_rewards_are_the_grader_s_and_secrets_stay(server: Server, store: TaskStore, grader: Grader) -> None:
    seen, rewards, expected = [], {}, {}
    with server.client() as client:
        for task in store.tasks():
            for name, text in solutions(store, task).items():
                first = client.reset(task_id=task.task_id, episode_id=name)
                assert (first.reward, first.done) == (None, False)
                step = client.step(act("write_file", path=NUMBERS, content=text))
                assert (step.reward, step.done, step.observation.is_error) == (0.0, False, False)
                wrong = client.step(ToolAction(name="bash", arguments='{"command": '))
                assert wrong.observation.is_error and not wrong.done
                assert (client.state().episode_id, client.state().step_count) == (name, 2)
                last = client.step(act("submit"))
                assert last.done and last.observation.stop_reason == "submitted"
                assert last.observation.infrastructure_failure == ""
                state = client.state()
                assert (state.step_count, state.num_invalid) == (3, 1)
                assert state.is_over and not server.sandboxes()  # whoever lingers holds no sandbox
                rewards[task.symbol, name] = last.reward
                expected[task.symbol, name] = graded(grader, task, text).pass_share
                seen += [first.observation.text, wrong.observation.text, last.observation.text]
        with pytest.raises(RuntimeError, match="CR0800"):
            client.step(act("submit"))
    assert rewards == expected
    assert {rewards[symbol, name] for symbol, name in rewards if name == "whole"} == {1.0}
    assert {rewards[symbol, name] for symbol, name in rewards if name == "none"} == {0.0}
    assert 0.0 < rewards["sign", "some"] < 1.0
    for task in store.tasks():
        for secret in (store.golden_body(task).strip(), *task.tests.hidden):
            assert secret not in "\n".join(seen)
    assert any(task.tests.hidden for task in store.tasks())


def test_who_cheats_is_not_paid_and_its_client_is_told(
    serve: Callable[..., Server], store: TaskStore, clamp: Task
) -> None:
    server = serve()
    honest = write(golden_file(store, clamp))
    with server.client() as client:
        for moves in ([PLANT, honest], [honest]):
            client.reset(task_id=clamp.task_id)
            steps = [client.step(act(name, **arguments)) for name, arguments in moves]
            last = client.step(act("submit"))
            is_masked = len(moves) == 2
            assert (last.reward, last.done) == (0.0 if is_masked else 1.0, True)
            ended = (last.observation.stop_reason, last.observation.infrastructure_failure)
            assert ended == ("submitted", "")
            assert all(not step.observation.metadata for step in steps)
            told = last.observation.metadata["monitor"]
            assert told["masks_reward"] == bool(told["findings"]) == is_masked
            secrets = (str(store.root), store.golden_body(clamp).strip(), *clamp.tests.hidden)
            assert not [secret for secret in secrets if secret in json.dumps(told)]
    _, result = server.end()
    assert (result["flagged"], result["masked"]) == (1, 1)


def test_tasks_are_drawn_by_seed_and_refused_by_name(server: Server, store: TaskStore) -> None:
    with server.client() as client:
        drawn = []
        for seed in (0, 1, 2, 3, 4, 5, 0):
            client.reset(seed=seed)
            drawn.append(client.state().task_id)
        assert drawn[0] == drawn[-1] and set(drawn) == set(store.task_ids())
        for arguments, code in (
            ({"task_id": "gone"}, "CR0412"),
            ({"task": "gone"}, "CR0722"),
            ({"seed": "one"}, "CR0722"),
            ({"task_id": 7}, "CR0722"),
        ):
            with pytest.raises(RuntimeError, match=code) as refused:
                client.reset(**arguments)
            assert str(store.root) not in str(refused.value)
        client.reset(seed=0)
        assert client.state().task_id == drawn[0]


def test_bad_messages_are_answered_and_the_session_lives(server: Server) -> None:
    call = {"type": "step", "data": {"name": "bash", "arguments": {"command": "echo here"}}}
    with connect(socket_url(server), open_timeout=PATIENCE_SECONDS) as socket:
        for frame in (
            "no json",
            '{"type": "step"}',
            '{"type": "step", "data": {"name": 3}}',
            '{"type": "x"}',
        ):
            assert ask(socket, frame)["type"] == "error"
        assert ask(socket, call)["data"]["message"].startswith("CR0800")  # nothing was begun
        assert ask(socket, {"type": "reset", "data": {"seed": 0}})["type"] == "observation"
        wrong = {"type": "step", "data": {"name": "bash", "arguments": "]"}}
        assert ask(socket, wrong)["data"]["observation"]["is_error"]
        answer = ask(socket, call)["data"]
        assert answer["observation"]["text"].startswith("here")
        assert ask(socket, {"type": "state"})["data"]["num_invalid"] == 1


def test_a_full_server_refuses_and_a_freed_place_is_taken(server: Server) -> None:
    clients = [server.client() for _ in range(3)]
    for client in clients:
        client.connect()
        assert not client.reset(seed=1).done
    assert len(server.sandboxes()) == 3
    late = GenericEnvClient(server.url).sync()  # the library's plain client hears it, too
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
        late.reset(seed=1)
    late.close()
    clients[0].close()
    wait_until(lambda: len(server.sandboxes()) == 2)
    with GenericEnvClient(server.url).sync() as next_one:
        assert next_one.reset(seed=1).observation["text"]
        assert next_one.step({"name": "submit"}).done
    for client in clients[1:]:
        client.close()


NUM_SESSIONS, NUM_ATTEMPTS = 32, 4


def test_32_sessions_of_10_000_steps_are_paid_alone_and_leave_nothing(
    serve: Callable[..., Server], store: TaskStore, clamp: Task
) -> None:
    server, texts = serve("--max-sessions", str(NUM_SESSIONS)), solutions(store, clamp)

    def play(number: int) -> list[float]:
        """Attempts of 80 steps; every other session writes the right file."""
        name, rewards = ("whole", "none")[number % 2], []
        with server.client() as client:
            for _ in range(NUM_ATTEMPTS):
                client.reset(task_id=clamp.task_id)
                for turn in range(78):
                    step = client.step(act("bash", command=f"echo {number} >> mine; tail -n 1 mine"))
                    assert step.observation.text.split()[0] == str(number), (turn, step.observation.text)
                client.step(act("write_file", path=NUMBERS, content=texts[name]))
                rewards.append(client.step(act("submit")).reward)
        return rewards

    with concurrent.futures.ThreadPoolExecutor(NUM_SESSIONS) as threads:
        played = list(threads.map(play, range(NUM_SESSIONS)))
    assert played == [[1.0] * NUM_ATTEMPTS, [0.0] * NUM_ATTEMPTS] * (NUM_SESSIONS // 2)
    wait_until(lambda: (server.sandboxes(), server.descendants()) == ([], []))
    assert server.end()[1]["attempts"] == NUM_SESSIONS * NUM_ATTEMPTS


def test_a_killed_client_leaves_nothing_after_its_call_while_others_work(server: Server) -> None:
    program = [sys.executable, "-c", CLIENT_THAT_HANGS, server.url]
    with server.client() as other:
        other.reset(seed=1)
        assert other.step(act("bash", command="echo mine")).observation.text.startswith("mine")
        own = set(server.descendants())  # a warm jail lives as long as its session
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None and killed.stdout.readline() == "begun\n"
            wait_until(lambda: set(server.descendants()) > own)
            assert other.step(act("bash", command="echo also")).observation.text.startswith("also")
            os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda: len(server.sandboxes()) == 1 and set(server.descendants()) == own)
        assert other.step(act("bash", command="echo still")).observation.text.startswith("still")


def test_what_is_not_a_session_is_refused(server: Server) -> None:
    for path in ("/reset", "/step", "/web/reset", "/web/step"):
        assert fetch(server, "POST", path)[0] == 404
    assert fetch(server, "GET", "/health") == (200, {"status": "healthy"})
    status, schema = fetch(server, "GET", "/schema")
    assert status == 200 and set(schema["action"]["properties"]) >= {"name", "arguments"}
    assert set(schema["observation"]["properties"]) >= {"reward", "infrastructure_failure"}
    with pytest.raises(InvalidStatus, match="403"):
        connect(socket_url(server), origin="http://a.page.example", open_timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]
    for method, path in (("POST", "/mcp"), ("GET", "/health")):
        assert fetch(server, method, path)[0] == 200
        assert fetch(server, method, path, Origin="http://a.page.example") == (403, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_takes_all_away(serve: Callable[..., Server], number: signal.Signals) -> None:
    server = serve()
    slow = act("bash", command="sleep 300", timeout_seconds=HANGING_SECONDS)
    with concurrent.futures.ThreadPoolExecutor() as threads, server.client() as idle, server.client() as busy:
        idle.reset(seed=1)
        busy.reset(seed=1)
        waiting = threads.submit(busy.step, slow)
        wait_until(lambda: len(server.descendants()) > 0)
        code, result = server.end(number)
        with pytest.raises(Exception, match=r".*"):
            waiting.result(PATIENCE_SECONDS)
    assert code == (0 if number == signal.SIGTERM else 130)
    assert result == result | {"signal": number.name, "attempts": 0, "tasks": 2}


def test_told_to_end_it_waits_for_no_grading(
    serve: Callable[..., Server], store: TaskStore, clamp: Task
) -> None:
    server = serve()
    hanging = f"import time\ntime.sleep({HANGING_SECONDS})\n" + solutions(store, clamp)["whole"]
    with concurrent.futures.ThreadPoolExecutor() as threads, server.client() as client:
        client.reset(task_id=clamp.task_id)
        client.step(act("write_file", path=NUMBERS, content=hanging))
        client.step(act("bash", command="true"))
        own = set(server.descendants())
        waiting = threads.submit(client.step, act("submit"))
        wait_until(lambda: set(server.descendants()) > own)
        code, result = server.end()  # it gives up sooner than the grading would be through
        with pytest.raises(Exception, match=r".*"):
            waiting.result(PATIENCE_SECONDS)
    assert (code, result["attempts"]) == (0, 0)
