"""The frame of ``composer-rl``: parse, run one verb, print one result, map every error to its exit code.

``command_line.toml`` declares the verbs. The function that a verb names takes the parsed arguments and returns
``(result, exit code)``; the one beside it, with ``render`` for ``run`` in its name, says the result to a person, or ``columns``
where there is none. No verb's module is imported before its own run, so that ``--help`` is instant.
Whatever a verb prints on the way goes to standard error, so that ``--json`` is exactly one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NoReturn

from composer_replication import __version__
from composer_replication.cli.flags import add_output, add_verb, launched_rank, verb_helps
from composer_replication.cli.terminal import columns, visible
from composer_replication.errors import ComposerError, UsageError

PROGRAM = "composer-rl"
VERBS = tuple(verb_helps())  # in the order in which --help lists them


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are ``UsageError`` (CR0206) and name the nearest known word."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here, where this parser's own options are known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = re.findall(r"--[a-z][a-z-]*", self.format_help())
            self._refuse(f"unknown argument {unknown[0]!r}", unknown[0], known)
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Turn argparse's own complaint into ours instead of printing usage and leaving."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is None:
            self._refuse(message)
        words = [word.strip("' ") for word in choice[2].split(",")]
        what = message.partition(":")[0].removeprefix("argument ")
        self._refuse(f"{what} {choice[1]!r} is none of {', '.join(words)}", choice[1], words)

    def _refuse(self, sentence: str, word: str = "", known: Sequence[str] = ()) -> NoReturn:
        import difflib

        near = difflib.get_close_matches(word, known, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise UsageError("CR0206", f"{sentence}.", where=self.prog, fix=f"{guess}{self.prog} --help")


def build_parser(only: str = "", *, lists_verbs: bool = False) -> argparse.ArgumentParser:
    """The parser of the whole command, of the verb ``only``, or of all verbs without their arguments, which is quick."""
    parser = CommandParser(
        prog=PROGRAM,
        description="RL post-training of coding agents on deleted features of real repositories, "
        "with a kill switch for dishonest rewards.",
        epilog="Exit codes: 0 done, 1 a bug of ours, 2 usage, 3 something is missing here (doctor tells), "
        "4 unusable input, 5 halted by the guard, 6 too little evidence or nothing to do, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    add_output(parser)
    parser.set_defaults(json=False, quiet=False)
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for name in [only] if only in VERBS else VERBS:
        add_verb(subparsers, name, {"help": verb_helps()[name], "arguments": []} if lists_verbs else None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb by the arguments after the program's name; returns the exit code.

    Errors become one sentence on standard error (with ``--json`` one object on standard output, too), never a traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    try:
        args = _parse(words)
        with _orderly_end(), contextlib.redirect_stdout(sys.stderr):
            result, exit_code = resolve_name(args.run)(args)
        text = json.dumps(result, allow_nan=False) if args.json else rendered(args.run, result)
        if args.verb == "train" and launched_rank():
            text = ""  # the first process of the launch says it
    except SystemExit as leaving:  # argparse, once it has printed --help or --version
        return _print_result("", leaving.code if isinstance(leaving.code, int) else 1)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  a fault of ours is in the crash bundle
        from composer_replication.cli.machine_troubles import known_error

        return _print_error(known_error(error, words), as_json=as_json)
    return _print_result(text, exit_code)


def rendered(run: str, result: dict[str, Any]) -> str:
    """What a person reads of the result of the function ``run``."""
    module, _, name = run.partition(":")
    say = getattr(import_module(module), name.replace("run", "render", 1), columns)
    return str(say(result))


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Inside, an order to end, or a terminal that goes away, unwinds like Ctrl-C and leaves no temporary folder behind.

    A handler of another program, or ``nohup``, stays in charge.
    """
    import signal
    import threading

    is_main = threading.current_thread() is threading.main_thread()
    orders = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    taken = [number for number in orders if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    first = next((word for word in words if not word.startswith("-")), "")
    try:
        return build_parser(first, lists_verbs=first not in VERBS).parse_args(words)
    except BrokenPipeError:  # the reader of --help has gone; not every argparse keeps that to itself
        _silence_stdout()
        raise SystemExit(0) from None


def _print_result(text: str, exit_code: int) -> int:
    try:  # a reader that has gone takes nothing from the work that is done
        if text:
            print(visible(text))
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
    return exit_code


def _print_error(error: ComposerError, *, as_json: bool) -> int:
    with contextlib.suppress(BrokenPipeError):
        line = visible(str(error)).replace("\n", "\\n")  # of a path; an error is one line
        print(line, file=sys.stderr, flush=True)
    known = {"code": error.code, "message": error.message, "where": error.where, "fix": error.fix}
    return _print_result(json.dumps({"error": known}) if as_json else "", error.exit_code)


def _silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere instead of into a closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
