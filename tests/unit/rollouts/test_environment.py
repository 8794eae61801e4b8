"""Attempts in real sandboxes, graded outside of them; what is left when they end, however they end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from episode_parts import ask, attempt_folders, paid

from composer_replication.config import AgentRewardSection
from composer_replication.errors import InputError, SandboxFailure, UsageError
from composer_replication.records import Task, ToolCall
from composer_replication.rollouts.environment import feature_deletion_env as attempt_module
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.trl_face import TrlFeatureDeletion, environment_factory
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore

NUMBERS = "tinymath/numbers.py"


@pytest.fixture
def env(grader: Grader) -> Iterator[FeatureDeletionEnv]:
    before = attempt_folders()
    with FeatureDeletionEnv(grader) as made:
        yield made
    assert attempt_folders() == before  # nothing is left of any test


def solve(env: FeatureDeletionEnv, store: TaskStore, task: Task) -> None:
    golden = store.files(task, "golden")[NUMBERS].decode()
    assert not ask(env, "write_file", path=NUMBERS, content=golden).is_error


def test_a_policy_sees_neither_the_code_nor_a_hidden_test(
    env: FeatureDeletionEnv, store: TaskStore, clamp: Task
) -> None:
    message = env.reset(clamp.task_id)
    shown = ask(env, "bash", command="cat $(git ls-files); git log -p | cat; env").text + message
    for hidden in clamp.tests.hidden:
        name = hidden.rpartition("::")[2].partition("[")[0]
        assert f"def {name}(" not in shown
    assert "return min(x, high)" not in shown
    assert str(store.root) not in shown


def test_edits_of_tests_win_nothing(env: FeatureDeletionEnv, clamp: Task) -> None:
    env.reset(clamp.task_id)
    test_file = clamp.tests.visible[0].partition("::")[0]
    names = [test.rpartition("::")[2] for test in clamp.tests.visible]
    fake = "".join(f"def {name}():\n    pass\n\n" for name in names)
    ask(env, "write_file", path=test_file, content=fake)
    ask(env, "write_file", path="conftest.py", content="import os\nos._exit(0)\n")
    ask(env, "bash", command="echo 'import os; os._exit(0)' > sitecustomize.py")
    assert (env.graded_reward, env.report) == (None, None)
    judged = env.finish()
    assert judged is not None and judged.reward == judged.graded_reward == 0.0
    assert judged.report is not None and "test-edit" in judged.report.counts
    assert (env.reward(), env.graded_reward, env.report) == (0.0, 0.0, judged.report)


def test_a_solution_that_breaks_something_else_is_paid_nothing_or_less(
    env: FeatureDeletionEnv, grader: Grader, store: TaskStore, clamp: Task
) -> None:
    for options, expected in ((AgentRewardSection(), 0.0), (AgentRewardSection(breaks="ignore"), 1.0)):
        env.options = options
        env.reset(clamp.task_id)
        solve(env, store, clamp)
        ask(env, "str_replace", path=NUMBERS, old_str="return -x if x < 0 else x", new_str="return x")
        assert paid(env) == paid(env) == expected  # asked twice, looked at once
        assert env.is_done


def test_a_tree_too_large_to_grade_is_the_policys_failure(env: FeatureDeletionEnv, clamp: Task) -> None:
    env.reset(clamp.task_id)
    ask(env, "bash", command="head -c 80000000 /dev/zero > big.txt")
    for score in (env.grade(), env.grade("hidden")):
        assert score is not None and "the tree has 80" in score.error
    assert env.candidate() == {} and paid(env) == 0.0


def test_links_lead_nowhere(env: FeatureDeletionEnv, clamp: Task) -> None:
    env.reset(clamp.task_id)
    links = f"ln -s /etc/passwd {NUMBERS}; ln -s /etc/passwd link; mkdir -p a && ln -s .. a/up"
    ask(env, "bash", command=f"rm {NUMBERS}; {links}")
    assert ask(env, "read_file", path="link").is_error
    assert ask(env, "write_file", path="a/up/../../x", content="").is_error
    score = env.grade()
    assert score is not None and score.num_passed == 0


def test_each_attempt_is_fresh_and_the_one_before_is_gone(env: FeatureDeletionEnv, clamp: Task) -> None:
    before = attempt_folders()
    for _ in range(2):
        env.reset(clamp.task_id)
        assert "mine.txt" not in ask(env, "list_files").text
        ask(env, "write_file", path="mine.txt", content="x")
        assert len(attempt_folders() - before) == 1
    env.close()
    env.close()
    assert attempt_folders() == before


def test_a_lost_environment_leaves_nothing(grader: Grader, clamp: Task) -> None:
    before = attempt_folders()
    env = FeatureDeletionEnv(grader)
    env.reset(clamp.task_id)
    assert len(attempt_folders() - before) == 1

    def fail() -> None:
        with FeatureDeletionEnv(grader) as other:
            other.reset(clamp.task_id)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(attempt_folders() - before) == 1
    del env
    gc.collect()
    assert attempt_folders() == before


def test_a_sandbox_that_does_not_open_leaves_nothing(
    env: FeatureDeletionEnv, grader: Grader, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=SandboxFailure("CR0302", "no jail."))
    monkeypatch.setattr(attempt_module, "open_sandbox", refuse)
    before = attempt_folders()
    with pytest.raises(SandboxFailure):
        env.reset(clamp.task_id)
    assert attempt_folders() == before
    with pytest.raises(UsageError, match="CR0800"):
        env.grade()
    face = TrlFeatureDeletion(env)
    assert "not counted" in face.reset(task_id=clamp.task_id)
    assert "not counted" in face.bash(command="ls")
    assert face.get_reward() is None


def test_a_sandbox_that_breaks_gives_no_grade(env: FeatureDeletionEnv, grader: Grader, clamp: Task) -> None:
    env.reset(clamp.task_id)
    env._running.toolbox.sandbox.close()
    for _ in range(2):
        with pytest.raises(SandboxFailure):
            ask(env, "bash", command="ls")
    assert env.is_done
    assert (env.grade(), env.grade("hidden"), paid(env)) == (None, None, None)

    env.reset(clamp.task_id)
    env._running.toolbox.sandbox.close()
    assert paid(env) is None


def test_before_reset_and_after_close_there_is_nothing(grader: Grader, clamp: Task) -> None:
    env = FeatureDeletionEnv(grader)
    for use in (
        env.grade,
        lambda: env.grade("hidden"),
        env.finish,
        lambda: env.call(ToolCall("submit", "")),
        lambda: env.is_done,
    ):
        with pytest.raises(UsageError, match="CR0800"):
            use()
    with pytest.raises(InputError, match="CR0412"):
        env.reset("no-such-task")


def test_the_trl_face_opens_nothing_before_reset(grader: Grader) -> None:
    before = attempt_folders()
    face = environment_factory(grader)()
    assert attempt_folders() == before
    with pytest.raises(UsageError, match="CR0412"):
        face.reset(prompt=[{"role": "user", "content": ""}])
    with pytest.raises(UsageError, match="CR0800"):
        face.get_reward()
    assert attempt_folders() == before


def test_a_judgement_reads_a_tree_once(env: FeatureDeletionEnv, store: TaskStore, clamp: Task) -> None:
    env.reset(clamp.task_id)
    for number in range(3):
        assert ask(env, "bash", command=f"echo {number}").text == str(number)
    solve(env, store, clamp)
    assert ask(env, "run_tests").exit_code == 0
    sandbox = env._running.toolbox.sandbox
    sandbox.read_file = Mock(wraps=sandbox.read_file)
    assert paid(env) == paid(env) == 1.0
    files = (entry.path for entry in sandbox.list_files() if entry.kind == "file")
    read = [call.args[0] for call in sandbox.read_file.mock_calls]
    assert sorted(read) == sorted(path for path in files if not path.startswith(".git/"))
