"""Folders of Harbor: no secret where an agent looks, and a verifier that judges by the store's tests."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from composer_replication.records import ToolCall
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.harbor_tasks import write_harbor_tasks
from composer_replication.tasks.planning.edits import write_files
from composer_replication.tasks.store import TaskStore


@pytest.fixture(scope="module")
def folder(tiny_store: TaskStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("harbor") / "tasks"
    assert write_harbor_tasks(tiny_store, out) == 4
    return out


def text_below(*paths: Path) -> str:
    files = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
    return "\n".join(file.read_text() for file in files)


def test_what_an_agent_sees_has_neither_hidden_tests_nor_golden_code(
    tiny_store: TaskStore, folder: Path
) -> None:
    assert any(task.tests.hidden for task in tiny_store.tasks())
    for task in tiny_store.tasks():
        own = folder / task.task_id
        shown = text_below(own / "instruction.md", own / "environment", own / "task.toml")
        hidden = {f"def {test.partition('[')[0].rpartition('::')[2]}(" for test in task.tests.hidden}
        assert not any(name in shown for name in hidden)
        assert all(name in text_below(own / "tests" / "tree") for name in hidden)
        golden = [line.strip() for line in tiny_store.golden_body(task).splitlines() if line.strip()]
        unique = [line for line in golden if line not in tiny_store.broken_text(task)]
        assert unique
        assert not any(line in shown or line in text_below(own / "tests") for line in unique)
        solution = own / "solution" / "tree" / task.path
        assert solution.read_bytes() == tiny_store.files(task, "golden")[task.path]
        tree = own / "environment" / "tree"
        found = {
            path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()
        }
        assert found == tiny_store.files(task, "rollout")


def test_a_folder_says_what_it_is(tiny_store: TaskStore, folder: Path) -> None:
    task = tiny_store.tasks()[0]
    own, lock = folder / task.task_id, tiny_store.environment_lock(task.environment)
    value = tomllib.loads((own / "task.toml").read_text())
    assert value["metadata"]["symbol"] == task.symbol
    assert value["environment"] == {"workdir": "/app", "network_mode": "no-network"}
    assert f"FROM python:{lock.python}-slim\n" in (own / "environment" / "Dockerfile").read_text()
    assert "ENV PYTHONPATH=/app\n" in (own / "environment" / "Dockerfile").read_text()
    pins = (own / "environment" / "requirements.txt").read_text().splitlines()
    assert pins == [f"{one.name}=={one.version} --hash=sha256:{one.sha256}" for one in lock.wheels]
    for script in ("tests/test.sh", "solution/solve.sh"):
        assert (own / script).stat().st_mode & stat.S_IXUSR


def test_the_golden_code_is_paid_and_forgeries_are_not(
    tiny_store: TaskStore, folder: Path, tmp_path: Path
) -> None:
    """The verifier with folders of ours in the place of the container's."""
    task = tiny_store.tasks()[0]
    shutil.copytree(folder / task.task_id / "tests", tmp_path / "tests")
    plan = json.loads((tmp_path / "tests" / "plan.json").read_text())
    plan |= {"workdir": str(tmp_path / "app"), "logs": str(tmp_path / "logs")}
    (tmp_path / "tests" / "plan.json").write_text(json.dumps(plan))

    def reward(changes: Mapping[str, bytes]) -> str:
        shutil.rmtree(tmp_path / "app", ignore_errors=True)
        write_files(tmp_path / "app", {**tiny_store.files(task, "rollout"), **changes})
        python = tiny_store.environment(task).python
        subprocess.run([python, "-I", "-B", tmp_path / "tests" / "verify.py"], check=True)
        return (tmp_path / "logs" / "reward.txt").read_text()

    broken = tiny_store.files(task, "rollout")[task.path]
    forged = {test.partition("::")[0]: b"def test_it():\n    pass\n" for test in task.fail_to_pass}
    hooks = b"def pytest_runtest_makereport(item, call):\n    raise SystemExit(0)\n"
    assert reward({**forged, "conftest.py": hooks, "tests/conftest.py": hooks}) == "0\n"
    assert reward({task.path: broken + b"\nimport os\nos._exit(0)\n"}) == "0\n"
    own_reward = f"open({str(tmp_path / 'logs' / 'reward.json')!r}, 'w').write('{{\"reward\": 1}}')"
    assert reward({task.path: broken + f"\n{own_reward}\n".encode()}) == "0\n"
    assert not (tmp_path / "logs" / "reward.json").exists()  # Harbor would read it first
    golden = {task.path: tiny_store.files(task, "golden")[task.path]}
    assert reward({**golden, **forged, "conftest.py": hooks}) == "1\n"


def test_a_place_of_import_that_the_deletion_emptied_stays_one(
    make_project: Callable[[Mapping[str, str]], Path], tmp_path: Path
) -> None:
    code = "def one():\n    return 11\n\n\ndef two():\n    return 22\n"
    check = "\n\ndef test_{}():\n    assert {}\n".format
    tests = "import alone\n" + check("one", "alone.one() == 11") + check("two", "alone.two() == 22")
    other = {"other.py": "VALUE = 3\n", "test_other.py": "import other\n" + check("it", "other.VALUE")}
    source = str(make_project({"src/alone.py": code, "test_alone.py": tests, **other}))
    pins = {source: ["src/alone.py::alone@module/whole"]}
    build_tasks([source], tmp_path / "store", symbols=pins, jobs=1)
    store = TaskStore.open(tmp_path / "store")
    (task,) = store.tasks()
    write_harbor_tasks(store, tmp_path / "harbor")
    plan = json.loads((tmp_path / "harbor" / task.task_id / "tests" / "plan.json").read_text())
    assert plan["request"]["import_roots"] == ["src", "."]
    with closing(Grader(store)) as grader, FeatureDeletionEnv(grader) as env:
        env.reset(task.task_id)
        env.call(ToolCall("write_file", json.dumps({"path": "src/alone.py", "content": code})))
        seen = env.call(ToolCall("run_tests", "{}"))
        assert "passed" in seen.text and not seen.is_error
