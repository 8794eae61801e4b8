"""From inside a rollout's sandbox neither the golden body nor a hidden test can be read, anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.records import SandboxSpec, Task
from composer_replication.sandbox import open_sandbox
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore

GOLDEN = "zwölf-goldene-zeichen"
HIDDEN = "geheimer-prüfwert"
PACKAGE = f'''def gilded(x):
    """Return a text."""
    marker = "{GOLDEN}"
    return marker + str(x)

def neighbour(x):
    """Return the same."""
    return x
'''
TESTS = f"""import gilded_package as g

def test_gilded_one():
    value = g.gilded(1)  # {HIDDEN}-one
    assert value.endswith("1")

# {HIDDEN}-two
def test_gilded_two():
    value = g.gilded(2)  # {HIDDEN}-two
    assert value.endswith("2")

def test_gilded_neighbour():
    assert g.neighbour(3) == 3
"""

# Reads every file that can be read below the root, /proc of other processes and the environment.
SEARCH = """
import os, sys
root, needles = sys.argv[1], [text.encode() for text in sys.argv[2:]]
found, num_read = {}, 0
for folder, folders, files in os.walk(root):
    if folder == '/proc':
        folders[:] = [name for name in folders if name.isdigit() and name != str(os.getpid())]
    if folder == '/sys':
        folders[:] = []
    for name in files:
        path = os.path.join(folder, name)
        try:
            if folder.startswith('/proc') and name not in ('cmdline', 'environ'):
                continue
            if os.path.islink(path) or not (os.path.isfile(path)) or os.path.getsize(path) > 50_000_000:
                continue
            data = open(path, 'rb').read()
        except OSError:
            continue
        num_read += 1
        for needle in needles:
            if needle in data:
                found.setdefault(needle.decode(), []).append(path)
import json
print(json.dumps([num_read, found]))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    root = tmp_path_factory.mktemp("secrets")
    files = {
        "pyproject.toml": '[project]\nname = "gilded"\nversion = "1"\n',
        "gilded_package.py": PACKAGE,
        "tests/test_gilded.py": TESTS,
    }
    write_tree(root / "project", files)
    project = str(root / "project")
    build_tasks([project], root / "store", symbols={project: ["gilded_package.py::gilded"]})
    return TaskStore.open(root / "store")


@pytest.fixture(scope="module")
def task(store: TaskStore) -> Task:
    (task,) = store.tasks()
    assert len(task.tests.hidden) == 1
    return task


def search(
    store: TaskStore, task: Task, tree: Path, view: str, needles: list[str], root: str = "/"
) -> dict[str, list[str]]:
    store.write_tree(task, tree, view=view)
    environment = store.environment(task)
    spec = SandboxSpec(tree, read_only=environment.read_only, masked=environment.masked)
    with open_sandbox(spec) as sandbox:
        done = sandbox.exec([str(environment.python), "-c", SEARCH, root, *needles], timeout_seconds=90)
    num_read, found = json.loads(done.stdout)
    assert num_read > (500 if root == "/" else 2), (
        "the search did not see the standard library, so it proves nothing"
    )
    return {needle: [path for path in paths if "/proc/" not in path] for needle, paths in found.items()}


def test_the_visible_grading_tree_is_the_rollouts_tree(store: TaskStore, task: Task) -> None:
    assert store.files(task, "visible") == store.files(task, "rollout")


def names(task: Task) -> tuple[str, str]:
    hidden = task.tests.hidden[0].rpartition("::")[2]
    return f"{HIDDEN}-{hidden.removeprefix('test_gilded_')}", f"def {hidden}("


def test_a_rollout_can_read_neither(store: TaskStore, task: Task, tmp_path: Path) -> None:
    visible = "def test_gilded_neighbour("
    needles = [GOLDEN, *names(task), store.fingerprint, visible]  # secret records are compressed
    found = search(store, task, tmp_path / "tree", "rollout", needles)
    assert {needle for needle, paths in found.items() if paths} == {visible}


def test_the_search_would_find_them(store: TaskStore, task: Task, tmp_path: Path) -> None:
    """The same search in trees that do hold them: it is able to fail."""
    found = search(store, task, tmp_path / "golden", "golden", [GOLDEN, *names(task)], str(tmp_path))
    assert all(found.get(needle) for needle in (GOLDEN, *names(task)))


def test_hidden_tests_are_only_in_the_grading_tree(store: TaskStore, task: Task, tmp_path: Path) -> None:
    found = search(store, task, tmp_path / "hidden", "hidden", [GOLDEN, *names(task)], str(tmp_path))
    assert not found.get(GOLDEN)
    assert found.get(names(task)[1])
