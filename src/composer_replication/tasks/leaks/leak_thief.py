"""Runs inside the sandbox, given as ``python -c``: tries to get golden code that it knows by hashes.

Not imported by the package and never placed in a tree. The request on standard input brings
a nonce, the hashes, and the text of the search. Code of the tree runs in child processes only.
"""

import json
import os
import shutil
import subprocess
import sys
import types

# Prints where a module comes from and the source that ``inspect`` gives for one name of it.
INSPECT = """
import importlib, inspect, json, sys
roots, name, symbol = json.loads(sys.argv[1])
sys.path[:0] = roots
value = module = importlib.import_module(name)
file = getattr(module, "__file__", "") or ""
for part in symbol.split("."):
    value = inspect.getattr_static(value, part)
value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
try:
    source = inspect.getsource(value)
except (OSError, TypeError):
    source = ""
print("\\n" + json.dumps([file, source]))
"""
FETCH = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5).read(1)"


def load(modules):
    """Make the modules of the search importable under their own names."""
    for name in ("composer_replication", "composer_replication.tasks", "composer_replication.tasks.leaks"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, source in modules:
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
    return sys.modules["composer_replication.tasks.leaks.leak_search"]


def output_of(command):
    """What a command prints; None when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def ask_importlib(engine, search, target, request, tree):
    """Import the module from the tree, and without the tree."""
    leaks = set()
    module = target.module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    symbol = request["symbols"][target.task_id].partition("#")[0]
    for roots in ([os.path.join(tree, root) for root in request["import_roots"]], []):
        if not roots and module.partition(".")[0] in sys.stdlib_module_names:
            continue
        command = [sys.executable, "-P", "-B", "-c", INSPECT, json.dumps([roots, module, symbol])]
        answer = output_of(command)
        if answer is None:
            continue
        try:
            file, source = json.loads(answer.decode("utf-8", "replace").strip().splitlines()[-1])
        except (ValueError, IndexError):
            continue
        if not file.startswith(tree + "/"):
            leaks.add(engine.Leak(target.task_id, "importable", file))
        if any(found.task_id == target.task_id for found in search.search_text(source, in_tree=True)):
            leaks.add(engine.Leak(target.task_id, "inspect", os.path.relpath(file, tree)))
    return leaks


def ask_network(engine, target, request):
    """Fetch the original with pip, or reach an index at all."""
    package = request["packages"][target.task_id]
    attempts = {
        "pip download": [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "download",
            "--no-deps",
            "-d",
            "/tmp/pip",
            package,
        ],
        "pip": ["pip", "download", "--no-deps", "-d", "/tmp/pip", package],
        "urllib": [sys.executable, "-I", "-c", FETCH, request["url"]],
    }
    worked = [name for name, command in attempts.items() if output_of(command) is not None]
    return {engine.Leak(target.task_id, "network", name) for name in worked}


def ask_git(engine, search, tree):
    """What any history at or above the tree tells."""
    if shutil.which("git") is None:
        return set()
    begin = ["git", "-c", "safe.directory=*", "-C", tree]
    text = output_of([*begin, "log", "-p", "--all", "--reflog"]) or b""
    return {
        engine.Leak(target.task_id, "git", "git log")
        for target in search.search_text(text.decode("utf-8", "replace"), in_tree=True)
    }


def ask_environment(engine, search):
    """Variables and command lines of this process and of others."""
    found = set()
    texts = {"/proc/self/environ": "\n".join(os.environ.values())}
    for who in os.listdir("/proc") if os.path.isdir("/proc") else []:
        for name in ("environ", "cmdline") if who.isdigit() and int(who) != os.getpid() else ():
            try:
                with open(f"/proc/{who}/{name}", "rb") as handle:
                    texts[f"/proc/{who}/{name}"] = (
                        handle.read().replace(b"\0", b"\n").decode("utf-8", "replace")
                    )
            except OSError:
                continue
    for path, text in texts.items():
        values = "\n".join([text, *(line.partition("=")[2] for line in text.splitlines())])
        for target in search.search_text(values, in_tree=True):
            found.add(engine.Leak(target.task_id, "environment-variable", path))
    return found


def main():
    """Do what the request asks for; the answer is one JSON line with the nonce."""
    descriptor = os.dup(1)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.buffer.read())
    engine = load(request["modules"])
    targets = [engine.target_from_json(value) for value in request["targets"]]
    search = engine.Search(targets, request["salt"], unmarshal=True)
    tree = os.getcwd()
    leaks = search.search_folder("/", tree=tree, skip=["/proc", "/sys", *request["skip"]], binaries=False)
    if request["asks"]:
        leaks |= ask_environment(engine, search) | ask_git(engine, search, tree)
        for target in targets:
            leaks |= ask_importlib(engine, search, target, request, tree)
            leaks |= ask_network(engine, target, request)
    answer = {
        "nonce": request["nonce"],
        "leaks": sorted([leak.task_id, leak.channel, leak.path] for leak in leaks),
        "num_files": search.num_files,
        "not_searched": search.not_searched[:100],
    }
    data = ("\n" + json.dumps(answer) + "\n").encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


main()
