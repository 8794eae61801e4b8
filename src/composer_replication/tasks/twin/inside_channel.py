"""Runs inside the sandbox behind ``pytest_runner.py``: hands a request to one of the programs that came with it.

Not imported by the package and never placed in a tree. ``twin_player``, ``twin_recorder`` and ``inside_search`` are such programs.
"""

import json
import sys
import types


def hand_over():
    """Make the modules that came as text importable under their own names, and run the one that is asked for."""
    descriptor = private_stdout()  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    request = json.loads(sys.stdin.buffer.read())
    send = make_send(descriptor, request.pop("nonce"))  # type: ignore[name-defined]  # noqa: F821  of pytest_runner
    for name, source in request["sources"]:
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
    sys.modules[request["program"]].main(request, send)


hand_over()
