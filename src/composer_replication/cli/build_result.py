"""What ``tasks build`` and ``tasks import`` keep and print of a build."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer_replication.cli.isolation_flags import given_up, isolation_lines
from composer_replication.cli.show_command import flaky_lines, unused_lines

if TYPE_CHECKING:
    from composer_replication.tasks.build_summary import BuildSummary

Result = dict[str, object]


def finish_build(
    summary: BuildSummary, more: Mapping[str, object] | None = None, *, quiet: bool
) -> tuple[Result, int]:
    """Keep the summary of a build with ``more`` keys, say what comes next, and give what is printed.

    Raises:
        InputError: no repository can be used (CR0419).
        NothingToDoError: no candidate is a task (CR0418).
    """
    from composer_replication.run_folder import write_json

    result: Result = {
        "tasks": summary.tasks,
        "candidates": summary.candidates,
        "valid": summary.valid,
        "rejected": dict(summary.rejected),
        "seconds": round(summary.seconds, 3),
        "bytes": summary.bytes,
        "fingerprint": summary.fingerprint,
        "unused_tests": {name: found.to_json() for name, found in summary.unused_tests.items()},
        "flaky": {name: list(tests) for name, tests in summary.flaky.items()},
        "unusable": dict(summary.unusable),
        "unrecorded": {name: dict(pins) for name, pins in summary.unrecorded.items()},
        "parquet": summary.has_parquet,
        "restricted_licences": summary.restricted(),
        **(more or {}),
        **given_up(),
    }
    write_json(summary.folder / "summary.json", result)
    summary.require_tasks()
    if not quiet:
        if not summary.has_parquet:
            sys.stderr.write("No Parquet file: it needs pip install 'composer-replication[parquet]'\n")
        folder = shlex.quote(str(summary.folder))
        sys.stderr.write(f"Next: composer-rl recipe new --tasks {folder} --model MODEL\n")
    return result, 0


def render_build(result: dict[str, Any]) -> str:
    """Counts, and why candidates were not taken."""
    lines = [f"{result['tasks']} tasks of {result['candidates']} candidates in {result['seconds']:.0f} s"]
    lines += [f"  rejected {count:>5}  {reason}" for reason, count in result["rejected"].items()]
    lines += [f"  instructions {count:>5}  {what}" for what, count in result.get("instructions", {}).items()]
    lines += [f"  not usable: {source}: {why}" for source, why in result["unusable"].items()]
    lines += [f"  {line}" for line in isolation_lines(result)]
    lines += unused_lines(result.get("unused_tests", {}))
    lines += flaky_lines(result["flaky"])
    lines += licence_lines(result.get("restricted_licences", {}))
    for name, pins in result["unrecorded"].items():
        lines.append(
            f"  behaviour of {len(pins)} functions of {name} could not be recorded: {next(iter(pins.values()))}; "
            "the same command tries again"
        )
    return "\n".join([*lines, f"fingerprint {result['fingerprint']}"])


def licence_lines(restricted: Mapping[str, str]) -> list[str]:
    """A line for each repository whose licence is not permissive or unknown; see ``BuildSummary.restricted``."""
    return [
        f"  look at the licence before you pass these tasks on: {name}: {what}"
        for name, what in restricted.items()
    ]
