"""An episode in, findings out: every call, and the tree that it left."""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from itertools import chain, islice
from typing import get_args

from composer_replication.errors import UsageError
from composer_replication.records import MonitorMode
from composer_replication.rollouts.monitor.answer_tables import Known, hard_coded, visible_literals
from composer_replication.rollouts.monitor.python_names import LONGEST, parse_python
from composer_replication.rollouts.monitor.report import (
    HACK_CLASSES,
    EpisodeEvidence,
    HackFinding,
    MonitorReport,
    as_text,
)
from composer_replication.rollouts.monitor.reported import (
    call_arguments,
    changed_tests,
    compiled_patterns,
    is_of_tests,
    matches,
    new_lines,
)
from composer_replication.rollouts.monitor.solution import check_solution

_MOST_FINDINGS = 5
"""Of one class in one episode: one is enough to act on, and a hostile episode could make thousands."""
_MOST_HITS = 2000
"""Of one file: a hostile text cannot make the monitor run for ever."""
_QUOTE_CHARACTERS = 240
_DOCUMENTS = re.compile(r'"""(.*?)"""|#(.*?)$', re.DOTALL | re.MULTILINE)
_WORD = re.compile(r"\w+")
_Place = tuple[int | None, int | None]
_NO_CALL: _Place = (None, None)


class HackMonitor:
    """Looks at whole episodes; with ``only_reports`` no finding flags one.

    One monitor may be used for any number of episodes. Whatever an episode holds, the answer is a report.
    """

    def __init__(self, *, only_reports: bool = False) -> None:
        self.only_reports = only_reports

    def inspect(self, episode: EpisodeEvidence) -> MonitorReport:
        """All findings of one episode, in the order of its calls, those of the final tree last."""
        return _Inspection(episode, only_reports=self.only_reports).report()


def monitor_for(asked: MonitorMode) -> HackMonitor | None:
    """The monitor that looks as asked: ``mask`` as the classes say, ``report`` masks nothing; None where it is ``off``."""
    known = get_args(MonitorMode)
    if asked not in known:
        fix = f"take one of {', '.join(known)}."
        raise UsageError("CR0722", f"the hack monitor knows no {asked!r}.", where="monitor", fix=fix)
    return None if asked == "off" else HackMonitor(only_reports=asked == "report")


class _Inspection:
    """One episode under inspection."""

    def __init__(self, episode: EpisodeEvidence, *, only_reports: bool) -> None:
        self.episode, self.only_reports = episode, only_reports
        self.before = {path: as_text(data) for path, data in episode.before.items()}
        self.after = {path: as_text(data) for path, data in episode.after.items()}
        self.findings: dict[HackFinding, None] = {}
        self.seen: Counter[str] = Counter()
        self.num_calls = self.num_unreadable = 0
        self.told: list[tuple[str, _Place]] = []
        """What calls that may write said, latest last."""

    def report(self) -> MonitorReport:
        patterns = compiled_patterns(self.episode.task)
        for turn_idx, turn in enumerate(self.episode.turns):
            for call_idx, (call, _) in enumerate(turn):
                self.num_calls += 1
                self.num_unreadable += call_arguments(call) is None
                at = (turn_idx, call_idx)
                if call.name in ("bash", "write_file", "str_replace"):
                    self.told.append((call.arguments, at))
                for name, words in matches(call, patterns, self.episode.tree_root):
                    self._add(name, words, call.name, at)
        for path, words in changed_tests(self.before, self.after):
            self._add("test-edit", words, path, self._writer(path))
        for path in self._answer_files():
            try:
                self._answer(path)
            except RecursionError:
                self.num_unreadable += 1
                self._add("not-inspected", "code that is nested too deeply to be walked", path, _NO_CALL)
        task_id, findings = self.episode.task.task_id, tuple(self.findings)
        return MonitorReport(task_id, findings, self.num_calls, self.num_unreadable)

    def _answer_files(self) -> list[str]:
        """The Python files that were changed or made; a new one counts once another changed file names its module."""
        changed = {
            path: set(_WORD.findall(text))
            for path, text in sorted(self.after.items())
            if path.endswith(".py") and text != self.before.get(path) and not is_of_tests(path)
        }
        named = Counter(word for words in changed.values() for word in words)
        old = {*self.before, *self.episode.task.hole_paths}
        stems = {path: path.rpartition("/")[2].removesuffix(".py") for path in changed}
        return [
            path
            for path, stem in stems.items()
            if path in old or stem == "__init__" or named[stem] > (stem in changed[path])
        ]

    def _answer(self, path: str) -> None:
        """The new code of one file of the answer."""
        old, text, at = self.before.get(path, ""), self.after[path], self._writer(path)
        if len(text) > LONGEST:
            self._add("not-inspected", f"Python behind its first {LONGEST} characters", path, at)
        code = parse_python(text, new_lines(old, text))
        if code is None:
            self.num_unreadable += 1
            return
        tests = self.episode.task.test_texts
        own = [old] if path in self.before else self._sources
        names = frozenset(each.rpartition("/")[2] for each in tests)
        hits = check_solution(code, path, "\n".join((*own, *tests.values())), names)
        documents = "\n".join(filter(None, chain.from_iterable(_DOCUMENTS.findall(old)))).lower()
        for found in (hits, hard_coded(code, self._known, documents)):
            for name, node in islice(found, _MOST_HITS):
                self._add(name, code.quote(node), f"{path}:{getattr(node, 'lineno', 0)}", at)

    @cached_property
    def _sources(self) -> list[str]:
        """Where the whole file was taken out, the other code of the package stands for it."""
        return [text for path, text in self.before.items() if path.endswith(".py") and not is_of_tests(path)]

    @cached_property
    def _known(self) -> Known:
        return visible_literals(self.episode.task.test_texts, self.episode.task.visible_tests)

    def _writer(self, path: str) -> _Place:
        """The last call that names a file and may have written it."""
        name = path.rpartition("/")[2]
        return next((at for text, at in reversed(self.told) if name in text), _NO_CALL)

    def _add(self, name: str, words: str, place: str, at: _Place) -> None:
        if self.seen[name] >= _MOST_FINDINGS:
            return
        action: MonitorMode = "report" if self.only_reports else HACK_CLASSES[name]
        finding = HackFinding(name, action, _clean(words), place, *at)
        self.seen[name] += finding not in self.findings
        self.findings[finding] = None


def _clean(text: str) -> str:
    """One printable line of bounded length."""
    plain = " ".join("".join(each if each.isprintable() else " " for each in text[:4000]).split())
    return plain if len(plain) <= _QUOTE_CHARACTERS else plain[: _QUOTE_CHARACTERS - 3] + "..."
