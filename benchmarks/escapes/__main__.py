"""Run the attempts and print what came of them."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import benchmarks.escapes as package
from benchmarks.escapes.attempt import Attempt, all_attempts
from benchmarks.escapes.course import run_course
from benchmarks.escapes.journal import Journal, latest
from benchmarks.escapes.ordinary_user import NoInterpreterError, run_as_user
from benchmarks.escapes.plain import Plain
from benchmarks.escapes.table import HELD, NOT_RUN, WITHOUT_JAIL, markdown, summary_row, unseen
from composer_replication.interfaces import SandboxBackend
from composer_replication.sandbox import accept, choose_backend
from composer_replication.sandbox.acceptance import EVERYTHING

_JAILS = ("bubblewrap", "bubblewrap-warm", "sandlock")
_ALL = (*_JAILS, "none", "control")
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
        return _report([row for path in args.table for row in Journal.at(path).rows()])
    if platform.machine() != _MACHINE:
        print(f"the attempts name system calls by their numbers on {_MACHINE}; this is {platform.machine()}")
        return 2
    attempts = [
        replace(attempt, timeout_seconds=args.patience * attempt.timeout_seconds)
        for attempt in all_attempts()
        if not args.family or any(word in attempt.full_name for word in args.family)
    ][args.part[0] - 1 :: args.part[1]]
    if args.list:
        _print_list(attempts)
        return 0
    if args.journal_descriptor is not None:  # we are the ordinary user that root has started
        with suppress(KeyboardInterrupt):
            _run_here(args, attempts, Journal(args.journal_descriptor))
        return 0
    with tempfile.TemporaryDirectory(prefix="escapes-journal-") as folder:
        journal = Journal.at(args.json or Path(folder) / "findings")
        is_interrupted = False
        try:
            if not args.only_as_user:
                _run_here(args, attempts, journal)
            if os.geteuid() == 0 and not args.as_we_are:
                _run_as_user(args, journal)
        except KeyboardInterrupt:
            is_interrupted = True
        code = _report(journal.rows())
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


def _print_list(attempts: list[Attempt]) -> None:
    for attempt in attempts:
        reason = attempt.not_without_jail
        print(attempt.full_name + (f"  [not without a jail: {reason}]" if reason else ""))
    print(f"{len(attempts)} attempts in {len({attempt.family for attempt in attempts})} families")


def _backend(name: str) -> SandboxBackend:
    if name == "none":
        accept([EVERYTHING])
    return Plain() if name == "control" else choose_backend(name)


def _run_here(args: Namespace, attempts: list[Attempt], journal: Journal) -> None:
    user = "root" if os.geteuid() == 0 else "user"
    for name in args.backend or _ALL:
        backend = _backend(name)
        check = backend.is_available()
        if not check.ok:
            print(f"{name}: not measured, {check.detail}", flush=True)
            continue
        done = journal.done(name, user)
        rest = [attempt for attempt in attempts if (attempt.family, attempt.name) not in done]
        started = said = time.monotonic()
        for number, finding in enumerate(run_course(backend, rest), 1):
            row = {"backend": name, "user": user, **asdict(finding)}
            journal.add(row)
            if args.verbose or (row["state"] not in {HELD, NOT_RUN} and name not in WITHOUT_JAIL):
                print(
                    f"{name} as {user}: {row['state']}: {row['family']}: {row['name']} "
                    f"({row['evidence']}) {row['seconds']} s",
                    flush=True,
                )
            now = time.monotonic()
            if now - said >= _SECONDS_BETWEEN_WORDS:
                said, left = now, (now - started) / number * (len(rest) - number)
                words = f"{name} as {user}: {number} of {len(rest)}, about {left / 60:.0f} minutes left"
                print(words, file=sys.stderr, flush=True)


def _run_as_user(args: Namespace, journal: Journal) -> None:
    words = [word for name in args.backend or () for word in ("--backend", name)]
    words += [word for name in args.family or () for word in ("--family", name)]
    words += ["--patience", str(args.patience), "--part", "{}/{}".format(*args.part)]
    words += ["--verbose"] if args.verbose else []
    try:
        run_as_user(words, journal.descriptor)
    except NoInterpreterError as error:
        print(f"not run as an ordinary user: {error}")


def _report(rows: list[dict[str, Any]]) -> int:
    findings = latest(rows)
    kinds = sorted({(row["backend"], row["user"]) for row in findings}, key=_order)
    by_kind = {kind: [row for row in findings if (row["backend"], row["user"]) == kind] for kind in kinds}
    summaries = [summary_row(*kind, found, all_attempts()) for kind, found in by_kind.items()]
    print(markdown(summaries))
    for row in summaries:
        if row["backend"] not in WITHOUT_JAIL and row["names"]:
            print(f"{row['backend']} as {row['user']} did not hold: " + "; ".join(row["names"]))
        if row["could_not_be_tried"]:
            print(f"{row['backend']} as {row['user']}: {row['could_not_be_tried']} could not be tried")
    for kind, found in by_kind.items():
        if kind[0] == "control" and unseen(found):
            print(f"no success seen in the control as {kind[1]}: " + "; ".join(unseen(found)))
    versions = sorted({row["sources"] for row in findings})
    if len(versions) > 1:
        counts = (f"{name} ({sum(row['sources'] == name for row in findings)})" for name in versions)
        print("findings of several versions of the code: " + ", ".join(counts))
    in_jails = [row for row in summaries if row["backend"] not in WITHOUT_JAIL]
    return int(any(row["names"] or row["could_not_be_tried"] for row in in_jails))


def _order(kind: tuple[str, str]) -> tuple[int, str, str]:
    """Ours in their order, then whatever else was tried by its name."""
    return (_ALL.index(kind[0]) if kind[0] in _ALL else len(_ALL)), *kind


if __name__ == "__main__":
    sys.exit(main())
