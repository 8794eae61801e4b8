"""Runs inside the sandbox behind ``pytest_runner.py``: which functions of the tree are called while the suite runs.

Not imported by the package and never placed in a tree.
"""

import os
import sys

TOOL = 4  # no debugger, coverage or profiler uses this number of sys.monitoring


class CallRecorder:
    """Notes what is called from now on, in all threads of this process."""

    def __init__(self, root):
        self.prefix = root + os.sep
        self.codes = {}  # by identity, for to hash one is slow
        self.profiler = None
        if monitoring := getattr(sys, "monitoring", None):  # of Python 3.12
            monitoring.use_tool_id(TOOL, "composer-rl")
            start = monitoring.events.PY_START
            monitoring.register_callback(TOOL, start, lambda code, _: self.add(code) or monitoring.DISABLE)
            monitoring.set_events(TOOL, start)
            return
        import _lsprof
        import threading

        threading.setprofile(lambda frame, event, _: self.add(frame.f_code) if event == "call" else None)
        self.profiler = _lsprof.Profiler(builtins=False, subcalls=False)
        self.profiler.enable()

    def add(self, code):
        self.codes[id(code)] = code

    def called(self):
        """File and first line of each function; None where a test took the profiler away, and nobody knows."""
        if self.profiler is not None:
            current: object = sys.getprofile()
            if current is not self.profiler:
                return None
            self.profiler.disable()
            for entry in self.profiler.getstats():
                if not isinstance(entry.code, str):
                    self.add(entry.code)
        ours = [code for code in self.codes.values() if code.co_filename.startswith(self.prefix)]
        return sorted(
            {
                (code.co_filename.removeprefix(self.prefix), code.co_firstlineno)
                for code in ours
                if code.co_name != "<module>"
            }
        )
