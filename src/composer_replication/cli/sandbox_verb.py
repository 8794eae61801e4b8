"""``composer-rl sandbox``: prove that the jail holds, or run one command inside it."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from composer_replication import sandbox
from composer_replication.cli.flags import given_up, isolation_lines
from composer_replication.cli.terminal import progress_bar
from composer_replication.errors import InputError, MissingError
from composer_replication.records import SandboxSpec
from composer_replication.sandbox.acceptance import EVERYTHING
from composer_replication.sandbox.folders import copy_file, door_in
from composer_replication.sandbox.process_folder import process_folder

_SELFTEST_FAILED = 3


def run_selftest(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Try every guard; where some were given up, the result names them, and ``ok`` is about the others."""
    sandbox.accept(args.accepted)
    backend = sandbox.choose_backend(args.backend)
    works = backend.is_available()
    if not works.ok:  # one sentence instead of a list of tests that cannot be tried
        raise MissingError("CR0301", works.detail, where=backend.name, fix=works.fix)
    with progress_bar(quiet=args.quiet) as report:
        checks, without = sandbox.run_selftest(backend, progress=report), sandbox.accepted()
    is_ok = all(check.ok or check.name in without or EVERYTHING in without for check in checks)
    result = {"backend": backend.name, "ok": is_ok, "checks": [asdict(check) for check in checks]}
    return {**result, **given_up()}, 0 if is_ok else _SELFTEST_FAILED


def run_exec(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    sandbox.accept(args.accepted)
    backend = sandbox.choose_backend(args.backend)
    with TemporaryDirectory(dir=process_folder(), ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        _copy(args.tree, tree)
        with sandbox.open_sandbox(SandboxSpec(tree), backend) as jail:
            done = jail.exec(args.command, timeout_seconds=args.timeout)
    told = ("exit_code", "stdout", "stderr", "timed_out", "out_of_memory", "truncated")
    return {**{name: getattr(done, name) for name in told}, **given_up()}, 0


def _copy(source: Path | None, tree: Path) -> None:
    if source is None:
        tree.mkdir()
        return
    if not source.is_dir():
        raise InputError("CR0304", "the tree is not a folder.", where=str(source), fix="--tree FOLDER")
    ours = process_folder().resolve()  # in the temporary folder, which may lie in the tree
    try:
        if door := door_in(source):
            why, fix = f"the tree cannot be handed over: {door}.", "take it out of the folder"
            raise InputError("CR0304", why, where=str(source), fix=fix)
        how: dict[str, Any] = {"symlinks": True, "copy_function": copy_file}
        how["ignore"] = lambda folder, _: [ours.name] if Path(folder) == ours.parent else []
        shutil.copytree(source.resolve(), tree, **how)
    except (OSError, RecursionError) as error:  # shutil.Error is an OSError with a list of problems
        problem = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
        why = f"the tree cannot be copied: {str(problem)[:300]}."
        raise InputError("CR0304", why, where=str(source)) from error


def render_selftest(result: dict[str, Any]) -> str:
    lines = [f"{'ok  ' if row['ok'] else 'FAIL'} {row['name']}: {row['detail']}" for row in result["checks"]]
    verdict = "holds" if result["ok"] else "does NOT hold"
    if result["ok"] and not all(row["ok"] for row in result["checks"]):
        verdict = "does NOT hold, as was accepted"
    return "\n".join([*lines, f"The sandbox {result['backend']} {verdict}.", *isolation_lines(result)])


def render_exec(result: dict[str, Any]) -> str:
    parts = [result["stdout"].rstrip("\n"), result["stderr"].rstrip("\n")]
    ending = "timed out" if result["timed_out"] else f"exit code {result['exit_code']}"
    ending += ", output cut" if result["truncated"] else ""
    return "\n".join([*(part for part in parts if part), f"[{ending}]", *isolation_lines(result)])
