"""The command line of a build, so that a store whose build was cut off can say how it is finished."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from composer_replication.tasks.store_records import SUITE_SECONDS


def build_command(
    sources: Sequence[str],
    out: Path,
    *,
    symbols: Mapping[str, Sequence[str]],
    granularities: Collection[str],
    removals: Collection[str],
    with_truth: bool,
    max_tasks: int | None,
    seed: int,
    hidden_share: float,
    suite_seconds: float,
) -> str:
    """``composer-rl tasks build`` with these arguments; empty where the command line cannot say them.

    Paths are absolute, so that it works from every folder. What changes no task (``--jobs``,
    ``--backend``, ``--ray``) is left out. Pins of several sources come from recipes only.
    """
    if symbols and len(sources) > 1:
        return ""
    words = [*map(_from_everywhere, sources), "--out", str(Path(out).resolve())]
    if max_tasks is not None:
        words += ["--max-tasks", str(max_tasks)]
    for flag, values, default in (
        ("--granularity", granularities, ["function"]),
        ("--removal", removals, ["body"]),
    ):
        if list(values) != default:
            words += [word for value in values for word in (flag, value)]
    for pin in (pin for pins in symbols.values() for pin in pins):
        words += ["--symbol", pin]
    words += ["--seed", str(seed)] if seed else []
    words += ["--hidden-share", str(hidden_share)] if hidden_share != 0.5 else []
    words += ["--suite-seconds", f"{suite_seconds:g}"] if suite_seconds != SUITE_SECONDS else []
    words += [] if with_truth else ["--visible-only"]
    return shlex.join(["composer-rl", "tasks", "build", *words])


def _from_everywhere(source: str) -> str:
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source
