"""Runs inside the sandbox, given as ``python -c``: hands a request to one of the programs that came with it.

Not imported by the package and never placed in a tree. ``twin_player``, ``twin_recorder`` and ``inside_search`` are such programs.
"""

import json
import os
import sys
import types


def make_channel():
    """Standard output under a private descriptor; what the tree prints goes to standard error."""
    descriptor = os.dup(1)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.read())
    nonce, dump, write = request.pop("nonce"), json.dumps, os.write

    def send(event, **fields):
        line = "\n" + dump({"nonce": nonce, "event": event, **fields}) + "\n"
        data = line.encode("utf-8", "backslashreplace")
        while data:
            data = data[write(descriptor, data) :]

    return request, send


def main():
    """Make the modules that came as text importable under their own names, and run the one that is asked for."""
    request, send = make_channel()
    for name, source in request["sources"]:
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
    sys.modules[request["program"]].main(request, send)


main()
