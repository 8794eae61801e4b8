"""Which limit of a sandbox a suite met before anything was deleted, and what can be typed then.

A suite that is green but needs more time, memory, disk, processes or open files than a run has is not
red: whoever is told so would look for a failing test that is none.
"""

from __future__ import annotations

import re
from collections import Counter

from composer_replication.records import Limits
from composer_replication.tasks.intake.lock import UnusableRepository
from composer_replication.tasks.test_run import Ended, TestReport

TOO_SLOW = "too-slow"
TOO_LARGE = "too-large"
MAX_SUITE_SECONDS = 86_400.0
_MORE_TIME = 3
_WITHOUT = "no flag raises it: give the folder or a copy of it without the tests that need more"
_SIGNS = {
    "memory": re.compile(r"^MemoryError\b|Cannot allocate memory|Unable to allocate"),
    "disk": re.compile(r"\[Errno (?:27|28)\]|No space left on device|File too large"),
    "processes": re.compile(r"can't start new thread|BlockingIOError: \[Errno 11\]"),
    "open files": re.compile(r"\[Errno 24\]|Too many open files"),
}
"""How the limits show in a test that went on after it met one."""


def cut_off(report: TestReport, suite_seconds: float, where: str = "") -> UnusableRepository:
    """The refusal of a suite whose run as a whole failed: at a limit, or else it is red. Names the test that was running.

    Args:
        report: a run with an error.
        suite_seconds: how long it had.
        where: said in front, such as ``in another order, ``.
    """
    last = f"; {report.running} was running" if report.running else ""
    if report.ended is Ended.TIME:
        more = min(MAX_SUITE_SECONDS, _MORE_TIME * suite_seconds)
        return UnusableRepository(
            TOO_SLOW,
            f"{where}the suite ran longer than {suite_seconds:g} s; --suite-seconds {more:g} gives it more time{last}",
        )
    if report.ended in (Ended.MEMORY, Ended.DISK, Ended.PROCESSES):
        used = _amount(report.ended.value, Limits())
        return UnusableRepository(
            TOO_LARGE, f"{where}the suite used more than {used}, and was ended; {_WITHOUT}{last}"
        )
    return UnusableRepository("red-baseline", f"{where}{report.error}{last}")


def failed_at_a_limit(report: TestReport, num_green: int, num_needed: float) -> UnusableRepository | None:
    """The refusal of a suite that would have enough green tests, were it not for those that met a limit.

    Args:
        report: a run that went to its end, with the first line of each failure.
        num_green: how many of its tests count as green.
        num_needed: how many must be.
    """
    kinds = {test: kind for test, text in report.why.items() if (kind := _kind_of(text))}
    if not kinds or num_green + len(kinds) < num_needed:
        return None
    kind, _ = Counter(kinds.values()).most_common(1)[0]
    test = next(test for test, one in kinds.items() if one == kind)
    detail = (
        f"{len(kinds)} tests failed for want of {kind}, of which a sandbox has {_amount(kind, Limits())} "
        f"(the first is {test}: {report.why[test][:200]}); {_WITHOUT}"
    )
    return UnusableRepository(TOO_LARGE, detail)


def _kind_of(text: str) -> str:
    return next((kind for kind, sign in _SIGNS.items() if sign.search(text)), "")


def _amount(kind: str, limits: Limits) -> str:
    return {
        "memory": f"{limits.memory_bytes // 1024**3} GiB of memory",
        "disk": f"{limits.disk_bytes // 1024**2} MiB of disk",
        "processes": f"{limits.num_processes} processes",
        "open files": f"{limits.num_open_files} open files",
    }[kind]
