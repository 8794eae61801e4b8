"""Is an argument of the trainer's constructor of the kind that it has to be?

A value of another kind would end in an attribute that is missing, far from the call that gave it. Only what is sure to fail
is refused, and what a channel reads only where the channel is on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import ValidationError

from composer_replication.channel_tables import Section
from composer_replication.trainer.policy_options import PolicyOptions
from composer_replication.trainer.setting_errors import TrainerSettingError

Table = TypeVar("Table", bound=Section)


def refuse_bad_weight(name: str, weight: Any) -> None:
    """A channel's weight is a number; True would silently be 1.

    Raises:
        TrainerSettingError: CR0711.
    """
    try:
        is_good = not isinstance(weight, bool) and math.isfinite(weight) and weight >= 0.0
    except (TypeError, ValueError, OverflowError, RuntimeError):  # no number, or a tensor of several
        is_good = False
    if not is_good:
        raise TrainerSettingError(
            "CR0711",
            f"{name} is {weight!r} and must be a finite number of at least 0.",
            where=f"trainer.{name}",
            fix=f"set trainer.{name} to 0 or above.",
        )


def refuse_other_kinds(policy_options: Any, run_folder: Any) -> None:
    """What the trainer reads whichever channels are on.

    Raises:
        TrainerSettingError: options that are none, a folder's path in the place of a ``RunFolder`` (CR0722).
    """
    if not isinstance(policy_options, PolicyOptions):
        raise _other_kind("policy_options", policy_options, "pass PolicyOptions(...), or leave it out.")
    if isinstance(run_folder, str | os.PathLike):
        raise _other_kind("run_folder", run_folder, "pass RunFolder(Path(...)), or None for no files.")


def refuse_silent_source(source: Any) -> None:
    """A hint source has a method ``hinted_turns``.

    Raises:
        TrainerSettingError: CR0722.
    """
    if source is not None and not callable(getattr(source, "hinted_turns", None)):
        raise _other_kind("hint_source", source, "pass an object with a method hinted_turns(rollouts).")


def refuse_other_records(name: str, records: Any, kind: type[Any]) -> None:
    """Records are a list of the dataclass ``kind``, or of what has all its fields.

    Raises:
        TrainerSettingError: CR0722.
    """
    if records is None:
        return
    fix = f"pass a list of {kind.__name__}(...)."
    if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
        raise _other_kind(name, records, fix)
    for idx, record in enumerate(records):
        if not has_fields(record, kind):
            raise _other_kind(f"{name}[{idx}]", record, fix)


def has_fields(record: Any, kind: type[Any]) -> bool:
    """Whether a value has every field of the dataclass ``kind``."""
    return all(hasattr(record, field.name) for field in fields(kind))


def table_of(kind: type[Table], given: Any, name: str) -> Table:
    """The table of a recipe that an argument is: as it is, made of a mapping, or its defaults for None.

    Raises:
        TrainerSettingError: neither (CR0722), or a key or value that the table does not take (CR0204).
    """
    if isinstance(given, kind):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise _other_kind(name, given, f"pass {kind.__name__}(...), or a dict of its keys.")
    try:
        return kind.model_validate(dict(given or {}))
    except ValidationError as error:
        raise TrainerSettingError(
            "CR0204",
            _first_problem(error, name),
            where=f"ComposerReplicationTrainer({name}=)",
            fix="see docs/recipe-keys.md for every key.",
        ) from error


def _first_problem(error: ValidationError, name: str) -> str:
    """The sentence about the first unknown key, or else the first bad value."""
    problems = error.errors(include_url=False)
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    key = ".".join([name, *(str(part) for part in problem["loc"])])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}."
    return f"{key}: {problem['msg'].removeprefix('Value error, ').rstrip('.')}."


def _other_kind(name: str, given: Any, fix: str) -> TrainerSettingError:
    return TrainerSettingError(
        "CR0722",
        f"{name} cannot be a {type(given).__name__}.",
        where=f"ComposerReplicationTrainer({name.partition('[')[0]}=)",
        fix=fix,
    )
