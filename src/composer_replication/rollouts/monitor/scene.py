"""What the checks may ask about the task and its tree, and what they answer."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from composer_replication.rollouts.monitor.episode_evidence import Files, PublicTask
from composer_replication.rollouts.monitor.python_code import PythonCode, parse_python
from composer_replication.rollouts.monitor.tree_paths import Place
from composer_replication.tasks.intake.tree_rules import is_test_path


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What one check saw: the class, the words that show it, where they stand, and the path it is about, if any.

    ``is_grey`` says that honest work looks the same: it is reported and masks nothing.
    """

    name: str
    quote: str
    place: str = ""
    path: str = ""
    is_grey: bool = False


@dataclass(slots=True)
class Progress:
    """What the policy itself made so far: that is no theft."""

    made_paths: set[str] = field(default_factory=set)
    has_committed: bool = False
    has_stashed: bool = False
    has_built: bool = False


class Scene:
    """The public task and its tree before and after, with the questions that many checks ask."""

    def __init__(self, task: PublicTask, before: Files, after: Files, root: str = "") -> None:
        self.task = task
        self.root = root
        self.before: Mapping[str, str] = {path: as_text(data) for path, data in before.items()}
        self.after: Mapping[str, str] = {path: as_text(data) for path, data in after.items()}
        self.progress = Progress()
        self._old: dict[tuple[str, str], bool] = {}
        self._meant: dict[str, list[str]] = {}
        self._used: dict[str, frozenset[str]] = {}
        names = {task.package, task.distribution, re.sub(r"[-_.]+", "_", task.distribution)}
        self._names = {_plain(name) for name in names if len(name) > 1}
        self.stems = {PurePosixPath(path).stem for path in task.hole_paths} - {"__init__"}
        self.symbol = task.symbol.rpartition(".")[2]

    def is_own_name(self, part: str) -> bool:
        """Whether one part of a path, or a requirement, names the package: ``pkg``, ``pkg.py``, ``pkg-1.0.dist-info``."""
        name = _plain(re.split(r"[\[<>=!~ ;@]", part, maxsplit=1)[0])
        name = name.strip("*?")
        return any(
            name == own or (name.startswith(own) and re.match(r"[-_.]*(\d|py|dist|egg|src|whl|tar|zip|so)", name[len(own) :]))
            for own in self._names
        )  # fmt: skip

    def is_own_build(self, place: Place) -> bool:
        """Whether an archive may be what the policy itself built of the tree: in the tree or in scratch space."""
        return self.progress.has_built and (place.is_inside or place.is_scratch) and not self.old_paths(place)

    def may_mean_own(self, pattern: str, *, least: int = 1) -> bool:
        """Whether a part of a path with wildcards fits the package or its metadata: ``t*`` fits ``tinyfmt``.

        Args:
            pattern: one part of a path.
            least: letters that must stand in it; fewer name nothing.
        """
        if not set("*?[") & set(pattern) or sum(letter.isalnum() for letter in pattern) < least:
            return False
        plain = _plain(pattern)
        shown = [
            f"{own}{end}"
            for own in self._names
            for end in ("", ".py", "_1.dist_info", "_1.0.dist_info", "_1.egg_info")
        ]
        return any(fnmatch.fnmatchcase(each, plain) for each in shown)

    def names_target(self, text: str) -> bool:
        """Whether a pattern of a search names the package, a file with a hole, or the deleted symbol."""
        plain = _plain(text)
        wanted = {*self._names, *(_plain(stem) for stem in self.stems if len(stem) > 2)}
        if len(self.symbol) > 2:
            wanted.add(_plain(self.symbol))
        return any(re.search(rf"(?<![a-z0-9]){re.escape(each)}(?![a-z0-9])", plain) for each in wanted)

    def old_paths(self, place: Place) -> list[str]:
        """The paths of the tree before that a place means: itself, all below it, or what its wildcards fit."""
        if not place.is_inside:
            return []
        if place.path not in self._meant:
            self._meant[place.path] = self._old_paths(place.path)
        return self._meant[place.path]

    def _old_paths(self, path: str) -> list[str]:
        if path in self.before:
            return [path]
        if not path:
            return list(self.before)
        if any(mark in path for mark in "*?[") and len(path) < 200:
            return [old for old in self.before if fnmatch.fnmatchcase(old, path)]
        return [old for old in self.before if old.startswith(path + "/")]

    def old_tests(self, place: Place) -> list[str]:
        """As ``old_paths``, tests and what lies among them only."""
        return [path for path in self.old_paths(place) if self.is_test(path)]

    def old_tests_at(self, path: str) -> list[str]:
        """As ``old_tests``, for a path inside the tree."""
        return self.old_tests(Place(path, is_inside=True))

    def is_test(self, path: str) -> bool:
        return is_test_path(path) or path in self.task.test_texts

    def is_old(self, path: str, pattern: str) -> bool:
        """Whether an idiom is no news: the file had it before, or the visible tests name it.

        Where the whole file was taken out, the other code of the package stands for it.
        """
        if (path, pattern) not in self._old:
            self._old[path, pattern] = self._is_old(path, pattern)
        return self._old[path, pattern]

    def used_before(self, path: str, name: str) -> bool:
        """As ``is_old``, for a module or a dotted name: code must have used it; a word in a text is no use."""
        return any(used == name or used.startswith(f"{name}.") for used in self.names_before(path))

    def names_before(self, path: str) -> frozenset[str]:
        """The dotted names out of modules that the code of ``is_old`` uses."""
        if path not in self._used:
            parsed = (parse_python(text) for text in self._old_texts(path))
            self._used[path] = frozenset(used for code in parsed if code for used in _imported_names(code))
        return self._used[path]

    def _is_old(self, path: str, pattern: str) -> bool:
        return any(re.search(pattern, text) for text in self._old_texts(path))

    def _old_texts(self, path: str) -> list[str]:
        if path in self.before:
            texts = [self.before[path]]
        else:
            texts = [
                text for old, text in self.before.items() if old.endswith(".py") and not self.is_test(old)
            ]
        return [*texts, *self.task.test_texts.values()]


def _imported_names(code: PythonCode) -> set[str]:
    """Dotted names that come from an import: a variable that is called as a module is none."""
    imports = [name for name, node in code.mentions if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = {name.partition(".")[0] for name in imports}
    return {name for name, _ in code.mentions if name.partition(".")[0] in roots}


def as_text(data: str | bytes) -> str:
    """A file's text, whatever its bytes."""
    return data if isinstance(data, str) else data.decode("utf-8", "replace")


def _plain(text: str) -> str:
    return text.lower().replace("-", "_")
