"""A single answer fills the body of one function: tasks of other sizes are left out, and that is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from composer_replication.cli.main import build_parser
from composer_replication.cli.task_division import divide_tasks, one_hole_tasks
from composer_replication.config import RunConfig, parse_config
from composer_replication.errors import InputError, NothingToDoError
from composer_replication.tasks.store import TaskStore


@pytest.fixture
def others_only(make_store: Any, sized_tasks: Any) -> TaskStore:
    return make_store(*(task for name, task in sized_tasks.items() if name != "t-function-body"))


def config_of(store: TaskStore, **tables: Any) -> RunConfig:
    return parse_config(
        {"model": {"name": "none"}, "tasks": {"store": str(store.root)}, **tables}, where="test"
    )


def call(*words: str) -> None:
    args = build_parser(words[0]).parse_args(words)
    resolve_name(args.run)(args)


def evaluate(store: TaskStore, *flags: str) -> None:
    call("eval", "no-such-model", "--tasks", str(store.root), *flags)


def test_others_are_left_out_and_counted(sized_store: TaskStore) -> None:
    said: list[str] = []
    assert [task.task_id for task in one_hole_tasks(sized_store, said.append)] == ["t-function-body"]
    divided = divide_tasks(config_of(sized_store), sized_store, Path(), said.append)
    assert [task.task_id for task in divided.train] == ["t-function-body"]
    assert said == ["tasks: 8 left out: one answer fills the body of one function only"] * 2


def test_a_store_of_functions_alone_loses_none(make_store: Any, sized_tasks: Any) -> None:
    store = make_store(sized_tasks["t-function-body"])
    said: list[str] = []
    divide_tasks(config_of(store), store, Path(), said.append)
    assert said == []


def test_both_sides_of_a_stored_split_lose_the_others(make_store: Any, sized_tasks: Any) -> None:
    from composer_replication.cli.task_division import FILE_NAME
    from composer_replication.run_folder import write_json
    from composer_replication.safety import HeldoutSplit

    body = sized_tasks["t-function-body"]
    mean = replace(
        body, task_id="t-mean", symbol="mean", functions=("tinymath/numbers.py::mean",),
        visible=("tests/test_numbers.py::test_mean",), hidden=("tests/test_numbers.py::test_mean_of_nothing",),
        without_hidden=None,
    )  # fmt: skip
    store = make_store(body, mean, sized_tasks["t-class-whole"], sized_tasks["t-module-body"])
    sides = [
        map(store.content, map(store.get, side))
        for side in (("t-function-body", "t-class-whole"), ("t-mean", "t-module-body"))
    ]
    write_json(store.root / FILE_NAME, HeldoutSplit(*sides).state_dict())
    divided = divide_tasks(config_of(store, heldout={"every": 1}, guard={}), store, Path())
    assert [task.task_id for task in divided.train] == ["t-function-body"]
    assert [task.task_id for task in divided.heldout] == ["t-mean"]
    assert divided.split is not None
    assert set(divided.split.contents) == {"t-function-body", "t-mean"}


def test_none_left_says_what_to_type(others_only: TaskStore) -> None:
    with pytest.raises(NothingToDoError) as caught:
        divide_tasks(config_of(others_only), others_only, Path())
    assert caught.value.code == "CR0604"
    assert caught.value.exit_code == 6
    assert caught.value.message.startswith("none of the 8 tasks ")
    assert "--granularity function --removal body" in caught.value.fix


def test_eval_says_how_many_are_left_out(sized_store: TaskStore, capsys: pytest.CaptureFixture[str]) -> None:
    broken = sized_store.root / "difficulty" / "x.json"
    broken.parent.mkdir()
    broken.write_text("{}")  # it stops there, after the tasks were chosen and before the model is loaded
    with pytest.raises(InputError, match="CR0411"):
        evaluate(sized_store, "--update-difficulty")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tasks: 8 left out")
    with pytest.raises(InputError, match="CR0411"):
        evaluate(sized_store, "--update-difficulty", "--quiet")
    assert capsys.readouterr().err == ""
