"""Public names are a decision: a change here is a change for everybody who imports us."""

from __future__ import annotations

import importlib

import pytest

import composer_replication

PUBLIC = {
    "__version__",
    "CollapseStopError",
    "ComposerError",
    "ComposerReplicationTrainer",
    "HeldOutGuard",
    "HeldoutSplit",
    "RunConfig",
}
ERRORS = {
    "CollapseStopError": 5,
    "ComposerError": 1,
    "CommandError": 2,
    "EmptyMaskError": 4,
    "InputError": 4,
    "MissingError": 3,
    "NothingToDoError": 6,
    "SandboxFailure": 3,
    "SandboxFileError": 4,
    "SplitOverlapError": 4,
    "UsageError": 2,
}
RECORDS = set(
    "Check Completion ExecResult FileEntry HeldoutReading Edit HintedTurn Hole Limits Outcome "
    "PreferencePair Rollout SandboxSpec Score StopReason Task TaskContent TaskOutcome TestSplit ToolCall "
    "ToolResult ToolSpec Turn".split()
)
PROTOCOLS = {"Guard", "GuardStatus", "Stateful"}


def classes_of(module_name: str) -> set[str]:
    module = importlib.import_module(module_name)
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module_name and not name.startswith("_")
    }


def test_the_package_offers_exactly_these() -> None:
    assert set(composer_replication.__all__) == PUBLIC
    assert set(dir(composer_replication)) == PUBLIC
    assert all(getattr(composer_replication, name) for name in PUBLIC)  # each is loaded when it is asked for


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        getattr(composer_replication, "NoSuchThing")  # noqa: B009  the plain form is a type error


def test_error_classes_and_exit_codes() -> None:
    errors = importlib.import_module("composer_replication.errors")
    assert {name: getattr(errors, name).exit_code for name in classes_of(errors.__name__)} == ERRORS


def test_records_and_protocols() -> None:
    assert classes_of("composer_replication.records") == RECORDS
    assert classes_of("composer_replication.interfaces") == PROTOCOLS


def test_the_two_fixed_import_paths() -> None:
    from composer_replication.safety import HeldOutGuard
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer

    assert composer_replication.HeldOutGuard is HeldOutGuard
    assert composer_replication.ComposerReplicationTrainer is ComposerReplicationTrainer
