"""Attempts through what a test runner loads: its configuration, plugins and hooks, modules, imports."""

from __future__ import annotations

from forgery_attempts.attempt import Attempt

_HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""

CONFIGURATION = (
    Attempt(
        "configuration",
        "conftest.py beside the tests and below",
        f"""
import pathlib
for folder in ("tests", "tests/later", "."):
    pathlib.Path(folder, "conftest.py").write_text({_HOOK!r})
""",
    ),
    Attempt(
        "configuration",
        "pytest.ini, tox.ini, setup.cfg and pyproject.toml",
        f"""
import pathlib
pathlib.Path("forged.py").write_text({_HOOK!r})
pathlib.Path("pytest.ini").write_text("[pytest]\\naddopts = -p forged\\n")
pathlib.Path("tox.ini").write_text("[pytest]\\naddopts = -p forged\\n")
pathlib.Path("setup.cfg").write_text("[tool:pytest]\\naddopts = -p forged\\n")
pathlib.Path("pyproject.toml").write_text('[tool.pytest.ini_options]\\naddopts = "-p forged"\\n')
""",
    ),
    Attempt(
        "configuration",
        "an entry point in metadata of its own, loaded at once",
        f"""
import pathlib
pathlib.Path("forged.py").write_text({_HOOK!r})
pathlib.Path("forged-1.0.dist-info").mkdir(exist_ok=True)
pathlib.Path("forged-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\\nName: forged\\nVersion: 1.0\\n")
pathlib.Path("forged-1.0.dist-info/entry_points.txt").write_text("[pytest11]\\nforged = forged\\n")
@REACH@
config = _config()
config.pluginmanager.load_setuptools_entrypoints("pytest11")
import forged
if not config.pluginmanager.is_registered(forged):
    config.pluginmanager.register(forged)
""",
    ),
    Attempt(
        "configuration",
        "a plugin that passes the known tests alone",
        """
@REACH@
import pytest, types
plugin = types.ModuleType("helper")

@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if _name(item) in @NAMES@:
        outcome.get_result().outcome = "passed"

plugin.pytest_runtest_makereport = pytest_runtest_makereport
_config().pluginmanager.register(plugin)
""",
    ),
    Attempt(
        "collection",
        "everything is deselected",
        """
@REACH@
import _pytest.main
real = _pytest.main.Session.perform_collect

def perform_collect(self, *args, **kwargs):
    real(self, *args, **kwargs)
    self.items[:] = []
    return self.items

_pytest.main.Session.perform_collect = perform_collect
""",
    ),
    Attempt(
        "collection",
        "tests are put in the place of tests",
        """
@REACH@
session = _find("session")
class Quiet:
    def pytest_collection_modifyitems(self, items):
        good = next(item for item in items if item.name == "test_no_letters")
        for item in items:
            item.obj = good.obj
session.config.pluginmanager.register(Quiet())
""",
    ),
    Attempt(
        "collection",
        "each test is marked xfail",
        """
@REACH@
import pytest
class Marks:
    def pytest_itemcollected(self, item):
        item.add_marker(pytest.mark.xfail(strict=False))
_config().pluginmanager.register(Marks())
""",
    ),
    Attempt(
        "collection",
        "each test is marked skip and skips count as passes",
        """
@REACH@
import pytest, _pytest.reports
class Marks:
    def pytest_itemcollected(self, item):
        item.add_marker(pytest.mark.skip)
    def pytest_runtest_logreport(self, report):
        report.outcome = "passed"
_config().pluginmanager.register(Marks())
""",
    ),
    Attempt(
        "imports",
        "sys.modules holds another pytest",
        """
        import sys, types, pytest
        class Fake(types.ModuleType):
            def __getattr__(self, name):
                return getattr(pytest, name)
            def raises(self, *args, **kwargs):
                import contextlib
                return contextlib.suppress(BaseException)
        sys.modules["pytest"] = Fake("pytest")
        """,
    ),
    Attempt(
        "imports",
        "an import hook serves tests without assertions",
        """
        import importlib.abc, importlib.machinery, sys
        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, name):
                text = self.get_data(self.path).replace(b"assert ", b"_ = ")
                return compile(text, self.path, "exec")
        class Finder(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                spec = importlib.machinery.PathFinder.find_spec(name, path)
                if spec and spec.origin and "test_" in spec.origin:
                    spec.loader = Loader(name, spec.origin)
                    return spec
        sys.meta_path.insert(0, Finder())
        """,
    ),
    Attempt(
        "imports",
        "the import system takes assertions out",
        """
        from _pytest.assertion import rewrite
        import ast
        def rewrite_asserts(tree, source, *args, **kwargs):
            class Out(ast.NodeTransformer):
                def visit_Assert(self, node):
                    return ast.copy_location(ast.Pass(), node)
            Out().visit(tree)
        rewrite.rewrite_asserts = rewrite_asserts
        rewrite._read_pyc = lambda *args: None
        """,
    ),
    Attempt(
        "imports",
        "functions of the test modules lose their code",
        """
        import sys
        def _nothing(*args, **kwargs):
            pass
        """,
        """
        for module in list(sys.modules.values()):
            if "test_" in getattr(module, "__name__", ""):
                for name, value in list(vars(module).items()):
                    if name in @NAMES@ and hasattr(value, "__code__"):
                        value.__code__ = _nothing.__code__
        """,
    ),
    Attempt(
        "chance and time",
        "random, urandom and the clock stand still",
        """
        import os, random, time, uuid
        random.seed(0)
        os.urandom = lambda number: b"\\0" * number
        random.SystemRandom = random.Random
        time.time = time.perf_counter = time.monotonic = lambda: 0.0
        """,
    ),
)
