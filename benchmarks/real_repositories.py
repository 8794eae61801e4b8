"""How many ordinary repositories give a task: each pinned source distribution is built by itself, one after another.

    python benchmarks/real_repositories.py [--only NAME …] [--wall-seconds 240]   # NAME of the list, or NAME==VERSION

For each of ``SOURCES`` it runs ``composer-rl --json --quiet tasks build sdist:NAME==VERSION --max-tasks 1`` in a
process of its own and prints a row: exit code, seconds by the clock and of the processor, tasks, tests
that are used of those that were collected, and the first reason of what is not used. The last line is the share that
gave a task in time. Nobody tuned the product for these: they were drawn before any was tried,
over build backends (setuptools, hatch, poetry, flit, pdm), layouts (``src`` and flat) and unittest beside pytest.

Environments that an earlier run made are used again; ``COMPOSER_RL_CACHE`` names an empty folder for a first run.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command_line import options

SOURCES = (
    "flask==3.1.3", "httpcore==1.0.9", "werkzeug==3.1.9", "freezegun==1.5.5", "cattrs==26.2.1", "typer==0.29.2",
    "jsonschema==4.26.0", "starlette==1.10.0", "requests==2.34.2", "h11==0.16.0", "wsproto==1.3.2", "webob==1.8.11",
    "asgiref==3.13.0", "tenacity==9.2.1", "structlog==26.1.0", "pyparsing==3.3.3",
    "markdown==3.11.3", "python-dateutil==4.0.0", "natsort==8.4.0", "jsonpointer==3.12", "deepdiff==9.1.0",
    "pathspec==1.1.1", "platformdirs==4.14.8", "mako==1.4.3", "voluptuous==0.16.0", "python-dotenv==1.2.4",
    "argcomplete==3.7.2", "typeguard==4.6.1", "responses==0.26.3", "parameterized==0.9.0", "blinker==1.9.0",
    "pyjwt==2.15.1", "oauthlib==4.0.1", "aiofiles==25.1.0", "python-multipart==0.0.34", "beautifulsoup4==4.15.0",
    "html5lib==1.1", "defusedxml==0.7.1", "iniconfig==2.3.1", "pytest-mock==3.17.0", "environs==15.2.0",
    "markdown-it-py==4.3.0", "networkx==3.6.1", "transitions==0.9.3", "prompt-toolkit==3.0.53",
)  # fmt: skip
COLUMNS = ("source", "exit", "seconds", "cpu", "tasks", "tests used", "first reason")


def build(source: str, wall_seconds: float) -> dict[str, Any]:
    """Build one task of a source in a fresh folder: what came of it."""
    with tempfile.TemporaryDirectory(prefix="real-") as folder:
        command = [
            str(Path(sys.executable).with_name("composer-rl")), "--json", "--quiet", "tasks", "build",
            f"sdist:{source}", "--out", f"{folder}/store", "--max-tasks", "1",
        ]  # fmt: skip
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True
        )
        try:
            output, _ = process.communicate(timeout=wall_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # it ends its sandboxes itself
            output, _ = process.communicate()
            output = json.dumps({"error": {"code": "", "message": f"not done after {wall_seconds:g} s"}})
        seconds = time.monotonic() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return {"source": source, "exit": process.returncode, "seconds": seconds, "cpu": cpu, **read(output)}


def read(output: str) -> dict[str, Any]:
    """The figures of a build's JSON."""
    try:
        value = json.loads(output)
    except ValueError:
        return {"tasks": 0, "tests used": "-", "first reason": f"no JSON: {output[-200:]}"}
    if "error" in value:
        error = value["error"]
        return {"tasks": 0, "tests used": "-", "first reason": f"{error['code']} {error['message']}"}
    unused = next(iter(value["unused_tests"].values()))
    num_used, num_collected, num_broken = (unused[key] for key in ("used", "collected", "broken_files"))
    reason = unused["first_reason"] if num_used < num_collected or num_broken else ""
    used = f"{num_used}/{num_collected}" + (f" +{num_broken} files" if num_broken else "")
    return {"tasks": value["tasks"], "tests used": used, "first reason": reason}


def line(row: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    cells = [f"{row[name]:.0f}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ")[:240] for cell in cells) + " |"


def main() -> None:
    """Build what was asked for, one repository after another, and print the table."""
    # a shell's background jobs ignore it, and so would a build
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = options(__doc__, only=[], wall_seconds=240.0)
    known = {source.partition("==")[0]: source for source in SOURCES}
    rows = []
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for source in [known.get(one, one) for one in given.only or known]:
        rows.append(build(source, given.wall_seconds))
        print(line(rows[-1]), flush=True)
    good = sum(row["tasks"] > 0 for row in rows)
    print(f"\n{good} of {len(rows)} gave a task: {100 * good / max(1, len(rows)):.0f}%")


if __name__ == "__main__":
    main()
