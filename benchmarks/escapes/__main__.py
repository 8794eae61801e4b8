"""Run the attempts and print what came of them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.escapes as package
from benchmarks.escapes.attempt import Attempt, all_attempts
from benchmarks.escapes.course import run_course
from benchmarks.escapes.ordinary_user import NoInterpreterError, run_as_user
from benchmarks.escapes.plain import Plain
from benchmarks.escapes.table import render, summary_row, unseen
from composer_replication.interfaces import SandboxBackend
from composer_replication.sandbox import accept, choose_backend
from composer_replication.sandbox.acceptance import EVERYTHING

_JAILS = ("bubblewrap", "bubblewrap-warm", "sandlock")
_ALL = (*_JAILS, "none", "control")
_MACHINE = "x86_64"


def main() -> int:
    """Exit code 1 when a jail did not hold or an attempt could not be tried."""
    args = _arguments()
    if platform.machine() != _MACHINE:
        print(f"the attempts name system calls by their numbers on {_MACHINE}; this is {platform.machine()}")
        return 2
    attempts = [
        replace(attempt, timeout_seconds=args.patience * attempt.timeout_seconds)
        for attempt in all_attempts()
        if (not args.family or any(word in attempt.family for word in args.family))
        and (not args.name or any(word in attempt.name for word in args.name))
    ]
    if args.spread:
        attempts = _spread(attempts)
    if args.list:
        _print_list(attempts)
        return 0
    findings = [] if args.only_as_user else _run_here(args, attempts)
    if os.geteuid() == 0 and not args.as_we_are:
        findings += _run_as_user(args)
    return _report(args, findings)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", action="append", choices=_ALL, help="may be given several times")
    parser.add_argument("--family", action="append", help="only families with this in their name")
    parser.add_argument("--name", action="append", help="only attempts with this in their name")
    parser.add_argument("--patience", type=float, default=1.0, help="times the time-outs, for a busy machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every finding there")
    parser.add_argument("--as-we-are", action="store_true", help="as root: not as an ordinary user too")
    parser.add_argument("--only-as-user", action="store_true", help="as root: as an ordinary user alone")
    parser.add_argument(
        "--spread", action="store_true", help="one of each family, then another of each, and so on"
    )
    parser.add_argument("--list", action="store_true", help="print the attempts and run nothing")
    parser.add_argument("--verbose", action="store_true", help="a line for each attempt")
    return parser.parse_args()


def _spread(attempts: list[Attempt]) -> list[Attempt]:
    """So that a run that is cut short has tried something of everything."""
    seen: dict[str, int] = {}
    ranked = []
    for attempt in attempts:
        seen[attempt.family] = seen.get(attempt.family, 0) + 1
        ranked.append((seen[attempt.family], attempt))
    return [attempt for _, attempt in sorted(ranked, key=lambda pair: pair[0])]


def _print_list(attempts: list[Attempt]) -> None:
    for attempt in attempts:
        print(
            f"{attempt.full_name}"
            + (f"  [not without a jail: {attempt.not_without_jail}]" if attempt.not_without_jail else "")
        )
    print(f"{len(attempts)} attempts in {len({attempt.family for attempt in attempts})} families")


def _backend(name: str) -> SandboxBackend:
    if name == "none":
        accept([EVERYTHING])
    return Plain() if name == "control" else choose_backend(name)


def _run_here(args: argparse.Namespace, attempts: list[Attempt]) -> list[dict[str, Any]]:
    user = "root" if os.geteuid() == 0 else "user"
    findings = []
    for name in args.backend or _ALL:
        backend = _backend(name)
        check = backend.is_available()
        if not check.ok:
            print(f"{name}: not measured, {check.detail}", flush=True)
            continue
        for finding in run_course(backend, attempts):
            row = {"backend": name, "user": user, **finding.as_json()}
            findings.append(row)
            if args.verbose or (row["state"] not in {"held", "not run"} and name not in {"none", "control"}):
                print(
                    f"{name} as {user}: {row['state']}: {row['family']}: {row['name']} "
                    f"({row['evidence']}) {row['seconds']} s",
                    flush=True,
                )
    return findings


def _run_as_user(args: argparse.Namespace) -> list[dict[str, Any]]:
    words = [word for name in args.backend or () for word in ("--backend", name)]
    words += [word for name in args.family or () for word in ("--family", name)]
    words += [word for name in args.name or () for word in ("--name", name)]
    words += ["--spread"] if args.spread else []
    words += ["--patience", str(args.patience)]
    words += ["--verbose"] if args.verbose else []
    try:
        return run_as_user(words)
    except NoInterpreterError as error:
        print(f"not run as an ordinary user: {error}")
        return []


def _report(args: argparse.Namespace, findings: list[dict[str, Any]]) -> int:
    kinds = list(dict.fromkeys((row["backend"], row["user"]) for row in findings))
    by_kind = {kind: [row for row in findings if (row["backend"], row["user"]) == kind] for kind in kinds}
    summaries = [summary_row(*kind, rows) for kind, rows in by_kind.items()]
    if args.json:
        args.json.write_text(json.dumps({"summaries": summaries, "findings": findings}, indent=1))
    if not (args.as_we_are and os.geteuid() != 0):
        print(render(summaries))
        for row in summaries:
            if row["backend"] in _JAILS and row["names"]:
                print(f"{row['backend']} as {row['user']} did not hold: " + "; ".join(row["names"]))
        for kind, rows in by_kind.items():
            if kind[0] == "control" and unseen(rows):
                print(f"no success seen in the control as {kind[1]}: " + "; ".join(unseen(rows)))
    bad = [
        row
        for row in summaries
        if row["backend"] in _JAILS and (row["successes"] or row["could_not_be_tried"])
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
