"""The solver that cheats: it answers every call that a visible test makes from a table.

It passes most visible tests and has understood nothing. A task whose hidden tests and twin
it passes as well has no truth stronger than its reward, so it serves as a gate, never as a
candidate. Not in the table: results without a pickle, and changes that a function makes to
its arguments.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.intake.source_folders import below_root, recorded_folders
from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.twin.twin_run import Job, RecordedCall, Subject, helper_sources, play_apart

HELPER = "composer_lookup_table"
"""The module that holds the table; it lies where the tree's packages are imported from."""

_HELPER = """
import base64, gc, inspect, json, pickle, sys, types, zlib

_DATA = json.loads(zlib.decompress(base64.b64decode({data!r})))
for _name, _source in _DATA["sources"]:
    if _name not in sys.modules:
        sys.modules[_name] = types.ModuleType(_name)
        exec(compile(_source, _name, "exec"), sys.modules[_name].__dict__)
_encoding = sys.modules["canonical_encoding"]
sys.modules["call_pickle"].load_cloudpickle(_DATA["cloudpickle"])
_table = None


def _key(values):
    return _encoding.digest(_encoding.encode(values, is_result=False, with_code=True))


def _load(code):
    function = next(f for f in gc.get_referrers(code) if isinstance(f, types.FunctionType))
    signature = inspect.signature(function, follow_wrapped=False)
    table = {{}}
    for call, answer in _DATA["calls"]:
        try:
            args, kwargs = pickle.loads(base64.b64decode(call))
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            table[_key(dict(bound.arguments))] = base64.b64decode(answer)
        except Exception:
            continue
    return table


def answer(values):
    global _table
    if _table is None:
        _table = _load(sys._getframe(1).f_code)
    found = _table.get(_key(values))
    if found is None:
        return None
    how, value = pickle.loads(found)
    if how == "raise":
        raise value
    return iter(value) if how == "iterator" else value
"""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """Pickled arguments of one call, and the pickled answer of the golden code. Secret."""

    blob: bytes
    answer: bytes


def answered_calls(
    files: Mapping[str, bytes],
    environment: Environment,
    functions: Sequence[tuple[BodyCut, Sequence[RecordedCall]]],
    backend: str | None,
) -> tuple[dict[str, list[bytes | None]], dict[str, str]]:
    """The pickled answer of the golden code to each recorded call, by pin; None where there is none.

    Returns:
        The answers, and for each function whose replay took its sandbox down what went wrong: of its
        other calls nothing is known. One that cannot be imported alone answers nothing, and is not among these.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    reports = play_apart(
        files,
        environment,
        [Subject(cut.path, cut.symbol, tuple(call.blob for call in calls)) for cut, calls in functions],
        [Job(number, "answers") for number in range(len(functions))],
        backend=backend,
    )
    answers: dict[str, list[bytes | None]] = {}
    problems: dict[str, str] = {}
    for (cut, calls), report in zip(functions, reports, strict=True):
        answers[cut.pin] = [report.answers.get(index) for index in range(len(calls))]
        if report.is_unknown:
            problems[cut.pin] = report.error
    return answers, problems


def helper_file(
    files: Mapping[str, bytes], path: str, name: str, calls: Sequence[AnsweredCall]
) -> tuple[str, bytes]:
    """The module that answers for one function: where the file at ``path`` can import it, and its text."""
    data = {
        "sources": helper_sources(("canonical_encoding", "call_pickle")),
        "cloudpickle": dict(helper_sources(("cloudpickle",)))["cloudpickle"],
        "calls": [
            [base64.b64encode(call.blob).decode(), base64.b64encode(call.answer).decode()] for call in calls
        ],
    }
    packed = base64.b64encode(zlib.compress(json.dumps(data).encode(), 6)).decode()
    root = path.removesuffix(below_root(path, recorded_folders(files)))
    return f"{root}{name}.py", _HELPER.format(data=packed).encode()
