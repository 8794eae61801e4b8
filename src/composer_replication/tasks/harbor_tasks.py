"""Tasks as folders of Harbor (https://harborframework.com), one each.

    instruction.md   what is to be done
    task.toml        limits, no network; what was deleted
    environment/     the tree that a rollout sees; a Dockerfile with the locked wheels, by their hashes
    tests/           all tests and what configures them, and who judges; Harbor uploads it when the agent is done
    solution/        the deleted code; Harbor uploads it for its oracle alone

Hidden tests and golden code stand in the last two alone.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path, PurePosixPath

import tomli_w

from composer_replication.records import Task
from composer_replication.tasks.build import Progress
from composer_replication.tasks.intake.tree_rules import (
    PYTEST_FILES,
    in_test_folder,
    is_test_path,
    recorded_folders,
)
from composer_replication.tasks.planning.edits import write_files
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RUN_FACTOR, RepositoryRecord
from composer_replication.tasks.swebench import OWN_COLUMNS, Row, iter_rows
from composer_replication.tasks.test_run import VARIABLES, Trial, program_text

WORKDIR = "/app"
_LOADED = (*PYTEST_FILES, "conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth")
"""What a test runner or interpreter loads by itself where it stands: never an agent's."""
_MADE = ("test_*.py", "*_test.py", "*.py[co]", "*.so")
_DOCKERFILE = """\
FROM python:{python}-slim
ENV PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements.txt /opt/requirements.txt
RUN python -m pip install --no-cache-dir --no-deps --only-binary=:all: --require-hashes -r /opt/requirements.txt
COPY tree {workdir}
WORKDIR {workdir}
ENV PYTHONPATH={roots}
"""
_TEST = "#!/bin/sh\nexec python -I -B /tests/verify.py\n"
_WHERE = f"The repository is in `{WORKDIR}`. `python -m pytest` runs its tests."


def write_harbor_tasks(store: TaskStore, folder: Path, *, progress: Progress | None = None) -> int:
    """Write every task of a store as a folder named by its id; how many."""
    folder.mkdir(parents=True, exist_ok=True)
    for public, _ in iter_rows(store, progress):
        task = store.get(str(public["instance_id"]))
        _write_task(store, task, public, folder / task.task_id)
    return len(store.task_ids())


def _write_task(store: TaskStore, task: Task, public: Row, folder: Path) -> None:
    record = store.record(task.task_id)
    repository = store.repository(record.repository_record)
    touched = record.changes.source_files
    original = store.repository_files(record.repository_record)
    seconds = repository.suite_seconds * RUN_FACTOR
    hidden = store.files(task, "hidden")
    kept = [path for path in hidden if path not in touched and _is_kept(repository, path)]
    write_files(folder / "environment" / "tree", store.files(task, "rollout"))
    write_files(folder / "tests" / "tree", {path: hidden[path] for path in kept})
    write_files(folder / "solution" / "tree", {path: original[path] for path in touched})
    withheld = store.secret(task.task_id).withheld
    node_ids = [*task.fail_to_pass, *sorted({*task.tests.pass_to_pass, *withheld})]
    request = Trial({}, node_ids, left_out=repository.left_out).request(folder / "environment" / "tree", "")
    request["import_roots"] = recorded_folders(original)  # the broken tree may have nothing left in one
    plan = {
        "workdir": WORKDIR,
        "logs": "/logs/verifier",
        "touched": touched,
        "left_out_names": [*_LOADED, *_MADE],
        "variables": VARIABLES,
        "seconds": seconds,
        "request": request,
    }
    lock = store.environment_lock(task.environment)
    requirements = [f"{one.name}=={one.version} --hash=sha256:{one.sha256}\n" for one in lock.wheels]
    metadata = {"repository": task.repository, **{name: public[name] for name in OWN_COLUMNS}}
    # Some have no statement, because every one would show code.
    bare = f"`{task.symbol}` was taken out of `{task.path}`. Write it anew; the tests say what it has to do."
    statement = str(public["problem_statement"] or bare).rstrip()
    texts = {
        "instruction.md": f"{statement}\n\n{_WHERE}\n",
        "task.toml": tomli_w.dumps(
            {
                "schema_version": "1.4",
                "metadata": {name: "" if value is None else value for name, value in metadata.items()},
                "environment": {"workdir": WORKDIR, "network_mode": "no-network"},
                "verifier": {"timeout_sec": seconds + 60},  # it makes the tree, too
            }
        ),
        "environment/Dockerfile": _DOCKERFILE.format(
            python=lock.python,
            workdir=WORKDIR,
            roots=":".join(str(PurePosixPath(WORKDIR, root)) for root in request["import_roots"]),
        ),
        "environment/requirements.txt": "".join(requirements),
        "tests/test.sh": _TEST,
        "tests/plan.json": json.dumps(plan, indent=1),
        "tests/verify.py": program_text("running.harbor_verifier"),
        "tests/pytest_runner.py": program_text("running.pytest_runner")
        + "\n\nrun_tests(json.loads(sys.stdin.buffer.read()), private_stdout())\n",
        "solution/solve.sh": f"#!/bin/sh\nexec cp -R /solution/tree/. {shlex.quote(WORKDIR)}\n",
    }
    write_files(folder, {path: text.encode() for path, text in texts.items()})
    for script in ("tests/test.sh", "solution/solve.sh"):
        (folder / script).chmod(0o755)


def _is_kept(repository: RepositoryRecord, path: str) -> bool:
    """Whether a file is the store's whatever an agent did: tests, their data, what is loaded where it stands."""
    pure = PurePosixPath(path)
    is_loaded = any(pure.match(pattern) for pattern in _LOADED)
    return is_loaded or is_test_path(path) or in_test_folder(pure) or repository.helps_tests(path)
