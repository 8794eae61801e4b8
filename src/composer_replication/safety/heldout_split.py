"""Train and held-out tasks share nothing, or nothing starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any, Literal

from composer_replication.errors import ComposerError, InputError, SplitOverlapError
from composer_replication.safety.split_overlaps import checked_kinds, groups_of, overlaps
from composer_replication.safety.split_tasks import Entry, ReadTask, SplitRequestError, TaskReader

STATE_VERSION = 2
FINGERPRINT_VERSION = 1


class HeldoutSplit:
    """Two disjoint sets of tasks with one fingerprint.

    Items are task ids, or objects with ``task_id`` and any of ``broken_tree``,
    ``tests`` (path to text), ``golden`` (text), ``own_tests`` (text of the task's own
    tests), ``repository`` (``NAME==VERSION``) and ``symbol``; ``records.TaskContent`` has
    them all. Two tasks overlap by

    - id: the same id;
    - content: the same sha256 over tree, tests and golden, without white space,
      comments, ids, file names and file order;
    - near-duplicate: at least 60% of the shingles in common (Jaccard index |A & B| / |A | B|),
      either of golden with golden code, or of own tests with own tests of another
      repository. A shingle is five tokens in a row, without comments, docstrings, round
      brackets, the names of variables and the values of constants. Below 12 shingles
      nothing is compared: so short a body is an idiom, not a copy;
    - origin: the same repository name, whatever its version, and the same deleted symbol,
      where ``pkg/api.py::Version.minor``, ``Version.minor`` and ``minor`` are the same; or,
      in any two repositories, the same golden code under the same symbol; or golden lines
      in common. Lines count by their words (different names, numbers and strings; not
      keywords, ``self`` or ``cls``), from two words on. In common must be half of the
      words of the shorter golden and at least 8, or at least 5 if all of it is the same:
      ``return self._x`` in two repositories is none.

    What can be compared is compared; a kind is in ``checked`` only if every task gave what it needs.
    docs/safety.md has the measurements behind these numbers, and what is not found.

    Attributes:
        train_ids, heldout_ids: sorted ids.
        checked: the kinds of overlap looked for on every task.
        fingerprint: sha256 hex over both sides' ids and content hashes.
        num_without_hidden_tests: tasks that ``split`` kept in train because they have none.

    ``check_content`` is off only where the content is not at hand.

    Raises:
        SplitOverlapError: the sides overlap; it lists every pair with its kind (CR0501).
        SplitRequestError: the items are no tasks, or nothing is held out; a ValueError (CR0503).
    """

    def __init__(self, train: Iterable[Any], heldout: Iterable[Any], *, check_content: bool = True) -> None:
        reader = TaskReader(check_content=check_content)
        self._set(reader.read(train, "train"), reader.read(heldout, "heldout"), 0)

    def _set(self, train: list[ReadTask], heldout: list[ReadTask], num_without_hidden_tests: int) -> None:
        if not heldout:
            wrong = "no task is held out."
            raise SplitRequestError(wrong, where="heldout", fix="use composer-rl tasks split.")
        pairs = overlaps(train, heldout)
        if pairs:
            raise SplitOverlapError(pairs)
        self._train = tuple(task.entry for task in train)
        self._heldout = tuple(task.entry for task in heldout)
        self.train_ids = tuple(entry.task_id for entry in self._train)
        self.heldout_ids = tuple(entry.task_id for entry in self._heldout)
        self.checked = checked_kinds((*self._train, *self._heldout))
        self.num_without_hidden_tests = num_without_hidden_tests
        self.fingerprint = _fingerprint(self._train, self._heldout)

    @classmethod
    def _of(cls, train: Iterable[ReadTask], heldout: Iterable[ReadTask], num_barred: int) -> HeldoutSplit:
        made = cls.__new__(cls)
        made._set(list(train), list(heldout), num_barred)
        return made

    @classmethod
    def split(
        cls,
        tasks: Iterable[Any],
        heldout_fraction: float,
        seed: int,
        *,
        by: Literal["origin", "repository"] = "origin",
        check_content: bool = True,
    ) -> HeldoutSplit:
        """Part tasks into train and held-out, keeping together what belongs together.

        Tasks joined by content, near-duplicate or origin, also through a third task, stay
        on one side. The number held out is the nearest to ``heldout_fraction`` that such groups allow,
        at least one. The result depends on the tasks and the seed alone, not on their order or the
        machine. A task whose attribute ``has_hidden_tests`` is false stays in train, with its group.

        Args:
            tasks: ids or task objects, at least two.
            heldout_fraction: wanted share, above 0 and below 1.
            seed: any integer; another one draws other groups.
            by: ``"repository"`` keeps each repository on one side.
            check_content: as for the class.

        Raises:
            SplitRequestError: there is no such split; the message says why and what would work (CR0503).
        """
        _check_request(heldout_fraction, seed, by)
        barred: set[str] = set()
        items = tasks if isinstance(tasks, str) else _noting_barred(tasks, barred)  # a text is refused below
        read = TaskReader(check_content=check_content).read(items, "tasks")
        unknown = [task.entry.task_id for task in read if not task.entry.repository]
        if by == "repository" and unknown:
            raise SplitRequestError(
                f"{len(unknown)} of {len(read)} tasks name no repository, {unknown[0]!r} first.",
                where="by",
                fix='pass task objects with a repository, or group by "origin".',
            )
        groups = groups_of(read, by_repository=by == "repository")
        chosen = _choose_heldout(groups, barred, heldout_fraction, seed)
        train, heldout = (
            [task for task in read if (task.entry.task_id in chosen) == is_held] for is_held in (False, True)
        )
        return cls._of(train, heldout, len(barred))

    @property
    def contents(self) -> dict[str, str | None]:
        """Task id to content hash, None where content was not looked at; both sides."""
        return {entry.task_id: entry.content_sha256 for entry in (*self._train, *self._heldout)}

    def restricted_to(self, task_ids: Container[str]) -> HeldoutSplit:
        """The same sides without all other tasks; a SplitRequestError where nothing is held out then."""
        train, heldout = (
            [ReadTask(entry) for entry in side if entry.task_id in task_ids]
            for side in (self._train, self._heldout)
        )
        return self._of(train, heldout, self.num_without_hidden_tests)

    def state_dict(self) -> dict[str, Any]:
        """Ids, hashes, names and fingerprint, JSON-safe and versioned; no code, no tests."""
        return {
            "version": STATE_VERSION,
            "kind": "HeldoutSplit",
            "fingerprint": self.fingerprint,
            "checked": list(self.checked),
            "num_without_hidden_tests": self.num_without_hidden_tests,
            "train": [asdict(entry) for entry in self._train],
            "heldout": [asdict(entry) for entry in self._heldout],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], where: str = "") -> HeldoutSplit:
        """Read back what ``state_dict`` wrote, and check ids, hashes and names again.

        Code is not in it, so near-duplicates and golden lines are not compared again: whoever
        has the tasks makes ``HeldoutSplit(train, heldout)`` of them and compares fingerprints.

        Raises:
            InputError: of another version, damaged, or changed by hand (CR0504); ``where`` is its file.
            SplitOverlapError, SplitRequestError: as the class (CR0501, CR0503).
        """
        try:
            if (state["version"], state["kind"]) != (STATE_VERSION, "HeldoutSplit"):
                raise ValueError(f"it is version {state['version']!r} of {state['kind']!r}")
            train, heldout = (
                [ReadTask(Entry(**row)) for row in sorted(state[side], key=itemgetter("task_id"))]
                for side in ("train", "heldout")
            )
            made = cls._of(train, heldout, state["num_without_hidden_tests"])
            if (made.fingerprint, list(made.checked)) != (state["fingerprint"], state["checked"]):
                raise ValueError("its tasks do not give its fingerprint and its list of checks")
        except ComposerError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                "CR0504",
                f"the stored split cannot be read: {type(error).__name__}, {error}.",
                where=where,
                fix="make it again with composer-rl tasks split.",
            ) from error
        return made


def _noting_barred(items: Iterable[Any], barred: set[str]) -> Iterator[Any]:
    """The items one by one, so that no more than one task's files are held at a time."""
    for item in items:
        if not getattr(item, "has_hidden_tests", True):
            barred.add(item.task_id)
        yield item


