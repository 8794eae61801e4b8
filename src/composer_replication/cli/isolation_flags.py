"""``--backend`` and ``--i-accept-no-isolation`` of the verbs that run code that nobody has read."""

from __future__ import annotations

import argparse
from typing import Any

_BACKEND_HELP = "sandbox backend (default: the first that works here)"
_ACCEPT_HELP = (
    "do without any isolation, which the backend none needs: what the repository runs can do whatever you can; a name "
    "after it is that of one guard, as in composer-rl sandbox"
)


def add_isolation_flags(parser: argparse.ArgumentParser) -> None:
    """Add both; a verb begins with ``chosen_backend``."""
    parser.add_argument("--backend", metavar="NAME", help=_BACKEND_HELP)
    add_acceptance_flag(parser, _ACCEPT_HELP)


def add_acceptance_flag(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add ``--i-accept-no-isolation [GUARD]``: the names that were given up are in ``accepted``."""
    parser.add_argument(
        "--i-accept-no-isolation",
        metavar="GUARD",
        nargs="?",
        action="append",
        const="everything",
        default=[],
        dest="accepted",
        help=help_text,
    )


def chosen_backend(args: argparse.Namespace) -> str:
    """The name of the backend that is used, known before anything is fetched, read or written.

    Raises:
        UsageError: an unknown backend (CR0305), ``none`` without acceptance (CR0340), an unknown guard (CR0340).
        MissingError: no sandbox works here (CR0301).
    """
    from composer_replication.sandbox import accept, choose_backend

    accept(args.accepted)
    return choose_backend(args.backend).name


def refuse_without_jail(backend: str, why: str) -> None:
    """Refuse the backend that is no jail where even an acceptance is not enough.

    Raises:
        UsageError: it is ``none`` (CR0340).
    """
    from composer_replication.errors import UsageError
    from composer_replication.sandbox.acceptance import WITHOUT_ISOLATION

    if backend == WITHOUT_ISOLATION:
        raise UsageError(
            "CR0340",
            f"the backend {backend!r} cannot be used for this: {why}.",
            where="--backend",
            fix="leave --backend out, or name a backend that isolates: composer-rl sandbox selftest --backend NAME",
        )


def given_up() -> dict[str, object]:
    """Said in every result of a process that does without something."""
    from composer_replication.sandbox import accepted

    names = list(accepted())
    return {"accepted_no_isolation": names} if names else {}


def isolation_lines(result: dict[str, Any]) -> list[str]:
    """What a person reads of it."""
    names = result.get("accepted_no_isolation", [])
    return [f"Accepted to do without isolation: {', '.join(names)}."] if names else []
