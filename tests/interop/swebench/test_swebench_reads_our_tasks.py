"""An exported task set in the hands of SWE-bench's own tools: its loader, its gold predictions, its grading.

The library's containers are the one part that has no place here: tests are run in the exported tree, and what
pytest prints goes through the library's log parser and report, as its harness does with a container's log.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from swebench import types as swebench_types
from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT
from swebench.harness.grading import get_eval_report
from swebench.harness.utils import get_predictions_from_file, load_swebench_dataset

from composer_replication.cli.main import main
from composer_replication.tasks.store import TaskStore

Instance = dict[str, Any]


@pytest.fixture(scope="session")
def task_set(store: TaskStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole store as JSON lines, patches and hidden tests among them."""
    path = tmp_path_factory.mktemp("task-set") / "tasks.jsonl"
    assert (
        main(["tasks", "export", str(store.root), "--format", "swebench", "--golden", "--out", str(path)])
        == 0
    )
    return path


def _tree(store: TaskStore, instance: Instance, folder: Path, patches: tuple[str, ...]) -> Path:
    """The exported tree of a task, as a solver's container would have it, with these columns applied by git."""
    assert main(["tasks", "export", str(store.root), instance["instance_id"], "--out", str(folder)]) == 0
    for column in filter(instance.get, patches):  # a task without hidden test functions has no test_patch
        subprocess.run(["git", "apply", "-"], cwd=folder, input=instance[column], text=True, check=True)
    return folder


def _log_of_tests(tree: Path, log: Path) -> Path:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    log.write_text(f"{START_TEST_OUTPUT}\n{ran.stdout}\n{END_TEST_OUTPUT}\n")
    return log


def _report(instance: Instance, prediction: dict[str, str], log: Path) -> dict[str, Any]:
    """What SWE-bench's harness says of one prediction by the log of its tests."""
    spec = swebench_types.TestSpec(
        instance_id=instance["instance_id"],
        image="",
        eval_script_list=[],
        repo=instance["repo"],
        version=instance["version"],
        FAIL_TO_PASS=json.loads(instance["FAIL_TO_PASS"]),
        PASS_TO_PASS=json.loads(instance["PASS_TO_PASS"]),
        log_parser="parse_log_pytest_v2",  # the first one cuts an id at its first blank
        eval_type="pass_and_fail",
    )
    report: dict[str, Any] = get_eval_report(spec, prediction, str(log), include_tests_status=True)
    return dict(report[instance["instance_id"]])


def test_its_loader_reads_every_task_with_every_column(store: TaskStore, task_set: Path) -> None:
    instances = load_swebench_dataset(str(task_set))
    assert sorted(one["instance_id"] for one in instances) == sorted(task.task_id for task in store.tasks())
    for instance in instances:
        for column, kind_of_value in swebench_types.SWEbenchInstance.__annotations__.items():
            assert isinstance(dict(instance)[column], kind_of_value), column


def test_the_public_rows_load_and_hold_no_patch(store: TaskStore, tmp_path: Path) -> None:
    rows = tmp_path / "tasks.jsonl"
    assert main(["tasks", "export", str(store.root), "--format", "swebench", "--out", str(rows)]) == 0
    instances = load_swebench_dataset(str(rows))
    assert len(instances) == len(store.tasks())
    assert not any(dict(one).get("patch") or one["test_patch"] for one in instances)


def test_its_gold_predictions_are_resolved_and_an_empty_answer_is_not(
    store: TaskStore, task_set: Path, tmp_path: Path
) -> None:
    instances = {one["instance_id"]: dict(one) for one in load_swebench_dataset(str(task_set))}
    gold = get_predictions_from_file("gold", str(task_set), "test")
    assert sorted(one["instance_id"] for one in gold) == sorted(instances)
    for number, prediction in enumerate(gold):
        instance = instances[prediction["instance_id"]]
        assert prediction["model_patch"] == instance["patch"]

        solved = _tree(store, instance, tmp_path / f"solved-{number}", ("patch", "test_patch"))
        report = _report(instance, prediction, _log_of_tests(solved, tmp_path / f"solved-{number}.log"))
        assert report["resolved"] is True, report

        untouched = _tree(store, instance, tmp_path / f"untouched-{number}", ("test_patch",))
        report = _report(instance, prediction, _log_of_tests(untouched, tmp_path / f"untouched-{number}.log"))
        assert report["patch_successfully_applied"] is True  # the library's word for: the log could be read
        assert report["resolved"] is False
        assert report["tests_status"]["FAIL_TO_PASS"]["failure"]
        assert report["tests_status"]["PASS_TO_PASS"]["failure"] == []
