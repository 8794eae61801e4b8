"""Train and held-out tasks share nothing, or nothing starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from composer_replication.errors import InputError, SplitOverlapError
from composer_replication.safety.split_entries import (
    Entry,
    ReadTask,
    SplitRequestError,
    TaskReader,
    checked_kinds,
)
from composer_replication.safety.split_overlaps import groups_of, overlaps
from composer_replication.safety.split_selection import choose_heldout
from composer_replication.safety.task_sketch import Sketch

STATE_VERSION = 2
STATE_KIND = "HeldoutSplit"
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

    A kind is in ``checked`` only if every task on both sides gave what it needs (near-duplicate
    and golden lines: a golden); what can be compared is compared anyway.

    Why these numbers: ``python benchmarks/near_duplicates.py`` (Python 3.11, 30,000 functions
    of the standard library and twelve packages, 62% of them with 12 shingles) compares 1,500
    of them with changed versions of themselves, and all of them with those of other packages:

    =======  =========  ========================  =====================  ===================
    shingle  threshold  other names, constants    and a statement less   foreign pairs
    =======  =========  ========================  =====================  ===================
    3        60%        99.1% found               90.0%                  253 of 193 million
    5        50%        98.4%                     90.0%                  137 of 173 million
    **5**    **60%**    **97.6%**                 **84.1%**              **72**
    5        80%        94.3%                     56.7%                  53
    7        60%        96.2%                     77.1%                  47 of 154 million
    =======  =========  ========================  =====================  ===================

    Of the 72, 46 have one name and were copied between packages; of the other 26, 3 are no
    copies by eye. Without the blindness to names 1.5% of the renamed versions are found. By
    its lines half a body in front of foreign code is found in 335 of 466 cases, and 83 of 450
    million foreign pairs are taken for copies (145 with 6 words instead of 8; 59 of the 83
    have one name). Own tests are compared between repositories only: in the shipped recipe's
    16 tasks 3 of the 17 pairs of one repository share 60% and more, none of two repositories
    more than 10%.

    What is not found: code that was written anew, and a body of fewer than 12 shingles with
    other names in it.

    Attributes:
        train_ids: sorted ids.
        heldout_ids: sorted ids.
        checked: the kinds of overlap looked for on every task.
        fingerprint: sha256 hex over both sides' ids and content hashes; a split whose
            content was not looked at has another one than the same split checked.
        num_without_hidden_tests: tasks that ``split`` kept in train because they have
            no hidden tests.

    Args:
        train: tasks to train on.
        heldout: tasks that are never trained on, at least one.
        check_content: look at the content too; off only where it is not at hand.

    Raises:
        SplitOverlapError: the sides overlap; it lists every pair with its kind (CR0501).
        SplitRequestError: the items are no tasks, or nothing is held out; a ValueError
            (CR0503).
    """

    def __init__(self, train: Iterable[Any], heldout: Iterable[Any], *, check_content: bool = True) -> None:
        reader = TaskReader(check_content=check_content)
        self._set(reader.read(train, "train"), reader.read(heldout, "heldout"), 0)

    def _set(self, train: list[ReadTask], heldout: list[ReadTask], num_without_hidden_tests: int) -> None:
        if not heldout:
            raise SplitRequestError(
                "no task is held out.", where="heldout", fix="use composer-rl tasks split."
            )
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
        on one side.
        The number held out is the nearest to ``heldout_fraction`` that such groups
        allow, at least one. The result depends on the tasks and the seed alone, not on
        their order, the machine or the Python version. A task whose attribute
        ``has_hidden_tests`` is false stays in train with all that belongs to it.

        Args:
            tasks: ids or task objects, at least two.
            heldout_fraction: wanted share, above 0 and below 1.
            seed: any integer; another one draws other groups.
            by: ``"repository"`` keeps each repository on one side, so that held-out
                tasks come from repositories that are not trained on.
            check_content: as for the class.

        Raises:
            SplitRequestError: there is no such split; the message says why and what
                would work; a ValueError (CR0503).
        """
        _check_request(heldout_fraction, seed, by)
        barred: set[str] = set()
        items = tasks if isinstance(tasks, str) else _noting_barred(tasks, barred)  # a text is refused below
        read = TaskReader(check_content=check_content).read(items, "tasks")
        if by == "repository":
            _require_repositories([task.entry for task in read])
        groups = groups_of(read, by_repository=by == "repository")
        chosen = choose_heldout(groups, barred, heldout_fraction, seed)
        made = cls.__new__(cls)
        made._set(
            [task for task in read if task.entry.task_id not in chosen],
            [task for task in read if task.entry.task_id in chosen],
            len(barred),
        )
        return made

    @property
    def contents(self) -> dict[str, str | None]:
        """Task id to content hash, None where content was not looked at; both sides."""
        return {entry.task_id: entry.content_sha256 for entry in (*self._train, *self._heldout)}

    def restricted_to(self, task_ids: Container[str]) -> HeldoutSplit:
        """The same sides without all other tasks; a part of disjoint sides is disjoint.

        Raises:
            SplitRequestError: nothing is held out in it (CR0503).
        """
        made = type(self).__new__(type(self))
        made._set(
            _without_content([entry for entry in self._train if entry.task_id in task_ids]),
            _without_content([entry for entry in self._heldout if entry.task_id in task_ids]),
            self.num_without_hidden_tests,
        )
        return made

    def require_fingerprint(self, other: str | None, where: str) -> None:
        """Refuse what was measured on another split.

        Args:
            other: the fingerprint that a checkpoint, a verdict or a score carries.
            where: what carries it, for the message.

        Raises:
            InputError: the fingerprints differ; the message has both (CR0502).
        """
        if other != self.fingerprint:
            raise InputError(
                "CR0502",
                f"this was measured on another split: {other} there, {self.fingerprint} here.",
                where=where,
                fix="use the split of that run, or start a new run with --out RUN.",
            )

    def state_dict(self) -> dict[str, Any]:
        """Ids, hashes, names and fingerprint, JSON-safe and versioned; no code, no tests."""
        return {
            "version": STATE_VERSION,
            "kind": STATE_KIND,
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

        Args:
            state: the stored mapping.
            where: the file it comes from, for the message.

        Raises:
            InputError: of another version, damaged, or changed by hand (CR0504).
            SplitOverlapError: the stored sides overlap (CR0501).
            SplitRequestError: nothing is held out in it (CR0503).
        """
        try:
            train, heldout, num_barred = _parse_state(state)
        except (KeyError, TypeError, ValueError) as error:
            raise _stored_split_error(f"it cannot be read, {type(error).__name__}: {error}", where) from error
        made = cls.__new__(cls)
        made._set(_without_content(train), _without_content(heldout), num_barred)
        if made.fingerprint != state["fingerprint"] or list(made.checked) != state["checked"]:
            raise _stored_split_error("its tasks do not give its fingerprint and its list of checks", where)
        return made


