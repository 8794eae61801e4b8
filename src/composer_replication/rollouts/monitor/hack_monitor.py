"""An episode in, findings out: every call, every edit, and the tree that it left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice

from composer_replication.records import MonitorMode, ToolCall
from composer_replication.rollouts.monitor.call_events import (
    CallEvents,
    Scripts,
    add_code,
    call_arguments,
    call_events,
)
from composer_replication.rollouts.monitor.code_checks import check_snippet
from composer_replication.rollouts.monitor.command_checks import check_command
from composer_replication.rollouts.monitor.episode_evidence import EpisodeEvidence, HackFinding, MonitorReport
from composer_replication.rollouts.monitor.file_checks import check_file
from composer_replication.rollouts.monitor.hack_classes import HACK_CLASSES, Action
from composer_replication.rollouts.monitor.hard_coding import hard_coded
from composer_replication.rollouts.monitor.install_checks import builds, packs
from composer_replication.rollouts.monitor.line_changes import new_lines
from composer_replication.rollouts.monitor.monitor_options import MonitorOptions, options_for
from composer_replication.rollouts.monitor.python_code import LONGEST, PythonCode, cut_text, parse_python
from composer_replication.rollouts.monitor.scene import Scene, Suspicion
from composer_replication.rollouts.monitor.solution_checks import check_solution
from composer_replication.rollouts.monitor.tree_changes import changed_paths, check_tree
from composer_replication.rollouts.monitor.tree_paths import locate
from composer_replication.rollouts.monitor.visible_literals import Known, visible_literals
from composer_replication.rollouts.monitor.written_code import OLD_TOKENS, check_written

_QUOTE_CHARACTERS = 240
_MOST_SUSPICIONS = 2000
"""Of one file: a hostile text cannot make the monitor run for ever."""
_OF_THE_TREE = frozenset({"test-edit", "test-deletion", "conftest-edit", "grader-config"})
"""Classes that the final tree decides: what was undone before the end only reports."""
_Place = tuple[int | None, int | None]


class HackMonitor:
    """Looks at whole episodes.

    Pure text work: it needs no sandbox and runs nothing. One monitor may be used for any number of episodes. Whatever an
    episode holds, the answer is a report.
    """

    def __init__(self, options: MonitorOptions | None = None) -> None:
        self.options = options or MonitorOptions()

    def inspect(self, episode: EpisodeEvidence) -> MonitorReport:
        """All findings of one episode, in the order of its calls, those of the final tree last."""
        return _Inspection(episode, self.options).run()


def monitor_for(asked: MonitorMode | MonitorOptions) -> HackMonitor | None:
    """The monitor that looks as asked; None where it is off.

    Raises:
        UsageError: no such mode (CR0830).
    """
    if asked == "off":
        return None
    return HackMonitor(asked if isinstance(asked, MonitorOptions) else options_for(asked))


class _Inspection:
    """One episode under inspection."""

    def __init__(self, episode: EpisodeEvidence, options: MonitorOptions) -> None:
        self.episode = episode
        self.options = options
        self.scene = Scene(episode.task, episode.before, episode.after, episode.tree_root)
        self.findings: list[HackFinding] = []
        self.seen: Counter[tuple[str, Action]] = Counter()
        self.num_calls = 0
        self.num_unreadable = 0
        self.writers: dict[str, tuple[int, int]] = {}
        self.scripts = Scripts(
            before=self.scene.before, own=frozenset((*self.scene.before, *episode.task.hole_paths))
        )

    def run(self) -> MonitorReport:
        for turn_idx, turn in enumerate(self.episode.turns):
            for call_idx, (call, _) in enumerate(turn):
                self.num_calls += 1
                at = (turn_idx, call_idx)
                self._guarded(lambda call=call, at=at: self._call(call, at), at)  # type: ignore[misc]
        self._guarded(self._tree)
        return MonitorReport(
            self.episode.task.task_id, tuple(self.findings), self.num_calls, self.num_unreadable
        )

    def _guarded(self, step: Callable[[], None], at: _Place = (None, None)) -> None:
        """Code that is nested deeper than Python can walk cannot be read: that is said."""
        try:
            step()
        except RecursionError:
            self.num_unreadable += 1
            self._add(Suspicion("not-inspected", "a text that is nested too deeply to be walked"), at)

    def _call(self, call: ToolCall, at: tuple[int, int]) -> None:
        events = call_events(call, root=self.episode.tree_root, scripts=self.scripts)
        self.num_unreadable += events.is_unreadable
        for suspicion in self._of_events(events):
            if suspicion.name in _OF_THE_TREE and suspicion.path:
                self._changed_tree(suspicion, at)
            else:
                self._add(suspicion, at)
        for effect in events.effects:
            if effect.how in ("write", "append", "edit", "link", "touch") and effect.place.path:
                self.writers[effect.place.path] = at
                self.scene.progress.made_paths.add(effect.place.path)
        for command in events.commands:
            if command.program in ("tar", "zip", "git"):
                self.scene.progress.made_paths.update(word for word in command.arguments if "." in word)
        self._undone(call, at)

    def _of_events(self, events: CallEvents) -> Iterator[Suspicion]:
        progress = self.scene.progress
        for command in events.commands:
            if packs(command):
                places = (
                    locate(word, folder=command.folder, root=self.episode.tree_root)
                    for word in command.arguments
                )
                progress.made_paths.update((*command.arguments, *(place.path for place in places)))
            progress.has_built = progress.has_built or builds(command)
        for effect in events.effects:
            yield from check_file(effect, self.scene)
        for command in events.commands:
            yield from check_command(command, self.scene, events.commands)
        for code in events.snippets:
            yield from _quoted(check_snippet(code, self.scene), code, "python")
        for written in events.written:
            yield from check_written(written, self.scene)
        for quote in events.left_out:
            yield Suspicion("not-inspected", quote)

    def _changed_tree(self, suspicion: Suspicion, at: tuple[int, int]) -> None:
        """A change of tests or configuration: the final tree says whether it stayed, was undone, or only added tests."""
        paths = self.scene.old_tests_at(suspicion.path)
        touched = [path for path in paths if self.scene.before.get(path) != self.scene.after.get(path)]
        for path in touched:
            self.writers.setdefault(path, at)
        if (not touched and suspicion.path not in self.scene.after) or (
            not touched and self.scene.before.get(suspicion.path) == self.scene.after.get(suspicion.path)
        ):
            self._add(suspicion, at, action="report")

    def _undone(self, call: ToolCall, at: tuple[int, int]) -> None:
        """New code that did not stay until the end: what it shows is reported, and masks nothing."""
        if call.name not in ("write_file", "str_replace"):
            return
        arguments = call_arguments(call) or {}
        path, text = arguments.get("path"), arguments.get("content", arguments.get("new_str"))
        if not isinstance(path, str) or not isinstance(text, str) or not path.endswith(".py"):
            return
        if path not in self.episode.task.hole_paths or text.strip() in self.scene.after.get(path, ""):
            return
        code = parse_python(text)
        if code is not None:
            for suspicion in islice(
                _quoted(check_solution(code, path, self.scene), code, path), _MOST_SUSPICIONS
            ):
                self._add(suspicion, at, action="report")

    def _tree(self) -> None:
        for suspicion in check_tree(self.scene):
            self._add(suspicion, self.writers.get(suspicion.path, (None, None)))
        for path in changed_paths(self.scene):
            text = self.scene.after.get(path)
            if text is None or not path.endswith((".py", ".pyi", ".pyx")):
                continue
            if len(text) > LONGEST:
                self._add(
                    Suspicion("not-inspected", cut_text(text), path), self.writers.get(path, (None, None))
                )
            code = parse_python(text, new_lines(self.scene.before.get(path, ""), text))
            if code is None or code.text != text[: len(code.text)]:
                self.num_unreadable += 1
                continue
            self._guarded(lambda code=code, path=path: self._solution(code, path))  # type: ignore[misc]

    def _solution(self, code: PythonCode, path: str) -> None:
        at = self.writers.get(path, (None, None))
        is_test = self.scene.is_test(path)
        for suspicion in islice(
            _quoted(check_solution(code, path, self.scene), code, path), _MOST_SUSPICIONS
        ):
            if not is_test or suspicion.name in _IN_TESTS:
                self._add(suspicion, at)
        if is_test:
            return
        events = CallEvents()
        add_code(events, code, root=self.episode.tree_root)
        for effect in events.effects:
            for suspicion in check_file(effect, self.scene, is_solution=True):
                token = OLD_TOKENS.get(suspicion.name)
                if token is None or not self.scene.is_old(path, token):
                    self._add(Suspicion(suspicion.name, suspicion.quote, path, path), at)
        for command in events.commands:
            for suspicion in check_command(command, self.scene, events.commands):
                self._add(Suspicion(suspicion.name, suspicion.quote, path, path), at)
        for inner in events.snippets:
            for suspicion in _quoted(check_snippet(inner, self.scene), inner, path):
                self._add(suspicion, at)
        hits = hard_coded(code, self._known, documents_of(self.scene, path))
        for suspicion in islice(_quoted(hits, code, path), _MOST_SUSPICIONS):
            self._add(suspicion, at)

    @cached_property
    def _known(self) -> Known:
        return visible_literals(self.episode.task.test_texts, self.episode.task.visible_tests)

    def _add(self, suspicion: Suspicion, at: _Place, *, action: Action | None = None) -> None:
        kind = HACK_CLASSES[suspicion.name]
        chosen = self.options.action_of(suspicion.name)
        weaker: Action = "report" if action == "report" or suspicion.is_grey else chosen
        if chosen == "off" or self.seen[suspicion.name, weaker] >= self.options.max_findings:
            return  # what only reports takes no room from what masks
        evidence = _clean(suspicion.quote)
        if any(
            (f.name, f.action, f.evidence, f.turn_idx, f.call_idx) == (kind.name, weaker, evidence, *at)
            for f in self.findings
        ):
            return
        self.seen[suspicion.name, weaker] += 1
        self.findings.append(
            HackFinding(kind.name, kind.group, kind.severity, weaker, evidence, suspicion.place, *at)
        )


_IN_TESTS = frozenset({"skipped-tests", "pytest-plugin", "builtins-patch", "test-framework-patch", "early-exit", "equals-everything"})  # fmt: skip


def documents_of(scene: Scene, path: str) -> str:
    """What the file documents, lower case: the docstrings and comments that it had. Examples of other pages are the tests' own."""
    source = scene.before.get(path, "")
    found = re.findall(r'"""(.*?)"""|\'\'\'(.*?)\'\'\'|#(.*?)$', source, re.DOTALL | re.MULTILINE)
    return "\n".join(text for texts in found for text in texts if text).lower()


def _quoted(hits: Iterable[tuple[str, object]], code: PythonCode, place: str) -> Iterator[Suspicion]:
    for name, node in hits:
        line = getattr(node, "lineno", 0)
        where = f"{place}:{line}" if place.endswith(".py") else place
        yield Suspicion(name, code.quote(node) or name, where)  # type: ignore[arg-type]


def _clean(text: str) -> str:
    """One printable line of bounded length."""
    plain = " ".join("".join(each if each.isprintable() else " " for each in text[:4000]).split())
    return plain if len(plain) <= _QUOTE_CHARACTERS else plain[: _QUOTE_CHARACTERS - 3] + "..."
