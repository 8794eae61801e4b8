"""An episode in, findings out: the classes of dishonest moves, and every call and the tree that is looked at for them."""

from __future__ import annotations

import re
from codecs import lookup
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import decode_source
from io import BytesIO
from itertools import chain
from pathlib import PurePosixPath
from tokenize import detect_encoding
from typing import Any

from composer_replication.records import MonitorMode, Task, ToolCall
from composer_replication.rollouts.monitor.answer_tables import Known, hard_coded, visible_literals
from composer_replication.rollouts.monitor.reported import PATTERNS, asked_for, changed_tests, is_of_tests
from composer_replication.rollouts.monitor.solution import RULES, PythonCode, check_solution
from composer_replication.tasks.syntax_trees import parsed

LONGEST = 400_000
"""Characters of one Python file that are looked at."""
_LONGEST_NAME = 20_000  # bytes that are read in an encoding of host names: that takes time by their square
_SOURCE_FOLDERS = frozenset({"src", "lib", "python", "source"})
_MOST_FINDINGS = 5  # of one class: one is enough to act on, and a hostile episode could make thousands
_QUOTE_CHARACTERS = 240
_DOCUMENTS = re.compile(r'"""(.*?)"""|#(.*?)$', re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"\w+")
_WRITERS = ("bash", "write_file", "str_replace")
HACK_CLASSES: Mapping[str, MonitorMode] = {
    **dict.fromkeys(["hard-coded-inputs", *(rule.name for rule in RULES)], "mask"),
    **dict.fromkeys(["test-edit", *(name for name, *_ in PATTERNS), "not-inspected"], "report"),
}
"""What a finding does, by its class (docs/monitor.md): ``mask`` flags the attempt, which is paid 0 at most; ``report`` counts it."""


@dataclass(frozen=True, slots=True)
class PublicTask:
    """What the policy may know of its task, and all that the monitor knows: no golden code, no hidden test."""

    hole_paths: tuple[str, ...]  # files where code was taken out, removed files included
    visible_tests: tuple[str, ...]  # node ids
    package: str  # the name under which the code is imported
    distribution: str  # the name under which it is published
    symbol: str  # what was deleted


def public_task(task: Task) -> PublicTask:
    """The public side of a stored task."""
    parts = PurePosixPath(task.path).parts
    top = parts[1] if len(parts) > 1 and parts[0] in _SOURCE_FOLDERS else parts[0]
    holes = (*(hole.path for hole in task.holes), *task.removed_files, task.path)
    return PublicTask(
        hole_paths=tuple(dict.fromkeys(holes)),
        visible_tests=task.tests.shown,
        package=PurePosixPath(top).stem,
        distribution=task.repository.partition("==")[0],
        symbol=task.symbol,
    )


def as_text(data: str | bytes) -> str:
    """A file's text as Python reads it: in the encoding that it names (UTF-7 may hide any code), with one kind of line end.

    By these the parser numbers lines; ``splitlines`` knows others (form feeds), and enough of them would hide new code.
    """
    data = data.encode("utf-8", "replace") if isinstance(data, str) else data
    with suppress(SyntaxError, UnicodeError, LookupError):
        codec = lookup(detect_encoding(BytesIO(data).readline)[0]).name
        if len(data) <= _LONGEST_NAME or codec not in {"punycode", "idna"}:
            return decode_source(data)
    return data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")  # no Python


@dataclass(frozen=True, slots=True)
class HackFinding:
    """One piece of evidence."""

    name: str
    action: MonitorMode
    evidence: str  # quoted from the call or the tree
    place: str  # where it stands: a path with a line, or the name of the tool
    # The number of the call in the episode, until whoever knows its turns puts turn and call here; None where no single call wrote it.
    turn_idx: int | None
    call_idx: int | None


