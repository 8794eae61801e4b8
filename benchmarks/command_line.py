"""The options of a benchmark, by their defaults, which its help shows; what each is for stands in the docstring of its script."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any


def options(about: str | None, words: Sequence[str] | None = None, /, **defaults: Any) -> Namespace:
    """``--name`` of the type of its default: a switch for False, several of a list, one of a tuple, of which the first is the default."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        how: dict[str, Any] = {"type": type(default), "default": default, "help": "default: %(default)s"}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, tuple):
            how = {"choices": default, "default": default[0], "help": "default: %(default)s"}
        elif isinstance(default, list):
            kind, shown = type(default[0]) if default else str, " ".join(map(str, default)) or "none"
            how = {"type": kind, "action": "extend", "nargs": "+", "help": f"default: {shown}"}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    given = vars(parser.parse_args(words))
    return Namespace(**{name: defaults[name] if value is None else value for name, value in given.items()})