def _fingerprint(train: Sequence[Entry], heldout: Sequence[Entry]) -> str:
    sides = {
        "version": FINGERPRINT_VERSION,
        "train": [[entry.task_id, entry.content_sha256] for entry in train],
        "heldout": [[entry.task_id, entry.content_sha256] for entry in heldout],
    }
    return hashlib.sha256(json.dumps(sides, sort_keys=True).encode()).hexdigest()


def _check_request(heldout_fraction: object, seed: object, by: object) -> None:
    is_number = isinstance(heldout_fraction, int | float) and not isinstance(heldout_fraction, bool)
    if not is_number or not 0 < heldout_fraction < 1:  # type: ignore[operator]  # is_number says so
        wrong = f"the held-out fraction {heldout_fraction!r} is not above 0 and below 1."
        raise SplitRequestError(wrong, where="heldout_fraction", fix="ask for a share such as 0.2.")
    if type(seed) is not int:
        wrong = f"the seed {seed!r} is not an integer."
        raise SplitRequestError(wrong, where="seed", fix="pass one such as 0.")
    if by not in ("origin", "repository"):
        wrong = f"tasks cannot be grouped by {by!r}."
        raise SplitRequestError(wrong, where="by", fix='choose "origin" or "repository".')


def _choose_heldout(groups: list[list[str]], barred: set[str], fraction: float, seed: int) -> set[str]:
    """Ids to hold out; a group goes as a whole.

    The groups are put in the order of a hash keyed with the seed, and the first combination whose
    size is nearest to ``fraction`` of all tasks wins. Groups with an id in ``barred`` stay in train.

    Raises:
        SplitRequestError: no combination comes near enough, with the reason (CR0503).
    """
    num_tasks = sum(map(len, groups))
    allowed = [group for group in groups if barred.isdisjoint(group)]
    num_allowed, num_wanted = sum(map(len, allowed)), fraction * num_tasks
    if len(groups) <= 1:
        wrong = f"{num_tasks} task(s) that all belong together cannot be parted."
        raise SplitRequestError(wrong, where="tasks", fix="add tasks of another origin or repository.")
    if num_allowed == 0 or num_allowed <= num_wanted - 1:
        raise SplitRequestError(
            f"only {num_allowed} of {num_tasks} tasks can be held out and about {num_wanted:.3g} were "
            f"asked for: {len(barred)} have no hidden tests and stay in train with all that belongs to them.",
            where="heldout_fraction",
            fix="ask for less, or leave out the tasks without hidden tests first.",
        )
    ordered = sorted(allowed, key=lambda group: hashlib.sha256(json.dumps([seed, group]).encode()).digest())
    chosen = _nearest(ordered, num_wanted, num_tasks)
    is_too_small = len(chosen) < num_wanted / 2
    is_too_large = len(chosen) > 2 * num_wanted and 2 * len(chosen) > num_tasks
    if is_too_small or is_too_large:
        raise SplitRequestError(
            f"tasks that belong together allow {len(chosen)} of {num_tasks} held out, "
            f"not about {num_wanted:.3g}.",
            where="heldout_fraction",
            fix=f"ask for {len(chosen) / num_tasks:.3f}, or add tasks of other origins.",
        )
    return chosen


def _nearest(ordered: list[list[str]], num_wanted: float, num_tasks: int) -> set[str]:
    """Subset of groups, neither empty nor everything, whose size is nearest to the wanted one."""
    # size reached -> indices of the groups that reach it first, as a linked list
    reached: dict[int, tuple[int, int]] = {0: (-1, 0)}
    for index, group in enumerate(ordered):
        for size in sorted(reached, reverse=True):
            total = size + len(group)
            if total < num_tasks:
                reached.setdefault(total, (index, size))
        if any(2 * abs(size - num_wanted) <= 1 for size in reached if size):  # no whole number is nearer
            break
    best = min((size for size in reached if size), key=lambda size: (abs(size - num_wanted), size))
    chosen: set[str] = set()
    while best:
        index, best = reached[best]
        chosen.update(ordered[index])
    return chosen
