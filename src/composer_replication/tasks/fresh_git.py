"""A ``.git`` of exactly one commit, for agents that use ``git status``, ``git diff`` and ``git stash``.

Written without git, so that it holds nothing of the machine: no name, hook, reflog or time. Author, date and message are
fixed, so the same files give the same commit everywhere. Formats: gitrepository-layout(5) and gitformat-index(5) of git.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping

AUTHOR = "Task <task@localhost> 946684800 +0000"
"""1 January 2000."""
MESSAGE = "The tree of the task\n"
BRANCH = "refs/heads/main"
_CONFIG = """\
[core]
\trepositoryformatversion = 0
\tfilemode = false
\tbare = false
\tlogallrefupdates = false
\tautocrlf = false
[user]
\tname = Task
\temail = task@localhost
[gc]
\tauto = 0
"""
_FILE, _FOLDER = b"100644", b"40000"


def with_git(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A tree as an agent has it: the files, which have no ``.git``, and one whose only commit they are.

    The working tree is clean by it: ``git status`` says nothing until something is changed.
    """
    objects: _Objects = {}
    blobs = {path.encode(): _add(objects, b"blob", data) for path, data in sorted(files.items())}
    tree = _add_tree(objects, blobs)
    message = f"tree {tree.hex()}\nauthor {AUTHOR}\ncommitter {AUTHOR}\n\n{MESSAGE}"
    commit = _add(objects, b"commit", message.encode())
    return {
        **files,
        ".git/HEAD": f"ref: {BRANCH}\n".encode(),
        ".git/config": _CONFIG.encode(),
        f".git/{BRANCH}": commit.hex().encode() + b"\n",
        ".git/index": _index(blobs),
        **{f".git/objects/{name.hex()[:2]}/{name.hex()[2:]}": data for name, data in objects.items()},
    }


_Objects = dict[bytes, bytes]
"""What lies in the file of each object, by its name."""


def _add(objects: _Objects, kind: bytes, data: bytes) -> bytes:
    """Add an object; its name."""
    content = b"%s %d\0%s" % (kind, len(data), data)
    name = _sha1(content)
    objects[name] = zlib.compress(content, 0)  # stored: a rollout waits for it
    return name


def _add_tree(objects: _Objects, blobs: Mapping[bytes, bytes]) -> bytes:
    """Add the tree object of a folder, folders inside first; its name."""
    folders: dict[bytes, dict[bytes, bytes]] = {}
    entries: list[tuple[bytes, bytes, bytes]] = []
    for path, name in blobs.items():
        first, slash, rest = path.partition(b"/")
        if slash:
            folders.setdefault(first, {})[rest] = name
        else:
            entries.append((first, _FILE, name))
    entries += [(first, _FOLDER, _add_tree(objects, inside)) for first, inside in folders.items()]
    # git sorts a folder as if its name ended in a slash
    entries.sort(key=lambda entry: entry[0] + b"/" if entry[1] == _FOLDER else entry[0])
    return _add(objects, b"tree", b"".join(mode + b" " + leaf + b"\0" + name for leaf, mode, name in entries))


def _index(blobs: Mapping[bytes, bytes]) -> bytes:
    """The staging area: no times and a size of 0 mean that git compares content when it first looks."""
    entries = []
    for path, name in sorted(blobs.items()):
        entry = struct.pack(">10I", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, 0) + name
        entry += struct.pack(">H", min(len(path), 0xFFF)) + path
        entries.append(entry + b"\0" * (8 - len(entry) % 8))
    content = b"".join([b"DIRC", struct.pack(">II", 2, len(entries)), *entries])
    return content + _sha1(content)


def _sha1(data: bytes) -> bytes:
    return hashlib.sha1(data, usedforsecurity=False).digest()
