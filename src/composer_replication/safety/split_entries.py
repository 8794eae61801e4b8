"""What a split keeps of each task: ids, hashes and names in one spelling.

No golden code and no test text outlives the check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.safety.content_digest import ContentDigest
from composer_replication.safety.task_sketch import Sketch, SketchReader

_SOURCE_ROOTS = ("", "src/", "lib/")


class SplitRequestError(UsageError, ValueError):
    """The items or the request cannot make a split (CR0503)."""

    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__("CR0503", message, where=where, fix=fix)


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One task of a split; what is None was not given or not looked at.

    ``repository`` is the name without its version, in one spelling; ``symbol`` is the
    dotted name of the deleted definition in its module; ``has_golden`` says whether golden
    code was compared.
    """

    task_id: str
    content_sha256: str | None = None
    repository: str | None = None
    symbol: str | None = None
    has_golden: bool = False


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A task as it is compared: what is kept of it, and what is forgotten after the check."""

    entry: Entry
    sketch: Sketch


class TaskReader:
    """Reads tasks; one reader for both sides of a split, so that shared files are read once.

    Args:
        check_content: off: only ids and names are looked at.
    """

    def __init__(self, *, check_content: bool) -> None:
        self._check_content = check_content
        self._digest = ContentDigest()
        self._sketches = SketchReader()

    def read(self, items: Iterable[Any], side: str) -> list[ReadTask]:
        """Tasks in the order of their ids; an item that is listed twice counts once.

        Raises:
            SplitRequestError: an item is neither an id nor has a ``task_id``, its content
                is not text, or one id stands for two different tasks.
        """
        if isinstance(items, str):
            raise SplitRequestError("one text is not a list of tasks.", where=side, fix=f"pass [{items!r}].")
        tasks: dict[str, ReadTask] = {}
        for position, item in enumerate(items):
            task = self._read_one(item, f"{side}[{position}]")
            if tasks.setdefault(task.entry.task_id, task) != task:
                raise SplitRequestError(
                    f"two different tasks have the id {task.entry.task_id!r}.",
                    where=side,
                    fix="give each task its own id.",
                )
        return [tasks[task_id] for task_id in sorted(tasks)]

    def _read_one(self, item: Any, where: str) -> ReadTask:
        task_id = item if isinstance(item, str) else getattr(item, "task_id", None)
        if not isinstance(task_id, str) or not task_id:
            raise SplitRequestError(
                f"{type(item).__name__} is not a task.",
                where=where,
                fix="pass task ids, or objects with a task_id.",
            )
        content, sketch = None, Sketch()
        if self._check_content and not isinstance(item, str):
            try:
                content, sketch = self._digest.of_task(item), self._sketches.of_task(item)
            except TypeError as error:
                raise SplitRequestError(
                    f"the content of {task_id!r} cannot be read: {error}.", where=where
                ) from error
        entry = Entry(
            task_id,
            content,
            repository_name(getattr(item, "repository", None)),
            qualified_name(getattr(item, "symbol", None), getattr(item, "broken_tree", None)),
            sketch.golden_code is not None,
        )
        return ReadTask(entry, sketch)


def repository_name(repository: object) -> str | None:
    """``https://host/org/Foo_Bar.git``, ``Foo_Bar==1.2`` and ``foo.bar`` are all ``foo-bar``."""
    name = re.split(r"==|@", str(repository or ""), maxsplit=1)[0].strip().rstrip("/")
    name = re.split(r"[/\\:]", name)[-1].removesuffix(".git")
    return re.sub(r"[-_.]+", "-", name).lower() or None


def qualified_name(symbol: object, tree: object) -> str | None:
    """The name of a definition in its module, without the path to that module.

    ``src/pkg/api.py::Class.f``, ``pkg.api:Class.f`` and ``pkg.api.Class.f`` are all
    ``Class.f``. In a dotted name the module is what the tree has as a file or package. A
    tree that has none says that there is no module in the name, unless the name begins with
    two lower-case parts; then, and without a tree, all lower-case parts before the last count.
    """
    text = str(symbol or "").strip()
    in_file = re.fullmatch(r".*\.pyi?::?(.+)", text)
    parts = [part for part in re.split(r"[.:\s]+", in_file[1] if in_file else text) if part]
    if in_file or not parts:
        return ".".join(parts) or None
    has_tree = isinstance(tree, Mapping) and bool(tree)
    if has_tree:
        for length in range(len(parts) - 1, 0, -1):
            if _is_module(parts[:length], tree):
                return ".".join(parts[length:])
    num_lower = next((n for n, part in enumerate(parts[:-1]) if not part.islower()), len(parts) - 1)
    return ".".join(parts[num_lower if num_lower > int(has_tree) else 0 :])


def _is_module(parts: list[str], tree: Any) -> bool:
    path = "/".join(parts)
    return any(
        f"{root}{path}{end}" in tree for root in _SOURCE_ROOTS for end in (".py", ".pyi", "/__init__.py")
    )


def checked_kinds(entries: Iterable[Entry]) -> tuple[str, ...]:
    """The kinds of overlap that could be looked for on every task."""
    listed = list(entries)
    kinds = ["id"]
    if all(entry.content_sha256 for entry in listed):
        kinds.append("content")
    if all(entry.has_golden for entry in listed):
        kinds.append("near-duplicate")
    if all(entry.repository and entry.symbol for entry in listed):
        kinds.append("origin")
    return tuple(kinds)
