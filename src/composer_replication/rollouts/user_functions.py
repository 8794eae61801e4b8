"""Functions of the user, named by dotted path: imported, tried on their arguments, their errors in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


class UnusableFunctionError(ValueError):
    """What is wrong with it, as the end of a sentence that begins with its name."""


def import_function(dotted: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Import ``package.module:function`` and see that it takes so many arguments; it is not called.

    Raises:
        UnusableFunctionError: it cannot be imported, is not callable, or takes other arguments.
    """
    module_name, _, name = dotted.partition(":")
    try:
        function: Any = getattr(import_module(module_name), name)
    except Exception as error:  # the user's module may raise anything
        raise UnusableFunctionError(f"cannot be imported: {one_line(error)}") from error
    if not callable(function):
        raise UnusableFunctionError("is not callable")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UnusableFunctionError(f"does not take ({', '.join(arguments)}): {error}") from error
    except ValueError:  # written in C, without a signature to read: its first call will tell
        pass
    return function  # type: ignore[no-any-return]  # what it gives is checked where it is called


def one_line(error: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')[:200]}" if lines else type(error).__name__
