"""What a verb was given: its arguments, as ``command_line.toml`` declares them, and its place among the processes of a launch."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from composer_replication.errors import UsageError, needs_extra

_TOLD = {"help", "description", "usage"}


@cache
def _texts() -> dict[str, str]:
    """``command_line.toml`` as text, verb by verb: to parse all of it takes as long as the rest of ``--help``."""
    text = Path(__file__).with_name("command_line.toml").read_text(encoding="utf-8")
    parts = re.split(r"(?m)^(?=\[[a-z-]+\]$)", text)[1:]
    return {part[1 : part.index("]")]: part for part in parts}


def verb_helps() -> dict[str, str]:
    """The line of each verb in ``--help``, which is the second of its table."""
    lines = {name: text.split("\n")[1] for name, text in _texts().items() if name != "shared"}
    return {name: line.removeprefix('help = "').removesuffix('"') for name, line in lines.items()}


@cache
def _declared(name: str) -> dict[str, Any]:
    """The table of a verb, or ``shared``."""
    import tomllib

    return dict(tomllib.loads(_texts()[name])[name])


def add_verb(subparsers: Any, name: str, table: Mapping[str, Any] | None = None, group: str = "") -> None:
    """Add a verb to the parser, declared as the file does it: its arguments, or the sub-verbs of which it is the ``group``."""
    table = _declared(name) if table is None else table
    told = {"description": table["help"], **{key: table[key] for key in _TOLD & table.keys()}}
    parser = subparsers.add_parser(name, **told)
    if "arguments" not in table:
        verbs = parser.add_subparsers(dest="sub_verb", metavar="VERB", required=True, title="verbs")
        for word, inner in table.items():
            if word not in _TOLD:
                add_verb(verbs, word, inner, name)
        return
    add_output(parser)
    add_arguments(parser, table["arguments"])
    run = table.get("run") or (f"{group}_verb:run_{name}" if group else f"{name.replace('-', '_')}_verb:run")
    parser.set_defaults(run=f"{__package__}.{run}")


def add_output(parser: argparse.ArgumentParser) -> None:
    """What may stand before a verb or behind it: a default of the verb's parser would reset what stands before."""
    options: Any = {"action": "store_true", "default": argparse.SUPPRESS}
    parser.add_argument("--json", help="print exactly one JSON object on standard output", **options)
    parser.add_argument("--quiet", help="no progress on standard error", **options)


def add_arguments(parser: argparse.ArgumentParser, rows: list[Any]) -> None:
    """Add arguments as the file writes them; its first lines say what stands in a row."""
    for row in rows:
        if isinstance(row, str):
            add_arguments(parser, _declared("shared")[row])
            continue
        usage, text, options = row[0], row[1], dict(row[2]) if len(row) > 2 else {}
        name, _, metavar = usage.partition(" ")
        if metavar:
            options["metavar"] = metavar
        elif "choices" not in options:
            options["action"] = "store_true"
        if "type" in options:
            options["type"] = _type_of(options["type"])
        parser.add_argument(name, help=text, **options)


def _type_of(kind: str) -> Callable[[str], Any]:
    """The function that reads a type of the file, as its first lines have them; infinity and NaN are no number here."""
    simple: dict[str, Callable[[str], Any]] = {"path": Path, "int": int, "float": float}
    simple |= {"named": _named, "price": price}
    if kind in simple:
        return simple[kind]
    read: Callable[[str], float] = float
    least, most = 0.0 if kind == ">=0" else math.ulp(0.0), sys.float_info.max
    wanted = f"a number {'of at least' if kind == '>=0' else 'above'} 0"
    if ".." in kind:
        read = int
        least, most = (int(bound or 2**32 - 1) for bound in kind.split(".."))
        wanted = f"a whole number in {least} … {most}"

    def convert(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if least <= (value := read(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return convert


def _named(text: str) -> tuple[str, str]:
    name, is_named, value = text.partition("=")
    if not is_named or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=…")
    return name, value


def price(text: str) -> tuple[str, tuple[float, float]]:
    """Of ``NAME=IN/OUT``."""
    name, value = _named(text)
    dollars_in, dollars_out = map(_type_of(">=0"), value.split("/"))
    return name, (dollars_in, dollars_out)


def refuse_unwritable(path: Path) -> None:
    """Refuse a folder that cannot be written before any work is done for it."""
    import tempfile  # not needed for --help

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

    return {"accepted_no_isolation": list(accepted())} if accepted() else {}


def isolation_lines(result: dict[str, Any]) -> list[str]:
    """What a person reads of it."""
    names = result.get("accepted_no_isolation", [])
    return [f"Accepted to do without isolation: {', '.join(names)}."] if names else []


def check_cluster(address: str, purpose: str) -> None:
    """What can be said of a cluster before anything is built or loaded; ``purpose`` begins the sentence of a missing package."""
    with needs_extra("ray", purpose):
        from composer_replication.tasks.workers.ray_cluster import check_address
    check_address(address)


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Which process of the launch this is, from 0; the first one alone writes the run folder, and speaks."""
    rank = environment.get("RANK", "")
    return int(rank) if launched_size(environment) > 1 and rank.isdecimal() else 0


def launched_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the launch has; 1 where this one is alone."""
    size = environment.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def file_part() -> str:
    """What the names of this process's own files have before their ending: nothing for the first."""
    rank = launched_rank()
    return f"-process-{rank}" if rank else ""


def shards_weights(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``accelerate launch`` was told to spread the weights over the processes."""
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":  # a file of DeepSpeed's own is read later
        return environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    return environment.get("ACCELERATE_USE_FSDP") == "true"
