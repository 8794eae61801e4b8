"""Pickles calls the same way on every machine. Runs inside the sandbox; its text is sent along.

cloudpickle's text comes with the request and becomes a module of a name of its own: the
task's environment needs no cloudpickle, and one that it has stays as it is.
"""

import collections
import io
import os
import sys
import types
from typing import Any

MODULE = "composer_call_pickle"
"""The name under which pickles refer to cloudpickle's functions."""


def make_dumps(root, max_bytes):
    """A function that pickles by cloudpickle, without paths and up to ``max_bytes``.

    It raises a ValueError, or what the value's own pickling raises.
    """
    module: Any = sys.modules[MODULE]
    module._get_or_create_tracker_id = lambda _class: None  # it would draw numbers of classes at random
    home = os.fsencode(root)

    def reduce_code(code):
        return module._code_reduce(code.replace(co_filename="<recorded>"))

    class Pickler(module.Pickler):  # type: ignore[misc]
        # A class attribute: the pickler reads it while it is made.
        dispatch_table = collections.ChainMap({types.CodeType: reduce_code}, module.Pickler.dispatch_table)  # noqa: RUF012

        def _function_getnewargs(self, func):
            made = super()._function_getnewargs(func)
            made[1].pop("__file__", None)
            made[1].pop("__path__", None)
            return made

    class Bounded(io.BytesIO):
        def write(self, data):
            if self.tell() + len(data) > max_bytes:
                raise ValueError("too large")
            return super().write(data)

    def dumps(value):
        with Bounded() as file:
            Pickler(file, protocol=4).dump(value)
            data = file.getvalue()
        if home in data:
            raise ValueError("it holds a path of this process")
        return data

    return dumps
