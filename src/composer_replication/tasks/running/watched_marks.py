"""Runs inside the sandbox, before ``watched_runner.py``: what the test runner was, and what became of it.

Not imported by the package and never placed in a tree.
"""

import os
import sys

MARKED_PACKAGES = ("_pytest", "pluggy", "pytest")
MARKED_MODULES = ("builtins", "unittest.case")
NUM_NAMED = 8
NUM_NEW = 64  # more than the test runner's own plugins exchange for the time of a run


def marked(module_name):
    """Whether the functions of a module are watched for changes."""
    return module_name in MARKED_MODULES or module_name.partition(".")[0] in MARKED_PACKAGES


def code_of(value):
    """What a function does, however it is wrapped in its class; None for other values."""
    value = getattr(value, "fget", None) if type(value) is property else getattr(value, "__func__", value)
    return (value, value.__code__) if type(value) is type(code_of) else None


def take_marks():
    """What the functions of the test runner are: for each module and class its names and their code."""
    marks = []
    for name, module in list(sys.modules.items()):
        if not marked(name):
            continue
        own = {}
        for key, value in vars(module).items():
            found = code_of(value)
            if found or (name == "builtins" and key != "_"):
                own[key] = (value, found)
            if isinstance(value, type) and value.__module__ == name and name != "builtins":
                inner = {k: (v, code_of(v)) for k, v in vars(value).items() if code_of(v)}
                marks.append((f"{name}.{key}", vars(value), inner, True))
        marks.append((name, vars(module), own, False))  # type: ignore[arg-type]
    return marks, {name: module for name, module in sys.modules.items() if marked(name)}


def make_check():
    """A function that names what was changed since the marks were taken; it looks at nothing that is new.

    ``changed(False)``, between tests, leaves out the built-in functions, which tests exchange for a while, and what it
    has named before. Runs below the hook: it asks no object of the tree anything, and compares texts with texts alone.
    """
    marks, before = take_marks()
    modules, nothing, kind_of, ident, text = sys.modules, object(), type, id, str
    named: set[str] = set()
    kinds = {id(kind) for kind in (type(code_of), property, staticmethod, classmethod)}
    known = {place: frozenset(now) for place, now, _, is_class in marks if is_class}

    def plain(mapping):
        return {key: value for key, value in [*mapping.items()] if kind_of(key) is text}

    def changed(has_builtins):
        present = plain(modules)
        found = [f"module {name} replaced" for name, old in before.items() if present.get(name) is not old]
        for place, mapping, own, is_class in marks:
            if place == "builtins" and not has_builtins:
                continue
            now = (
                mapping if is_class else plain(mapping)
            )  # a class makes each name of its attributes a plain text
            for key, (value, code) in own.items():
                if now.get(key, nothing) is not value or (code and code[0].__code__ is not code[1]):
                    found.append(f"{place}.{key} changed")
            if is_class:
                others = known[place].symmetric_difference(now)
                found += [f"{place}.{key} added" for key in others if ident(kind_of(now.get(key))) in kinds]
        if has_builtins:
            return found[:NUM_NAMED]
        new = [each for each in found if each not in named]
        named.update(new)
        return new[:NUM_NEW]

    return changed


def hook_callers(config, relay):
    """The hooks of ``relay`` by name. In pytest 7 and 8 a proxy stands before it, which keeps what it was asked for."""
    wrapped = (
        "ignore_collect",
        "collect_file",
        "pycollect_makemodule",
        "report_header",
        "report_collectionfinish",
    )
    found, names = dict(vars(relay)), {f"pytest_{name}" for name in wrapped}
    if config.hook is not relay:  # the proxy has functions of its own for these names
        kept = vars(config.hook).items()
        found.update((name, each) for name, each in kept if each is not relay and name not in names)
    return found


def make_hook_check(config):
    """A function that names the hooks of the test runner that do not call what they called when it was first seen."""
    kept: dict[int, tuple[object, object]] = {}
    relay = config.pluginmanager.hook
    callers = hook_callers(config, relay)
    plugins = {id(plugin) for plugin in config.pluginmanager.get_plugins()}
    manager, execute, is_first = config.pluginmanager, config.pluginmanager._inner_hookexec, [True]
    ident, every = id, hook_callers

    def exchanged():
        found = []
        if manager._inner_hookexec is not execute:
            found.append("hook calls exchanged")
        for name, caller in every(config, relay).items():
            if callers.setdefault(name, caller) is not caller:
                found.append(f"hook {name} exchanged")
            for each in caller.get_hookimpls() if hasattr(caller, "get_hookimpls") else ():
                if ident(each) not in kept and not is_first and ident(each.plugin) in plugins:
                    found.append(f"hook {name} of {each.plugin_name} added")
                if kept.setdefault(ident(each), (each, each.function))[1] is not each.function:
                    found.append(f"hook {name} of {each.plugin_name} exchanged")
        is_first.clear()
        return found[:NUM_NAMED]

    exchanged()
    return exchanged


def plugins_of(config, root):
    """The plugins that the test runner has, each by a name that says what it is, and hooks that were exchanged."""
    found = set()
    for plugin in config.pluginmanager.get_plugins():
        path = getattr(plugin, "__file__", None)
        if path and str(path).startswith(root + os.sep):
            found.add(f"plugin {os.path.relpath(path, root)}")
        else:
            kind = plugin if type(plugin) is type(os) else type(plugin)
            found.add(f"plugin {getattr(kind, '__module__', '')}.{kind.__name__}")
    for name, caller in hook_callers(config, config.pluginmanager.hook).items():
        for each in caller.get_hookimpls() if hasattr(caller, "get_hookimpls") else ():
            if getattr(each.plugin, getattr(each.function, "__name__", ""), each.function) != each.function:
                found.add(f"hook {name} of {each.plugin_name} exchanged")
    return sorted(found)
