"""``composer-rl doctor``: what this machine has, what it lacks, and what to type about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from composer_replication.errors import UsageError

MISSING_EXIT_CODE = 3


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Register the verb; ``common`` carries ``--json`` and ``--quiet``."""
    parser = subparsers.add_parser(
        "doctor",
        parents=[common],
        help="what this machine has and what it lacks",
        description="Check this machine: Python, memory, disk, packages, and every sandbox backend by trying to "
        "break out of it. Exit code 3 when something that the quick start needs is missing, or the server does not fit.",
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="ask this sampling server, too: version, model, settings"
    )
    parser.add_argument("--endpoint-key-env", default="", metavar="VARIABLE", help="holds the server's key")
    parser.set_defaults(run="composer_replication.cli.doctor_verb:run")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """All checks; exit code 0 when all that are required hold, else 3. A failing check is a result, not an error.

    Raises:
        UsageError: a key for no server (CR0206).
    """
    from composer_replication.cli.machine_checks import Finding, all_checks, check_server

    if args.endpoint_key_env and not args.endpoint:
        raise UsageError(
            "CR0206", "a key without a server.", where="--endpoint-key-env", fix="give --endpoint URL, too."
        )
    findings = all_checks((lambda _: None) if args.quiet else partial(print, file=sys.stderr, flush=True))
    if args.endpoint:
        findings.append(Finding(check_server(args.endpoint, args.endpoint_key_env)))
    is_ok = all(finding.check.ok for finding in findings if finding.is_required)
    return {
        "ok": is_ok,
        "checks": [asdict(finding.check) for finding in findings],
    }, 0 if is_ok else MISSING_EXIT_CODE


def render(result: Mapping[str, Any]) -> str:
    """What a person reads: one line a check, the next step below those that fail."""
    lines: list[str] = []
    for check in result["checks"]:
        lines.append(f"{'ok  ' if check['ok'] else 'NO  '} {check['name']:<20} {check['detail']}")
        if not check["ok"] and check["fix"]:
            lines.append(f"{'':<25} -> {check['fix']}")
    lines += [
        "",
        "ready for composer-rl quickstart"
        if result["ok"]
        else "what is marked NO and has a next step is missing, or does not fit",
    ]
    return "\n".join(lines)
