"""Runs inside the sandbox started by ``pytest_runner.hand_over``: tries to get golden code whose lines it is told.

Not imported by the package and never placed in a tree. It runs no code of the tree.
"""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.machinery import all_suffixes

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


def ask_importlib(targets):
    """Which modules that lost code an import without the tree would find; nothing is executed."""
    leaks = set()
    for task_id, path in {(target.task_id, target.module) for target in targets}:
        stem, ending = os.path.splitext(path)
        if ending == ".py" and path.split("/")[0].removesuffix(".py") not in sys.stdlib_module_names:
            places = [os.path.join(folder, stem + end) for folder in sys.path for end in all_suffixes()]
            leaks |= {Leak(task_id, "importable", place) for place in places if os.path.exists(place)}
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


def folders_of(roots, tree):
    """The real folders behind some paths, none inside another; the tree where the root is closed, as without namespaces."""
    try:
        os.listdir("/")
    except OSError:
        roots = [tree if root == "/" else root for root in roots]
    found = set()
    for root in roots:
        with suppress(OSError):  # a link that may not be read; its folder is named, too
            found.add(os.path.realpath(root))
    return sorted(
        one for one in found if not any(one.startswith(f"{other.rstrip('/')}/") for other in found - {one})
    )


def main(request, send):
    """Do what the request asks for; the answer is one record."""
    targets = [Target(*fields) for fields in request["targets"]]
    search = Search(targets, unmarshal=True)
    tree = os.getcwd()
    leaks, failed = ask_git(search, tree) if request["asks"] else (set(), set())
    for root in folders_of(request["roots"], tree):
        leaks |= search.search_folder(root, tree=tree, skip=["/proc", "/sys", *request["skip"]])
    if request["asks"]:
        leaks |= ask_importlib(targets).union(*(ask_network(one, request) for one in request["packages"]))
    send(
        "searched",
        leaks=sorted([leak.task_id, leak.channel, leak.path] for leak in leaks),
        num_files=search.num_files,
        not_searched=search.not_searched[:100],
        failed_checks=sorted(failed),
    )
