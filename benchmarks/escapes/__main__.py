"""Run the attempts and print what came of them."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import benchmarks.escapes as package
from benchmarks.escapes import findings
from benchmarks.escapes.attempt import Attempt, all_attempts
from benchmarks.escapes.course import run_course
from benchmarks.escapes.findings import HELD, NOT_RUN, WITHOUT_JAIL, Row
from benchmarks.escapes.ordinary_user import run_as_user
from benchmarks.escapes.plain import Plain
from composer_replication.sandbox import accept, choose_backend
from composer_replication.sandbox.acceptance import EVERYTHING

_ALL = ("bubblewrap", "bubblewrap-warm", "sandlock", "none", "control")
_MACHINE = "x86_64"
_SECONDS_BETWEEN_WORDS = 15.0
_INTERRUPTED = 130


def main() -> int:
    """Exit code 1 when a jail did not hold or an attempt could not be tried, 130 when it was interrupted."""
    args = _arguments()
    if args.table:
        if absent := [str(path) for path in args.table if not path.is_file()]:
            print(f"there is no file {', '.join(absent)}: give what --json has written", file=sys.stderr)
            return 2
        journals = map(findings.open_journal, args.table)
        return _report([row for journal in journals for row in findings.rows_of(journal)])
    if platform.machine() != _MACHINE:
        print(f"the attempts name system calls by their numbers on {_MACHINE}; this is {platform.machine()}")
        return 2
    attempts = [
        replace(attempt, timeout_seconds=args.patience * attempt.timeout_seconds)
        for attempt in all_attempts()
        if not args.family or any(word in attempt.full_name for word in args.family)
    ][args.part[0] - 1 :: args.part[1]]
    if args.list:
        for attempt in attempts:
            reason = attempt.not_without_jail
            print(attempt.full_name + (f"  [not without a jail: {reason}]" if reason else ""))
        print(f"{len(attempts)} attempts in {len({attempt.family for attempt in attempts})} families")
        return 0
    if args.journal_descriptor is not None:  # we are the ordinary user that root has started
        os.set_inheritable(args.journal_descriptor, False)
        with suppress(KeyboardInterrupt):
            _run_here(args, attempts, args.journal_descriptor)
        return 0
    with tempfile.TemporaryDirectory(prefix="escapes-journal-") as folder:
        journal = findings.open_journal(args.json or Path(folder) / "findings")
        is_interrupted = False
        try:
            if not args.only_as_user:
                _run_here(args, attempts, journal)
            if os.geteuid() == 0 and not args.as_we_are:
                _run_as_user(args, journal)
        except KeyboardInterrupt:
            is_interrupted = True
        code = _report(findings.rows_of(journal))
    if not is_interrupted:
        return code
    print("interrupted: " + ("the same command goes on" if args.json else "with --json FILE it could go on"))
    return _INTERRUPTED


def _arguments() -> Namespace:
    parser = ArgumentParser(description=package.__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=_ALL, help="may be given several times")
    parser.add_argument("--family", action="append", help="only families or attempts with this in their name")
    parser.add_argument("--patience", type=float, default=1.0, help="times the time-outs, for a busy machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add what is found; try nothing again")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="the K-th of N parts alone")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print what such files hold")
    parser.add_argument("--as-we-are", action="store_true", help="as root: not as an ordinary user too")
    parser.add_argument("--only-as-user", action="store_true", help="as root: as an ordinary user alone")
    parser.add_argument("--list", action="store_true", help="print the attempts and run nothing")
    parser.add_argument("--verbose", action="store_true", help="a line for each attempt")
    parser.add_argument("--journal-descriptor", type=int, help=SUPPRESS)
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    number, _, total = text.partition("/")
    if not (number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
        raise ArgumentTypeError(f"K/N with K from 1 to N is needed, as 2/6, not {text!r}")
    return int(number), int(total)


def _run_here(args: Namespace, attempts: list[Attempt], journal: int) -> None:
    user = "root" if os.geteuid() == 0 else "user"
    for name in args.backend or _ALL:
        if name == "none":
            accept([EVERYTHING])
        backend = Plain() if name == "control" else choose_backend(name)
        check = backend.is_available()
        if not check.ok:
            print(f"{name}: not measured, {check.detail}", flush=True)
            continue
        done = findings.done(journal, name, user)
        rest = [attempt for attempt in attempts if (attempt.family, attempt.name) not in done]
        started = said = time.monotonic()
        for number, finding in enumerate(run_course(backend, rest), 1):
            row = {"backend": name, "user": user, **asdict(finding)}
            findings.add(journal, row)
            if args.verbose or (row["state"] not in {HELD, NOT_RUN} and name not in WITHOUT_JAIL):
                said_of_it = f"{row['family']}: {row['name']} ({row['evidence']}) {row['seconds']} s"
                print(f"{name} as {user}: {row['state']}: {said_of_it}", flush=True)
            now = time.monotonic()
            if now - said >= _SECONDS_BETWEEN_WORDS:
                said, left = now, (now - started) / number * (len(rest) - number)
                words = f"{name} as {user}: {number} of {len(rest)}, about {left / 60:.0f} minutes left"
                print(words, file=sys.stderr, flush=True)


def _run_as_user(args: Namespace, journal: int) -> None:
    words = [word for name in args.backend or () for word in ("--backend", name)]
    words += [word for name in args.family or () for word in ("--family", name)]
    words += ["--patience", str(args.patience), "--part", "{}/{}".format(*args.part)]
    words += ["--verbose"] if args.verbose else []
    if not run_as_user(words, journal):
        print("not run as an ordinary user: no Python 3.11 or newer that an ordinary user may start")


def _report(rows: list[Row]) -> int:
    """Print the table; 1 where a jail did not hold or something could not be tried."""
    found, by_kind, is_bad = findings.latest(rows), dict[tuple[str, str], list[Row]](), False
    for row in found:
        by_kind.setdefault((row["backend"], row["user"]), []).append(row)
    by_kind = {kind: by_kind[kind] for kind in sorted(by_kind, key=_order)}
    print("| backend | user | attempts tried | families | successes |\n|---|---|---|---|---|")
    for kind, own in by_kind.items():
        print(findings.table_row(*kind, own, all_attempts()))
    for (backend, user), own in by_kind.items():
        names, num_untried = findings.escaped(own), sum(row["state"] == findings.UNTRIED for row in own)
        held = [f"{row['family']}: {row['name']}" for row in own if row["state"] == HELD]
        if backend not in WITHOUT_JAIL:
            is_bad |= bool(names or num_untried)
            if names:
                print(f"{backend} as {user} did not hold: " + "; ".join(names))
        if num_untried:
            print(f"{backend} as {user}: {num_untried} could not be tried")
        if backend == "control" and held:
            print(f"no success seen in the control as {user}: " + "; ".join(held))
    if len(versions := Counter(row["sources"] for row in found)) > 1:
        counts = ", ".join(f"{name} ({number})" for name, number in sorted(versions.items()))
        print(f"findings of several versions of the code: {counts}")
    return int(is_bad)


def _order(kind: tuple[str, str]) -> tuple[int, str, str]:
    """Ours in their order, then whatever else was tried by its name."""
    return (_ALL.index(kind[0]) if kind[0] in _ALL else len(_ALL)), *kind


if __name__ == "__main__":
    sys.exit(main())
