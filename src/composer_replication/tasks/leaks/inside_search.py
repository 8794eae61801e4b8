"""Runs inside the sandbox behind ``inside_channel.py``: tries to get golden code whose lines it is told.

Not imported by the package and never placed in a tree. Code of the tree runs in child processes only.
"""

import json
import os
import shutil
import subprocess
import sys

from composer_replication.tasks.leaks.leak_search import Leak, Search, Target

# Prints where a module comes from, whatever happens afterwards, and then the sources that ``inspect``
# gives for the module and for names of it. A name that is gone has none, which is an answer.
INSPECT = """
import importlib, importlib.util, inspect, json, sys
roots, name, symbols = json.loads(sys.argv[1])
sys.path[:0] = roots
file, raised, module = "", "", None
try:
    module = importlib.import_module(name)
    file = getattr(module, "__file__", "") or ""
except BaseException as error:
    is_absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
    raised = "absent" if is_absent else type(error).__name__
    try:
        file = importlib.util.find_spec(name).origin or ""
    except BaseException:
        pass
print("\\n" + json.dumps(["told-file", file, raised]), flush=True)
sources = []
for symbol in ["", *symbols] if module else []:
    value = module
    try:
        for part in symbol.split(".") if symbol else ():
            try:
                value = inspect.getattr_static(value, part)
            except AttributeError:
                value = getattr(value, part)
        for inner in () if inspect.isclass(value) or inspect.ismodule(value) else ("__func__", "fget", "func"):
            value = getattr(value, inner, None) or value
        sources.append(inspect.getsource(value))
    except Exception:
        pass
print("\\n" + json.dumps(["told-sources", "\\n".join(sources)]), flush=True)
"""
FETCH = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5).read(1)"
CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5).close()"


def output_of(command):
    """What a command prints; None when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def told_by(command):
    """What ``INSPECT`` printed, by tag, and how the process ended."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        output, ending = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", "it ran too long"
    except OSError as error:
        output, ending = b"", type(error).__name__
    told = {}
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            tag, *values = json.loads(line)
        except (ValueError, TypeError):
            continue
        if tag in ("told-file", "told-sources"):
            told[tag] = values
    return told, ending


def modules_of(targets):
    """Every module that lost code, with the names to ask it for, by task and path."""
    modules: dict[tuple[str, str], dict[str, None]] = {}
    for target in targets:
        if target.module.endswith(".py"):
            names = modules.setdefault((target.task_id, target.module), {})
            names.update(dict.fromkeys(target.symbols))
    return modules


def ask_importlib(search, question, request, tree):
    """Import a module from the tree, and without the tree; also what could not be asked."""
    leaks, failed = set(), set()
    (task_id, path), symbols = question
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    own_roots = [os.path.join(tree, root) for root in request["import_roots"]]
    is_there = any(os.path.exists(os.path.join(root, path)) for root in own_roots)
    for roots in (own_roots, []):
        if not roots and module.partition(".")[0] in sys.stdlib_module_names:
            continue
        request_text = json.dumps([roots, module, list(symbols)])
        told, ending = told_by([sys.executable, "-P", "-B", "-c", INSPECT, request_text])
        file, raised = told.get("told-file", ("", ""))
        if file and not file.startswith(tree + "/"):
            leaks.add(Leak(task_id, "importable", file))
        for source in told.get("told-sources", ()):
            shown = search.lines_found(source.encode("utf-8", "surrogatepass"), in_tree=True)
            if any(found.task_id == task_id for found in shown):
                leaks.add(Leak(task_id, "inspect", os.path.relpath(file, tree)))
        if len(told) < 2:
            failed.add(f"{task_id}: import {module}: no answer ({ending})")
        elif raised == "absent" and roots and is_there:
            failed.add(f"{task_id}: import {module}: it is in the tree, but not found")
    return leaks, failed


def ask_network(task_id, request):
    """Fetch the original with pip, reach an index, or a port that listens on the machine outside."""
    package = request["packages"][task_id]
    download = ["download", "--no-deps", "-d", "/tmp/pip", package]
    attempts = {
        "pip download": [sys.executable, "-P", "-m", "pip", *download],
        "pip": ["pip", *download],
        "a port of the machine": [sys.executable, "-I", "-c", CONNECT, str(request["port"])],
    }
    attempts |= {f"urllib {url}": [sys.executable, "-I", "-c", FETCH, url] for url in request["urls"]}
    worked = [name for name, command in attempts.items() if output_of(command) is not None]
    return {Leak(task_id, "network", name) for name in worked}


def ask_git(search, tree):
    """What any history at or above the tree tells: every commit that is named anywhere, and every object."""
    if shutil.which("git") is None:
        return set(), set()
    leaks, failed = set(), set()
    begin = ["git", "-c", "safe.directory=*", "-C", tree]
    for words in (["log", "-p", "--all", "--reflog"], ["cat-file", "--batch-all-objects", "--batch"]):
        output = output_of([*begin, *words])
        if output is None and os.path.exists(os.path.join(tree, ".git")):
            failed.add(f"git {words[0]}: no answer")
        path = f".git/{words[0]}"  # so the channel is git, whatever the form
        leaks |= {
            Leak(leak.task_id, leak.channel, f"git {words[0]}")
            for leak in search.search_bytes(path, output or b"", in_tree=True)
        }
    return leaks, failed


def listed(folder):
    """Names in a folder; none where it is closed to us, as outside of the tree without namespaces."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def main(request, send):
    """Do what the request asks for; the answer is one record."""
    targets = [Target(*fields) for fields in request["targets"]]
    search = Search(targets, unmarshal=True)
    tree = os.getcwd()
    skip = ["/proc", "/sys", *request["skip"]]
    leaks = set()
    for root in request["roots"] if listed("/") else request["shown"]:
        leaks |= search.search_folder(root, tree=tree, skip=skip)
    failed: set[str] = set()
    if request["asks"]:
        questions = modules_of(targets).items()
        answers = [ask_importlib(search, question, request, tree) for question in questions]
        for found, problems in (ask_git(search, tree), *answers):
            leaks |= found
            failed |= problems
        for task_id in sorted({target.task_id for target in targets}):
            leaks |= ask_network(task_id, request)
    send(
        "searched",
        leaks=sorted([leak.task_id, leak.channel, leak.path] for leak in leaks),
        num_files=search.num_files,
        not_searched=search.not_searched[:100],
        failed_checks=sorted(failed),
    )
