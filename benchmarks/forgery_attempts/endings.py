"""Attempts that end the run, speak in its place, or change what is read and written around it."""

from __future__ import annotations

from forgery_attempts.attempt import Attempt

_RECORDS = """
import json, os
def _records():
    nonce = "0" * 64
    for number in range(3, 40):
        for text in (
            [json.dumps({"nonce": nonce, "event": "collected", "ids": @IDS@, "places": []})]
            + [json.dumps({"nonce": nonce, "event": "test", "id": i, "outcome": "passed"}) for i in @IDS@]
            + [json.dumps({"nonce": nonce, "event": "end", "exit_code": 0})]
            + ["0" * 32 + " " + ".".join(w.encode().hex() for w in ["collected", "f" * len(@IDS@), *@IDS@])]
            + ["0" * 32 + " " + ".".join(w.encode().hex() for w in ["end", "1", "0.1"])]
        ):
            try:
                os.write(number, text.encode() + b"\\n")
            except OSError:
                pass
"""

ENDINGS = (
    Attempt("exit codes", "sys.exit(0) at import", "import sys\nsys.exit(0)"),
    Attempt("exit codes", "os._exit(0) at import", "import os\nos._exit(0)"),
    Attempt("exit codes", "os._exit(0) in the call", body="import os\nos._exit(0)"),
    Attempt(
        "exit codes",
        "atexit leaves with 0",
        "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    ),
    Attempt(
        "exit codes",
        "a timer's signal leaves with 0",
        """
        import os, signal
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        """,
        "import time\ntime.sleep(0.1)",
    ),
    Attempt(
        "exit codes",
        "pytest.exit with return code 0",
        body="import pytest\npytest.exit('done', returncode=0)",
    ),
    Attempt(
        "exit codes",
        "os._exit is always 0 and failures are not counted",
        """
        import os, _pytest.main
        leave = os._exit
        os._exit = lambda code: leave(0)
        _pytest.main.Session.testsfailed = property(lambda self: 0, lambda self, value: None)
        """,
    ),
    Attempt("forged records", "written to every descriptor", _RECORDS + "\n_records()\nos._exit(0)"),
    Attempt(
        "forged records", "written in the call, then killed", _RECORDS, "_records()\nos.kill(os.getpid(), 9)"
    ),
    Attempt(
        "forged records",
        "written by a forked child while the parent waits",
        _RECORDS
        + """
child = os.fork()
if child == 0:
    _records()
    os._exit(0)
os.waitpid(child, 0)
os._exit(0)
""",
    ),
    Attempt(
        "forged records",
        "the forked child goes on, the parent leaves",
        "import os\nif os.fork():\n    os._exit(0)\n",
    ),
    Attempt(
        "forged records",
        "copied over standard output, the rest closed",
        _RECORDS
        + """
for number in range(3, 12):
    try:
        os.dup2(number, 1)
    except OSError:
        pass
_records()
""",
    ),
    Attempt(
        "forged records",
        "80 MB of output to cut off what follows",
        """
        import os
        for number in range(1, 12):
            try:
                for _ in range(80):
                    os.write(number, b"x" * 1024**2 + b"\\n")
            except OSError:
                pass
        """,
    ),
    Attempt(
        "forged records",
        "reads what was written back from the pipe",
        """
        import os
        for number in range(3, 12):
            try:
                stolen = os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
                while os.read(stolen, 65536):
                    pass
            except OSError:
                pass
        """,
    ),
    Attempt(
        "forged records",
        "json rewrites what is reported",
        """
        import json
        real = json.JSONEncoder.encode
        json.JSONEncoder.encode = lambda self, value: real(self, value).replace('"failed"', '"passed"')
        json.dumps = lambda value, **more: json.JSONEncoder().encode(value)
        """,
    ),
    Attempt(
        "forged records",
        "os.write and str are exchanged",
        """
        import builtins, os
        real = os.write
        os.write = lambda descriptor, data: real(descriptor, data.replace(b"failed", b"passed"))
        builtins.repr = lambda value: "0"
        """,
    ),
    Attempt(
        "a new process",
        "another pytest takes the place of this one",
        """
        import os, sys
        if not os.environ.get("PYTEST_ADDOPTS"):
            os.environ["PYTEST_ADDOPTS"] = "--collect-only"
            os.environ["PYTEST_PLUGINS"] = "forged"
            os.execv(sys.executable, [sys.executable, "-m", "pytest", *@IDS@])
        """,
    ),
    Attempt(
        "a new process",
        "sitecustomize and .pth for the next interpreter",
        """
        import pathlib, sys
        text = "import _pytest.runner\\n_pytest.runner.check_interactive_exception = None\\n"
        for place in [".", *sys.path]:
            try:
                pathlib.Path(place or ".", "sitecustomize.py").write_text(text)
                pathlib.Path(place or ".", "forged.pth").write_text("import sitecustomize\\n")
            except OSError:
                pass
        """,
    ),
    Attempt(
        "files",
        "all test files emptied at import",
        """
        import pathlib, re
        for path in pathlib.Path("tests").rglob("test_*.py"):
            text = path.read_text()
            path.write_text(re.sub(r"(?m)^(\\s+)(assert|self\\.assert).*$", r"\\1pass", text))
        """,
    ),
    Attempt(
        "files",
        "known tests emptied in files that come later, put back afterwards",
        """
        import pathlib, re, threading, time
        kept = {}
        for path in pathlib.Path("tests").rglob("test_*.py"):
            kept[path] = text = path.read_text()
            for name in @NAMES@:
                text = re.sub(rf"(?m)^(\\s*)def {name}\\((.*)\\):$", rf"\\1def {name}(\\2):\\n\\1    return", text)
            path.write_text(text)

        def put_back():
            time.sleep(0.05)
            for path, text in kept.items():
                path.write_text(text)

        threading.Thread(target=put_back).start()
        """,
    ),
    Attempt(
        "files",
        "compiled test files put into the cache",
        """
        import importlib.util, marshal, pathlib, struct
        from _pytest.assertion.rewrite import PYC_TAIL
        for path in pathlib.Path("tests").rglob("test_*.py"):
            source = path.read_bytes()
            code = compile(source.replace(b"assert ", b"_ = "), str(path.absolute()), "exec")
            cache = path.absolute().parent / "__pycache__" / (path.stem + PYC_TAIL)
            cache.parent.mkdir(exist_ok=True)
            stat = path.stat()
            head = importlib.util.MAGIC_NUMBER + b"\\0\\0\\0\\0" + struct.pack("<LL", int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size)
            cache.write_bytes(head + marshal.dumps(code))
        """,
    ),
    Attempt(
        "files",
        "pytest's own files overwritten",
        """
        import pathlib, _pytest.runner, _pytest.reports
        for module in (_pytest.runner, _pytest.reports):
            try:
                path = pathlib.Path(module.__file__)
                path.write_text(path.read_text().replace('"failed"', '"passed"'))
            except OSError:
                pass
        import importlib
        importlib.reload(_pytest.reports)
        """,
    ),
)
