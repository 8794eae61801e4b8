"""Which of a deletion's failing tests a solver sees, which are paid but not shown, and which are hidden."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from composer_replication.records import Edit
from composer_replication.tasks.deleted_texts import deleted_texts
from composer_replication.tasks.fair_split import deleted_words, names_elsewhere, places_to_show
from composer_replication.tasks.planning.edits import edited_text, line_edits, shifted_line
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.test_functions import Place, part_tests
from composer_replication.tasks.views import Changes

PAID_SHARE = 1 / 3
"""Of the visible test functions of a task, those that are paid but not shown."""
MIN_VISIBLE_FUNCTIONS = 3
"""With fewer of them all are shown: a policy needs tests to work with."""


def part_subject(
    unsplit: Subject,
    failing: frozenset[str],
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    *,
    hidden_share: float,
    seed: int,
    salt: str,
    given: Collection[str] = (),
) -> Subject:
    """Part the failing tests of a deletion into visible and hidden ones, and the trees with them; all visible ones are shown.

    What would not be fair or not be hidden (``fair_split``) becomes visible, and others are drawn in its place.

    Args:
        unsplit: the deletion.
        failing: the tests that fail without the code.
        repository: where its tests stand.
        original: the files with the code.
        hidden_share: of the failing test functions, in [0, 1).
        seed: draws the hidden ones, together with ``salt``.
        salt: another one gives another draw.
        given: names that a rollout is told besides its tree.
    """
    places = frozenset(repository.places[test] for test in failing)
    to_show = _ToShow(unsplit, original, given)
    shown: frozenset[Place] = frozenset()
    while True:
        hidden, edits = _drawn(
            unsplit.changes, places, original,
            share=hidden_share, seed=seed, salt=salt, shown=shown,
        )  # fmt: skip
        out = {test for test in repository.green if repository.places[test] in hidden}
        subject = replace(
            unsplit,
            changes=replace(unsplit.changes, visible_edits=edits),
            visible=tuple(sorted(failing - out)),
            hidden=tuple(sorted(failing & out)),
            withheld=tuple(sorted(out - failing)),
        )
        more = to_show(hidden, subject)
        if not more:
            return subject
        shown |= more


def with_paid(
    subject: Subject,
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    *,
    seed: int,
    salt: str,
    given: Collection[str] = (),
) -> Subject:
    """Take some visible test functions out of what a rollout sees: the reward counts them all the same.

    The subject as it is where fewer than ``MIN_VISIBLE_FUNCTIONS`` are visible, where none can go, or where a hidden test
    would need what only they tell.

    Args:
        subject: of ``part_subject``, as the other arguments are.
        repository: where its tests stand.
        original: the files with the code.
        seed: draws the paid ones, together with ``salt``.
        salt: another one gives another draw.
        given: names that a rollout is told besides its tree.
    """
    visible = frozenset(repository.places[test] for test in subject.visible)
    hidden = frozenset(repository.places[test] for test in subject.hidden)
    if len(visible) < MIN_VISIBLE_FUNCTIONS:
        return subject
    to_show = _ToShow(subject, original, given)
    shown: frozenset[Place] = frozenset()
    while True:
        paid, edits = _drawn(
            subject.changes, visible, original,
            share=PAID_SHARE, seed=seed, salt=salt, shown=shown, gone=hidden,
        )  # fmt: skip
        narrowed = replace(
            subject,
            changes=replace(subject.changes, shown_edits=edits),
            paid=tuple(test for test in subject.visible if repository.places[test] in paid),
        )
        more = to_show(paid, narrowed)
        if not more:
            return subject if not paid or to_show(hidden, narrowed) else narrowed
        shown |= more


class _ToShow:
    """Which of some functions that a subject's rollouts do not see must be shown, by ``places_to_show``."""

    def __init__(self, subject: Subject, original: Mapping[str, bytes], given: Collection[str]) -> None:
        self._original, self._given = original, given
        self._words = deleted_words(subject.changes, original)
        self._texts = deleted_texts(subject.changes, original)

    def __call__(self, places: Collection[Place], subject: Subject) -> frozenset[Place]:
        shown = subject.broken(self._original, "rollout")
        return places_to_show(places, self._original, shown, self._words, self._given, texts=self._texts)


def _drawn(
    changes: Changes,
    places: frozenset[Place],
    original: Mapping[str, bytes],
    *,
    share: float,
    seed: int,
    salt: str,
    shown: frozenset[Place],
    gone: frozenset[Place] = frozenset(),
) -> tuple[frozenset[Place], tuple[Edit, ...]]:
    """Some of the places, and the edits that take them out of the test files, where those of ``gone`` are out already."""
    edits_of: dict[str, list[Edit]] = {}
    for edit in changes.test_edits:
        edits_of.setdefault(edit.path, []).append(edit)
    paths = {place[0] for place in places | gone}
    before = {path: original[path].decode("utf-8", "replace") for path in paths & set(original)}
    texts = {path: edited_text(text, edits_of.get(path, ())) for path, text in before.items()}
    now = {_moved(place, before, edits_of): place for place in places | gone}
    split = part_tests(
        sorted(moved for moved, place in now.items() if place in places),
        texts,
        hidden_share=share,
        seed=seed,
        salt=salt,
        shown={moved for moved, place in now.items() if place in shown},
        gone={moved for moved, place in now.items() if place in gone},
        needed={path: names_elsewhere(original, path) for path in texts},
    )
    untouched = tuple(edit for edit in changes.visible_edits if edit.path not in split.files)
    shorter = (
        edit for path, text in sorted(split.files.items()) for edit in line_edits(path, before[path], text)
    )
    return frozenset(now[place] for place in split.hidden), (*untouched, *shorter)


def _moved(place: Place, original: Mapping[str, str], edits_of: Mapping[str, Sequence[Edit]]) -> Place:
    """Where a test function stands once the imports of its file are moved."""
    path, line, name = place
    if not edits_of.get(path) or path not in original:
        return place
    return path, shifted_line(original[path], edits_of[path], line), name
