"""Did the tests of an answer pass, or was it made to look so?

Each grading runs the real tests in a random order with sentinels among them (``tasks.sentinels``)
and is watched (``tasks.running.watched_run``). What a task's own golden code does under the same
watch, before the first grading, says which sentinels fit it and which oddities are its habit; beyond
that nothing odd is forgiven.

A task was proven by a run of its original code in one sandbox (``TaskStore.proved_by``). On another machine, or in
another kind of jail, the same code may fail: no network of its own, another Python, another kernel. An answer that fails
there is no wrong answer, so its grading is a failure of the sandbox (``Grader.of_golden_code``).
"""

from __future__ import annotations

import math
import os
import random
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from composer_replication.records import Outcome
from composer_replication.tasks.intake.tree_rules import PYTEST_FILES, in_test_folder, is_test_path
from composer_replication.tasks.sentinels import NUM_PLAIN_FILES, Copy, Plan, make_plan, possible_copies
from composer_replication.tasks.test_run import TestReport

NUM_DOUBLES = 4
NUM_CONTRARIES = 4
"""Of each grading, each of another test function, as far as there are so many."""
MAX_SURVEYED = 16
"""Test functions of a task, drawn at random, out of which sentinels are made."""
SLOW_SECONDS = 0.25
"""A copy that takes longer with the golden code is never made again."""
TESTS_FAILED = 1
"""Exit code of pytest when some test failed: in a grading with sentinels, always."""
_CONFIG_NAMES = {*PYTEST_FILES, "conftest.py"}
START_NAMES = frozenset({"sitecustomize.py", "usercustomize.py", *_CONFIG_NAMES})
"""What a test runner or interpreter loads by itself where it stands."""

Run = Callable[..., TestReport]
"""Runs tests: ``(files, node_ids, seed, *, backwards)``, with the files that were changed among its flags (``Grader.watched``)."""
MAX_LOOKS = 3  # at golden code, with fewer and fewer copies


@dataclass(frozen=True, slots=True)
class Survey:
    """What golden code does under watch: the copies that fit; its flags; whether any order will do; whether plain sentinels
    do what they must; the processor time with all these copies.
    """

    copies: tuple[Copy, ...]
    flags: frozenset[str]
    is_shuffled: bool = True
    has_plain: bool = True
    cpu_seconds: float = field(default=math.inf, compare=False)


def survey(
    files: Mapping[str, bytes],
    node_ids: Sequence[str],
    run: Run,
    *,
    has_copies: bool = True,
    all_pass: bool = True,
) -> Survey:
    """Run golden code (in ``files``) with every sentinel that its tests' text allows, and keep what fits.

    It runs in a drawn order and in the same backwards: each copy comes before every other test once, so that what it leaves
    behind is seen. Copies of tests that fail then are left out. Where this does not help it runs in the order of the files,
    each copy before its test, then without copies, then without plain sentinels. Tests whose assertions mean nothing have no copies
    (``has_copies``). Where golden code passes all tests (``all_pass``) a failure is the fault of copies or order.
    """
    dice = random.SystemRandom()
    copies = possible_copies(files, node_ids, dice) if has_copies else []
    names = sorted({copy.node_id for copy in copies})
    drawn = {*dice.sample(names, min(MAX_SURVEYED, len(names)))}
    copies = left = [copy for copy in copies if copy.node_id in drawn]
    look = partial(_look, files, node_ids, run, all_pass=all_pass)
    bare: TestReport | None = None
    for _ in range(MAX_LOOKS):
        found, guilty = look(left, is_shuffled=True)
        if found is not None:
            return found
        if bare is None:
            bare = run(files, node_ids, None)
            if problem := _problem(bare, node_ids, all_pass=all_pass):
                raise GoldenFails(problem)
        innocent = [copy for copy in left if copy.node_id not in guilty]
        if len(innocent) in (0, len(left)):
            break
        left = innocent
    for chosen, is_shuffled, has_plain in (
        (copies, False, True), ([], True, True), ([], False, True), (copies, True, False),
    ):  # fmt: skip
        found, _ = look(chosen, is_shuffled=is_shuffled, has_plain=has_plain)
        if found is not None:
            return found
    assert bare is not None
    return Survey((), bare.flags, is_shuffled=False, has_plain=False, cpu_seconds=bare.cpu_seconds)


def _look(
    files: Mapping[str, bytes],
    node_ids: Sequence[str],
    run: Run,
    copies: Sequence[Copy],
    *,
    all_pass: bool,
    is_shuffled: bool,
    has_plain: bool = True,
) -> tuple[Survey | None, set[str]]:
    """What golden code does with these copies, None where it does not bear them; and the tests whose copies may be why."""
    dice = random.SystemRandom()
    plan = make_plan(
        files, node_ids, copies, dice, num_plain_files=len(node_ids) * has_plain, copies_first=not is_shuffled
    )
    seed = dice.getrandbits(32) if is_shuffled else None
    tree, names = {**files, **plan.files}, (*node_ids, *plan.node_ids)
    reports: list[TestReport] = []
    for backwards in (False, True) if is_shuffled else (False,):
        reports.append(run(tree, names, seed, backwards=backwards))
        if reports[-1].error:
            return None, set(node_ids)
    guilty: set[str] = set()
    for outcomes in (report.outcomes for report in reports):
        guilty |= {test for test in node_ids if all_pass and outcomes[test] is not Outcome.PASSED}
        # An error is no assertion that fails: a fixture that is shared has noticed the copy.
        erring = (copy.node_id for name, copy in plan.copies.items() if outcomes[name] is Outcome.ERROR)
        guilty |= {test for test in erring if outcomes[test] is not Outcome.ERROR}
    if guilty:
        return None, guilty
    fitting = frozenset.intersection(*(_fitting(plan, report) for report in reports))
    return Survey(
        tuple(sorted(fitting, key=lambda copy: (copy.node_id, copy.kind, copy.site))),
        frozenset[str]().union(*(report.flags | _odd_end(plan, report) for report in reports)),
        is_shuffled,
        has_plain and not any(_is_untrue(plan, report) for report in reports),
        max(report.cpu_seconds for report in reports),
    ), guilty


