"""Which of a deletion's failing tests a solver sees, and which are held back."""

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
    """Part the failing tests of a deletion, and the trees with them.

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
    deleted = deleted_words(unsplit.changes, original)
    texts = deleted_texts(unsplit.changes, original)
    shown: frozenset[Place] = frozenset()
    while True:
        subject = _parted(
            unsplit, failing, repository, original,
            hidden_share=hidden_share, seed=seed, salt=salt, shown=shown,
        )  # fmt: skip
        hidden = {repository.places[test] for test in subject.hidden}
        more = places_to_show(
            hidden, original, subject.broken(original, "rollout"), deleted, given, texts=texts
        )
        if not more:
            return subject
        shown |= more


def _parted(
    unsplit: Subject,
    failing: frozenset[str],
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    *,
    hidden_share: float,
    seed: int,
    salt: str,
    shown: frozenset[Place],
) -> Subject:
    edits_of: dict[str, list[Edit]] = {}
    for edit in unsplit.changes.test_edits:
        edits_of.setdefault(edit.path, []).append(edit)
    places = {repository.places[test] for test in failing}
    before = {
        path: original[path].decode("utf-8", "replace") for path in {p[0] for p in places} & set(original)
    }
    texts = {path: edited_text(text, edits_of.get(path, ())) for path, text in before.items()}
    now = {_moved(place, before, edits_of): place for place in places}
    split = part_tests(
        sorted(now),
        texts,
        hidden_share=hidden_share,
        seed=seed,
        salt=salt,
        shown={place for place, before_edits in now.items() if before_edits in shown},
        needed={path: names_elsewhere(original, path) for path in texts},
    )
    out = {now[place] for place in split.hidden}
    untouched = tuple(edit for edit in unsplit.changes.test_edits if edit.path not in split.files)
    shorter = (
        edit for path, text in sorted(split.files.items()) for edit in line_edits(path, before[path], text)
    )
    return replace(
        unsplit,
        changes=replace(unsplit.changes, visible_edits=(*untouched, *shorter)),
        visible=tuple(sorted(test for test in failing if repository.places[test] not in out)),
        hidden=tuple(sorted(test for test in failing if repository.places[test] in out)),
        withheld=tuple(sorted(test for test in repository.green - failing if repository.places[test] in out)),
    )


def _moved(place: Place, original: Mapping[str, str], edits_of: Mapping[str, Sequence[Edit]]) -> Place:
    """Where a test function stands once the imports of its file are moved."""
    path, line, name = place
    if not edits_of.get(path) or path not in original:
        return place
    return path, shifted_line(original[path], edits_of[path], line), name
