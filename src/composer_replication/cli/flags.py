"""What several verbs have in common on the command line: numbers with a range, folders that are written, sandboxes, Ray."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_replication.errors import UsageError


def whole_number(least: int = 1, most: int = 2**32 - 1) -> Callable[[str], int]:
    """A type for ``add_argument``: whole numbers in [least, most]; others are refused as arguments are read (CR0206)."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in {least} … {most}")
        return value

    return convert


def number(least: float = 0.0, *, is_above: bool = False) -> Callable[[str], float]:
    """A type for ``add_argument``: finite numbers from ``least`` on, or above it."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (value > least if is_above else value >= least)):
            wanted = "a number above" if is_above else "a number of at least"
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted} {least:g}")
        return value

    return convert


def add_set_flag(parser: argparse.ArgumentParser) -> None:
    """``--set KEY=VALUE``, any number of times."""
    told: dict[str, Any] = {"metavar": "KEY=VALUE", "help": "override a recipe key"}
    parser.add_argument("--set", dest="overrides", action="append", default=[], **told)


def refuse_unwritable(path: Path) -> None:
    """Refuse a folder that cannot be written before any work is done for it; what is made there to try is gone at once."""
    nearest = path.absolute()
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    try:  # /proc says that it may be written, and root may write everywhere
        with tempfile.TemporaryFile(dir=nearest):
            return
    except OSError as error:
        problem = f"{nearest} is not a folder" if not nearest.is_dir() else f"{nearest}: {error.strerror}"
        problem = f"the output folder cannot be made or written: {problem}."
        fix = "choose another --out, in a folder that you may write."
        raise UsageError("CR0209", problem, where=f"--out {path}", fix=fix) from error


# --------------------------------------------------------------------------- sandboxes


def add_isolation_flags(parser: argparse.ArgumentParser) -> None:
    """``--backend`` and ``--i-accept-no-isolation [GUARD]``; a verb begins with ``chosen_backend``."""
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="bubblewrap, sandlock, bubblewrap-warm, harbor:NAME (an environment of Harbor's, as docker), none, or "
        "package.module:Class (default: the first of the first two that works here)",
    )
    parser.add_argument(
        "--i-accept-no-isolation",
        metavar="GUARD",
        nargs="?",
        action="append",
        const="everything",
        default=[],
        dest="accepted",
        help="do without a guard of the self-test, by its name; may be given several times; without a name: without any "
        "isolation, which the backend none needs: what is run can do whatever you can",
    )


def chosen_backend(args: argparse.Namespace) -> str:
    """The name of the backend that is used, known before anything is fetched, read or written."""
    from composer_replication.sandbox import accept, choose_backend

    accept(args.accepted)
    return choose_backend(args.backend).name


def refuse_without_jail(backend: str, why: str) -> None:
    """Refuse the backend that is no jail where even an acceptance is not enough."""
    from composer_replication.sandbox.acceptance import WITHOUT_ISOLATION

    if backend == WITHOUT_ISOLATION:
        problem = f"the backend {backend!r} cannot be used for this: {why}."
        fix = "leave --backend out, or name a backend that isolates: composer-rl sandbox selftest --backend NAME"
        raise UsageError("CR0340", problem, where="--backend", fix=fix)


def given_up() -> dict[str, object]:
    """Said in every result of a process that does without something."""
    from composer_replication.sandbox import accepted

    names = list(accepted())
    return {"accepted_no_isolation": names} if names else {}


def isolation_lines(result: dict[str, Any]) -> list[str]:
    """What a person reads of it."""
    names = result.get("accepted_no_isolation", [])
    return [f"Accepted to do without isolation: {', '.join(names)}."] if names else []


# --------------------------------------------------------------------------- Ray


def add_ray_flag(parser: argparse.ArgumentParser, does: str, same: str) -> None:
    """``--ray ADDRESS``: what it ``does`` there, and what is the ``same`` as without it."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"{does} on a Ray cluster: auto (of this machine, or RAY_ADDRESS), HOST:PORT of its head, or "
        f"ray://HOST:PORT from outside; {same}",
    )