def _problem(report: TestReport, node_ids: Sequence[str], *, all_pass: bool) -> str:
    """Empty where all is as it must be with golden code."""
    num_failed = sum(report.outcomes[test] is not Outcome.PASSED for test in node_ids)
    if report.error:
        return f"its tests end with: {report.error}"
    return f"{num_failed} of its {len(node_ids)} tests do not pass" if num_failed and all_pass else ""


def _fitting(plan: Plan, report: TestReport) -> frozenset[Copy]:
    """The copies that behave as they must with golden code, and are quick; none of a test that it fails, as in a canary."""
    found = set()
    for sentinel, copy in plan.copies.items():
        has_passed = report.outcomes[sentinel] is Outcome.PASSED
        original = report.outcomes[copy.node_id] is Outcome.PASSED
        fits = original and has_passed == (copy.kind == "double")
        if fits and report.test_seconds.get(sentinel, 0.0) <= SLOW_SECONDS:
            found.add(copy)
    return frozenset(found)


def plan_of(files: Mapping[str, bytes], node_ids: Sequence[str], known: Survey, draw: random.Random) -> Plan:
    """The sentinels of one grading, drawn anew."""
    doubles = _one_each([copy for copy in known.copies if copy.kind == "double"], NUM_DOUBLES, draw)
    contraries = [copy for copy in known.copies if copy.kind == "contrary"]
    chosen = _one_each([copy for copy in contraries if copy.has_value], NUM_CONTRARIES // 2, draw)
    chosen *= 2 if len(chosen) == 1 else 1  # on both sides of its test
    others = [copy for copy in contraries if copy not in chosen]
    chosen += _one_each(others, NUM_CONTRARIES - len(chosen), draw) + doubles
    return make_plan(files, node_ids, chosen, draw, num_plain_files=NUM_PLAIN_FILES * known.has_plain)


def _one_each(copies: Sequence[Copy], number: int, draw: random.Random) -> list[Copy]:
    """Up to so many copies, each of another test."""
    by_test: dict[str, list[Copy]] = {}
    for copy in copies:
        by_test.setdefault(copy.node_id, []).append(copy)
    return [draw.choice(by_test[test]) for test in draw.sample(sorted(by_test), min(number, len(by_test)))]


def forgery(plan: Plan, node_ids: Collection[str], report: TestReport, known: Survey) -> str:
    """Empty, or what shows that outcomes of a run were forged.

    A run that did not come to its end is a failure anyway, and one in which no real test
    passed has won nothing: neither is looked at.
    """
    if report.error or not any(report.outcomes[test] is Outcome.PASSED for test in node_ids):
        return ""
    found = ["a test that must fail has not failed"] if _is_untrue(plan, report) else []
    for sentinel, copy in plan.doubles.items():
        if (report.outcomes[sentinel] is Outcome.PASSED) != (report.outcomes[copy.node_id] is Outcome.PASSED):
            found.append(f"{copy.node_id} and a copy of it under another name do not agree")
    for sentinel, copy in plan.contraries.items():
        if report.outcomes[sentinel] is Outcome.PASSED:
            found.append(f"{copy.node_id} passes with an assertion that cannot hold")
    odd = (report.flags | _odd_end(plan, report)) - known.flags
    found += [f"unlike the original code: {flag}" for flag in sorted(odd)]
    return "; ".join(found[:3])


def _is_untrue(plan: Plan, report: TestReport) -> bool:
    """Whether a plain sentinel, which must fail, has another outcome."""
    return any(report.outcomes[test] is not Outcome.FAILED for test in plan.must_fail)


def _odd_end(plan: Plan, report: TestReport) -> set[str]:
    """Named where the test runner ended as if no test had failed."""
    is_odd = (plan.must_fail or plan.contraries) and report.pytest_exit_code != TESTS_FAILED
    return {f"the test runner ended with exit code {report.pytest_exit_code}"} if is_odd else set()


def changed_files(tree: Path, files: Mapping[str, bytes]) -> frozenset[str]:
    """What a run did to its tests, their data and their configuration, seen from outside after it.

    Stored files below test folders and configuration files of the test runner that are gone or
    differ, and files that a test runner or interpreter would load at its next start and that were not there.
    """
    found = set()
    for name, data in files.items():
        path = PurePosixPath(name)
        counts = is_test_path(name) or in_test_folder(path) or path.name in _CONFIG_NAMES
        if counts and not _is_same(tree / name, data):
            found.add(f"file {name} changed")
    for folder, _, names in os.walk(tree):
        for name in names:
            if name in START_NAMES or name.endswith(".pth"):
                place = (Path(folder) / name).relative_to(tree).as_posix()
                if place not in files:
                    found.add(f"file {place} made")
    return frozenset(found)


def _is_same(path: Path, data: bytes) -> bool:
    """Whether a plain file has this content; no link is followed, nothing is waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with open(descriptor, "rb") as handle:
        info = os.fstat(descriptor)
        return stat.S_ISREG(info.st_mode) and info.st_size == len(data) and handle.read(len(data) + 1) == data


class GoldenFails(Exception):
    """The original code does not pass; the text says how, and names no hidden test."""
