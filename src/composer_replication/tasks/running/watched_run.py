"""Grade untrusted code: what a watched run says, read by the parent outside.

The code under test shares an interpreter with its tests, so a report from inside is evidence and
no proof. ``running/watched_runner.py`` sends each observation when it is made, as a line that is
signed together with all lines before it; here the lines are checked, put in order, and made into
outcomes. What does not fit is an error of the whole run, what is merely odd is a flag: whether
honest code raises it as well is for the caller to know (see ``rollouts.forgery_checks``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from composer_replication.records import ExecResult, Limits, Outcome
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.test_run import (
    TestReport,
    Trial,
    broken_off,
    compare_ids,
    last_words,
    program_text,
    run_inside,
)

_WORST = (Outcome.PASSED, Outcome.SKIPPED, Outcome.FAILED, Outcome.ERROR)


def run_watched(
    tree: Path,
    environment: Environment,
    trial: Trial,
    *,
    backend: str | None = None,
    limits: Limits | None = None,
) -> TestReport:
    """Run the tests of a trial over a private copy of a tree that holds untrusted code, and not over the trial's files.

    Args:
        tree: the caller's private copy; its tests may write into it.
        environment: where the test runner lives.
        trial: exactly its ``node_ids`` must be collected and run, in its ``seconds`` of processor time.
        backend: sandbox backend by name or dotted path; None for the best of this machine.
        limits: of the sandbox.
    """
    key = secrets.token_hex(32)
    result = run_inside(
        tree,
        environment,
        [_program()],
        bytes.fromhex(key) + json.dumps(trial.request(tree, "")).encode(),
        backend=backend,
        limits=limits or Limits(),
        timeout_seconds=trial.wall_seconds,
        is_ours=False,
    )
    return judge_watched(result, key, trial)


@cache
def _program() -> str:
    """The runner in a namespace of its own: no module has it, and its built-in functions are copies."""
    text = program_text("running.pytest_runner", "running.watched_runner") + "\n\nwatched_main()\n"
    own = "{'__name__': 'watched_runner', '__builtins__': dict(vars(__import__('builtins')))}"
    return f"exec(compile({text!r}, '<runner>', 'exec'), {own})"


def judge_watched(result: ExecResult, key: str, trial: Trial) -> TestReport:
    """Turn what came out of the sandbox into a report; anything out of order is an error."""
    node_ids = trial.node_ids or ()
    problem = broken_off(result, trial.seconds)
    if not problem:
        try:
            report = _story_of(_read_transcript(result, key), result.seconds)
            problem = compare_ids(node_ids, report.collected, report.outcomes)
            if not problem:
                return report
        except ValueError as error:
            problem = str(error)
    failed = dict.fromkeys(node_ids, Outcome.FAILED)
    return TestReport(failed, (), f"{problem}{last_words(result)}", result.seconds)


def _read_transcript(result: ExecResult, key: str) -> list[list[str]]:
    """The records in order; ValueError where one is not signed with all before it, or they do not end as they must.

    A line is ``MAC HEX.HEX…``: blake2s of 16 bytes, keyed with the 32 bytes of ``key``, over the
    second words of this line and all before it, each with a line feed; each HEX is one UTF-8 text.
    """
    state = hashlib.blake2s(key=bytes.fromhex(key), digest_size=16)
    records: list[list[str]] = []
    *lines, rest = result.stdout.split("\n")
    if rest or result.truncated:
        raise ValueError("the records are cut off")
    for line in lines:
        mac, _, body = line.partition(" ")
        state.update(body.encode("utf-8", "replace") + b"\n")
        if not hmac.compare_digest(mac.encode("utf-8", "replace"), state.copy().hexdigest().encode()):
            raise ValueError("something else than the test runner wrote records")
        records.append([bytes.fromhex(each).decode("utf-8", "surrogatepass") for each in body.split(".")])
    if not records or records[-1][0] != "end":
        raise ValueError("the run ended without its closing record")
    if result.exit_code != 0:
        raise ValueError("the run was ended after its closing record")
    return records


def _story_of(records: Sequence[list[str]], seconds: float) -> TestReport:
    """What ran and what came of it, if the records are as ``watched_runner.make_recorder`` writes them in an orderly run.

    ValueError: they are not.
    """
    collected: list[str] = []
    kinds: dict[str, str] = {}
    outcomes: dict[str, Outcome] = {}
    took: dict[str, float] = {}
    flags: set[str] = set()
    phases: list[Outcome] = []
    calls: list[str] = []
    current = ""
    *told, end = records
    for record in told:
        match record:
            case ["flag", text]:
                flags.add(text)
            case ["collected", letters, *ids] if not collected and len({*ids}) == len(ids) == len(letters):
                collected, kinds = ids, dict(zip(ids, letters, strict=True))
            case ["start", node_id, *changed] if [node_id] == collected[len(outcomes) :][:1] and not current:
                flags.update(changed)
                current, phases, calls = node_id, [], []
            case ["call", node_id, how] if node_id == current:
                calls.append(how)
            case ["report", node_id, said] if node_id == current:
                phases += [Outcome(said)] if said else []  # nothing for a setup or teardown that went well
            case ["finish", node_id, own_seconds] if node_id == current:
                outcomes[node_id] = max(phases, key=_WORST.index, default=Outcome.MISSING)
                took[node_id], current = float(own_seconds), ""
                has_passed = outcomes[node_id] is Outcome.PASSED
                if has_passed and kinds[node_id] == "f" and calls != ["returned"]:
                    flags.add("a test was reported as passed that did not return")
            case _:
                raise ValueError(f"a record is out of order: {' '.join(record)[:200]}")
    if current:
        raise ValueError(f"{current} has no end")
    _, code, cpu_seconds, *changed = end
    flags.update(changed)
    return TestReport(
        outcomes, tuple(collected), "", seconds, cpu_seconds=float(cpu_seconds),
        flags=frozenset(flags), test_seconds=took, pytest_exit_code=int(code),
    )  # fmt: skip
