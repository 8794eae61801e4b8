"""Train and held-out tasks share nothing, or nothing starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from composer_replication.errors import InputError, SplitOverlapError
from composer_replication.safety.content_digest import ContentDigest
from composer_replication.safety.split_entries import (
    Entry,
    SplitRequestError,
    checked_kinds,
    groups_of,
    overlaps,
    read_entries,
)
from composer_replication.safety.split_selection import choose_heldout

STATE_VERSION = 1
STATE_KIND = "HeldoutSplit"


class HeldoutSplit:
    """Two disjoint sets of tasks with one fingerprint.

    Items are task ids, or objects with ``task_id`` and any of ``broken_tree``,
    ``tests`` (path to text), ``golden`` (text), ``repository`` (``NAME==VERSION``) and
    ``symbol``; ``records.TaskContent`` has them all. Two tasks overlap by

    - id: the same id;
    - content: the same sha256 over tree, tests and golden, without white space,
      comments, ids, file names and file order;
    - origin: the same repository name, whatever its version, and the same deleted
      symbol, where ``pkg.Version.minor``, ``Version.minor`` and ``minor`` are the same.

    A kind is in ``checked`` only if every task on both sides gave what it needs; what
    can be compared is compared anyway. A changed copy (renamed variables, one more
    file) is not found by these kinds.

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
        digest = ContentDigest() if check_content else None
        self._set(read_entries(train, "train", digest), read_entries(heldout, "heldout", digest), 0)

    def _set(self, train: list[Entry], heldout: list[Entry], num_without_hidden_tests: int) -> None:
        if not heldout:
            raise SplitRequestError(
                "no task is held out.", where="heldout", fix="use composer-rl tasks split."
            )
        pairs = overlaps(train, heldout)
        if pairs:
            raise SplitOverlapError(pairs)
        self._train, self._heldout = tuple(train), tuple(heldout)
        self.train_ids = tuple(entry.task_id for entry in train)
        self.heldout_ids = tuple(entry.task_id for entry in heldout)
        self.checked = checked_kinds((*train, *heldout))
        self.num_without_hidden_tests = num_without_hidden_tests
        self.fingerprint = _fingerprint(train, heldout)

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

        Tasks joined by content or origin, also through a third task, stay on one side.
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
        items: Any = tasks if isinstance(tasks, str) else list(tasks)  # a text is refused below
        entries = read_entries(items, "tasks", ContentDigest() if check_content else None)
        if by == "repository":
            _require_repositories(entries)
        barred = {item.task_id for item in items if not getattr(item, "has_hidden_tests", True)}
        groups = groups_of(entries, by_repository=by == "repository")
        chosen = choose_heldout(groups, barred, heldout_fraction, seed)
        made = cls.__new__(cls)
        made._set(
            [entry for entry in entries if entry.task_id not in chosen],
            [entry for entry in entries if entry.task_id in chosen],
            len(barred),
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
        """Read back what ``state_dict`` wrote, and check it again.

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
        made._set(train, heldout, num_barred)
        if made.fingerprint != state["fingerprint"] or list(made.checked) != state["checked"]:
            raise _stored_split_error("its tasks do not give its fingerprint and its list of checks", where)
        return made


def _fingerprint(train: list[Entry], heldout: list[Entry]) -> str:
    sides = {
        "version": STATE_VERSION,
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


def _is_text(entry: Entry) -> bool:
    return all(value is None or isinstance(value, str) for value in asdict(entry).values())


def _stored_split_error(what: str, where: str) -> InputError:
    return InputError(
        "CR0504",
        f"the stored split is not usable: {what}.",
        where=where,
        fix="make it again with composer-rl tasks split.",
    )
