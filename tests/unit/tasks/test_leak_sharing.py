"""Searching for many tasks at once finds what searching for each alone does, and walks what they share once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from composer_replication.tasks.leaks import leak_scan
from composer_replication.tasks.leaks.leak_fingerprints import fingerprints
from composer_replication.tasks.leaks.leak_search import Leak, Search
from composer_replication.tasks.leaks.leak_targets import line_check, without_marks
from composer_replication.tasks.store import TaskStore

if TYPE_CHECKING:
    import pytest

SALT = "salt"
NUMBERS = "tinymath/numbers.py"
# The hash of a wheel whose digits, read as base64, give bytes of which a line begins with a slash.
DIRECT_URL = (
    b'{"archive_info": {"hash": "sha256=2f6da418d1f1e0fddd844478f41680e794e6051915791a034ff65e5f100525a2"}}'
)


@given(
    line=st.text(min_size=1).map(str.strip).filter(lambda text: text and len(text.splitlines()) == 1),
    before=st.sampled_from(["", "+ ", "- ", "> ", "12: ", '"', "'", "# ", "    3 |", "...", "* "]),
    after=st.sampled_from(["", '",', "'", "|", '"']),
)
def test_the_check_sum_of_a_line_does_not_see_its_marks(line: str, before: str, after: str) -> None:
    marked = f"{before}{line}{after}".strip()
    assert line_check(marked) == line_check(line) == line_check(without_marks(marked))


def test_all_tasks_at_once_find_what_each_finds_alone(tiny_store: TaskStore) -> None:
    known = {task: fingerprints(tiny_store, task, SALT) for task in tiny_store.tasks()}
    original = tiny_store.files(tiny_store.tasks()[0], "golden")
    together = Search([one.target for own in known.values() for one in own], SALT, unmarshal=True)
    num_found = 0
    for path, data in original.items():
        for in_tree in (True, False):
            alone: set[Leak] = set()
            for own in known.values():
                search = Search([one.target for one in own], SALT, unmarshal=True)
                alone |= search.search_bytes(path, data, in_tree=in_tree)
            assert together.search_bytes(path, data, in_tree=in_tree) == alone
            num_found += len(alone)
    assert num_found > 4


def test_a_file_counts_for_the_tasks_that_have_it(tiny_store: TaskStore) -> None:
    """The original file leaks clamp and sign; a task in whose tree it does not stand is not concerned."""
    tasks = {task.symbol: task for task in tiny_store.tasks()}
    targets = [one.target for task in tasks.values() for one in fingerprints(tiny_store, task, SALT)]
    search = Search(targets, SALT, unmarshal=False)
    data = tiny_store.files(tasks["clamp"], "golden")[NUMBERS]
    ids = {task.task_id for task in tasks.values()}
    everybody = {leak.task_id for leak in search.search_bytes("x.py", data, in_tree=True, tasks=ids)}
    assert everybody == {tasks["clamp"].task_id, tasks["sign"].task_id}
    own = {tasks["sign"].task_id}
    assert {leak.task_id for leak in search.search_bytes("x.py", data, in_tree=True, tasks=own)} == own


def test_shared_places_are_walked_once(tiny_store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[tuple[str, int, int]] = []

    def steal(_files: Any, tasks: Any, targets: Any, *_: Any, walk: str = "all", **__: Any) -> dict[str, Any]:
        walks.append((walk, len(tasks), len(targets)))
        return {"leaks": [], "num_files": 0, "not_searched": [], "failed_checks": []}

    monkeypatch.setattr(leak_scan, "steal", steal)
    num_targets = sum(len(fingerprints(tiny_store, task, SALT)) for task in tiny_store.tasks())
    leak_scan.scan_store(tiny_store.root)
    assert Counter(walk for walk, _, _ in walks) == {"system": 1, "environment": 1, "all": 4}
    assert {targets for walk, _, targets in walks if walk != "all"} == {num_targets}


def test_a_tree_is_searched_for_its_own_tasks(tiny_store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two trees of one repository, one holds the code that the other lost: that is no leak; a copy in its own is."""
    answer = {"leaks": [], "num_files": 0, "not_searched": [], "failed_checks": []}
    monkeypatch.setattr(leak_scan, "steal", lambda *_, **__: answer)
    assert leak_scan.scan_store(tiny_store.root).leaks == ()
    real, clamp = TaskStore.files, next(t for t in tiny_store.tasks() if t.symbol == "clamp")
    prints = {task.task_id: fingerprints(tiny_store, task, SALT) for task in tiny_store.tasks()}
    copy = real(tiny_store, clamp, "golden")[NUMBERS]

    def files(self: TaskStore, task: Any, view: Any) -> dict[str, bytes]:
        more = {"tests/data.txt": copy} if task.symbol == "clamp" else {}
        return {**real(self, task, view), **more}

    monkeypatch.setattr(leak_scan, "fingerprints", lambda _, task, __: prints[task.task_id])
    monkeypatch.setattr(leak_scan.secrets, "token_hex", lambda _: SALT)
    monkeypatch.setattr(TaskStore, "files", files)
    leaks = leak_scan.scan_store(tiny_store.root).leaks
    assert {(leak.task_id, leak.path) for leak in leaks} == {(clamp.task_id, "tests/data.txt")}


def test_digits_in_a_list_of_installed_files_lead_nowhere(tiny_store: TaskStore, tmp_path: Path) -> None:
    target = fingerprints(tiny_store, tiny_store.tasks()[0], SALT)[0].target
    search = Search([target], SALT, unmarshal=False)
    path = "/x/site-packages/a.dist-info/direct_url.json"
    assert search.search_bytes(path, DIRECT_URL, in_tree=False) == set()
    editable = b'{"dir_info": {"editable": true}, "url": "file:///home/a"}'
    assert {leak.channel for leak in search.search_bytes(path, editable, in_tree=False)} == {"editable"}


def test_a_target_is_found_by_its_check_sums_alone(tiny_store: TaskStore) -> None:
    """They are what decides which lines are hashed: without them nothing is found."""
    task = next(t for t in tiny_store.tasks() if t.symbol == "clamp")
    target = fingerprints(tiny_store, task, SALT)[0].target
    data = tiny_store.files(task, "golden")[NUMBERS]
    blind = dataclasses.replace(target, checks=frozenset())
    assert Search([target], SALT, unmarshal=False).search_bytes("x.py", data, in_tree=True)
    assert not Search([blind], SALT, unmarshal=False).search_bytes("x.py", data, in_tree=True)
