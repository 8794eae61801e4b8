"""Pickles calls the same way on every machine. Runs inside the sandbox; its text is sent along.

cloudpickle's text comes with the request and becomes a module of a name of its own: the
task's environment needs no cloudpickle, and one that it has stays as it is.
"""

import collections
import hashlib
import io
import os
import sys
import types
import weakref
from typing import Any

MODULE = "composer_call_pickle"
"""The name under which pickles refer to cloudpickle's functions."""


class TooLarge(Exception):
    """The pickle is larger than allowed."""


class NotPortable(Exception):
    """The pickle holds something of this process, such as a path of its tree."""


def load_cloudpickle(source):
    """Make cloudpickle from its text, with names for classes that do not change from run to run."""
    module: Any = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    exec(compile(source, MODULE, "exec"), module.__dict__)
    # Whoever pickles for several functions gives each a number here: what the pickles of one hold
    # must not hang on which others are recorded in the same run.
    module.counting_for = None
    numbers: collections.Counter[tuple[Any, str]] = collections.Counter()
    ids: dict[Any, Any] = {}

    def tracker_id(class_def):
        with module._DYNAMIC_CLASS_TRACKER_LOCK:
            own = ids.setdefault(module.counting_for, weakref.WeakKeyDictionary())
            known = own if module.counting_for is not None else module._DYNAMIC_CLASS_TRACKER_BY_CLASS
            found = known.get(class_def)
            if found is None:
                # cloudpickle draws a uuid; the how-manieth class of that name is as distinct.
                name = f"{class_def.__module__}.{class_def.__qualname__}"
                numbers[module.counting_for, name] += 1
                number = numbers[module.counting_for, name]
                found = hashlib.sha256(f"{name}#{number}".encode()).hexdigest()[:32]
                own[class_def] = found
                module._DYNAMIC_CLASS_TRACKER_BY_CLASS[class_def] = found
                module._DYNAMIC_CLASS_TRACKER_BY_ID[found] = class_def
            return found

    module._get_or_create_tracker_id = tracker_id
    return module


def make_dumps(module, root, max_bytes):
    """A function that pickles by cloudpickle, without paths and up to ``max_bytes``.

    It raises ``TooLarge``, ``NotPortable``, or what the value's own pickling raises.
    """
    home = os.fsencode(root)

    def reduce_code(code):
        return module._code_reduce(code.replace(co_filename="<recorded>"))

    class Pickler(module.Pickler):  # type: ignore[misc, name-defined]
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
                raise TooLarge
            return super().write(data)

    def dumps(value):
        with Bounded() as file:
            Pickler(file, protocol=4).dump(value)
            data = file.getvalue()
        if home in data:
            raise NotPortable
        return data

    return dumps