def _noting_barred(items: Iterable[Any], barred: set[str]) -> Iterator[Any]:
    """The items one by one, so that no more than one task's files are held at a time."""
    for item in items:
        if not getattr(item, "has_hidden_tests", True):
            barred.add(item.task_id)
        yield item


def _without_content(entries: list[Entry]) -> list[ReadTask]:
    """As read from a file: what was compared of them beyond hashes and names is not kept."""
    return [ReadTask(entry, Sketch()) for entry in entries]


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
        raise SplitRequestError(
            f"the held-out fraction {heldout_fraction!r} is not above 0 and below 1.",
            where="heldout_fraction",
            fix="ask for a share such as 0.2.",
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SplitRequestError(
            f"the seed {seed!r} is not an integer.", where="seed", fix="pass one such as 0."
        )
    if by not in ("origin", "repository"):
        raise SplitRequestError(
            f"tasks cannot be grouped by {by!r}.", where="by", fix='choose "origin" or "repository".'
        )


def _require_repositories(entries: list[Entry]) -> None:
    unknown = [entry.task_id for entry in entries if not entry.repository]
    if unknown:
        raise SplitRequestError(
            f"{len(unknown)} of {len(entries)} tasks name no repository, {unknown[0]!r} first.",
            where="by",
            fix='pass task objects with a repository, or group by "origin".',
        )


def _parse_state(state: Mapping[str, Any]) -> tuple[list[Entry], list[Entry], int]:
    if not isinstance(state, Mapping):
        raise TypeError(f"a mapping was expected, not {type(state).__name__}")
    found = (state.get("version"), state.get("kind"))
    if found != (STATE_VERSION, STATE_KIND):
        raise ValueError(
            f"version {found[0]!r} of {found[1]!r} is not version {STATE_VERSION} of {STATE_KIND!r}"
        )
    num_barred = state["num_without_hidden_tests"]
    if type(num_barred) is not int or num_barred < 0:
        raise ValueError(f"num_without_hidden_tests is {num_barred!r}")
    sides = {}
    for side in ("train", "heldout"):
        entries = [Entry(**row) for row in state[side]]
        if not all(entry.task_id and _is_text(entry) for entry in entries):
            raise ValueError(f"an id or a name in {side} is not text")
        sides[side] = sorted(entries, key=lambda entry: entry.task_id)
    return sides["train"], sides["heldout"], num_barred


def _is_text(entry: Any) -> bool:
    """Whether what a file gave has the types of an ``Entry``."""
    texts = (entry.task_id, entry.content_sha256, entry.repository, entry.symbol)
    return isinstance(entry.has_golden, bool) and all(text is None or isinstance(text, str) for text in texts)


def _stored_split_error(what: str, where: str) -> InputError:
    return InputError(
        "CR0504",
        f"the stored split is not usable: {what}.",
        where=where,
        fix="make it again with composer-rl tasks split.",
    )
