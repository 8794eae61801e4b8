"""The gates that look at what is held back, without running it: hidden-shown and unfair-hidden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from composer_replication.tasks.deleted_texts import deleted_texts
from composer_replication.tasks.fair_split import deleted_words, is_named, places_to_show
from composer_replication.tasks.gate_failed import GateFailed
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.test_functions import count_functions


def check_hidden_out(subject: Subject, repository: RepositoryRecord, original: Mapping[str, bytes]) -> None:
    """Each hidden test function is gone from its file in the tree that a rollout sees.

    Raises:
        GateFailed: hidden-shown; which one stays unsaid.
    """
    shown = subject.broken(original, "rollout")
    places = {repository.places[test] for test in subject.hidden if test in repository.places}
    hidden = Counter((path, name) for path, _, name in places)
    for path in sorted({path for path, _ in hidden}):
        before = count_functions(original[path].decode("utf-8", "replace"))
        after = count_functions(shown.get(path, b"").decode("utf-8", "replace"))
        if any(
            after[name] > before[name] - count for (other, name), count in hidden.items() if other == path
        ):
            raise GateFailed("hidden-shown", f"a hidden test still stands in {path}")


def check_fair(
    subject: Subject,
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    twins: Iterable[tuple[str, str]],
    given: Collection[str],
) -> None:
    """Hidden tests and recorded behaviour ask for nothing that only the deleted code says, and no copy shows them.

    Args:
        subject: the task.
        repository: where its tests stand.
        original: the files with the code.
        twins: path and symbol of each function with recorded behaviour.
        given: names that a rollout is told besides its tree.

    Raises:
        GateFailed: hidden-shown or unfair-hidden; which test it is stays unsaid.
    """
    shown = subject.broken(original, "rollout")
    places = {repository.places[test] for test in subject.hidden if test in repository.places}
    if places_to_show(places, original, shown, frozenset(), given):
        raise GateFailed("hidden-shown", "a copy of a hidden test stands in the tree")
    deleted, texts = deleted_words(subject.changes, original), deleted_texts(subject.changes, original)
    if places_to_show(places, original, shown, deleted, given, texts=texts):
        raise GateFailed(
            "unfair-hidden", "a hidden test asks for a name or a text that only the deleted code says"
        )
    if subject.is_whole and not all(is_named(path, symbol, shown, given) for path, symbol in twins):
        raise GateFailed(
            "unfair-hidden", "recorded behaviour is that of a function whose name nobody can know"
        )