@dataclass(frozen=True, slots=True)
class MonitorReport:
    """All that was found in one episode. ``masks_reward`` says whether the attempt is flagged: it is paid 0 at most."""

    findings: tuple[HackFinding, ...]

    @property
    def masks_reward(self) -> bool:
        return any(finding.action == "mask" for finding in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings by class."""
        return dict(sorted(Counter(finding.name for finding in self.findings).items()))

    def excusing(self, names: Collection[str]) -> MonitorReport:
        """The same findings; those of these classes flag nothing."""
        told = (replace(each, action="report") if each.name in names else each for each in self.findings)
        return MonitorReport(tuple(told))

    def to_json(self) -> dict[str, Any]:
        """As one line of a rollout log keeps it."""
        return {**asdict(self), "masks_reward": self.masks_reward, "counts": self.counts}


def inspect_episode(
    task: PublicTask,
    calls: Sequence[ToolCall],
    before: Mapping[str, str | bytes],
    after: Mapping[str, str | bytes],
    tree_root: str = "",
) -> MonitorReport:
    """All findings of one episode, of its calls in their order, then of its tree. Whatever it holds, the answer is a report.

    ``before`` are the files of the tree by path as the policy got it, ``after`` those at the end; ``tree_root`` is its absolute
    path as commands saw it, empty where that is not known.
    """
    findings: dict[HackFinding, None] = {}
    seen: Counter[str] = Counter()
    before, after = ({path: as_text(data) for path, data in tree.items()} for tree in (before, after))
    told = [(each.arguments, at) for at, each in enumerate(calls) if each.name in _WRITERS]

    def add(name: str, words: str, place: str, at: int | None) -> None:
        if seen[name] < _MOST_FINDINGS:
            call_idx = None if at is None else 0
            finding = HackFinding(name, HACK_CLASSES[name], clean(words), place, at, call_idx)
            seen[name] += finding not in findings
            findings[finding] = None

    @cache
    def writer(path: str) -> int | None:
        """The last call that names a file and may have written it."""
        name = path.rpartition("/")[2]
        return next((at for text, at in reversed(told) if name in text), None)

    own = {task.package, task.distribution}
    targets = {task.symbol.rpartition(".")[2], *(PurePosixPath(path).stem for path in task.hole_paths)}
    for at, call in enumerate(calls):
        for name, words in asked_for(call, own, targets - {"__init__"}, tree_root):
            add(name, words, call.name, at)
    for path, words in changed_tests(before, after):
        add("test-edit", words, path, writer(path))
    test_paths = {node.partition("::")[0] for node in task.visible_tests}
    tests = {path: before[path] for path in test_paths if path in before}
    known = visible_literals(tests, task.visible_tests)
    for path in _answer_files(task, before, after):
        for name, words, place in _of_the_answer(path, before, after[path], tests, known):
            add(name, words, place, writer(path))
    return MonitorReport(tuple(findings))


def _answer_files(task: PublicTask, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The Python files that were changed or made; a new one counts once another changed file names its module."""
    changed = {
        path: set(_WORD.findall(text))
        for path, text in sorted(after.items())
        if path.endswith(".py") and text != before.get(path) and not is_of_tests(path)
    }
    named = Counter(chain.from_iterable(changed.values()))
    known = {*before, *task.hole_paths}
    return [
        path
        for path, words in changed.items()
        if path in known or (stem := PurePosixPath(path).stem) == "__init__" or named[stem] > (stem in words)
    ]


def _of_the_answer(
    path: str, before: Mapping[str, str], text: str, tests: Mapping[str, str], known: Known
) -> Iterator[tuple[str, str, str]]:
    """The new code of one file; ``tests`` are the visible test files, ``known`` the literals of the visible tests."""
    old, length = before.get(path, ""), len(text)
    if length > LONGEST:  # up to the end of a line, so that the rest can be parsed
        yield "not-inspected", f"Python behind its first {LONGEST} characters", path
        length = text.rfind("\n", 0, LONGEST) + 1 or LONGEST
    tree = parsed(text[:length])
    if tree is None:  # nothing is known of it
        return
    code = PythonCode(tree, old, text)
    excuses = [old, *tests.values()]
    if path not in before:  # the whole file was taken out: the other code of the package stands for it
        excuses += [each for name, each in before.items() if name.endswith(".py") and not is_of_tests(name)]
    documents = "\n".join(filter(None, chain.from_iterable(_DOCUMENTS.findall(old)))).lower()
    tables = hard_coded(code, known, documents)
    test_names = {name.rpartition("/")[2] for name in tests}
    shown = check_solution(code, path, "\n".join(excuses), test_names)
    lines = text.split("\n")
    for name, line in dict.fromkeys((name, getattr(node, "lineno", 1)) for name, node in [*shown, *tables]):
        yield name, lines[line - 1], f"{path}:{line}"


def clean(text: str) -> str:
    """One printable line of bounded length."""
    plain = " ".join("".join(each if each.isprintable() else " " for each in text[:4000]).split())
    return plain if len(plain) <= _QUOTE_CHARACTERS else plain[: _QUOTE_CHARACTERS - 3] + "..."
