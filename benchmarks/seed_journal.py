"""Finished training runs as lines of a journal: commit it, and the seeds of a study may be spread over days and machines.

A line is told from those of other settings (another recipe, other ``--set``) by ``fingerprint``. Lines of other settings
stay in the journal and are left out of a study's table.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_replication.config import parse_override, read_table
from composer_replication.run_folder import read_json, read_jsonl, rewrite_jsonl

COMMAND = Path(sys.executable).with_name("composer-rl")
HALTED = 5  # the guard stopped it; its rates were measured all the same

Line = Mapping[str, Any]


def fingerprint(recipe: Path, settings: Sequence[str]) -> str:
    """Of a recipe as it is written, and what is set over it; the seed aside."""
    table = {key: value for key, value in read_table(recipe).items() if key != "seed"}
    text = json.dumps([table, dict(parse_override(setting) for setting in settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_run(folder: Path) -> dict[str, Any]:
    """What a finished run folder says: passed and samples by task, verdict, and on what it was run."""
    summary, environment = read_json(folder / "summary.json"), read_json(folder / "environment.json")

    def counts(side: str, tests: str) -> dict[str, dict[str, list[int]]]:
        return {
            when: {name: [row[tests], row["samples"]] for name, row in summary[when][side]["by_task"].items()}
            for when in ("before", "after")
        }

    return {
        "heldout": counts("heldout", "hidden"),
        "trained": counts("train", "visible"),
        "steps": summary["steps"],
        "verdict": summary["verdict"],
        "minutes": round(summary["seconds"] / 60, 1),
        "parameter_sha256": summary["parameter_sha256"],
        "tasks": environment["tasks_fingerprint"],
        "revision": environment["git_revision"],
    }


def train(recipe: Path, folder: Path, seed: int, settings: Sequence[str]) -> bool:
    """One run to its end, from where it was cut off; whether there is something to read."""
    if (folder / "summary.json").is_file():
        return True
    flags = [part for setting in (f"seed={seed}", *settings) for part in ("--set", setting)]
    resume = ["--resume"] if (folder / "run.toml").is_file() else []
    command = [str(COMMAND), "train", str(recipe), "--out", str(folder), *flags, *resume]
    return subprocess.run(command, check=False).returncode in (0, HALTED)


def add_line(journal: Path, line: Line) -> None:
    """The whole file anew: a line that a crash tore must not swallow the next one."""
    rewrite_jsonl(journal, [*read_jsonl(journal), line])
