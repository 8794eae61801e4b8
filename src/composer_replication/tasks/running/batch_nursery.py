"""Runs inside the sandbox behind ``pytest_runner.py``: several test runs, one start.

Three kinds of processes, so that no run can speak for another:

- the *keeper* (``batch_keeper.py``) reads the orders, holds all nonces and the way out, and never runs code of a tree;
- the *nursery*, forked off before the orders are read, imports the test runner once and compiles once what
  several trees hold, but runs no code of a tree;
- each *run* is forked off the nursery in its own session, with its own request on standard
  input and its own pipe as standard output. Its memory and descriptors hold nothing of the others.

Not imported by the package and never placed in a tree.
"""

import json
import os
import socket
import sys


class Lookout:
    """Notes whether anything asked for a module that the trees have: it would come from elsewhere."""

    def __init__(self, names):
        self.names = frozenset(names)
        self.seen = []

    def find_spec(self, name, path=None, _target=None):
        if path is None and name in self.names:
            self.seen.append(name)


def import_quietly(name, attributes=()):
    """Import a module as a test file would; what cannot be imported fails again, and is seen, in the run."""
    import importlib

    try:
        module = importlib.import_module(name)
    except Exception:
        return
    for attribute in attributes:
        if not hasattr(module, attribute):
            import_quietly(f"{name}.{attribute}")


def preload(wanted, lookout):
    """Import the test runner, its plugins and what the trees import; False where a fork would not do."""
    sys.meta_path.insert(0, lookout)
    try:
        import importlib.metadata

        import pytest  # noqa: F401
        from _pytest.config import default_plugins

        for name in default_plugins:
            if f"no:{name}" not in wanted["blocked"]:
                import_quietly(f"_pytest.{name}")
        for entry in importlib.metadata.entry_points(group="pytest11"):
            if f"no:{entry.name}" not in wanted["blocked"]:
                import_quietly(entry.module)
        for name, attributes in wanted["modules"]:
            import_quietly(name, attributes)
    except BaseException:
        return False
    finally:
        sys.meta_path.remove(lookout)
    return not lookout.seen and not has_threads()


def compiled(source, place, is_rewritten):
    """The code object of a file; None where that fails or warns: it does so again, and is seen, in the run."""
    import ast

    from _pytest.assertion import rewrite

    try:
        code = source
        if is_rewritten:
            code = ast.parse(source, filename=place)
            rewrite.rewrite_asserts(code, source, place, None)
        return compile(code, place, "exec", dont_inherit=True)
    except Exception:
        return None


def compile_shared(sources, tree):
    """Code of files that several trees hold, by path and bytes: as imported, and as pytest rewrites tests."""
    import warnings

    as_imported: dict[tuple[str, bytes], object] = {}
    as_rewritten: dict[tuple[str, bytes], object] = {}
    deepest = sys.getrecursionlimit()
    sys.setrecursionlimit(deepest * 3 // 4)  # a run compiles from deeper down, so it may find a file too deep
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path, number, is_rewritten in sources:
            with open(os.path.join(str(number), "tree", path), "rb") as file:
                source = file.read()
            place = os.path.join(tree, path)
            (as_rewritten if is_rewritten else as_imported)[place, source] = compiled(
                source, place, is_rewritten
            )
    sys.setrecursionlimit(deepest)
    return as_imported, as_rewritten


def hand_out(as_imported, as_rewritten):
    """Let imports find compiled code; once each, since a second import makes code objects of its own."""
    from importlib.machinery import SourceFileLoader

    from _pytest.assertion import rewrite

    compile_source, read_pyc = SourceFileLoader.source_to_code, getattr(rewrite, "_read_pyc", None)

    def source_to_code(loader, data, path, *more, **options):
        if type(data) is bytes and type(path) is str and not more and not options:
            code = as_imported.pop((path, data), None)
            if code is not None:
                return code
        return compile_source(loader, data, path, *more, **options)

    # Python leaves frames of that name out of the traceback of a syntax error.
    name = compile_source.__code__.co_filename
    source_to_code.__code__ = source_to_code.__code__.replace(co_filename=name)

    def read_code(source, *more, **options):
        try:
            with open(source, "rb") as file:
                code = as_rewritten.pop((str(source), file.read()), None)
        except OSError:
            code = None
        return read_pyc(source, *more, **options) if code is None else code  # type: ignore[misc]

    if as_imported:
        SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign,assignment]
    if as_rewritten and read_pyc:
        rewrite._read_pyc = read_code


def has_threads():
    """Whether this process has more than one thread; without ``/proc``, whether it could have."""
    import threading

    try:
        return threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1
    except OSError:
        foreign = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
        return threading.active_count() > 1 or any(
            name.endswith(".so") and "site-packages" in name for name in foreign
        )


def nursery(link, run_tests):
    """Import once, then give birth to one run after the other; never returns."""
    import gc

    with link.makefile("rb") as lines:
        wanted = json.loads(lines.readline())
    is_forked = wanted["fork"] and preload(wanted, Lookout(wanted["tree_names"]))
    if is_forked and wanted["shared"]:
        hand_out(*compile_shared(wanted["shared"], os.path.join(os.getcwd(), "run", "tree")))
    gc.collect()
    gc.freeze()
    link.sendall(b"fork\n" if is_forked else b"spawn\n")
    while True:
        folder, descriptors, _, _ = socket.recv_fds(link, 4096, 3)
        if not folder:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            link.close()
            become_run(os.fsdecode(folder), descriptors, run_tests if is_forked else None)
        for descriptor in descriptors:
            os.close(descriptor)
        link.sendall(b"%d\n" % pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        link.sendall(b"%d\n" % (128 - status if status < 0 else status))


def become_run(folder, descriptors, run_tests):
    """Be what a lone runner is: its folder, its streams, nothing else; never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if "PWD" in os.environ:
            os.environ["PWD"] = folder
        sys.argv[1:] = []
        if run_tests is None:
            os.execv(sys.orig_argv[0], sys.orig_argv[:-1])
        run_tests()
    except SystemExit as error:  # what the interpreter does with it at the end of a program
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            code = 120  # as the interpreter says it
        os._exit(code & 0xFF)
