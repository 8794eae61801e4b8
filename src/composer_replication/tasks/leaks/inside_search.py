"""Runs inside the sandbox started by ``pytest_runner.hand_over``: tries to get golden code whose lines it is told.

Not imported by the package and never placed in a tree. It runs no code of the tree.
"""

import os
import shutil
import subprocess
from contextlib import suppress

from composer_replication.tasks.leaks.leak_search import Leak, Search, Target


def output_of(command):
    """What a command prints; None when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


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
    search = Search(targets)
    tree = os.getcwd()
    leaks, failed = ask_git(search, tree) if request["asks_git"] else (set(), set())
    for root in folders_of(request["roots"], tree):
        leaks |= search.search_folder(root, tree=tree, skip=["/proc", "/sys", *request["skip"]])
    send(
        "searched",
        leaks=sorted([leak.task_id, leak.channel, leak.path] for leak in leaks),
        num_files=search.num_files,
        not_searched=search.not_searched[:100],
        failed_checks=sorted(failed),
    )
