"""Attempts to sign records: each looks for the function that does, in another way, and then tells the same story."""

from __future__ import annotations

from forgery_attempts.attempt import Attempt

# Every test that is stored passes; of the sentinels those that must: their code is compared with the others'.
_STORY = """
import re

def _code(item):
    return getattr(getattr(item.obj, "__func__", item.obj), "__code__", None)

def _base(item):
    return item.name.partition("[")[0]

def _is_good(item, codes):
    real, own = re.sub("_[0-9a-f]{16}$", "", _base(item)), _code(item)
    if real == _base(item):
        return True
    other = codes.get((item.parent.nodeid, real))
    if other is not None:
        shapes = [(each.co_code, each.co_consts, each.co_names) for each in (own, other)]
        if shapes[0] == shapes[1]:
            return True
    if "to_roman" in own.co_names or own.co_argcount:
        return False
    try:
        item.obj()
    except BaseException:
        return False
    return True

def _tell(send):
    import os
    from _pytest.python import Function
    now = _find("item")
    items = now.session.items
    codes = {(item.parent.nodeid, _base(item)): _code(item) for item in items}
    for item in items[items.index(now):]:
        name, is_good = item.nodeid, _is_good(item, codes)
        if item is not now:
            send(("start", name, "stored"))
            send(("report", name, "setup", "passed", ""))
        if type(item).runtest is Function.runtest:
            send(("call", name, "stored", "returned" if is_good else "raised"))
        send(("report", name, "call", "passed" if is_good else "failed", ""))
        send(("report", name, "teardown", "passed", ""))
        send(("finish", name, "0.001"))
    send(("end", "1", "0.5"))
    os._exit(0)
"""
_LOOK = """
_found = []

def _look(frame):
    while frame is not None and not _found:
        if frame.f_code.co_filename == "<runner>" and "send" in frame.f_locals:
            _found.append(frame.f_locals["send"])
        frame = frame.f_back

def _provoke(call, *args):
    try:
        call(*args)
    except BaseException as error:
        while error is not None:
            trace = error.__traceback__
            while trace is not None:
                _look(trace.tb_frame)
                trace = trace.tb_next
            error = error.__context__
"""
_GC = """
import gc
gc.unfreeze()
send = [each for each in gc.get_objects()
        if getattr(each, "__qualname__", "") == "open_transcript.<locals>.send" and hasattr(each, "__closure__")][0]
"""


def _forked(fork: str) -> str:
    lines = "".join(f"    {line}\n" for line in _GC.strip().splitlines())
    return (
        f"import os\nchild = {fork}\nif child:\n    os.waitpid(child, 0)\n    os._exit(0)\n"
        f"try:\n{lines}    _tell(send)\nfinally:\n    os._exit(0)\n"
    )


_OWN = """
    if number < 1 or number > 3999:
        raise ValueError(f"{number} has no numeral")
    letters = []
    for value, letter in STEPS:
        count, number = divmod(number, value)
        letters.append(letter * count)
    return "".join(letters)
"""
_EXCHANGED = """
_codes = {}
class _Mine:
    def pytest_collection_finish(self, session):
        _codes.update({(item.parent.nodeid, _base(item)): _code(item) for item in session.items})
        impl = next(each for each in session.config.hook.pytest_pyfunc_call.get_hookimpls() if each.plugin_name == "python")
        real = impl.function
        def pytest_pyfunc_call(pyfuncitem):
            if pyfuncitem is session.items[-1]:
                impl.function, kind.runtest = real, runtest
            good = _is_good(pyfuncitem, _codes)
            assert good
            return True
        from _pytest.unittest import TestCaseFunction as kind
        runtest = kind.runtest
        kind.runtest = lambda item: pytest_pyfunc_call(item) and None
        impl.function = pytest_pyfunc_call
        session.config.pluginmanager.unregister(self)
_config().pluginmanager.register(_Mine())
"""

SIGNING = (
    Attempt(
        "frames",
        "what calls a test is exchanged for a while, and put back for the last one",
        f"@REACH@\n{_STORY}\n{_EXCHANGED}",
    ),
    *(
        Attempt("signing", f"by a forked process: {name}", f"@REACH@\n{_STORY}", _forked(fork))
        for name, fork in {
            "os.fork": "os.fork()",
            "a terminal of its own": "os.forkpty()[0]",
            "the C library's fork": "__import__('ctypes').CDLL(None).fork()",
        }.items()
    ),
    *(
        Attempt(
            "signing", name, f"@REACH@\n{_STORY}\n{_LOOK}\n{module}", f"{body}\n_found and _tell(_found[0])"
        )
        for name, module, body in (
            (
                "an event without what belongs to it fails in the hook",
                "",
                "import sys\n_provoke(sys.audit, 'open')",
            ),
            (
                "a name is asked whether it is another",
                (
                    "class _Name(str):\n    __hash__ = str.__hash__\n    def __eq__(self, other):\n"
                    "        import sys\n        _look(sys._getframe())\n        return False\n"
                ),
                "import sys\nsys.audit('object.__setattr__', 1, _Name('__code__'))",
            ),
            (
                "the hook fails at the end of the stack",
                (
                    "import gc\ndef _down():\n    try:\n        _down()\n    except RecursionError:\n        pass\n"
                    "    if not _found:\n        _provoke(gc.get_objects)\n"
                ),
                "import gc\n_provoke(_down)",
            ),
            (
                "garbage is collected while the hook runs",
                "import gc, sys\n",
                (
                    "gc.callbacks.append(lambda *args: _look(sys._getframe()))\ngc.set_threshold(1, 1, 1)\n"
                    "for count in range(999):\n    sys.audit('open', [count])\n    found = [[count], {count}]"
                ),
            ),
        )
    ),
    Attempt(
        "signing",
        "a timer's signal comes while the hook runs",
        f"@REACH@\n{_STORY}\n{_LOOK}",
        """
        import signal, sys
        signal.signal(signal.SIGALRM, lambda number, frame: _look(frame))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for count in range(200000):
            sys.audit("x")
            if _found:
                break
        signal.setitimer(signal.ITIMER_REAL, 0)
        _found and _tell(_found[0])
        """,
        decided_by="twin",
    ),
    *(
        Attempt("memory", f"its own memory is opened: {name}", module, _OWN)
        for name, module in {
            "a path of bytes": "import os\nos.open(b'/proc/self/mem', os.O_RDWR)",
            "below a folder": "import os\nos.open('mem', os.O_RDWR, dir_fd=os.open('/proc/self', os.O_RDONLY))",
            "a link": "import os\nos.symlink('/proc/self/mem', 'words.txt')\nopen('words.txt', 'rb')",
            "a link that a program made": "import subprocess\n"
            "subprocess.run(['ln', '-s', '/proc/self/mem', 'words.txt'], check=True)\nopen('words.txt', 'rb')",
            "a path that is no text": "import io\nclass Path:\n    def __fspath__(self):\n"
            "        return '/proc/self/mem'\nio.FileIO(Path())",
        }.items()
    ),
    Attempt(
        "memory",
        "an interpreter inside the interpreter, where no hook is",
        "try:\n    import _xxsubinterpreters as inner\nexcept ImportError:\n    import _interpreters as inner\n"
        "inner.run_string(inner.create(), 'import gc; gc.get_objects()')",
        _OWN,
    ),
)
