"""Sends the thief to the trees of tasks, and tells what he is after."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.views import write_files
from swesmith_peer import thief

MAX_LINES_AROUND = 6


@dataclass(frozen=True)
class Tree:
    """A valid task of either side: its name, and the folder that a solver works in."""

    name: str
    folder: Path


def target_of(original: Mapping[str, bytes], shown: Mapping[str, bytes]) -> dict[str, list[Any]]:
    """What the original files have and the tree of a solver has not: runs of lines, code objects.

    A run is one deleted or changed line if any such line is distinctive: it occurs once in
    the restored tree and not in the broken one. Else (lines only moved, or stand elsewhere too)
    it is a changed place with up to ``MAX_LINES_AROUND`` lines on each side, as few as
    make it distinctive. Blank lines, comments and indentation do not count.
    """
    changed = [
        path
        for path, data in original.items()
        if path.endswith(".py") and not is_test_path(path) and shown.get(path) != data
    ]
    broken = [thief.normalised(data) for data in shown.values()]
    restored = [
        thief.normalised(data) for data in {**shown, **{path: original[path] for path in changed}}.values()
    ]

    def is_distinctive(run: Sequence[str]) -> bool:
        wanted = thief.needle(run)
        return sum(_count(text, wanted) for text in restored) == 1 and not any(
            wanted in text for text in broken
        )

    lines: list[list[str]] = []
    places: list[list[str]] = []
    codes: list[list[Any]] = []
    for path in changed:
        left = _codes(shown.get(path, b""))
        codes += [code for code in _codes(original[path]) if code not in left]
        before, after = (thief.code_lines(files.get(path, b"")) for files in (original, shown))
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        for tag, first, last, _, _ in matcher.get_opcodes():
            if tag != "equal":
                lines += [[line] for line in before[first:last] if is_distinctive([line])]
                around = (before[max(0, first - n) : last + n] for n in range(1, MAX_LINES_AROUND + 1))
                places += [run for run in around if run and is_distinctive(run)][:1]
    runs = lines or places
    return {"runs": runs, "codes": codes if runs else []}


def _count(text: str, wanted: str) -> int:
    """How often, counting what shares a line end."""
    number, place = 0, text.find(wanted)
    while place >= 0:
        number, place = number + 1, text.find(wanted, place + 1)
    return number


def _codes(data: bytes) -> list[list[Any]]:
    try:
        code = compile(data, "code", "exec", dont_inherit=True)  # compiled, never run
    except (SyntaxError, ValueError):
        return []
    return [thief.code_facts(each) for each in thief.all_codes(code)]


def shown_files(folder: Path) -> dict[str, bytes]:
    """The files of a working tree, git's own aside."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in thief.files_below(folder)}


def send_thief(tree: str, outside: Sequence[str], targets: Mapping[str, Any]) -> dict[str, list[str]]:
    """One visit of the thief."""
    request = json.dumps({"tree": tree, "outside": list(outside), "targets": dict(targets)})
    done = subprocess.run(
        [sys.executable, "-I", str(thief.__file__)],
        input=request, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@dataclass(frozen=True)
class Loot:
    """The channels through which each task that can be judged was robbed; ``num_control`` of them
    are recovered when the original lies open.
    """

    found: Mapping[str, frozenset[str]]
    num_control: int


def rob(original: Mapping[str, bytes], outside: str, trees: Sequence[Tree]) -> Loot:
    """Send the thief into every task's tree, into a folder outside, and, as a control, to the original."""
    targets = {tree.name: target_of(original, shown_files(tree.folder)) for tree in trees}
    targets = {name: target for name, target in targets.items() if target["runs"]}
    found = {name: set[str]() for name in targets}
    for tree in trees:
        if tree.name in targets:
            found[tree.name].update(
                *send_thief(str(tree.folder), [], {tree.name: targets[tree.name]}).values()
            )
    for name, channels in send_thief("", [outside], targets).items():
        found[name].update(channels)
    with tempfile.TemporaryDirectory(prefix="control-", dir=process_folder()) as folder:
        write_files(Path(folder), original)
        control = send_thief(folder, [], targets)
    return Loot(
        {name: frozenset(channels) for name, channels in found.items()},
        sum(bool(channels) for channels in control.values()),
    )
