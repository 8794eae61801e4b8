"""Runs inside the sandbox behind ``inside_channel.py``: tries to get golden code whose lines it is told.

Not imported by the package and never placed in a tree. It runs no code of the tree.
"""

import os
import shutil
import subprocess
import sys
import types

from composer_replication.tasks.leaks.leak_search import Leak, Search, Target

FETCH = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5).read(1)"
CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5).close()"


def output_of(command):
    """What a command prints; None when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def place_of(module):
    """The file that an import without the tree would find; nothing is executed, so a package that breaks is found, too."""
    file, path = "", None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        found = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
        if found is None:
            return ""
        file, path = found.origin or "", found.submodule_search_locations or []
        if name not in sys.modules:  # a namespace below it asks for the path of what is imported by this name
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = path
    return file


def ask_importlib(targets):
    """Which modules that lost code can be imported without the tree."""
    leaks = set()
    for task_id, path in {(target.task_id, target.module) for target in targets}:
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        is_own = path.endswith(".py") and module.partition(".")[0] not in sys.stdlib_module_names
        if is_own and (place := place_of(module)):
            leaks.add(Leak(task_id, "importable", place))
    return leaks


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
        found, failed = ask_git(search, tree)
        leaks |= found | ask_importlib(targets)
        for task_id in sorted({target.task_id for target in targets}):
            leaks |= ask_network(task_id, request)
    send(
        "searched",
        leaks=sorted([leak.task_id, leak.channel, leak.path] for leak in leaks),
        num_files=search.num_files,
        not_searched=search.not_searched[:100],
        failed_checks=sorted(failed),
    )
