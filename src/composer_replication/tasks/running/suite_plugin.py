"""Runs inside the sandbox: a plugin of pytest that lets a suite run although tools around it are not installed.

What measures or speeds up a suite (coverage, parallel runs, reports) is left out of every environment. Its options,
fixtures and hooks may still be named by the repository; none of that must end the run. Not imported by the package
and never placed in a tree.
"""

import importlib.metadata
import importlib.util
import os
import sys


def importable_plugins(options, root):
    """The options without ``-p NAME`` where nothing is called so: a tool that was left out."""
    from _pytest.config import builtin_plugins

    known = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")} | set(builtin_plugins)

    def is_there(name):
        top = name.partition(".")[0]
        return name.startswith("no:") or not known.isdisjoint({name, top}) or _is_module(top, root)

    return [option for option in options if not option.startswith("-p") or is_there(option[2:])]


def _is_module(top, root):
    """Whether a module of that name can be imported, or lies in the tree, to which ``pythonpath`` may lead."""
    try:
        if importlib.util.find_spec(top) is not None:
            return True
    except (ImportError, ValueError, AttributeError):
        return False
    return any(top in folders or f"{top}.py" in files for _, folders, files in os.walk(root))


class Benchmark:
    """What stands in for the fixture of pytest-benchmark and pytest-codspeed: calls the function once."""

    enabled, disabled, group, stats = False, True, None, None

    def __init__(self, request):
        self.name = self.fullname = request.node.name
        self.extra_info = {}

    def __call__(self, function, *args, **kwargs):
        return function(*args, **kwargs)

    def pedantic(self, target, args=(), kwargs=None, setup=None, **_options):
        made = setup() if setup is not None else None
        args, kwargs = made if made is not None else (args, kwargs)
        return target(*args, **(kwargs or {}))


STAND_INS = {
    "worker_id": ("session", lambda: "master"),
    "testrun_uid": ("session", lambda: "composer-rl"),
    "cov": ("function", lambda: None),
    "no_cover": ("function", lambda: None),
    "extra": ("function", list),
    "extras": ("function", list),
    "json_metadata": ("function", dict),
}
"""Fixtures of tools that are left out, with their scope and what gives their value."""


def make_suite(options, left_out=()):
    """The plugin; ``options`` are the repository's own, and those that nothing installed knows are taken back.

    ``left_out`` are ids of tests that are not run, and files that are not imported.
    """
    import pytest

    root, left_out = os.getcwd(), set(left_out)

    class Suite:
        def pytest_addhooks(self, pluginmanager):
            # A conftest.py may have hooks for a tool that was left out.
            pluginmanager.check_pending = lambda: None

        @pytest.hookimpl(trylast=True)
        def pytest_load_initial_conftests(self, args, parser):
            """Now that plugins and conftest.py files have named theirs."""
            for option in options:
                flag = option.partition("=")[0]
                if option in args and not is_known(parser, option):
                    place = args.index(option)
                    args[place : place + 1] = [flag] if flag != option and is_known(parser, flag) else []

        def pytest_internalerror(self, excrepr):
            # Where a hook of the repository's ended it, nothing else prints why.
            sys.stderr.write(f"{str(excrepr).strip()}\n")

        def pytest_ignore_collect(self, collection_path):
            return True if left_out and os.path.relpath(collection_path, root) in left_out else None

        def pytest_collection_modifyitems(self, items):
            items[:] = [item for item in items if item.nodeid not in left_out]

        @pytest.fixture
        def benchmark(self, request):
            return Benchmark(request)

    def stand_in(name, scope, make):
        return pytest.fixture(scope=scope, name=name)(lambda _self: make())

    # Whoever brings the real ones is registered later, and wins.
    for name, (scope, make) in STAND_INS.items():
        setattr(Suite, name, stand_in(name, scope, make))
    return Suite()


def is_known(parser, option):
    """Whether pytest, a plugin or a conftest.py takes an option in this form."""
    try:
        return not parser.parse_known_and_unknown_args([option])[1]
    except (Exception, SystemExit):  # a value that it does not take
        return False
