"""Attempts that change functions of the test runner, of ``unittest`` or of Python."""

from __future__ import annotations

from forgery_attempts.attempt import Attempt

PATCHES = (
    Attempt(
        "patched pytest",
        "TestReport says passed",
        """
        import _pytest.reports
        real = _pytest.reports.TestReport.from_item_and_call.__func__
        def from_item_and_call(cls, item, call):
            report = real(cls, item, call)
            report.outcome, report.longrepr = "passed", None
            return report
        _pytest.reports.TestReport.from_item_and_call = classmethod(from_item_and_call)
        """,
    ),
    Attempt(
        "patched pytest",
        "TestReport says passed for the known tests",
        """
        import _pytest.reports
        real = _pytest.reports.TestReport.from_item_and_call.__func__
        def from_item_and_call(cls, item, call):
            report = real(cls, item, call)
            if item.nodeid in @IDS@:
                report.outcome, report.longrepr = "passed", None
            return report
        _pytest.reports.TestReport.from_item_and_call = classmethod(from_item_and_call)
        """,
    ),
    Attempt(
        "patched pytest",
        "the report's class has an outcome of its own",
        """
        import _pytest.reports
        _pytest.reports.TestReport.__getattribute__ = lambda self, name: (
            "passed" if name == "outcome" else False if name == "failed" else object.__getattribute__(self, name)
        )
        """,
    ),
    Attempt(
        "patched pytest",
        "CallInfo swallows exceptions",
        """
        import _pytest.runner
        real = _pytest.runner.CallInfo.from_call.__func__
        def from_call(cls, func, when, reraise=None):
            def quiet():
                try:
                    return func()
                except Exception:
                    return None
            return real(cls, quiet, when, reraise)
        _pytest.runner.CallInfo.from_call = classmethod(from_call)
        """,
    ),
    Attempt(
        "patched pytest",
        "CallInfo swallows what known tests raise, and is put back after each",
        """
        @REACH@
        import _pytest.runner
        real = vars(_pytest.runner.CallInfo)["from_call"]
        def _quiet(item):
            def from_call(cls, func, when, reraise=None):
                def quiet():
                    try:
                        return func()
                    except Exception:
                        _pytest.runner.CallInfo.from_call = real
                return real.__func__(cls, quiet, when, reraise)
            _pytest.runner.CallInfo.from_call = classmethod(from_call)
        """,
        """
        item = _find("item")
        for other in item.session.items:
            if _name(other) in @NAMES@:
                _quiet(other)
        return None
        """,
    ),
    Attempt(
        "patched pytest",
        "Function.runtest does nothing",
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None",
    ),
    Attempt(
        "patched pytest",
        "Function.runtest does nothing for tests whose code occurs twice",
        """
        import _pytest.python
        real = _pytest.python.Function.runtest
        def runtest(self):
            def key(item):
                code = getattr(item, "function", real).__code__
                return code.co_code, code.co_consts, code.co_names
            own = key(self)
            if sum(key(other) == own for other in self.session.items) < 2:
                real(self)
        _pytest.python.Function.runtest = runtest
        """,
    ),
    Attempt(
        "patched pytest",
        "pytest.raises and pytest.fail let everything through",
        """
        import contextlib, pytest
        pytest.raises = lambda *args, **kwargs: contextlib.suppress(BaseException)
        pytest.fail = lambda *args, **kwargs: None
        """,
        "raise ValueError('no numeral')",
    ),
    Attempt(
        "patched pytest",
        "pluggy drops reports that are bad",
        """
        import pluggy._hooks
        real = pluggy._hooks.HookCaller.__call__
        def call(self, **kwargs):
            report = kwargs.get("report")
            if self.name == "pytest_runtest_logreport" and report.outcome == "failed":
                report.outcome = "passed"
            return real(self, **kwargs)
        pluggy._hooks.HookCaller.__call__ = call
        """,
    ),
    Attempt(
        "patched pytest",
        "warnings instead of errors",
        """
        import _pytest.runner, warnings
        real = _pytest.runner.call_and_report
        def call_and_report(item, when, log=True, **kwargs):
            report = real(item, when, log=False, **kwargs)
            if report.failed:
                warnings.warn(str(report.longrepr))
                report.outcome = "passed"
            if log:
                item.ihook.pytest_runtest_logreport(report=report)
            return report
        _pytest.runner.call_and_report = call_and_report
        """,
    ),
    Attempt(
        "patched unittest",
        "its assertions do nothing",
        """
        import unittest
        for name in dir(unittest.TestCase):
            if name.startswith("assert") and not name.startswith(("assertRaises", "assertWarns", "assertLogs")):
                setattr(unittest.TestCase, name, lambda self, *args, **kwargs: None)
        """,
        """
        if number < 1 or number > 3999:
            raise ValueError("no numeral")
        return "x" * number
        """,
    ),
    Attempt(
        "patched unittest",
        "TestCase.run reports success",
        """
        import unittest
        def run(self, result=None):
            result.startTest(self)
            result.addSuccess(self)
            result.stopTest(self)
            return result
        unittest.TestCase.run = run
        unittest.TestCase.__call__ = lambda self, *args, **kwargs: run(self, *args, **kwargs)
        """,
    ),
    Attempt(
        "patched Python",
        "AssertionError is a skip",
        """
        import builtins, pytest
        builtins.AssertionError = pytest.skip.Exception
        """,
    ),
    Attempt(
        "patched Python",
        "isinstance, str, len and set tell what is wanted",
        """
        import builtins
        real = builtins.isinstance
        builtins.isinstance = lambda value, kind: True if kind is BaseException else real(value, kind)
        builtins.len = lambda value: 1
        builtins.bool = lambda value=None: True
        """,
    ),
    Attempt(
        "patched Python",
        "a tracing function jumps over assertions",
        """
        import sys
        def _trace(frame, event, argument):
            if "test_" not in frame.f_code.co_filename:
                return None
            def local(frame, event, argument):
                if event == "line":
                    last = max(line for _, _, line in frame.f_code.co_lines() if line)
                    try:
                        frame.f_lineno = last
                        frame.f_trace_lines = False
                    except ValueError:
                        pass
                elif event == "exception":
                    return None
                return local
            return local
        sys.settrace(_trace)
        """,
    ),
    Attempt(
        "patched Python",
        "a profile function leaves each test before it ends",
        """
        import sys, threading
        def _profile(frame, event, argument):
            if event == "return" and frame.f_code.co_name in @NAMES@ and argument is None:
                frame.f_back.f_locals["result"] = True
        sys.setprofile(_profile)
        threading.setprofile(_profile)
        """,
    ),
)
