"""``composer-rl cache``: empty the folder of fetched and made things."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from composer_replication.cli.terminal import progress_bar
from composer_replication.errors import UsageError
from composer_replication.tasks.intake.cache import CACHE_VARIABLE, cache_folder, prune


def run_prune(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    try:
        folder = cache_folder()
    except OSError as error:
        problem = f"the cache folder cannot be made: {error.strerror}."
        fix = f"set {CACHE_VARIABLE} to a folder that you may write, or unset it."
        raise UsageError("CR0209", problem, where=str(error.filename or CACHE_VARIABLE), fix=fix) from error
    with progress_bar(quiet=args.quiet) as report:
        pruned = prune(folder, progress=report, is_dry_run=args.dry_run)
    return {
        "folder": str(folder),
        "freed_bytes": pruned.freed_bytes,
        "dry_run": args.dry_run,
        "paths": [str(entry.path) for entry in pruned.removed],
        "kept": [{"path": str(kept.path), "reason": kept.reason} for kept in pruned.kept],
    }, 0


def render_prune(result: dict[str, Any]) -> str:
    freed = f"{result['freed_bytes'] / 10**6:.1f} MB {'would be freed' if result['dry_run'] else 'freed'}"
    reasons = Counter(row["reason"] for row in result["kept"])
    lines = [f"{result['folder']}: {freed}", *(f"  {path}" for path in result["paths"])]
    return "\n".join([*lines, *(f"{count:>6}  kept: {reason}" for reason, count in reasons.items())])
